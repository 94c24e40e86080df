"""Maps: failovers that lose nothing durable, moves that are as few as can be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.cluster.catch_up import is_close
from upriver.cluster.plan import (
    NOBODY,
    ClusterState,
    Member,
    Move,
    VbucketReport,
    balanced_moves,
    best_replica,
    fail_over,
    interleaved,
    moved,
    new_state,
    newly_synced,
    unsafe_without,
    with_followers,
    with_replicas,
    without_member,
)
from upriver.errors import ConfigError
from upriver.model import FailoverEntry
from upriver.wire.messages.session import StatResponse

ACTIVE, REPLICA = 1, 2


def members(count: int) -> list[Member]:
    return [Member("127.0.0.1", 11210 + n, 8091 + n) for n in range(count)]


def report(
    consistent: int, high: int | None = None, branches: tuple[int, ...] = (1,), state: int = REPLICA
) -> VbucketReport:
    entries = tuple(FailoverEntry(uuid, 0) for uuid in branches)
    return VbucketReport(state, consistent if high is None else high, 0, consistent, entries)


STATES = st.integers(1, 5).flatmap(
    lambda nodes: st.builds(
        new_state, st.just("b"), st.just(members(nodes)), st.integers(1, 40), st.integers(0, min(2, nodes - 1))
    )
)


@given(STATES)
def test_a_state_survives_its_json(state: ClusterState) -> None:
    import json

    assert ClusterState.from_json(json.loads(json.dumps(state.to_json()))) == state


@given(STATES, st.data())
def test_a_rebalance_is_even_moves_only_the_surplus_and_keeps_copies_apart(
    state: ClusterState, data: st.DataObject
) -> None:
    count = len(state.members)
    wanted = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    moves = balanced_moves(state, wanted)
    assert len({move.vbucket for move in moves}) == len(moves)
    after = with_replicas(moved(with_followers(state, moves), moves), wanted)
    actives = Counter(chain[0] for chain in after.owners)
    assert set(actives) <= set(wanted)
    assert max(actives.values()) - min(actives.get(member, 0) for member in wanted) <= 1
    surplus = Counter(chain[0] for chain in state.owners)
    least = sum(max(0, n - -(-len(state.owners) // len(wanted))) if m in wanted else n for m, n in surplus.items())
    assert len(moves) <= least + len(wanted)
    for chain in after.owners:
        present = [member for member in chain if member != NOBODY]
        assert len(set(present)) == len(present)
        assert len(present) == min(state.replicas + 1, len(wanted))


def test_the_replica_with_the_longest_consistent_history_is_promoted_not_the_one_with_the_highest_seqno() -> None:
    assert best_replica({1: report(80, 87), 2: report(50, 95)}) == 1


def test_a_replica_on_an_older_branch_is_not_promoted_however_far_it_is() -> None:
    assert best_replica({1: report(110, branches=(9, 5)), 2: report(120, branches=(5,))}) == 1


def test_a_failover_is_safe_only_with_a_replica_that_was_seen_to_be_complete() -> None:
    state = new_state("b", members(3), 3, 1)
    assert unsafe_without(state, 0, {1, 2}) == []
    assert unsafe_without(state, 0, {2}) == [0]
    moving = with_replicas(fail_over(state, 2, {0: {2: report(5)}, 1: {}}), [0, 1])
    assert moving.owners[2] == (0, 1)
    assert unsafe_without(moving, 0, {1, 2}) == [2]
    reports = {0: {2: report(5, branches=(3, 1), state=ACTIVE)}, 1: {2: report(5, branches=(3, 1))}}
    assert unsafe_without(newly_synced(moving, reports, reports), 0, {1}) == []


def test_with_two_replicas_both_must_be_asked() -> None:
    state = new_state("b", members(3), 1, 2)
    assert unsafe_without(state, 0, {1, 2}) == []
    assert unsafe_without(state, 0, {1}) == [0]


def test_a_vbucket_without_another_copy_waits_for_its_node() -> None:
    state = new_state("b", members(2), 2, 0)
    after = fail_over(state, 0, {1: {}})
    assert after.owners == state.owners


def test_a_member_that_still_has_something_cannot_be_forgotten() -> None:
    state = new_state("b", members(2), 2, 1)
    with pytest.raises(ConfigError):
        without_member(state, 0)


def test_members_behind_a_forgotten_one_move_up() -> None:
    state = new_state("b", members(3), 3, 1)
    moves = balanced_moves(state, [0, 2])
    after = with_replicas(moved(with_followers(state, moves), moves), [0, 2])
    left = without_member(after, 1)
    assert left.members == (state.members[0], state.members[2])
    assert {member for chain in left.owners for member in chain} == {0, 1}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=40))
def test_all_pairs_of_nodes_work_from_the_first_move_on(pairs: list[tuple[int, int]]) -> None:
    moves = [Move(vb, source, target) for vb, (source, target) in enumerate(pairs)]
    order = interleaved(moves)
    assert sorted(order, key=lambda move: move.vbucket) == moves
    assert {(move.source, move.target) for move in order[: len(set(pairs))]} == set(pairs)


@pytest.mark.parametrize(
    ("status", "estimate", "close"),
    [
        (b"in-memory", b"0", True),
        (b"in-memory", b"100", True),
        (b"backfilling", b"101", False),
        (b"stream_does_not_exist", b"0", False),
        (b"connection_does_not_exist", b"0", False),
        (b"in-memory", b"", False),
    ],
)
def test_a_vbucket_is_handed_over_when_its_stream_runs_and_has_little_left(
    status: bytes, estimate: bytes, close: bool
) -> None:
    said = [StatResponse(b"status", status), StatResponse(b"estimate", estimate), StatResponse()]
    assert is_close(said) is close
