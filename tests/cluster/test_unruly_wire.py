"""A producer and a consumer with real stores, joined by a wire that splits, delays and cuts at any byte.

Whatever happens on the way, once the wire is whole again the consumer's store equals the producer's: caught up, or
rolled back and caught up. The producer also loses history and memory meanwhile, and the consumer its unsaved tail.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cluster.chaos_checker import documents_of
from tests.support.examples import examples
from tests.support.node_thread import FAST_STORE, NodeThread
from upriver.client._requests.connections import converse
from upriver.client.options import ConnectOptions
from upriver.errors import StatusError, SyncWriteInProgress
from upriver.model import VbucketState
from upriver.node.faults import _branch
from upriver.node.options import NodeOptions
from upriver.protocol.consumer.machine import Consumer
from upriver.protocol.consumer.negotiation import ConsumerOptions, replication_hello
from upriver.protocol.consumer.streams import Registry, StreamPhase
from upriver.protocol.topology import Address
from upriver.store import Bucket, Durability, StoreOptions
from upriver.wire.constants import OpenFlag
from upriver.wire.messages.dcp import Open
from upriver.wire.values import deflate, join_xattrs

FLAGS = (
    OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETE_TIMES | OpenFlag.INCLUDE_DELETED_USER_XATTRS
)
STORE = StoreOptions(durability=Durability.LAZY, background=False)
VB = 0
KEYS = [b"k%d" % n for n in range(6)]
HEAL_S = 10.0  # until the test gives up; far less is needed


@pytest.fixture(scope="module")
def producer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeThread]:
    node = NodeThread(NodeOptions(data=tmp_path_factory.mktemp("producer"), kv_port=0, vbuckets=1, store=FAST_STORE))
    yield node
    node.stop()


class Target:
    """The consumer's store, which may crash."""

    under_pressure = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bucket = self._open()
        self.bucket.set_state(VB, VbucketState.REPLICA)

    def _open(self) -> Bucket:
        return Bucket.open(self._path, name="default", vbuckets=1, options=STORE)

    def vbucket(self, number: int) -> Any:
        return self.bucket.vbucket(number)

    def set_state(self, number: int, state: VbucketState, *, takeover: bool = False) -> Any:
        return self.bucket.set_state(number, state, takeover=takeover)

    def expect_xattrs(self) -> None:
        self.has_xattrs = True

    def crash(self) -> None:
        self.bucket.abandon()
        self.bucket = self._open()


class Wire:
    """One connection between the two: what it carries is chopped into ``pieces`` and cut after ``length`` bytes."""

    def __init__(self, producer: NodeThread, target: Target) -> None:
        options = ConnectOptions.parse(f"couchbase://127.0.0.1:{producer.node.kv_port}")
        self._connection = converse(Address("127.0.0.1", producer.node.kv_port), options)
        answers = self._connection.ask([replication_hello("unruly"), Open(0, FLAGS, b"unruly")])
        assert [answer.status for answer in answers] == [0, 0]
        self._socket: socket.socket = self._connection._socket
        self._producer, self._target = producer, target
        self.machine = Consumer(target, Registry(), ConsumerOptions(consumer_name="unruly", window=2000))
        self.statuses: list[int] = []
        self.machine.add_streams([VB], lambda _, status: self.statuses.append(status))

    def carry(self, pieces: list[int], length: int | None) -> None:
        """Carry bytes until so many came, or (None) until both ends are at rest and equal."""
        self._socket.settimeout(0.01)
        came, turn = 0, 0
        deadline = time.monotonic() + (0.2 if length is not None else HEAL_S)
        while time.monotonic() < deadline:
            self._socket.sendall(self.machine.data_to_send())
            if self._at_rest():
                return
            size = pieces[turn % len(pieces)]
            turn += 1
            size = size if length is None else min(size, length - came)
            if size <= 0 or not self._receive(size):
                return
            came += size

    def _receive(self, size: int) -> bool:
        try:
            data = self._socket.recv(size)
        except TimeoutError:
            return True
        for _ in self.machine.receive(data, time.monotonic()):
            pass
        for vb, seqno, _ in self.machine.take_prepared():
            self.machine.acknowledge_prepares(vb, seqno)
        return bool(data)

    def _at_rest(self) -> bool:
        stream = self.machine.streams.get(VB)
        live = stream is not None and stream.phase is StreamPhase.LIVE
        high = self._producer.bucket.store.vbucket(VB).high_seqno
        return live and self._target.vbucket(VB).high_seqno == high and self._target.vbucket(VB).snapshot_complete

    def cut(self) -> None:
        self.machine.receive_eof()
        self._connection.close()


