"""A consumer with a real store, and a test that is the producer (and the third party) at the other end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from upriver.model import FailoverEntry, VbucketState
from upriver.protocol.consumer.machine import Consumer, ConsumerEvent
from upriver.protocol.consumer.negotiation import ConsumerOptions
from upriver.protocol.consumer.streams import Registry
from upriver.store import Bucket, Durability, StoreOptions
from upriver.wire import Context, FrameSplitter, Message, Opcode, OtherResponse, decode
from upriver.wire.constants import Dialect
from upriver.wire.keys import join_key
from upriver.wire.messages.dcp import AddStream, DcpControl, DcpMutation, FailoverLogResponse, SnapshotMarker

COLLECTIONS = Context(collections=True)
BRANCH = 0xABCD
ADD_OPAQUE = 0xD0000001
STORE = StoreOptions(durability=Durability.LAZY, background=False)


class Store:
    """A bucket that fits ``ReplicaStore``."""

    def __init__(self, path: Path) -> None:
        self.bucket = Bucket.open(path, name="default", vbuckets=4, options=STORE)
        self.under_pressure = False
        self.bucket.set_state(0, VbucketState.REPLICA)
        self.bucket.set_state(1, VbucketState.REPLICA)
        self.bucket.set_state(2, VbucketState.ACTIVE)

    def vbucket(self, number: int) -> Any:
        return self.bucket.vbucket(number)

    def set_state(self, number: int, state: VbucketState, *, takeover: bool = False) -> Any:
        return self.bucket.set_state(number, state, takeover=takeover)

    def expect_xattrs(self) -> None:
        self.has_xattrs = True


class Talk:
    """Sends messages to a consumer and returns its answers."""

    def __init__(self, store: Store, registry: Registry | None = None, **options: Any) -> None:
        self.store = store
        self.machine = Consumer(store, registry or Registry(), ConsumerOptions(**options))
        self.events: list[ConsumerEvent] = []
        self.refused_controls: dict[str, int] = {}
        self.now = 0.0
        self._splitter = FrameSplitter()

    def say(self, *messages: Message | bytes) -> list[Message]:
        """Everything that the consumer sends after these messages."""
        data = b"".join(each if isinstance(each, bytes) else each.encode() for each in messages)
        self.events += self.machine.receive(data, self.now)
        return self.heard()

    def heard(self) -> list[Message]:
        return [decode(frame, COLLECTIONS) for frame in self._splitter.receive(self.machine.data_to_send())]

    def negotiate(self, said: list[Message]) -> list[Message]:
        """Grant every control, except those that the test refuses, until another message comes."""
        while said and isinstance(said[-1], DcpControl):
            name = said[-1].key.decode()
            status = self.refused_controls.get(name, 0)
            said = self.say(OtherResponse(Opcode.DCP_CONTROL, opaque=said[-1].opaque, status=status))
        return said

    def add(self, vbucket: int = 0, flags: int = 0) -> Message:
        """Send ADD_STREAM; returns the stream request or the refusal."""
        said = self.negotiate(self.say(AddStream(flags, vbucket=vbucket, opaque=ADD_OPAQUE)))
        assert len(said) == 1, said
        return said[0]

    def open(self, vbucket: int = 0, flags: int = 0, log: Iterable[tuple[int, int]] = ((BRANCH, 0),)) -> int:
        """Open a live stream; returns its opaque."""
        request = self.add(vbucket, flags)
        answer = self.say(success(request, log))
        assert answer[0].status == 0  # type: ignore[attr-defined]
        return request.opaque

    def vb(self, number: int = 0) -> Any:
        return self.store.vbucket(number)


def success(request: Message, log: Iterable[tuple[int, int]] = ((BRANCH, 0),)) -> Message:
    return FailoverLogResponse(tuple(FailoverEntry(*each) for each in log), opaque=request.opaque)


def refusal(request: Message, status: int) -> Message:
    return OtherResponse(Opcode.DCP_STREAM_REQ, opaque=request.opaque, status=status)


def rolled_back(request: Message, seqno: int, dialect: Dialect = Dialect.DCP) -> Message:
    from upriver.wire.messages.dcp import RollbackResponse
    from upriver.wire.messages.upr import UprRollbackResponse

    kind = RollbackResponse if dialect is Dialect.DCP else UprRollbackResponse
    return kind(seqno, opaque=request.opaque, status=0x23)


def marker(start: int, end: int, opaque: int, flags: int = 1, vbucket: int = 0) -> SnapshotMarker:
    return SnapshotMarker(start, end, flags, vbucket=vbucket, opaque=opaque)


def mutation(seqno: int, opaque: int, key: bytes = b"", vbucket: int = 0, **fields: Any) -> DcpMutation:
    fields = {"cas": 1000 + seqno, "value": b'{"n":%d}' % seqno, **fields}
    return DcpMutation(
        seqno, fields.pop("rev_seqno", seqno), key=join_key(0, key or b"k%d" % seqno), vbucket=vbucket, opaque=opaque,
        **fields,
    )  # fmt: skip
