"""A replica that is promoted at any moment gives a new replica everything that it has."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cluster.test_unruly_wire import PIECES, VB, WRITES, Target, Wire, begin, compare, forget, write_all
from tests.support.examples import examples
from tests.support.node_thread import FAST_STORE, NodeThread
from upriver.client._requests.connections import converse
from upriver.client.options import ConnectOptions
from upriver.errors import Status
from upriver.model import VbucketState
from upriver.node.dcp.consumer import BucketStore
from upriver.node.options import NodeOptions
from upriver.protocol.consumer.negotiation import replication_hello
from upriver.protocol.topology import Address
from upriver.wire.constants import OpenFlag
from upriver.wire.messages.dcp import DcpControl, Open, StreamRequest
from upriver.wire.packed import RecordKind, pack


class InNode(BucketStore):
    """The store of a node that consumes, with what the tests' wire looks at."""

    @property
    def under_pressure(self) -> bool:
        return False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeThread, NodeThread]]:
    first, second = (
        NodeThread(NodeOptions(data=tmp_path_factory.mktemp(name), kv_port=0, vbuckets=1, store=FAST_STORE))
        for name in ("first", "second")
    )
    yield first, second
    for node in (first, second):
        node.stop()


BEFORE = st.one_of(
    st.tuples(st.just("write"), WRITES),
    st.tuples(st.just("carry"), PIECES, st.sampled_from([100, 300, 700, 2000, 5000])),
    st.tuples(st.just("forget")),
)
AFTER = st.one_of(
    st.tuples(st.just("write"), WRITES),
    st.tuples(st.just("pass on"), PIECES, st.sampled_from([0, 100, 300, 700, 2000, 5000])),
    st.tuples(st.just("forget")),
)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(BEFORE, min_size=2, max_size=10), after=st.lists(AFTER, max_size=6))
def test_a_promoted_replica_hands_on_everything(
    pair: tuple[NodeThread, NodeThread], before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
) -> None:
    first, second = pair
    active, replica = first.call(lambda: begin(first)), begin_replica(second)
    for step in before:
        if step[0] == "write":
            first.call(partial(write_all, active, step[1]))
        elif step[0] == "carry":
            second.call(partial(carry, first, InNode(second.bucket), step))
        else:
            second.call(partial(forget, second))
    second.call(lambda: second.bucket.set_states({VB: VbucketState.ACTIVE}))
    with tempfile.TemporaryDirectory(prefix="promoted-") as directory:
        target = Target(Path(directory) / "bucket")
        try:
            for step in after:
                if step[0] == "write":
                    second.call(partial(write_all, replica, step[1]))
                elif step[0] == "forget":
                    second.call(partial(forget, second))
                else:
                    carry(second, target, step)
            compare(second, target, replica, 5000)
        finally:
            target.bucket.abandon()


def begin_replica(node: NodeThread) -> Any:
    node.call(lambda: begin(node))
    node.call(lambda: node.bucket.delete_vbucket(VB))
    return node.call(lambda: node.bucket.set_state(VB, VbucketState.REPLICA))


def carry(producer: NodeThread, target: Any, step: tuple[Any, ...]) -> None:
    wire = Wire(producer, target)
    wire.carry(step[1], step[2])
    wire.cut()


def purged(node: NodeThread) -> Any:
    """Ten documents, of which eight were deleted and their tombstones purged; nothing of it is in memory."""
    vb = begin(node)
    for number in range(10):
        vb.documents.set(b"k%d" % number, b"{}")
    for number in range(8):
        vb.documents.delete(b"k%d" % number)
    vb.documents.set(b"last", b"{}")
    node.bucket.store.compact(VB, drop_deletes=True)
    forget(node)
    return vb


def answer_to(node: NodeThread, start: int, uuid: int) -> Any:
    """What a reader is told that comes with everything up to ``start``."""
    address = Address("127.0.0.1", node.node.kv_port)
    connection = converse(address, ConnectOptions.parse(f"couchbase://{address}"))
    try:
        place = {"start_seqno": start, "snap_start_seqno": start, "snap_end_seqno": start, "vbuuid": uuid}
        hello, opening = replication_hello("reader"), Open(0, OpenFlag.PRODUCER, b"reader")
        noop = DcpControl(b"enable_noop", b"true")
        return connection.ask([hello, opening, noop, StreamRequest(**place, end_seqno=start + 1)])[-1]
    finally:
        connection.close()


def test_a_reader_that_missed_purged_deletions_is_rolled_back_by_the_promoted_node(
    pair: tuple[NodeThread, NodeThread],
) -> None:
    first, second = pair
    active = first.call(lambda: purged(first))
    assert active.purge_seqno == 18
    begin_replica(second)
    second.call(partial(carry, first, InNode(second.bucket), ("carry", [5000], None)))
    second.call(lambda: second.bucket.set_states({VB: VbucketState.ACTIVE}))
    told = answer_to(second, 10, active.uuid)
    assert (told.status, told.seqno) == (Status.ROLLBACK, 0)
    assert answer_to(second, 19, active.uuid).status == Status.SUCCESS


def test_a_snapshot_that_was_cut_short_purges_no_more_than_was_received(tmp_path: Path) -> None:
    target = Target(tmp_path / "bucket")
    replica = target.vbucket(VB)
    replica.replication.begin_snapshot(0, 100, 2, 80)
    replica.replication.apply_records(pack(RecordKind.MUTATION, b"\0k", b"{}", seqno=5, cas=1))
    assert replica.purge_seqno == 80
    target.bucket.flush()
    target.crash()
    assert target.vbucket(VB).purge_seqno == 80
    assert target.set_state(VB, VbucketState.ACTIVE).purge_seqno == 5
    target.bucket.abandon()
