"""The messages of DCP, 0x50 to 0x67, in every version (docs/protocol/messages.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from upriver.errors import Status
from upriver.model import SEQNO_MAX, FailoverEntry, VbucketState
from upriver.wire.checks import Context
from upriver.wire.constants import (
    Dialect,
    DurabilityLevel,
    MarkerFlag,
    Opcode,
    OpenFlag,
    OsoFlag,
    StreamEndStatus,
    StreamFlag,
)
from upriver.wire.framing import Frame
from upriver.wire.layout import (
    ANY_DATATYPE,
    JSON_OR_RAW,
    U8,
    U16,
    U32,
    U64,
    Broken,
    DocKey,
    Key,
    Number,
    OptValue,
    Presence,
    Repeated,
    Section,
    Value,
    ValueU64,
)
from upriver.wire.message import Message, Response, message, response

FailoverEntries = Annotated[tuple[FailoverEntry, ...], Repeated("QQ", FailoverEntry, at_least=1)]

# Tombstones carry extended attributes or nothing: plain JSON, with or without snappy, is refused
# (docs/protocol/messages.md#deletion).
DELETION_DATATYPES = ANY_DATATYPE - {1, 3}


def _unknown_bits(field: str, flags: int, known: int) -> Iterator[Broken]:
    unknown = flags & ~int(known)  # ~ of an IntFlag has only the other known bits
    if unknown:
        yield Broken(field, f"flag bits 0x{unknown:x} do not exist")


def _no_seqno(field: str, seqno: int) -> Iterator[Broken]:
    if seqno == 0:
        yield Broken(field, "seqnos start at 1")


@message(Opcode.DCP_OPEN, datatypes=JSON_OR_RAW)
class Open(Message):
    """Makes this a DCP connection called ``name``; ``flags`` give the receiver its role."""

    reserved: U32
    flags: Annotated[int, Number("I"), OpenFlag]
    name: Key
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        yield from _unknown_bits("flags", self.flags, sum(OpenFlag))
        flags = OpenFlag(self.flags & sum(OpenFlag))
        if OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL in flags and OpenFlag.PRODUCER not in flags:
            yield Broken("flags", "0x200 (skip deletes) is only for producers")
        if OpenFlag.NO_VALUE in flags and OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE in flags:
            yield Broken("flags", "0x008 and 0x040 cannot be combined")
        if OpenFlag.INCLUDE_DELETED_USER_XATTRS in flags and OpenFlag.INCLUDE_XATTRS not in flags:
            yield Broken("flags", "0x100 (deleted user xattrs) needs 0x004 (xattrs)")
        if bool(self.value) != bool(self.datatype):
            yield Broken("datatype", "a value must be JSON, and no value must be raw")
        if self.value:
            yield from self._value_rules()

    def _value_rules(self) -> Iterator[Broken]:
        found = self._json()
        if not isinstance(found, dict):
            yield Broken("value", "must be a JSON object")
        elif set(found) - {"consumer_name"}:
            yield Broken("value", f"unknown key {min(set(found) - {'consumer_name'})!r}")
        elif found and self.flags & OpenFlag.PRODUCER:
            yield Broken("value", "consumer_name is only for consumer connections")
        elif not all(isinstance(name, str) for name in found.values()):
            yield Broken("value", "consumer_name must be a string")

    def _json(self) -> object:
        import orjson

        try:
            return orjson.loads(self.value)
        except orjson.JSONDecodeError:
            return None

    @property
    def consumer_name(self) -> str | None:
        """The consumer's name in the value, if there is one."""
        found = self._json() if self.value else None
        return found.get("consumer_name") if isinstance(found, dict) else None


# Plain numbers: a client opens a thousand streams at once, and a sum of IntFlags takes 20 us.
_CACHE_TRANSFER = int(StreamFlag.CACHE_TRANSFER)
_CACHE_TRANSFER_COMPANIONS = int(StreamFlag.CACHE_TRANSFER | StreamFlag.TAKEOVER | StreamFlag.ACTIVE_VB_ONLY)
_STREAM_FLAGS = sum(int(flag) for flag in StreamFlag if flag is not StreamFlag.NO_VALUE)


def _stream_flags(flags: int) -> Iterator[Broken]:
    flags = int(flags)
    yield from _unknown_bits("flags", flags, _STREAM_FLAGS)
    if flags & _CACHE_TRANSFER and flags & ~_CACHE_TRANSFER_COMPANIONS:
        yield Broken("flags", "0x100 (cache transfer) may be combined only with takeover and active-only")


@message(Opcode.DCP_ADD_STREAM)
class AddStream(Message):
    """Tells a consumer to open a stream for the vbucket; answered when the handshake ends."""

    flags: Annotated[int, Number("I"), StreamFlag] = 0

    def rules(self) -> Iterator[Broken]:
        yield from _stream_flags(self.flags)


