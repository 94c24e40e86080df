"""SCD type 2: every version, valid from when to when; a rollback changes the past."""

from __future__ import annotations

from pathlib import Path

from tests.lake.feed_sync import FeedSync
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.history import HistoryTable


def intervals(sync: FeedSync) -> list[tuple[object, ...]]:
    HistoryTable(sync.orders).advance(force=True)
    table = HistoryTable(sync.orders).table.delta.to_pyarrow_table()
    table = table.sort_by([("_key", "ascending"), ("_seqno", "ascending")])
    return [(row["_key"], row["n"], row["_valid_from"] is not None, row["_valid_to"]) for row in table.to_pylist()]


def test_versions_follow_each_other_without_gaps(sync: FeedSync) -> None:
    for number in (1, 2, 3):
        sync.feed.put("a", {"n": number})
        sync.commit()
    sync.feed.delete("a")
    sync.feed.put("b", {"n": 9})
    sync.commit()
    HistoryTable(sync.orders).advance()
    rows = HistoryTable(sync.orders).table.delta.to_pyarrow_table().to_pylist()
    mine = sorted((row for row in rows if row["_key"] == "a"), key=lambda row: row["_valid_from"])
    assert [row["n"] for row in mine] == [1, 2, 3]
    assert [row["_valid_to"] for row in mine[:2]] == [row["_valid_from"] for row in mine[1:]]
    assert mine[2]["_valid_to"] is not None  # it was deleted
    assert [row["_valid_to"] for row in rows if row["_key"] == "b"] == [None]


def test_a_lost_version_is_not_in_the_history(sync: FeedSync) -> None:
    sync.feed.put("a", {"n": 1})
    sync.commit()
    vbucket = sync.feed.vbucket("a")
    good = sync.feed.histories[vbucket].seqno
    sync.feed.put("a", {"n": 2})
    sync.commit()
    assert [(n, to is None) for _, n, _, to in intervals(sync)] == [(1, False), (2, True)]
    sync.feed.fail_over(vbucket, good)
    sync.commit()
    assert [(n, to is None) for _, n, _, to in intervals(sync)] == [(1, True)]


def test_a_new_column_reaches_the_history(sync: FeedSync) -> None:
    sync.feed.put("a", {"n": 1})
    sync.commit()
    HistoryTable(sync.orders).advance()
    sync.feed.put("a", {"n": 1.5, "city": "Bern"})
    sync.commit()
    HistoryTable(sync.orders).advance()
    rows = HistoryTable(sync.orders).table.delta.to_pyarrow_table().sort_by("_seqno").to_pylist()
    assert [(row["n"], row["city"]) for row in rows] == [(1.0, None), (1.5, "Bern")]


def test_a_collection_whose_every_change_was_lost_has_a_history_without_versions(sync: FeedSync) -> None:
    sync.feed.put("a", {"n": 1})
    sync.commit()
    assert len(intervals(sync)) == 1
    sync.feed.fail_over(sync.feed.vbucket("a"), 0)
    sync.commit()
    assert intervals(sync) == []


def test_a_run_that_ends_leaves_no_version_waiting_however_few_there_are(sync: FeedSync) -> None:
    for index in range(40):
        sync.feed.put(f"k{index}", {"n": index})
    sync.commit()
    HistoryTable(sync.orders).advance()
    sync.feed.put("k1", {"n": -1})
    sync.commit()
    history = HistoryTable(sync.orders)
    assert history.advance() == 0  # one change is not worth it
    assert history.advance(drain=True) == 1
    rows = history.table.delta.to_pyarrow_table().to_pylist()
    assert sorted(row["n"] for row in rows if row["_valid_to"] is None) == [-1, 0, *range(2, 40)]
    assert history.advance(drain=True) == 0


def test_no_version_waits_for_longer_than_it_may(tmp_path: Path) -> None:
    patient = FeedSync(tmp_path / "patient", policy=MergePolicy(small_rows=0, staleness_s=1e6))
    hasty = FeedSync(tmp_path / "hasty", policy=MergePolicy(small_rows=0, staleness_s=0.0))
    for sync in (patient, hasty):
        for index in range(40):
            sync.feed.put(f"k{index}", {"n": index})
        sync.commit()
        HistoryTable(sync.orders).advance()
        sync.feed.put("k1", {"n": -1})
        sync.commit()
    assert (HistoryTable(patient.orders).advance(), HistoryTable(hasty.orders).advance()) == (0, 1)
