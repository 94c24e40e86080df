"""A producer driven by bytes and time: what it sends when, when it disconnects, and what a consumer stores."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.producing import Link, Streamed
from tests.support.examples import examples
from upriver.errors import Status
from upriver.model import VbucketState
from upriver.protocol.consumer.machine import Consumer
from upriver.protocol.consumer.negotiation import ConsumerOptions
from upriver.protocol.consumer.streams import Registry
from upriver.protocol.producer.live import LiveVbucket
from upriver.protocol.producer.machine import StreamDropped, StreamGranted
from upriver.protocol.producer.stream import ProducerStream
from upriver.protocol.roles import Foreign, WrongRole
from upriver.store import Bucket, EndReason, StoreOptions
from upriver.wire import FrameSplitter, Message, Opcode, OtherResponse, decode
from upriver.wire.constants import MarkerFlag, StreamEndStatus, StreamFlag
from upriver.wire.messages import dcp, kv

NOW = 100.0
OPTIONS = StoreOptions(background=False)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    made = Bucket.open(tmp_path / "b", name="b", vbuckets=2, options=OPTIONS)
    made.create_all(VbucketState.ACTIVE)
    yield made
    made.abandon()


@pytest.fixture
def link(bucket: Bucket) -> Link:
    return Link(Streamed(bucket), b"p")


def said(link: Link) -> list[object]:
    """Messages and statuses, in the order in which they were sent."""
    link.turn()
    data, link.sent = bytes(link.sent), bytearray()
    frames = FrameSplitter().receive(data)
    return [Status(frame.specific) if frame.magic.is_response else decode(frame) for frame in frames]


def test_requests_are_answered_however_their_bytes_arrive(link: Link):
    requests = [dcp.StreamRequest(opaque=7), dcp.StreamRequest(opaque=8), dcp.CloseStream(), dcp.CloseStream()]
    events = []
    for byte in b"".join(request.encode() for request in requests):
        events += list(link.producer.receive(bytes((byte,)), NOW))
    assert said(link) == [Status.SUCCESS, Status.KEY_EEXISTS, Status.SUCCESS, Status.KEY_ENOENT]
    assert events == [StreamGranted(0, 0, 0, dcp.StreamRequest().end_seqno, 0), StreamDropped(0, 0)]


def test_a_key_value_command_is_handed_back(link: Link):
    [event] = link.producer.receive(kv.Get(b"k").encode(), NOW)
    assert isinstance(event, Foreign)
    assert event.frame.opcode == Opcode.GET


@pytest.mark.parametrize(
    "message", [dcp.AddStream(), dcp.DcpMutation(1, 1, key=b"\0k"), OtherResponse(Opcode.DCP_NOOP, opaque=1)]
)
def test_what_only_a_consumer_takes_ends_the_connection(link: Link, message: Message):
    with pytest.raises(WrongRole):
        list(link.producer.receive(message.encode(), NOW))


def test_a_noop_is_sent_when_it_is_due_and_the_next_one_only_after_its_answer(link: Link):
    producer = link.producer
    assert producer.wake_at == 20.0
    producer.wake(19.9)
    assert said(link) == []
    producer.wake(20.0)
    [noop] = said(link)
    assert isinstance(noop, dcp.DcpNoop)
    assert producer.wake_at == inf
    assert list(producer.receive(OtherResponse(Opcode.DCP_NOOP, opaque=noop.opaque).encode(), 21.0)) == []
    assert producer.wake_at == 40.0


def test_a_takeover_that_is_not_confirmed_makes_writers_wait_until_it_ends(bucket: Bucket):
    streamed = Streamed(bucket)
    link = Link(streamed, b"p")
    bucket.vbucket(0).documents.set(b"k", b"v")
    list(link.producer.receive(dcp.StreamRequest(flags=StreamFlag.TAKEOVER, opaque=5).encode(), 0.0))
    _, marker, *_ = said(link)
    assert isinstance(marker, dcp.SnapshotMarker)
    assert marker.flags & MarkerFlag.ACK
    link.producer.wake(59.0)
    assert not streamed.store.held
    link.producer.wake(60.0)
    assert streamed.store.held == {0}
    link.ask(dcp.CloseStream())
    assert not streamed.store.held


def test_a_stream_that_is_ended_by_another_thread_while_it_goes_live_is_sent_nothing_more(bucket: Bucket):
    streamed = Streamed(bucket)
    link = Link(streamed, b"p")
    join = streamed.live.join

    def join_and_end(stream: ProducerStream) -> LiveVbucket | None:
        joined = join(stream)
        assert joined is not None
        stream.source.kill(EndReason.STATE_CHANGED)  # type: ignore[attr-defined]
        return joined

    streamed.live.join = join_and_end  # type: ignore[method-assign]
    bucket.vbucket(0).documents.set(b"before", b"v")
    link.ask(dcp.StreamRequest())
    link.turn()
    bucket.vbucket(0).documents.set(b"after", b"v")
    assert streamed.live.turn() == []
    *_, document, end = said(link)
    assert isinstance(document, dcp.DcpMutation)
    assert document.key == b"\0before"
    assert end == dcp.StreamEnd(StreamEndStatus.STATE_CHANGED)


class Replica:
    """A bucket that fits ``ReplicaStore``."""

    def __init__(self, path: Path) -> None:
        self.bucket = Bucket.open(path, name="b", vbuckets=2, options=OPTIONS)
        self.under_pressure = False
        self.vbucket = self.bucket.vbucket
        for number in range(2):
            self.bucket.set_state(number, VbucketState.REPLICA)

    def set_state(self, number: int, state: VbucketState, *, takeover: bool = False) -> object:
        return self.bucket.set_state(number, state, takeover=takeover)

    def expect_xattrs(self) -> None: ...


writes = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.sampled_from(["set", "delete", "turn", "disk"])))


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(before=writes, after=writes, piece=st.sampled_from([1, 7, 100, 1 << 20]))
def test_a_consumer_joined_by_bytes_ends_with_an_equal_store(
    tmp_path_factory: pytest.TempPathFactory, before: list[tuple[int, int, str]], after: list[tuple[int, int, str]],
    piece: int,
):  # fmt: skip
    folder = tmp_path_factory.mktemp("joined")
    active, replica = Bucket.open(folder / "a", name="b", vbuckets=2, options=OPTIONS), Replica(folder / "r")
    active.create_all(VbucketState.ACTIVE)
    streamed = Streamed(active)
    link = Link(streamed, b"replication")
    consumer = Consumer(replica, Registry(), ConsumerOptions())

    def carry() -> None:
        while True:
            streamed.turn()
            to_producer, to_consumer = consumer.data_to_send(), bytes(link.sent)
            link.sent.clear()
            if not to_producer and not to_consumer:
                return
            for at in range(0, len(to_producer), piece):
                list(link.producer.receive(to_producer[at : at + piece], NOW))
            for at in range(0, len(to_consumer), piece):
                list(consumer.receive(to_consumer[at : at + piece], NOW))

    def act(vbucket: int, key: int, kind: str) -> None:
        vb, name = active.vbucket(vbucket), b"k%d" % key
        if kind == "set":
            vb.documents.set(name, b"v%d" % vb.high_seqno)
        elif kind == "delete" and (vbucket, name) in alive:
            vb.documents.delete(name)
        elif kind == "disk":
            active.flush()
            active.trim_memory()
        elif kind == "turn":
            carry()
        if kind in ("set", "delete"):
            (alive.add if kind == "set" else alive.discard)((vbucket, name))

    alive: set[tuple[int, bytes]] = set()
    for step in before:
        act(*step)
    consumer.add_streams([0, 1], lambda vbucket, status: None)
    for step in after:
        act(*step)
    carry()
    for number in range(2):
        assert replica.bucket.vbucket(number).high_seqno == active.vbucket(number).high_seqno
        assert replica.bucket.vbucket(number).item_count == active.vbucket(number).item_count
    for number, name in alive:
        assert (
            replica.bucket.vbucket(number).documents.get_replica(name).value
            == active.vbucket(number).documents.get(name).value
        )
    active.abandon()
    replica.bucket.abandon()