@response(Opcode.DCP_ADD_STREAM, when=lambda frame: frame.specific == 0 or len(frame.extras) == 4)
class AddStreamResponse(Response):
    """Ends the handshake; ``stream_opaque`` is the opaque of the stream's messages."""

    stream_opaque: U32 = 0


@message(Opcode.DCP_CLOSE_STREAM)
class CloseStream(Message):
    """Ends the vbucket's stream; with stream-ids on, the one with this stream-id."""


@message(Opcode.DCP_STREAM_REQ)
class StreamRequest(Message):
    """Asks for the changes after ``start_seqno``, the last seqno that the requester has, up to ``end_seqno``."""

    flags: Annotated[int, Number("I"), StreamFlag] = 0
    reserved: U32 = 0
    start_seqno: U64 = 0
    end_seqno: U64 = SEQNO_MAX
    vbuuid: U64 = 0
    snap_start_seqno: U64 = 0
    snap_end_seqno: U64 = 0
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        yield from _stream_flags(self.flags)

    def agreed_rules(self, context: Context) -> Iterator[Broken]:
        if self.value and not context.collections:
            yield Broken("value", "a filter needs collections, which HELLO did not turn on")


@response(Opcode.DCP_STREAM_REQ, Opcode.DCP_GET_FAILOVER_LOG, when=lambda frame: frame.specific == 0)
class FailoverLogResponse(Response):
    """The failover log of the vbucket, newest branch first."""

    entries: FailoverEntries


def is_rollback(frame: Frame) -> bool:
    return frame.specific == Status.ROLLBACK


@response(Opcode.DCP_STREAM_REQ, when=lambda frame: is_rollback(frame) and not frame.extras)
class RollbackResponse(Response):
    """The histories have diverged: ask again from ``seqno`` or lower."""

    seqno: ValueU64 = 0


@message(Opcode.DCP_GET_FAILOVER_LOG)
class GetDcpFailoverLog(Message):
    """Asks for the failover log of the vbucket, on a DCP connection."""


@message(Opcode.DCP_STREAM_END, dialect=Dialect.DCP)
class StreamEnd(Message):
    """Nothing more comes on this stream."""

    status: Annotated[int, Number("I"), StreamEndStatus]


def _marker_rules(start: int, end: int) -> Iterator[Broken]:
    if start > end:
        yield Broken("start_seqno", f"snapshot starts at {start}, after its end {end}")


@message(Opcode.DCP_SNAPSHOT_MARKER)
class SnapshotMarker(Message):
    """The changes that follow, from ``start_seqno`` to ``end_seqno``, form one snapshot."""

    start_seqno: U64
    end_seqno: U64
    flags: Annotated[int, Number("I"), MarkerFlag]

    def rules(self) -> Iterator[Broken]:
        yield from _marker_rules(self.start_seqno, self.end_seqno)


def _marker_version(frame: Frame) -> int:
    return frame.extras[0] if len(frame.extras) == 1 else -1


@message(Opcode.DCP_SNAPSHOT_MARKER, when=lambda frame: _marker_version(frame) in (0, 1) or _marker_version(frame) > 2)
class SnapshotMarkerV20(Message):
    """A marker for replicas, which also says which seqnos are visible and which prepares are complete."""

    version: U8
    start_seqno: ValueU64
    end_seqno: ValueU64
    flags: Annotated[int, Number("I", Section.VALUE), MarkerFlag]
    max_visible_seqno: ValueU64
    high_completed_seqno: ValueU64

    def rules(self) -> Iterator[Broken]:
        if self.version != 0:
            yield Broken("version", f"marker version 2.{self.version} does not exist")
        yield from _marker_rules(self.start_seqno, self.end_seqno)


@message(Opcode.DCP_SNAPSHOT_MARKER, when=lambda frame: _marker_version(frame) == 2)
class SnapshotMarkerV22(Message):
    """A marker that also says how far tombstones were purged."""

    version: U8
    start_seqno: ValueU64
    end_seqno: ValueU64
    flags: Annotated[int, Number("I", Section.VALUE), MarkerFlag]
    max_visible_seqno: ValueU64
    high_completed_seqno: ValueU64
    purge_seqno: ValueU64
    high_prepared_seqno: ValueU64

    def rules(self) -> Iterator[Broken]:
        if self.version != 2:
            yield Broken("version", f"this layout is marker version 2.2, not 2.{self.version}")
        yield from _marker_rules(self.start_seqno, self.end_seqno)


@message(Opcode.DCP_MUTATION, datatypes=ANY_DATATYPE)
class DcpMutation(Message):
    """A document was written."""

    by_seqno: U64
    rev_seqno: U64
    flags: U32 = 0
    expiry: U32 = 0
    lock_time: U32 = 0
    nmeta: U16 = 0
    nru: U8 = 0
    key: DocKey = b""
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        yield from _no_seqno("by_seqno", self.by_seqno)
        if self.nmeta:
            yield Broken("nmeta", "must be 0: DCP has no extended metadata")


