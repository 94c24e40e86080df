"""Other tools work on the tables during a sync: OPTIMIZE at any moment, VACUUM, a crash in between."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.lake.feed_sync import FeedSync
from tests.lake.test_truth import normal
from upriver.lake import read
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.apply.upkeep import fold_log, fold_tail
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.delta import Table
from upriver.lake.history import HistoryTable
from upriver.lake.tables import Tables

TABLES = ("changes", "tail", "current")
POLICIES = {
    "tail": MergePolicy(small_rows=0, share=100, tail_files=3),
    "merged": MergePolicy(small_rows=10**6),
    "ranges": MergePolicy(small_rows=2, share=0.5, target_rows=10, tail_files=3, max_files=2),
}


def truth(sync: FeedSync, name: str = "orders") -> dict[str, object]:
    return {key: normal(value) for key, value in sync.feed.truth(name).items()}


def optimize(uri: str) -> None:
    if DeltaTable.is_deltatable(uri):
        DeltaTable(uri).optimize.compact()


def part_of(uri: str) -> None:
    """Rewrite all files but one as one, as an OPTIMIZE with a size limit does."""
    if not DeltaTable.is_deltatable(uri):
        return
    table = Table(uri)
    files = [file for file in table.files() if not file.foreign][:-1]
    if files:
        rows = pa.concat_tables([pq.read_table(f"{uri}/{file.path}") for file in files], promote_options="default")
        path = f"part-{table.delta.version()}.parquet"
        pq.write_table(rows, f"{uri}/{path}")
        size = Path(uri, path).stat().st_size
        other = type(files[0])(path, 0, 0, 0, 0, rows.num_rows, size, foreign=True)
        table.commit("other", table.delta.version(), [other], files, rearrange=True)


def scenario(sync: FeedSync) -> None:
    """Inserts, updates, deletions of what waits and of what is merged, a rollback, a drop."""
    feed = sync.feed
    for index in range(40):
        feed.put(f"k{index}", {"n": index})
    sync.commit()
    for index in range(0, 20, 2):
        feed.put(f"k{index}", {"n": -index})
    sync.commit()
    for index in range(0, 20, 4):
        feed.delete(f"k{index}")
        feed.put(f"k{index + 21}", {"n": 1, "city": "Bern"})
    sync.commit()
    feed.fail_over(1, feed.histories[1].seqno // 2)
    feed.put("after", {"n": 1})
    sync.commit()
    feed.drop("users")
    feed.put("k1", {"n": 0.5})
    sync.commit()
    for index in range(30, 36):
        feed.delete(f"k{index}")
    sync.commit()


def changes(sync: FeedSync) -> int:
    """Rows of the log, each once."""
    rows = sync.orders.changes.delta.to_pyarrow_table()
    return int(rows.group_by(["event", "vbucket", "seqno", "epoch"]).aggregate([]).num_rows) if rows.num_rows else 0


@pytest.mark.parametrize("phase", range(3))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("disturb", [optimize, part_of], ids=["all of it", "a part"])
def test_optimize_between_any_two_commits_neither_loses_nor_doubles_a_row(
    tmp_path, monkeypatch, disturb: Callable[[str], None], policy, phase
) -> None:
    """Before every third commit or so, of any of the tables."""
    sync = FeedSync(tmp_path / "lake", policy=POLICIES[policy])
    write, random, busy = Table._write, Random(phase), [False]

    def disturbed(self, *arguments):
        if random.random() < 0.35 and not busy[0]:
            busy[0] = True
            disturb(f"{sync.root}/{random.choice(TABLES)}/shop.orders")
            busy[0] = False
        return write(self, *arguments)

    monkeypatch.setattr(Table, "_write", disturbed)
    scenario(sync)
    monkeypatch.setattr(Table, "_write", write)
    check(sync)


def check(sync: FeedSync) -> None:
    assert sync.read() == truth(sync)
    assert read(sync.root, "shop.orders").num_rows == len(truth(sync))
    for _ in range(2):
        sync.feed.put("last", {"n": sync.number})
        sync.commit()
        fold_tail(sync.orders)
        fold_log(sync.orders)
        assert sync.read() == truth(sync)
    sync.orders.advance(sync.number - 1, drain=True)
    current = sync.orders.current.delta.to_pyarrow_table()
    assert sorted(current["_key"].to_pylist()) == sorted(truth(sync))
    log = sync.orders.changes.delta.to_pyarrow_table()
    assert log.num_rows == changes(sync) == sync.orders_changes


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Count the rows that the log of orders must have."""
    commit = FeedSync.commit

    def counting(self) -> None:
        rows = [row for row in self.feed.pending if row.get("collection") in ("orders", None)]
        self.orders_changes = getattr(self, "orders_changes", 0) + len(rows)
        commit(self)

    monkeypatch.setattr(FeedSync, "commit", counting)


