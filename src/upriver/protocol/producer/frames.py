"""How a producer stream becomes bytes: its bulk encoder, and the frames that the bulk encoder does not make.

``make_encoder`` sets up the bulk encoder for plain documents. ``StreamFrames`` makes single frames: markers, stream
ends, system events, and documents whose value must change. The version 1 marker, which precedes every live batch, has
a struct of its own; everything else goes through the declared messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import NamedTuple, TypedDict

from upriver.errors import InvalidMessage, LocalProtocolError
from upriver.model import Datatype
from upriver.protocol.producer.controls import ProducerOptions
from upriver.protocol.producer.stream_filter import StreamFilter
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder
from upriver.wire.bulk.shape import ScratchMemory, ShapingEncoder, ValueShape
from upriver.wire.constants import Dialect, MarkerFlag, Opcode, OpenFlag, OsoFlag, RequestFrameId
from upriver.wire.framing import FrameInfo
from upriver.wire.keys import decode_leb128
from upriver.wire.message import Message
from upriver.wire.messages import dcp, upr
from upriver.wire.messages.events import SystemEvent, of_record
from upriver.wire.packed import RecordHead, RecordKind
from upriver.wire.values import deflate, inflate, join_xattrs, split_xattrs

_MARKER_V1 = Struct(">BBHBBHIIQQQI")
_ADVANCED = Struct(">BBHBBHIIQQ")
_REQUEST = 0x80
_MARKER = int(Opcode.DCP_SNAPSHOT_MARKER)
_COMMIT_DELETES = 1 << 63
_VALUE_BITS = Datatype.SNAPPY | Datatype.XATTR
_LEAST_WORTH_COMPRESSING = 32
# Plain numbers: with a thousand streams, IntFlag arithmetic would take as long as the rest of making an encoder.
_NO_VALUE = int(OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)
_KEEP_DATATYPE = int(OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)
_DELETE_TIMES = int(OpenFlag.INCLUDE_DELETE_TIMES)
_XATTRS = int(OpenFlag.INCLUDE_XATTRS)
_DELETED_USER_XATTRS = int(OpenFlag.INCLUDE_DELETED_USER_XATTRS)

Encoder = PackedEncoder | ShapingEncoder


class _Header(TypedDict):
    """The header fields that are the same in all frames of a stream."""

    vbucket: int
    opaque: int
    frame_infos: tuple[FrameInfo, ...]


class _DocumentHeader(_Header):
    cas: int
    datatype: int


class MarkerFacts(NamedTuple):
    """What the store knows about a snapshot."""

    start: int
    end: int
    flags: int
    max_visible: int = 0
    high_completed: int = 0
    purge_seqno: int = 0
    high_prepared: int = 0


class StreamFrames:
    """Makes the frames of one stream, in the dialect and the versions that the stream asked for."""

    __slots__ = ("_header", "_options", "_plain_markers", "opaque", "stop_datatypes", "stream_id", "upr", "vbucket")

    def __init__(self, options: ProducerOptions, dialect: Dialect, vbucket: int, opaque: int, stream_id: int) -> None:
        self._options = options
        self.upr = dialect is Dialect.UPR
        self.vbucket, self.opaque, self.stream_id = vbucket, opaque, stream_id
        self._plain_markers = not (self.upr or options.sync_writes or options.marker_v22 or stream_id)
        infos = (FrameInfo(RequestFrameId.STREAM_ID, stream_id.to_bytes(2, "big")),) if stream_id else ()
        self._header: _Header = {"vbucket": vbucket, "opaque": opaque, "frame_infos": infos}
        self.stop_datatypes = _stop_datatypes(int(options.flags), options.snappy)

    # ------------------------------------------------------------------------------------------ control frames

    def marker(self, facts: MarkerFacts) -> bytes:
        """A snapshot marker, in the version that applies to this snapshot.

        See docs/protocol/messages.md#snapshot-marker.
        """
        if self._plain_markers:
            return _MARKER_V1.pack(_REQUEST, _MARKER, 0, 20, 0, self.vbucket, 20, self.opaque, 0, *facts[:3])
        if self.upr:
            return upr.UprSnapshotMarker(**self._header).encode()
        options, on_disk = self._options, bool(facts.flags & MarkerFlag.DISK)
        span = facts.start, facts.end, facts.flags
        replication = options.sync_replication
        completed = facts.high_completed if replication and on_disk else 0
        visible = facts.max_visible if replication else 0
        if on_disk and options.marker_v22:
            prepared = facts.high_prepared if replication else 0
            return dcp.SnapshotMarkerV22(
                2, *span, visible, completed, facts.purge_seqno, prepared, **self._header
            ).encode()
        if replication:
            return dcp.SnapshotMarkerV20(0, *span, visible, completed, **self._header).encode()
        return dcp.SnapshotMarker(*span, **self._header).encode()

    def seqno_advanced(self, seqno: int) -> bytes:
        if self.stream_id:
            return dcp.SeqnoAdvanced(seqno, **self._header).encode()
        return _ADVANCED.pack(_REQUEST, Opcode.DCP_SEQNO_ADVANCED, 0, 8, 0, self.vbucket, 8, self.opaque, 0, seqno)

    def stream_end(self, status: int) -> bytes:
        end = upr.UprStreamEnd if self.upr else dcp.StreamEnd
        return end(status, **self._header).encode()

    def oso(self, flag: OsoFlag) -> bytes:
        return dcp.OsoSnapshot(flag, **self._header).encode()

    def set_vbucket_state(self, state: int) -> bytes:
        made = upr.UprSetVbucketState if self.upr else dcp.SetVbucketState
        return made(state, vbucket=self.vbucket, opaque=self.opaque).encode()

    def system_event(self, head: RecordHead, key: bytes, value: bytes) -> bytes:
        """A system event of the store, in the plain layout or as FlatBuffers."""
        content = of_record(head.extra >> 8, head.extra & 0xFF, key, value)
        return SystemEvent.of(
            head.seqno,
            content,
            flat=self._options.flatbuffers,
            **self._header,  # type: ignore[arg-type]
        ).encode()

    # ------------------------------------------------------------------------------------------ documents

    def document(self, head: RecordHead, key: bytes, value: bytes, deleted: bool | None = None) -> bytes:
        """A mutation, deletion or expiration whose value may have to change; also used for commits."""
        kind = head.kind & 0x7F
        gone = kind in (RecordKind.DELETION, RecordKind.EXPIRATION) if deleted is None else deleted
        datatype, value = self._value(head.datatype, value, gone)
        common: _DocumentHeader = {**self._header, "cas": head.cas, "datatype": datatype}
        key = key if self._options.collections else key[1:]
        if not gone:
            return self._mutation(head, key, value, common)
        return self._tombstone(head, key, value, common, expired=kind == RecordKind.EXPIRATION)

    def _mutation(self, head: RecordHead, key: bytes, value: bytes, common: _DocumentHeader) -> bytes:
        if self.upr:
            return upr.UprMutation(
                head.seqno, head.rev_seqno, head.flags, head.time, key=key, value=value, **common
            ).encode()
        nru = head.extra & 0xFF if head.kind == RecordKind.MUTATION else 0
        shown = nru if self._options.hifi_mfu else min(nru, 3)
        return dcp.DcpMutation(
            head.seqno, head.rev_seqno, head.flags, head.time, nru=shown, key=key, value=value, **common
        ).encode()

    def _tombstone(self, head: RecordHead, key: bytes, value: bytes, common: _DocumentHeader, expired: bool) -> bytes:
        seqnos = head.seqno, head.rev_seqno
        made: Message
        if self.upr:
            made = upr.UprDeletion(*seqnos, key=key, value=value, **common)
        elif expired and self._options.expiry_opcode:
            made = dcp.Expiration(*seqnos, head.time, key=key, value=value, **common)
        elif OpenFlag.INCLUDE_DELETE_TIMES in self._options.flags:
            made = dcp.DeletionV2(*seqnos, head.time, key=key, value=value, **common)
        else:
            made = dcp.DcpDeletion(*seqnos, key=key, value=value, **common)
        return made.encode()

    def prepare(self, head: RecordHead, key: bytes, value: bytes) -> bytes:
        datatype, value = self._value(head.datatype, value, gone=False)
        level, deleted = head.extra >> 8, head.extra & 0xFF
        return dcp.Prepare(
            head.seqno, head.rev_seqno, head.flags, head.time, deleted=deleted, durability_level=level,
            key=self._key(key), value=value, cas=head.cas, datatype=datatype, **self._header,
        ).encode()  # fmt: skip

    def commit(self, head: RecordHead, key: bytes) -> bytes:
        prepared = head.extra & ~_COMMIT_DELETES
        return dcp.Commit(prepared, head.seqno, self._key(key), **self._header).encode()

    def abort(self, head: RecordHead, key: bytes) -> bytes:
        return dcp.Abort(head.extra & ~_COMMIT_DELETES, head.seqno, self._key(key), **self._header).encode()

    @staticmethod
    def commit_deletes(head: RecordHead) -> bool:
        return bool(head.extra & _COMMIT_DELETES)

    def _key(self, key: bytes) -> bytes:
        return key if self._options.collections else key[decode_leb128(key)[1] :]

    def _value(self, datatype: int, value: bytes, gone: bool) -> tuple[int, bytes]:
        """The datatype and value as the flags of OPEN require, changed in the order of docs/protocol/open.md#values."""
        options, original = self._options, datatype
        strip = datatype & self.stop_datatypes or options.flags & _NO_VALUE
        if strip:
            try:
                datatype, value = _stripped(datatype, value, options.flags, gone)
            except (InvalidMessage, LocalProtocolError):
                datatype, value = _unreadable(value, options.flags, gone)
        if not value:
            datatype = 0
        if value and options.force_value_compression and not datatype & Datatype.SNAPPY:
            datatype, value = _compressed(datatype, value)
        if OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE in options.flags:
            datatype = original if options.snappy else original & ~Datatype.SNAPPY
        return datatype, value


