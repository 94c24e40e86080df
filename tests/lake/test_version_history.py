"""SCD type 2: every version, valid from when to when; a rollback changes the past."""

from __future__ import annotations

from pathlib import Path

from tests.lake.desks import Desk
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.history import HistoryTable


def intervals(desk: Desk) -> list[tuple[object, ...]]:
    HistoryTable(desk.orders).advance(force=True)
    table = HistoryTable(desk.orders).table.delta.to_pyarrow_table()
    table = table.sort_by([("_key", "ascending"), ("_seqno", "ascending")])
    return [(row["_key"], row["n"], row["_valid_from"] is not None, row["_valid_to"]) for row in table.to_pylist()]


def test_versions_follow_each_other_without_gaps(desk: Desk) -> None:
    for number in (1, 2, 3):
        desk.feed.put("a", {"n": number})
        desk.commit()
    desk.feed.delete("a")
    desk.feed.put("b", {"n": 9})
    desk.commit()
    HistoryTable(desk.orders).advance()
    rows = HistoryTable(desk.orders).table.delta.to_pyarrow_table().to_pylist()
    mine = sorted((row for row in rows if row["_key"] == "a"), key=lambda row: row["_valid_from"])
    assert [row["n"] for row in mine] == [1, 2, 3]
    assert [row["_valid_to"] for row in mine[:2]] == [row["_valid_from"] for row in mine[1:]]
    assert mine[2]["_valid_to"] is not None  # it was deleted
    assert [row["_valid_to"] for row in rows if row["_key"] == "b"] == [None]


def test_a_lost_version_is_no_version(desk: Desk) -> None:
    desk.feed.put("a", {"n": 1})
    desk.commit()
    vbucket = desk.feed.vbucket("a")
    good = desk.feed.histories[vbucket].seqno
    desk.feed.put("a", {"n": 2})
    desk.commit()
    assert [(n, to is None) for _, n, _, to in intervals(desk)] == [(1, False), (2, True)]
    desk.feed.fail_over(vbucket, good)
    desk.commit()
    assert [(n, to is None) for _, n, _, to in intervals(desk)] == [(1, True)]


def test_a_new_column_reaches_the_history(desk: Desk) -> None:
    desk.feed.put("a", {"n": 1})
    desk.commit()
    HistoryTable(desk.orders).advance()
    desk.feed.put("a", {"n": 1.5, "city": "Bern"})
    desk.commit()
    HistoryTable(desk.orders).advance()
    rows = HistoryTable(desk.orders).table.delta.to_pyarrow_table().sort_by("_seqno").to_pylist()
    assert [(row["n"], row["city"]) for row in rows] == [(1.0, None), (1.5, "Bern")]


def test_a_collection_whose_every_change_was_lost_has_a_history_without_versions(desk: Desk) -> None:
    desk.feed.put("a", {"n": 1})
    desk.commit()
    assert len(intervals(desk)) == 1
    desk.feed.fail_over(desk.feed.vbucket("a"), 0)
    desk.commit()
    assert intervals(desk) == []


def test_a_run_that_ends_leaves_no_version_waiting_however_few_there_are(desk: Desk) -> None:
    for index in range(40):
        desk.feed.put(f"k{index}", {"n": index})
    desk.commit()
    HistoryTable(desk.orders).advance()
    desk.feed.put("k1", {"n": -1})
    desk.commit()
    history = HistoryTable(desk.orders)
    assert history.advance() == 0  # one change is not worth it
    assert history.advance(drain=True) == 1
    rows = history.table.delta.to_pyarrow_table().to_pylist()
    assert sorted(row["n"] for row in rows if row["_valid_to"] is None) == [-1, 0, *range(2, 40)]
    assert history.advance(drain=True) == 0


def test_no_version_waits_for_longer_than_it_may(tmp_path: Path) -> None:
    patient, hasty = (Desk(tmp_path / name, policy=MergePolicy(small_rows=0, staleness_s=limit)) for name, limit in (
        ("patient", 1e6), ("hasty", 0.0)))  # fmt: skip
    for desk in (patient, hasty):
        for index in range(40):
            desk.feed.put(f"k{index}", {"n": index})
        desk.commit()
        HistoryTable(desk.orders).advance()
        desk.feed.put("k1", {"n": -1})
        desk.commit()
    assert (HistoryTable(patient.orders).advance(), HistoryTable(hasty.orders).advance()) == (0, 1)
