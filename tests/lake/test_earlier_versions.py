"""A lake of an earlier version continues: its log gets what it lacks, and loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.lake.feed_sync import FeedSync
from tests.lake.test_truth import normal
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.apply.rollbacks import void
from upriver.lake.apply.upkeep import fold_log
from upriver.lake.history import HistoryTable


def without_voided(sync: FeedSync) -> None:
    """Bring the log of a sync into the form of the versions that did not mark what was taken back."""
    root = Path(sync.orders.changes.uri)
    for path in root.rglob("vb*/*.parquet"):
        pq.write_table(pq.read_table(path, partitioning=None).drop_columns("voided"), path)
    for path in (root / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            if "metaData" in action:
                schema = json.loads(action["metaData"]["schemaString"])
                schema["fields"] = [field for field in schema["fields"] if field["name"] != "voided"]
                action["metaData"]["schemaString"] = json.dumps(schema)
            if "add" in action:
                action["add"]["size"] = (root / action["add"]["path"]).stat().st_size
        path.write_text("\n".join(map(json.dumps, actions)))


@pytest.fixture
def earlier(tmp_path, monkeypatch) -> FeedSync:
    """Documents, half of which were changed, and those changes taken back."""
    monkeypatch.setattr("upriver.lake.collection.void", lambda *_: {})  # as those versions did
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=0, tail_files=3))
    goods = sync.change_half()
    for vbucket, good in enumerate(goods):
        sync.feed.fail_over(vbucket, good)
    sync.commit()
    without_voided(sync)
    sync.open()
    monkeypatch.setattr("upriver.lake.collection.void", void)
    return sync


def standing(sync: FeedSync) -> dict[str, int]:
    """What a plain reader gets from the log with the documented query."""
    import duckdb

    log = DeltaTable(sync.orders.changes.uri).to_pyarrow_table()
    assert log.num_rows > 0
    rows = duckdb.sql("SELECT * FROM log WHERE voided IS NOT TRUE AND event <> 'rollback' ORDER BY vbucket, seqno")
    return {row[0].decode(): json.loads(row[1])["n"] for row in rows.project("key, value").fetchall()}


def truth(sync: FeedSync) -> dict[str, int]:
    return {key: normal(value)["n"] for key, value in sync.feed.truth().items()}  # type: ignore[index]


def test_changes_that_were_taken_back_are_voided_in_its_log(earlier: FeedSync) -> None:
    assert "voided" not in DeltaTable(earlier.orders.changes.uri).to_pyarrow_table().schema.names
    before = DeltaTable(earlier.orders.changes.uri).to_pyarrow_table().num_rows
    earlier.tables.prepare()
    assert DeltaTable(earlier.orders.changes.uri).to_pyarrow_table().num_rows == before
    assert standing(earlier) == truth(earlier)
    version = earlier.orders.changes.delta.version()
    earlier.open()
    earlier.tables.prepare()
    assert earlier.orders.changes.delta.version() == version  # once is enough


def test_the_next_run_repairs_a_crash_half_way(earlier: FeedSync, monkeypatch) -> None:
    monkeypatch.setattr("upriver.lake.delta.Table.add_columns", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        earlier.tables.prepare()
    monkeypatch.undo()
    earlier.open()
    earlier.tables.prepare()
    assert standing(earlier) == truth(earlier)


def test_it_follows_the_bucket_from_there_through_folds_and_further_rollbacks(earlier: FeedSync) -> None:
    earlier.tables.prepare()
    good = earlier.feed.histories[0].seqno
    for index in range(20):
        earlier.feed.put(f"k{index}", {"n": 100 + index})
        earlier.commit()
    fold_log(earlier.orders)
    earlier.feed.fail_over(0, good)
    earlier.commit()
    assert earlier.read() == {key: normal(value) for key, value in earlier.feed.truth().items()}
    assert standing(earlier) == truth(earlier)
    assert HistoryTable(earlier.orders).advance(force=True) > 0


def test_its_log_can_be_rewritten_by_another_tool(earlier: FeedSync) -> None:
    earlier.tables.prepare()
    DeltaTable(earlier.orders.changes.uri).optimize.compact()
    earlier.open()
    earlier.feed.put("k1", {"n": 7})
    earlier.commit()
    earlier.feed.fail_over(1, 1)
    earlier.commit()
    assert earlier.read() == {key: normal(value) for key, value in earlier.feed.truth().items()}
    assert standing(earlier) == truth(earlier)
