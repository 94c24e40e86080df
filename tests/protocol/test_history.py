"""The rollback decision, row by row against the tables of docs/protocol/rollback.md#decision, and the life of a
failover log.

See docs/protocol/rollback.md#failover-log.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.model import SEQNO_MAX, Claim, FailoverEntry, FailoverLog
from upriver.protocol.history import Accept, History, RollbackTo, UnknownUuid, decide, decide_upr

A, B, C, DEAD = 0xA, 0xB, 0xC, 0xDEAD
LOG = FailoverLog((FailoverEntry(C, 900), FailoverEntry(B, 500), FailoverEntry(A, 0)))
OK = Accept()


@pytest.mark.parametrize(
    ("start", "uuid", "snap_start", "snap_end", "extra", "expected"),
    [
        (0, 0, 0, 0, {}, OK),
        (0, DEAD, 0, 0, {}, OK),
        (0, DEAD, 0, 0, {"strict": True}, RollbackTo(0)),
        (0, 0, 0, 0, {"strict": True}, OK),
        (0, A, 0, 0, {"strict": True}, OK),
        (1000, C, 1000, 1000, {}, OK),
        (1300, C, 1300, 1300, {}, RollbackTo(1200)),
        (1100, C, 1000, 1300, {}, RollbackTo(1000)),
        (1000, C, 1000, 1300, {}, OK),
        (900, B, 900, 900, {}, OK),
        (950, B, 950, 950, {}, RollbackTo(900)),
        (880, B, 850, 950, {}, RollbackTo(850)),
        (850, B, 850, 950, {}, OK),
        (950, B, 850, 950, {}, RollbackTo(900)),
        (940, B, 920, 950, {}, RollbackTo(900)),
        (600, A, 600, 600, {}, RollbackTo(500)),
        (400, A, 300, 450, {}, OK),
        (10, DEAD, 10, 10, {}, RollbackTo(0)),
        (100, A, 100, 100, {"purge": 200}, RollbackTo(0)),
        (100, A, 100, 100, {"purge": 200, "rpurge": 200}, OK),
        (200, A, 200, 200, {"purge": 200}, OK),
        (100, A, 100, 100, {"purge": 200, "collection_high": 90}, OK),
        (100, A, 100, 100, {"purge": 200, "collection_high": 150}, RollbackTo(0)),
        (100, DEAD, 100, 100, {"purge": 200}, RollbackTo(0)),
    ],
)
def test_the_decision_is_that_of_the_table(start, uuid, snap_start, snap_end, extra, expected):
    history = History(LOG, 1200, extra.get("purge", 0), extra.get("collection_high"))
    wanted = Claim(uuid, start, snap_start, snap_end)
    got = decide(history, wanted, strict=extra.get("strict", False), known_purge_seqno=extra.get("rpurge", 0))
    assert got == expected


@pytest.mark.parametrize(("snap_start", "snap_end", "expected"), [(1, 4, RollbackTo(1)), (3, 3, OK)])
def test_the_second_table(snap_start, snap_end, expected):
    log = FailoverLog((FailoverEntry(2222, 3), FailoverEntry(1111, 0)))
    assert decide(History(log, 10), Claim(1111, 3, snap_start, snap_end)) == expected


@pytest.mark.parametrize(
    ("uuid", "start", "expected"),
    [
        (0, 0, OK),
        (DEAD, 0, UnknownUuid()),
        (DEAD, 10, UnknownUuid()),
        (0, 10, UnknownUuid()),
        (A, 0, OK),
        (A, 500, OK),
        (A, 600, RollbackTo(500)),
        (C, 1201, RollbackTo(1200)),
    ],
)
def test_upr_has_no_snapshots_and_names_an_unknown_branch(uuid, start, expected):
    assert decide_upr(History(LOG, 1200), uuid, start) == expected


@st.composite
def histories(draw):
    log = FailoverLog.new(1)
    high = 0
    for uuid in range(2, draw(st.integers(2, 6))):
        high += draw(st.integers(0, 50))
        high = draw(st.integers(0, high))
        log = log.branch(uuid, high)
    return History(log, high + draw(st.integers(0, 50)))


@given(histories(), st.integers(1, 6), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_following_a_rollback_once_is_always_enough(history, uuid, one, two, three):
    snap_start, start, snap_end = sorted((one, two, three))
    decision = decide(history, Claim(uuid, start, snap_start, snap_end))
    if isinstance(decision, RollbackTo):
        assert decision.seqno <= start
        back = decision.seqno
        assert decide(history, Claim(uuid, back, back, back)) in (OK, RollbackTo(0))


@given(histories(), st.integers(1, 6), st.integers(1, 200))
def test_a_snapshot_of_unknown_end_falls_back_to_its_start(history, uuid, start):
    decision = decide(history, Claim(uuid, start, start - 1, SEQNO_MAX))
    assert isinstance(decision, RollbackTo)
    assert decision.seqno < start


def test_a_branch_removes_what_was_above_it():
    log = FailoverLog.new(1).branch(2, 100).branch(3, 40)
    assert [tuple(entry) for entry in log] == [(3, 40), (1, 0)]


def test_the_log_keeps_the_newest_25():
    log = FailoverLog.new(1)
    for number in range(2, 40):
        log = log.branch(number, number)
    assert len(log) == 25
    assert log.uuid == 39
    assert log.entries[-1].uuid == 15


def test_a_rollback_below_every_entry_leaves_a_fresh_one():
    log = FailoverLog((FailoverEntry(7, 50),))
    assert log.roll_back(20, fresh_uuid=9) == FailoverLog((FailoverEntry(9, 20),))
    assert log.roll_back(50, fresh_uuid=9) == log


def test_loading_drops_entries_that_cannot_be_right():
    raw = [(5, 100), (0, 90), (4, 120), (3, 80), (2, 80), (1, 0)]
    loaded = FailoverLog.load(raw)
    assert loaded is not None
    assert [tuple(entry) for entry in loaded] == [(5, 100), (3, 80), (2, 80), (1, 0)]
    assert FailoverLog.load([(0, 1)]) is None
