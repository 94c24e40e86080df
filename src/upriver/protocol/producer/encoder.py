"""What a stream asked for, as options of the bulk encoder."""

from __future__ import annotations

from collections.abc import Callable

from upriver.protocol.producer.controls import ProducerOptions
from upriver.protocol.producer.frames import StreamFrames
from upriver.protocol.producer.stream_filter import StreamFilter
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder
from upriver.wire.bulk.shape import ScratchMemory, ShapingEncoder, ValueShape
from upriver.wire.constants import OpenFlag

# As plain numbers: with a thousand streams at once those of an IntFlag take as long as all the rest of an encoder.
_NO_VALUE = int(OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)
_KEEP_DATATYPE = int(OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)
_DELETE_TIMES = int(OpenFlag.INCLUDE_DELETE_TIMES)
_XATTRS = int(OpenFlag.INCLUDE_XATTRS)
_DELETED_USER_XATTRS = int(OpenFlag.INCLUDE_DELETED_USER_XATTRS)

Encoder = PackedEncoder | ShapingEncoder


def make_encoder(
    options: ProducerOptions, frames: StreamFrames, seen: StreamFilter, skip_deletes: bool, upr_expirations: bool,
    scratch: Callable[[], ScratchMemory],
) -> Encoder:  # fmt: skip
    """An encoder for the stream as it is now; another one is needed when its filter changes."""
    flags = int(options.flags)
    plain = FrameOptions(
        opaque=frames.opaque,
        vbucket=frames.vbucket,
        stream_id=frames.stream_id,
        collections=options.collections,
        collection_ids=seen.collection_ids if options.collections else None,
        delete_times=bool(flags & _DELETE_TIMES),
        expiry_opcode=upr_expirations if frames.upr else options.expiry_opcode,
        upr=frames.upr,
        no_value=bool(flags & _NO_VALUE),
        keep_datatype=bool(flags & _KEEP_DATATYPE),
        skip_deletes=skip_deletes,
        hifi_mfu=options.hifi_mfu,
        stop_datatypes=frames.stop_datatypes,
        plain_commits=not options.sync_writes,
    )
    if not frames.stop_datatypes and not options.force_value_compression:
        return PackedEncoder(plain)
    return ShapingEncoder(plain, _shape(options, frames), scratch())


def _shape(options: ProducerOptions, frames: StreamFrames) -> ValueShape:
    flags = int(options.flags)
    return ValueShape(
        stop_datatypes=frames.stop_datatypes,
        xattrs=bool(flags & _XATTRS),
        deleted_user_xattrs=bool(flags & _DELETED_USER_XATTRS),
        no_body=bool(flags & _NO_VALUE),
        force_compression=options.force_value_compression,
        keep_datatype=bool(flags & _KEEP_DATATYPE),
        snappy=options.snappy,
    )
