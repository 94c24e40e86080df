"""Messages of the older UPR dialect whose bytes differ from DCP (docs/protocol/upr.md).

The size of the extras tells most layouts apart, so they are read in either dialect. State numbers and end statuses
have the same layout with another meaning; to read those, the dialect of the stream must be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, NamedTuple

from upriver.errors import Status
from upriver.model import SEQNO_MAX
from upriver.wire.constants import Dialect, Opcode, StreamFlag, UprStreamEndStatus, UprVbucketState
from upriver.wire.framing import Frame
from upriver.wire.layout import ANY_DATATYPE, U16, U32, U64, Broken, DocKey, Number, OptValue, Repeated, Section, Value
from upriver.wire.message import Message, Response, message, response
from upriver.wire.messages.dcp import DELETION_DATATYPES, is_rollback

MAX_VBUCKETS_PER_REQUEST = 63  # the extras of an answer hold no more (docs/protocol/upr.md#add-stream)


@message(Opcode.DCP_STREAM_REQ, dialect=Dialect.UPR)
class UprStreamRequest(Message):
    """Asks for changes after ``start_seqno``; ``vbuuid`` and ``high_seqno`` name the branch. Has no snapshot range."""

    unmistakable: ClassVar[bool] = True

    flags: Annotated[int, Number("I"), StreamFlag] = 0
    reserved: U32 = 0
    start_seqno: U64 = 0
    end_seqno: U64 = SEQNO_MAX
    vbuuid: U64 = 0
    high_seqno: U64 = 0

    def rules(self) -> Iterator[Broken]:
        if self.flags & ~int(StreamFlag.TAKEOVER):
            yield Broken("flags", "UPR knows only flag 1 (takeover)")


@response(Opcode.DCP_STREAM_REQ, dialect=Dialect.UPR, when=lambda frame: is_rollback(frame) and bool(frame.extras))
class UprRollbackResponse(Response):
    """The histories have diverged; the seqno is in the extras, not in the value."""

    unmistakable: ClassVar[bool] = True

    seqno: U64 = 0


@message(Opcode.DCP_STREAM_END, dialect=Dialect.UPR)
class UprStreamEnd(Message):
    """Nothing more comes on this stream; in UPR, status 1 means that the state changed."""

    status: Annotated[int, Number("I"), UprStreamEndStatus]


@message(Opcode.DCP_SNAPSHOT_MARKER, dialect=Dialect.UPR)
class UprSnapshotMarker(Message):
    """One snapshot ends and another begins; its end is not announced."""

    unmistakable: ClassVar[bool] = True


class _UprMetadata:
    """Extended metadata: the last ``nmeta`` bytes of the value do not belong to the document."""

    __slots__ = ()

    nmeta: int
    value: bytes

    @property
    def document(self) -> bytes:
        return self.value[: len(self.value) - self.nmeta]

    @property
    def metadata(self) -> bytes:
        return self.value[len(self.value) - self.nmeta :]

    def rules(self) -> Iterator[Broken]:
        if self.by_seqno == 0:  # type: ignore[attr-defined]
            yield Broken("by_seqno", "seqnos start at 1")
        if self.nmeta > len(self.value):
            yield Broken("nmeta", f"{self.nmeta} bytes of metadata in a value of {len(self.value)}")


@message(Opcode.DCP_MUTATION, dialect=Dialect.UPR, datatypes=ANY_DATATYPE)
class UprMutation(_UprMetadata, Message):
    """A document was written."""

    unmistakable: ClassVar[bool] = True

    by_seqno: U64
    rev_seqno: U64
    flags: U32 = 0
    expiry: U32 = 0
    lock_time: U32 = 0
    nmeta: U16 = 0
    key: DocKey = b""
    value: OptValue = b""


@message(Opcode.DCP_DELETION, dialect=Dialect.UPR, datatypes=DELETION_DATATYPES)
class UprDeletion(_UprMetadata, Message):
    """A document was removed. The bytes are those of DCP's first version, but metadata may follow the key."""

    by_seqno: U64
    rev_seqno: U64
    nmeta: U16 = 0
    key: DocKey = b""
    value: OptValue = b""


@message(Opcode.DCP_EXPIRATION, dialect=Dialect.UPR, datatypes=DELETION_DATATYPES)
class UprExpiration(_UprMetadata, Message):
    """A document expired."""

    unmistakable: ClassVar[bool] = True

    by_seqno: U64
    rev_seqno: U64
    nmeta: U16 = 0
    key: DocKey = b""
    value: OptValue = b""


@message(Opcode.DCP_FLUSH, dialect=Dialect.UPR)
class UprFlush(Message):
    """Drops all data of the vbucket; DCP removed the command."""


@message(Opcode.DCP_SET_VBUCKET_STATE, dialect=Dialect.UPR, stream_id=False)
class UprSetVbucketState(Message):
    """A step of a takeover; in UPR, 2 is pending and 3 is replica."""

    state: Annotated[int, Number("B"), UprVbucketState]

    def rules(self) -> Iterator[Broken]:
        if self.state not in UprVbucketState._value2member_map_:
            yield Broken("state", f"{self.state} is not a vbucket state")


class VbucketStatus(NamedTuple):
    """How the handshake of one vbucket ended."""

    vbucket: int
    status: int


def is_add_streams(frame: Frame) -> bool:
    """Whether a 0xB3 frame, today COMPACT_DB, is the older command: its value, the connection's name, is raw.

    See docs/protocol/upr.md#add-stream.
    """
    return bool(frame.value) and frame.datatype == 0


@message(Opcode.COMPACT_DB, dialect=Dialect.UPR, when=is_add_streams)
class UprAddStreams(Message):
    """Tells a consumer connection, named by name and uuid, to open streams for several vbuckets."""

    unmistakable: ClassVar[bool] = True

    connection_uuid: U64
    vbuckets: Annotated[tuple[int, ...], Repeated("H", int, Section.EXTRAS, at_least=1)]
    name: Value = b""

    def rules(self) -> Iterator[Broken]:
        if len(self.vbuckets) > MAX_VBUCKETS_PER_REQUEST:
            limit = MAX_VBUCKETS_PER_REQUEST
            yield Broken("vbuckets", f"{len(self.vbuckets)} vbuckets: an answer has room for {limit}")


@response(Opcode.COMPACT_DB, dialect=Dialect.UPR, when=lambda frame: bool(frame.extras))
class UprAddStreamsResponse(Response):
    """One status per vbucket, sent when every handshake has ended."""

    unmistakable: ClassVar[bool] = True

    statuses: Annotated[tuple[VbucketStatus, ...], Repeated("HH", VbucketStatus, Section.EXTRAS, at_least=1)]


UPR_STREAM_STATUSES = frozenset(
    {Status.SUCCESS, Status.KEY_EEXISTS, Status.EINVAL, Status.NOT_MY_VBUCKET, Status.EINTERNAL}
)
