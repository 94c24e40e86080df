"""The plan of a batch: nothing is lost and nothing undone survives, whatever history does in between."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.spark.spark_model import Cluster, Query, at
from tests.support.examples import examples
from tests.support.model_vbucket import RandomVbucket
from upriver.errors import HistoryLost
from upriver.model import SEQNO_MAX, Claim, FailoverLog
from upriver.protocol.offsets import Offset
from upriver.protocol.position import Position
from upriver.spark.reader.planning import Known, Range, View, claimable, pack, plan, ranges, share, weight


def run(
    seed: int, *, mistake: str = "", steps: int = 30, tears: bool = True, filters: bool = False
) -> tuple[Query, RandomVbucket]:
    rng = random.Random(seed)
    cluster = Cluster(rng, keys=12 if filters else 4)
    query = Query(cluster, rng, mistake=mistake, tears=tears)
    for _ in range(steps):
        query.disturb()
        if filters and rng.random() < 0.25:
            query.refilter()
        query.step(most=rng.choice((None, 1, 2, 5)))
    cluster.heal()
    while query.step(quiet=True):
        pass
    return query, cluster.truth


def wrong(mistake: str, **more: bool) -> list[int]:
    made = {seed: run(seed, mistake=mistake, **more) for seed in range(300)}
    return [seed for seed, (query, producer) in made.items() if query.table.state() != producer.state()]


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(0, 2**32))
@example(18672083)  # a driver that died between plan and replay had forgotten that its start was consistent
def test_after_any_history_the_table_equals_the_database(seed):
    query, producer = run(seed)
    assert query.table.state() == producer.state()
    assert query.offset.positions[0].seqno == producer.high


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(0, 2**32))
def test_after_any_change_of_the_filter_the_table_has_what_is_wanted(seed):
    query, producer = run(seed, filters=True)
    assert query.expected(query.table.state()) == query.expected(producer.state())


def test_the_naive_claim_loses_documents_silently():
    """The same histories, claiming a snapshot from the start seqno to itself: what the planning is there for."""
    assert wrong("naive", tears=False)


@pytest.mark.parametrize("mistake", ["onlooker", "optimist"])
def test_a_driver_that_ignores_reports_loses_what_executors_could_not_read(mistake):
    """The same histories, planned by what the driver sees instead of what executors say (1, 3, 6)."""
    assert wrong(mistake)


def test_a_batch_that_an_executor_left_unread_is_read_again_though_the_driver_sees_nothing_wrong():
    """The driver asks a node that was cut off from its cluster; the executor has found the one that took over."""
    offset = Offset((at(0xA, 30, (20,), 3),), reads=frozenset({0}))
    view = View({0: 30}, {0: FailoverLog.new(0xA)})
    end = plan(offset, view, Known(unread={0: 30}, reported=True))
    assert (end.rollbacks, end.positions[0]) == ({0}, at(0xA, 30, (20,), 4))
    todo = ranges(offset, end, view, Known())
    assert [(one.start.seqno, one.end, one.rolled_back) for one in todo] == [(20, 30, True)]


def test_a_driver_that_knows_nothing_of_the_last_batch_reads_it_again():
    offset = Offset((at(0xA, 30, (20,)), at(0xA, 9, (9,))), reads=frozenset({0}))
    view = View({0: 30, 1: 9}, {0: FailoverLog.new(0xA), 1: FailoverLog.new(0xA)})
    assert plan(offset, view, Known()).rollbacks == {0}
    assert plan(offset, view, Known(reported=True)) is offset


def test_what_cannot_be_read_again_now_stays_unread():
    """Its owner does not answer, while other vbuckets continue; the next driver must not trust the position either."""
    offset = Offset((at(0xA, 30, (20,)), at(0xA, 9, (9,))), reads=frozenset({0}))
    end = plan(offset, View({1: 12}, {1: FailoverLog.new(0xA)}), Known(unread={0: 30}, reported=True))
    assert (end.unread, end.reads) == ({0}, {1})
    back = Offset.from_json(end.to_json())
    again = plan(back, View({0: 30}, {0: FailoverLog.new(0xA)}), Known(reported=True))
    assert again.rollbacks == {0}


def test_an_empty_batch_closes_the_last_one_and_then_there_is_nothing_to_do():
    """So that neither a new driver nor a failover must read again what was read."""
    offset = Offset((at(0xA, 30, (20,)),), reads=frozenset({0}))
    view, known = View({0: 30}, {0: FailoverLog.new(0xA)}), Known({0: (0xA, 30)}, reported=True)
    assert plan(offset, view, known) is offset
    closed = plan(offset, view, known, close=True)
    assert (closed.positions[0], closed.reads) == (at(0xA, 30, (30, 20)), frozenset())
    assert ranges(offset, closed, view, known) == []
    assert plan(closed, view, Known(), close=True) is closed


def test_the_silent_loss_scenario_of_a_reader_inside_a_snapshot():
    """Written at 30 and 80, read to 50 of 1..100, then a failover to 60: the version at 30 must come back."""
    offset = Offset((at(0xA, 50),))
    log = FailoverLog.new(0xA).branch(0xB, 60)
    end = plan(offset, View({0: 75}, {0: log}), Known())
    assert end.rollbacks == {0}
    todo = ranges(offset, end, View({0: 75}, {0: log}), Known())
    assert (todo[0].start.seqno, todo[0].end, todo[0].rolled_back) == (0, 75, True)


def test_a_start_inside_a_snapshot_claims_the_high_seqno_of_its_own_branch():
    place = at(0xA, 50, (20,))
    same, other = FailoverLog.new(0xA), FailoverLog.new(0xA).branch(0xB, 60)
    assert claimable(0, place, View({0: 100}, {0: same}), Known()).claim == Claim(0xA, 50, 20, 100)
    assert claimable(0, place, View({0: 100}, {0: other}), Known()).claim == Claim(0xA, 50, 20, SEQNO_MAX)


def test_a_rollback_goes_to_the_newest_complete_seqno_not_to_the_requested_one():
    offset = Offset((at(0xA, 100, (100, 80, 40)),))
    end = plan(offset, View({0: 95}, {0: FailoverLog.new(0xA).branch(0xB, 90)}), Known())
    assert end.rollbacks == {0}
    assert end.positions[0] == at(0xB, 95, (80, 40), 1)


def test_a_failover_that_lost_nothing_of_a_complete_vbucket_is_no_rollback():
    offset = Offset((at(0xA, 100, (100,)),))
    end = plan(offset, View({0: 120}, {0: FailoverLog.new(0xA).branch(0xB, 110)}), Known())
    assert not end.rollbacks
    assert end.positions[0] == at(0xB, 120, (100,), 0)


def test_a_rollback_without_new_data_is_still_a_row():
    offset = Offset((at(0xA, 100, (90,)),))
    view = View({0: 90}, {0: FailoverLog.new(0xA).branch(0xB, 90)})
    end = plan(offset, view, Known())
    assert [(r.end, r.start.seqno, r.rolled_back) for r in ranges(offset, end, view, Known())] == [(90, 90, True)]


def test_a_query_that_began_late_is_not_flooded_with_old_history_by_a_rollback():
    offset = Offset((at(0xA, 120, (100,)),), baseline=True)
    end = plan(offset, View({0: 95}, {0: FailoverLog.new(0xA).branch(0xB, 80)}), Known())
    assert end.rollbacks == {0}
    assert end.positions[0].snap_start == 80


def test_purged_tombstones_send_a_slow_reader_back_to_the_beginning():
    offset = Offset((at(0xA, 50, (50,)),))
    view = View({0: 100}, {0: FailoverLog.new(0xA)}, {0: 70})
    end = plan(offset, view, Known())
    assert (end.rollbacks, end.positions[0].snap_start) == ({0}, 0)


def test_on_rollback_fail_names_the_vbucket_and_the_numbers():
    offset = Offset((at(), at(0xA, 100, (100,))))
    log = FailoverLog.new(0xA).branch(0xB, 60)
    with pytest.raises(HistoryLost, match="vbucket 1"):
        plan(offset, View({1: 60}, {1: log}), Known(), fail_on_rollback=True)


def test_nothing_new_is_the_start_itself():
    offset = Offset((at(0xA, 100),))
    view = View({0: 100}, {0: FailoverLog.new(0xA)})
    known = Known()
    assert plan(offset, view, known, close=True) is offset
    assert known.complete == {}


def test_a_vbucket_without_an_owner_waits():
    offset = Offset((at(0xA, 100), at(0xA, 5)))
    assert plan(offset, View({1: 9}, {}), Known()) is offset


def test_an_anchor_is_read_as_nothing_whatever_the_start_is():
    end = Offset((at(0xA, 100),), anchor=True)
    assert ranges(Offset((at(0xA, 105),)), end, View({}, {}), Known()) == []


@given(st.dictionaries(st.integers(0, 63), st.integers(1, 10**9), max_size=20), st.integers(1, 10**9))
def test_shares_add_up_and_stay_within_the_backlog(backlogs, most):
    shares = share(backlogs, most)
    assert sum(shares.values()) == min(most, sum(backlogs.values()))
    assert all(0 < size <= backlogs[vb] for vb, size in shares.items())


# ---------------------------------------------------------------------------------------------- packing


def with_backlogs(backlogs):
    return [Range(vb, Position(), backlog, 1) for vb, backlog in enumerate(backlogs)]


@given(st.lists(st.integers(0, 10**6), max_size=200), st.integers(1, 16), st.integers(1, 5))
def test_every_range_is_in_exactly_one_task(backlogs, most, nodes):
    todo = with_backlogs(backlogs)
    groups = pack(todo, {vb: vb % nodes for vb in range(len(todo))}, most)
    assert sorted(one.vbucket for group in groups for one in group) == list(range(len(todo)))
    assert len(groups) <= most
    assert all(groups)


def test_a_trickle_is_one_task_and_a_flood_uses_all():
    assert len(pack(with_backlogs([1] * 50), {}, 8)) == 1
    assert len(pack(with_backlogs([10_000] * 50), {}, 8)) == 8


def test_tasks_have_about_the_same_to_do():
    groups = pack(with_backlogs([50_000, *[1000] * 100]), {}, 4)
    loads = sorted(sum(map(weight, group)) for group in groups)
    assert loads[-1] <= 1.6 * loads[0]


def test_a_task_reads_from_one_node_where_there_are_enough_tasks():
    owners = {vb: f"node{vb % 3}" for vb in range(60)}
    groups = pack(with_backlogs([5000] * 60), owners, 6)
    assert [len({owners[one.vbucket] for one in group}) for group in groups] == [1] * 6


def test_whole_nodes_are_joined_where_there_are_fewer_tasks_than_nodes():
    owners = {vb: f"node{vb % 4}" for vb in range(40)}
    groups = pack(with_backlogs([5000] * 40), owners, 2)
    assert [len({owners[one.vbucket] for one in group}) for group in groups] == [2, 2]
