"""A replica that was promoted, at whatever moment, gives a new replica everything that it has itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_node import PeerNode
from test_unruly_wire import PIECES, VB, WRITES, Target, Wire, begin, compare, forget, write_all

from upriver.model import VbucketState
from upriver.node.consumer_role import BucketStore


class InNode(BucketStore):
    """The store of a node that consumes, with what the tests' wire looks at."""

    @property
    def under_pressure(self) -> bool:
        return False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PeerNode, PeerNode]]:
    first, second = (PeerNode(tmp_path_factory.mktemp(name), vbuckets=1) for name in ("first", "second"))
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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(BEFORE, min_size=2, max_size=10), after=st.lists(AFTER, max_size=6))
def test_a_promoted_replica_hands_on_everything(
    pair: tuple[PeerNode, PeerNode], before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
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


def begin_replica(node: PeerNode) -> Any:
    node.call(lambda: begin(node))
    node.call(lambda: node.bucket.delete_vbucket(VB))
    return node.call(lambda: node.bucket.set_state(VB, VbucketState.REPLICA))


def carry(producer: PeerNode, target: Any, step: tuple[Any, ...]) -> None:
    wire = Wire(producer, target)
    wire.carry(step[1], step[2])
    wire.cut()