def write(vb: Any, key: bytes, kind: str, number: int) -> None:
    with contextlib.suppress(SyncWriteInProgress, StatusError):
        if kind == "plain":
            vb.documents.set(key, b'{"n":%d}' % number, expiry=number % 3 * 4_000_000, flags=number)
        elif kind == "delete":
            vb.documents.delete(key)
        elif kind == "xattrs":
            vb.documents.set(key, join_xattrs({"_s": b"1", "u": b"%d" % number}, b"[]"), datatype=4)
        elif kind == "snappy":
            vb.documents.set(key, deflate(b'{"n":"%s"}' % (b"%d" % number * 60)), datatype=2)
        else:
            with vb.durable.preparing(1):
                prepared = (
                    vb.documents.delete(key) if kind == "durable delete" else vb.documents.set(key, b"[%d]" % number)
                )
            if kind != "pending":
                (vb.durable.abort if kind == "aborted" else vb.durable.commit)(key, 0, prepared.seqno)


def write_all(vb: Any, writes: list[tuple[bytes, str, int]]) -> None:
    for each in writes:
        write(vb, *each)


KINDS = ["plain", "plain", "plain", "delete", "xattrs", "snappy", "committed", "aborted", "pending", "durable delete"]
A_WRITE = st.tuples(st.sampled_from(KEYS), st.sampled_from(KINDS), st.integers(0, 999))
WRITES = st.lists(A_WRITE, min_size=1, max_size=12)
PIECES = st.lists(st.sampled_from([1, 2, 3, 7, 23, 24, 25, 60, 200, 5000]), min_size=1, max_size=4)
STEPS = st.one_of(
    st.tuples(st.just("write"), WRITES),
    st.tuples(st.just("write"), WRITES),
    st.tuples(st.just("carry"), PIECES, st.integers(0, 2500)),
    st.tuples(st.just("carry"), PIECES, st.integers(0, 2500)),
    st.tuples(st.just("lose"), st.integers(0, 12)),
    st.tuples(st.just("forget")),
    st.tuples(st.just("flush")),
    st.tuples(st.just("crash")),
)


def begin(producer: NodeThread) -> Any:
    """An empty vbucket with a new history."""
    if any(producer.bucket.store.existing()):
        producer.bucket.delete_vbucket(VB)
    return producer.bucket.set_state(VB, VbucketState.ACTIVE)


def forget(producer: NodeThread) -> None:
    """Everything is on disk, and nothing in memory: the next stream is a backfill."""
    producer.bucket.store.flush()
    producer.bucket.store.trim_memory(0)


def act(producer: NodeThread, target: Target, step: tuple[Any, ...]) -> None:
    name, *rest = step
    vb = producer.bucket.store.vbucket(VB)
    if name == "write":
        producer.call(lambda: write_all(vb, rest[0]))
    elif name == "carry":
        wire = Wire(producer, target)
        wire.carry(rest[0], rest[1])
        wire.cut()
    elif name == "lose":
        producer.call(lambda: _branch(producer.bucket, VB, max(0, vb.high_seqno - rest[0])))
        for _ in range(3):  # what was prepared is resolved in the next turns of the node's loop
            producer.call(lambda: None)
    elif name == "forget":
        producer.call(lambda: forget(producer))
    elif name == "flush":
        target.bucket.flush()
    else:
        target.crash()


def plain(*names: int) -> tuple[str, list[tuple[bytes, str, int]]]:
    return "write", [(KEYS[name], "plain", number) for number, name in enumerate(names)]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_version_that_was_deduplicated_away_comes_back_when_its_successor_is_lost(
    producer: NodeThread, lost: int
) -> None:
    """A snapshot 1..6 without k0's first version is cut anywhere; then history ends where that version is alive."""
    for length in range(0, 1200, 31):
        trap = [plain(0, 1, 2), ("forget",), plain(3, 4, 0), ("forget",), ("carry", [7], length), ("lose", lost)]
        check(producer, trap)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=2, max_size=14), pieces=PIECES)
def test_after_healing_the_consumer_has_what_the_producer_has(
    producer: NodeThread, steps: list[tuple[Any, ...]], pieces: list[int]
) -> None:
    check(producer, steps, max(pieces))


def check(producer: NodeThread, steps: Sequence[tuple[Any, ...]], piece: int = 5000) -> None:
    """Do all that, heal the wire, and compare."""
    with tempfile.TemporaryDirectory(prefix="unruly-") as directory:
        target = Target(Path(directory) / "bucket")
        try:
            ours = producer.call(lambda: begin(producer))
            for step in steps:
                act(producer, target, step)
            compare(producer, target, ours, piece)
        finally:
            target.bucket.abandon()


def compare(producer: NodeThread, target: Target, ours: Any, piece: int) -> None:
    wire = Wire(producer, target)
    wire.carry([piece], None)
    theirs = target.vbucket(VB)
    assert wire.statuses == [0]
    assert theirs.high_seqno == ours.high_seqno
    assert theirs.failover_log == ours.failover_log
    assert documents_of(theirs) == producer.call(lambda: documents_of(ours))
    assert theirs.pending == ours.pending
    assert theirs.item_count == ours.item_count
    wire.cut()
