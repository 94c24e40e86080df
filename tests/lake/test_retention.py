"""Files and log entries are removed when their retention is over, not before: until then, a reader can read them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.lake.feed_sync import FeedSync
from upriver.lake import delta as deltas
from upriver.lake.apply.upkeep import vacuum
from upriver.lake.delta import Table
from upriver.lake.history import HistoryTable

HOUR = 3600


@pytest.fixture
def clock(monkeypatch):
    """Sets how many hours ago commits are made from now on."""

    def ago(hours: float) -> None:
        monkeypatch.setattr(deltas, "now_ms", lambda: int((time.time() - hours * HOUR) * 1000))

    return ago


def rewrite(sync: FeedSync) -> None:
    """One more batch, with all of ``current`` written again."""
    for key in range(20):
        sync.feed.put(f"k{key}", {"n": sync.number})
    sync.commit()
    sync.orders.advance(sync.number - 1, force=True)


def age(table: Table, hours: float) -> None:
    """Make the files of a table look as if they had been written long ago."""
    for path in Path(table.uri).rglob("*.parquet"):
        os.utime(path, (0, time.time() - hours * HOUR))


@pytest.mark.parametrize("retention", [24, 24 * 30])
def test_a_file_is_kept_for_the_retention_after_it_left_however_old_it_is(tmp_path, clock, retention) -> None:
    sync = FeedSync(tmp_path / "lake")
    clock(retention * 3)
    rewrite(sync)
    vacuum(sync.orders, retention)
    too_late = DeltaTable(sync.orders.current.uri)
    clock(retention * 2)
    rewrite(sync)
    within = DeltaTable(sync.orders.current.uri)
    before = within.to_pyarrow_table().sort_by("_key")
    clock(retention / 2)
    rewrite(sync)
    age(sync.orders.current, retention * 4)
    sync.orders.current.delta.create_checkpoint()  # where Delta forgets which files left long ago
    sync.open()
    assert vacuum(sync.orders, retention) > 0
    assert within.to_pyarrow_table().sort_by("_key").equals(before)
    assert DeltaTable(within.table_uri, version=within.version()).to_pyarrow_table().num_rows == before.num_rows
    with pytest.raises(FileNotFoundError):
        too_late.to_pyarrow_table()


def test_files_of_the_history_are_removed_as_well(tmp_path, clock) -> None:
    sync = FeedSync(tmp_path / "lake")
    clock(50)
    for _ in range(3):
        rewrite(sync)
        HistoryTable(sync.orders).advance(force=True)
    history = sync.tables.lake.table("history", "shop.orders")
    live, files = len(history.files()), len(list(Path(history.uri).rglob("vb*/*.parquet")))
    assert files > live
    vacuum(sync.orders, retention_hours=24)
    assert len(list(Path(history.uri).rglob("vb*/*.parquet"))) == live


def entries(table: Table) -> list[Path]:
    return sorted(Path(table.uri, "_delta_log").glob("*.json"))


def test_every_version_within_the_retention_of_the_log_can_be_opened_after_a_clean_up(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake")
    for number in range(120):  # past two checkpoints
        sync.feed.put("k", {"n": number})
        sync.commit()
    made = entries(sync.orders.changes)
    old = made[:75]
    for path in old:
        os.utime(path, (0, time.time() - HOUR * (deltas.LOG_HOURS + 1)))
    vacuum(sync.orders, retention_hours=24)
    left = entries(sync.orders.changes)
    assert len(left) < len(made) - 40
    for path in made[75:]:
        opened = DeltaTable(sync.orders.changes.uri, version=int(path.stem))
        assert pa.table(opened.get_add_actions()).num_rows == int(path.stem)


def test_the_user_can_change_the_retention_of_the_log(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake")
    for number in range(60):
        sync.feed.put("k", {"n": number})
        sync.commit()
    changed = DeltaTable(sync.orders.changes.uri)
    changed.alter.set_table_properties({"delta.logRetentionDuration": "interval 7 days"})
    for path in entries(sync.orders.changes):
        os.utime(path, (0, time.time() - HOUR * 24 * 6))
    vacuum(sync.orders, retention_hours=24)
    sync.feed.put("k", {"n": -1})
    sync.commit()
    assert DeltaTable(sync.orders.changes.uri, version=1).version() == 1
    configuration = DeltaTable(sync.orders.changes.uri).metadata().configuration
    assert configuration["delta.logRetentionDuration"] == "interval 7 days"
