"""The plan of a batch: nothing is lost and nothing undone survives, whatever history does in between."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spark_model import Producer, Query

from upriver.errors import HistoryLost
from upriver.model import SEQNO_MAX, FailoverLog, Position
from upriver.spark.offsets import Offset, Place
from upriver.spark.planning import Known, View, claim, plan, ranges, share


def run(seed: int, *, naive: bool = False, steps: int = 30) -> tuple[Query, Producer]:
    rng = random.Random(seed)
    producer = Producer(rng)
    query = Query(producer, rng, naive=naive)
    for _ in range(steps):
        query.disturb()
        query.step(most=rng.choice((None, 1, 2, 5)))
    while query.step(quiet=True):
        pass
    return query, producer


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 2**32))
@example(18672083)  # a driver that died between plan and replay had forgotten that its start was consistent
def test_after_any_history_the_table_equals_the_database(seed):
    query, producer = run(seed)
    assert query.table.state() == producer.state()
    assert query.offset.places[0].seqno == producer.high


def test_the_naive_claim_loses_documents_silently():
    """The same histories, claiming a snapshot from the start seqno to itself: what the planning is there for."""
    wrong = [seed for seed in range(300) if (made := run(seed, naive=True))[0].table.state() != made[1].state()]
    assert wrong


def test_the_silent_loss_scenario_of_a_reader_inside_a_snapshot():
    """Written at 30 and 80, read to 50 of 1..100, then a failover to 60: the version at 30 must come back."""
    offset = Offset((Place(0xA, 50),))
    log = FailoverLog.new(0xA).branch(0xB, 60)
    end = plan(offset, View({0: 75}, {0: log}), Known())
    assert end.rollbacks == {0}
    todo = ranges(offset, end, View({0: 75}, {0: log}), Known())
    assert (todo[0].claim.seqno, todo[0].end, todo[0].rolled_back) == (0, 75, True)


def test_a_start_inside_a_snapshot_claims_the_high_seqno_of_its_own_branch():
    place = Place(0xA, 50, (20,))
    same, other = FailoverLog.new(0xA), FailoverLog.new(0xA).branch(0xB, 60)
    assert claim(0, place, View({0: 100}, {0: same}), Known()) == Position(0xA, 50, 20, 100)
    assert claim(0, place, View({0: 100}, {0: other}), Known()) == Position(0xA, 50, 20, SEQNO_MAX)


def test_a_rollback_goes_to_the_newest_complete_seqno_not_to_the_requested_one():
    offset = Offset((Place(0xA, 100, (100, 80, 40)),))
    end = plan(offset, View({0: 95}, {0: FailoverLog.new(0xA).branch(0xB, 90)}), Known())
    assert end.rollbacks == {0}
    assert end.places[0] == Place(0xB, 95, (80, 40), 1)


def test_a_failover_that_lost_nothing_of_a_complete_vbucket_is_no_rollback():
    offset = Offset((Place(0xA, 100, (100,)),))
    end = plan(offset, View({0: 120}, {0: FailoverLog.new(0xA).branch(0xB, 110)}), Known())
    assert not end.rollbacks
    assert end.places[0] == Place(0xB, 120, (100,), 0)


def test_a_rollback_without_new_data_is_still_told():
    offset = Offset((Place(0xA, 100, (90,)),))
    view = View({0: 90}, {0: FailoverLog.new(0xA).branch(0xB, 90)})
    end = plan(offset, view, Known())
    assert [(r.end, r.claim.seqno, r.rolled_back) for r in ranges(offset, end, view, Known())] == [(90, 90, True)]


def test_a_query_that_began_late_is_not_flooded_with_old_history_by_a_rollback():
    offset = Offset((Place(0xA, 120, (100,)),), baseline=True)
    end = plan(offset, View({0: 95}, {0: FailoverLog.new(0xA).branch(0xB, 80)}), Known())
    assert end.rollbacks == {0}
    assert end.places[0].consistent == 80


def test_purged_tombstones_send_a_slow_reader_back_to_the_beginning():
    offset = Offset((Place(0xA, 50, (50,)),))
    view = View({0: 100}, {0: FailoverLog.new(0xA)}, {0: 70})
    end = plan(offset, view, Known())
    assert (end.rollbacks, end.places[0].consistent) == ({0}, 0)


def test_on_rollback_fail_names_the_vbucket_and_the_numbers():
    offset = Offset((Place(), Place(0xA, 100, (100,))))
    log = FailoverLog.new(0xA).branch(0xB, 60)
    with pytest.raises(HistoryLost, match="vbucket 1"):
        plan(offset, View({1: 60}, {1: log}), Known(), fail_on_rollback=True)


def test_nothing_new_is_the_start_itself():
    offset = Offset((Place(0xA, 100),))
    view = View({0: 100}, {0: FailoverLog.new(0xA)})
    known = Known()
    known.observe(offset, view)
    assert plan(offset, view, known) is offset
    assert known.complete == {0: (0xA, 100)}


def test_a_vbucket_that_nobody_owns_waits():
    offset = Offset((Place(0xA, 100), Place(0xA, 5)))
    assert plan(offset, View({1: 9}, {}), Known()) is offset


def test_an_anchor_is_read_as_nothing_whatever_the_start_is():
    end = Offset((Place(0xA, 100),), anchor=True)
    assert ranges(Offset((Place(0xA, 105),)), end, View({}, {}), Known()) == []


@given(st.dictionaries(st.integers(0, 63), st.integers(1, 10**9), max_size=20), st.integers(1, 10**9))
def test_shares_add_up_and_stay_within_the_backlog(backlogs, most):
    shares = share(backlogs, most)
    assert sum(shares.values()) == min(most, sum(backlogs.values()))
    assert all(0 < size <= backlogs[vb] for vb, size in shares.items())
