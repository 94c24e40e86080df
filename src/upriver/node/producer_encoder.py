"""What a stream asked for, as options of the bulk encoder."""

from __future__ import annotations

from upriver.protocol.controls import ProducerOptions
from upriver.protocol.producer_frames import StreamFrames
from upriver.protocol.stream_filter import StreamFilter
from upriver.wire.bulk_encode import FrameOptions, PackedEncoder
from upriver.wire.constants import OpenFlag

_NO_VALUE = OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE


def make_encoder(
    options: ProducerOptions, frames: StreamFrames, seen: StreamFilter, skip_deletes: bool, upr_expirations: bool
) -> PackedEncoder:
    """An encoder for the stream as it is now; another one is needed when its filter changes."""
    return PackedEncoder(
        FrameOptions(
            opaque=frames.opaque,
            vbucket=frames.vbucket,
            stream_id=frames.stream_id,
            collections=options.collections,
            collection_ids=seen.collection_ids if options.collections else None,
            delete_times=OpenFlag.INCLUDE_DELETE_TIMES in options.flags,
            expiry_opcode=upr_expirations if frames.upr else options.expiry_opcode,
            upr=frames.upr,
            no_value=bool(options.flags & _NO_VALUE),
            keep_datatype=OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE in options.flags,
            skip_deletes=skip_deletes,
            hifi_mfu=options.hifi_mfu,
            stop_datatypes=frames.stop_datatypes,
        )
    )