@lru_cache(maxsize=256)  # the same for all streams of a connection
def _stop_datatypes(open_flags: int, snappy: bool) -> int:
    """Datatype bits of the values that the bulk encoder must leave to ``document``."""
    flags, bits = OpenFlag(open_flags), 0
    keeps_xattrs = OpenFlag.INCLUDE_XATTRS in flags
    if flags & _NO_VALUE:
        hides_snappy = OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE in flags and not snappy
        return (Datatype.XATTR if keeps_xattrs else 0) | (Datatype.SNAPPY if hides_snappy else 0)
    if not keeps_xattrs or OpenFlag.INCLUDE_DELETED_USER_XATTRS not in flags:
        bits |= Datatype.XATTR
    if not snappy:
        bits |= Datatype.SNAPPY
    return bits


def _stripped(datatype: int, value: bytes, flags: OpenFlag, gone: bool) -> tuple[int, bytes]:
    plain = inflate(value) if datatype & Datatype.SNAPPY else value
    xattrs, body = split_xattrs(plain) if datatype & Datatype.XATTR else ({}, plain)
    if flags & _NO_VALUE or gone:
        body = b""
    if OpenFlag.INCLUDE_XATTRS not in flags:
        xattrs = {}
    elif gone and OpenFlag.INCLUDE_DELETED_USER_XATTRS not in flags:
        xattrs = {name: content for name, content in xattrs.items() if name.startswith("_")}
    kept = datatype & Datatype.JSON if body else 0
    if xattrs:
        return kept | Datatype.XATTR, join_xattrs(xattrs, body)
    return kept, body


def _unreadable(value: bytes, flags: OpenFlag, gone: bool) -> tuple[int, bytes]:
    """Send a value that cannot be parsed as raw bytes; it must not end the stream."""
    return 0, b"" if flags & _NO_VALUE or gone else value


def _compressed(datatype: int, value: bytes) -> tuple[int, bytes]:
    if len(value) < _LEAST_WORTH_COMPRESSING:
        return datatype, value
    smaller = deflate(value)
    return (datatype | Datatype.SNAPPY, smaller) if len(smaller) < len(value) else (datatype, value)


def make_encoder(
    options: ProducerOptions, frames: StreamFrames, seen: StreamFilter, skip_deletes: bool, upr_expirations: bool,
    scratch: Callable[[], ScratchMemory],
) -> Encoder:  # fmt: skip
    """A bulk encoder for the stream as it is now; make a new one when the filter changes."""
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