@message(Opcode.DCP_DELETION, datatypes=DELETION_DATATYPES)
class DcpDeletion(Message):
    """A document was removed."""

    by_seqno: U64
    rev_seqno: U64
    nmeta: U16 = 0
    key: DocKey = b""
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        yield from _no_seqno("by_seqno", self.by_seqno)
        if self.nmeta:
            yield Broken("nmeta", "must be 0: DCP has no extended metadata")


@message(Opcode.DCP_DELETION, datatypes=DELETION_DATATYPES)
class DeletionV2(Message):
    """A document was removed at ``delete_time``; sent on connections opened with delete times."""

    by_seqno: U64
    rev_seqno: U64
    delete_time: U32 = 0
    unused: U8 = 0
    key: DocKey = b""
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        yield from _no_seqno("by_seqno", self.by_seqno)


@message(Opcode.DCP_EXPIRATION, datatypes=DELETION_DATATYPES)
class Expiration(Message):
    """A document expired."""

    by_seqno: U64
    rev_seqno: U64
    delete_time: U32 = 0
    key: DocKey = b""
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        yield from _no_seqno("by_seqno", self.by_seqno)


@message(Opcode.DCP_SET_VBUCKET_STATE, dialect=Dialect.DCP, stream_id=False)
class SetVbucketState(Message):
    """A step of a takeover: the receiver's vbucket takes this state, and the receiver answers."""

    state: Annotated[int, Number("B"), VbucketState]

    def rules(self) -> Iterator[Broken]:
        if self.state not in VbucketState._value2member_map_:
            yield Broken("state", f"{self.state} is not a vbucket state")


@message(Opcode.DCP_NOOP)
class DcpNoop(Message):
    """Asks whether the reader is there; answered at once, with the same opaque."""


@message(Opcode.DCP_BUFFER_ACK)
class BufferAck(Message):
    """The reader has processed ``bytes`` bytes, so the producer may send as many more."""

    bytes: U32


@message(Opcode.DCP_CONTROL)
class DcpControl(Message):
    """Sets an option of a producer connection."""

    key: Key
    value: Value


@message(Opcode.DCP_PREPARE, cas=Presence.REQUIRED, datatypes=ANY_DATATYPE, stream_id=False)
class Prepare(Message):
    """A durable write has begun; it takes effect when a Commit follows."""

    by_seqno: U64
    rev_seqno: U64
    flags: U32 = 0
    expiry: U32 = 0
    lock_time: U32 = 0
    nru: U8 = 0
    deleted: U8 = 0
    durability_level: Annotated[int, Number("B"), DurabilityLevel] = DurabilityLevel.MAJORITY
    key: DocKey = b""
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        yield from _no_seqno("by_seqno", self.by_seqno)
        if not 1 <= self.durability_level <= 3:
            yield Broken("durability_level", f"{self.durability_level} is not a durability level")


@message(Opcode.DCP_SEQNO_ACKNOWLEDGED, cas=Presence.FORBIDDEN)
class SeqnoAcknowledged(Message):
    """Every prepare up to this seqno is durable here."""

    prepared_seqno: U64


@message(Opcode.DCP_COMMIT, cas=Presence.FORBIDDEN, stream_id=False)
class Commit(Message):
    """The prepared write of this key takes effect."""

    prepared_seqno: U64
    commit_seqno: U64
    key: DocKey = b""

    def rules(self) -> Iterator[Broken]:
        yield from _no_seqno("commit_seqno", self.commit_seqno)


@message(Opcode.DCP_ABORT, cas=Presence.FORBIDDEN, stream_id=False)
class Abort(Message):
    """The prepared write of this key never happened."""

    prepared_seqno: U64
    abort_seqno: U64
    key: DocKey = b""

    def rules(self) -> Iterator[Broken]:
        yield from _no_seqno("abort_seqno", self.abort_seqno)


@message(Opcode.DCP_SEQNO_ADVANCED)
class SeqnoAdvanced(Message):
    """The stream has reached this seqno, at which there is no change for this reader."""

    by_seqno: U64


@message(Opcode.DCP_OSO_SNAPSHOT)
class OsoSnapshot(Message):
    """Begins or ends an out-of-order snapshot; in between, changes come in any order of seqno."""

    flags: Annotated[int, Number("I"), OsoFlag]

    def rules(self) -> Iterator[Broken]:
        if self.flags not in OsoFlag._value2member_map_:
            yield Broken("flags", f"{self.flags} is neither start nor end")


@message(Opcode.DCP_CACHE_TRANSFER_END)
class CacheTransferEnd(Message):
    """The cache transfer is complete; an ordinary stream follows."""


def marker_range(marker: Message) -> tuple[int, int, int]:
    """The start, end and flags of a DCP marker of any version."""
    assert isinstance(marker, SnapshotMarker | SnapshotMarkerV20 | SnapshotMarkerV22)
    return marker.start_seqno, marker.end_seqno, marker.flags