def test_optimize_while_the_sync_runs_leaves_one_row_for_each_key(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES["ranges"])
    for index in range(200):
        sync.feed.put(f"k{index}", {"n": index})
        if index % 20 == 0:
            sync.commit()
    sync.commit()
    for index in range(100):
        sync.feed.put(f"k{index}", {"n": -1})
        if index % 20 == 0:
            optimize(sync.orders.current.uri)
            sync.commit()
    sync.commit()
    keys = sync.orders.current.delta.to_pyarrow_table()["_key"]
    assert len(keys) == len(pc.unique(keys)) == 200


def test_a_partial_optimize_keeps_what_waits_in_the_tail(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=0, share=0.5, target_rows=50))
    keys = [f"k{index}" for index in range(80)]
    for key in keys:
        sync.feed.put(key, {"n": 0})
    sync.commit()
    low, high = ([key for key in keys if (sync.feed.vbucket(key) < 2) is side] for side in (True, False))
    sync.feed.put(low[0], {"n": 1})
    sync.commit()
    for key in high[1:]:
        sync.feed.delete(key)
    sync.commit()
    merged = {file.lo: file.last_batch for file in sync.orders.current.files()}
    assert merged == {0: 0, 2: 2}  # one half has everything; a change waits for the other
    part_of(sync.orders.current.uri)
    assert [file.lo for file in Table(sync.orders.current.uri).files() if not file.foreign] == [2]
    sync.open()
    sync.feed.put(high[0], {"n": 3})
    sync.commit()
    sync.feed.put(high[0], {"n": 4})
    sync.commit()
    assert sync.read() == truth(sync)


def test_a_document_deleted_in_a_merge_stays_deleted_however_long_its_tail_file_stays(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=0, share=0.5, target_rows=50))
    keys = [f"k{index}" for index in range(100)]
    for key in keys:
        sync.feed.put(key, {"n": 0})
    sync.commit()
    low, high = ([key for key in keys if (sync.feed.vbucket(key) < 2) is side] for side in (True, False))
    sync.feed.put(low[0], {"n": 1})
    sync.commit()
    sync.feed.delete(low[0])
    for key in low[1:]:
        sync.feed.put(key, {"n": 2})
    sync.commit()
    for number in range(4):
        sync.feed.put(high[1], {"n": number})
        sync.commit()
        assert sync.read() == truth(sync), number
    optimize(sync.orders.current.uri)
    sync.feed.put(high[1], {"n": 9})
    sync.commit()
    assert sync.read() == truth(sync)


def test_a_running_step_survives_optimize_and_vacuum_at_once(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES["merged"])
    for index in range(40):
        sync.feed.put(f"k{index}", {"n": index})
    sync.commit()
    run, calls = sync.orders.run, [0]

    def late(tasks: Any, unapplied: pa.Table | None) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            desk_current = DeltaTable(sync.orders.current.uri)
            desk_current.optimize.z_order(["_key"])
            desk_current.vacuum(0, dry_run=False, enforce_retention_duration=False)
        return run(tasks, unapplied)

    sync.orders.run = late
    sync.feed.put("k3", {"n": -1})
    sync.commit()
    assert calls[0] == 2
    assert sync.read() == truth(sync)


def test_duplicates_that_an_earlier_version_left_are_found_and_removed(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=0, share=100))
    for index in range(40):
        sync.feed.put(f"k{index}", {"n": index})
    sync.commit()
    one = sync.orders.current.files()[0]
    again = one.path.replace("/b", "/b0")
    shutil.copy(f"{sync.orders.current.uri}/{one.path}", f"{sync.orders.current.uri}/{again}")
    sync.orders.current.commit("earlier", 1, [replace(one, path=again)])
    assert sync.orders.current.delta.to_pyarrow_table().num_rows == 40 + one.rows
    Path(sync.root, "_upriver", "checked.json").unlink(missing_ok=True)
    sync.open()
    sync.tables.prepare()
    assert sync.orders.current.delta.to_pyarrow_table().num_rows == 40
    assert sync.read() == truth(sync)


def test_a_history_that_another_tool_rewrote_has_every_version_once(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES["ranges"])
    for index in range(40):
        sync.feed.put(f"k{index}", {"n": index})
    sync.commit()
    history = HistoryTable(sync.orders)
    history.advance()
    optimize(history.table.uri)
    sync.feed.put("k1", {"n": -1})
    sync.commit()
    history.advance()
    rows = history.table.delta.to_pyarrow_table()
    assert rows.num_rows == 41
    assert rows.group_by(["_key", "_seqno"]).aggregate([]).num_rows == 41


def test_a_batch_replayed_after_optimize_rewrote_its_log_is_not_doubled(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake")
    sync.feed.put("a", {"n": 1})
    batches = sync.feed.batch()
    for _ in range(3):
        sync.tables = Tables(sync.tables.lake, "app", sync.options)
        sync.tables.apply(0, WrittenFiles.from_tasks([write_log(batches, sync.root, 0).to_json()]))
        optimize(sync.orders.changes.uri)
    assert sync.orders.changes.delta.to_pyarrow_table().num_rows == 1
    assert sync.read() == truth(sync)
