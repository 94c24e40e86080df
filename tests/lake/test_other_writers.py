"""Others work on the tables while the sync does: OPTIMIZE at every moment, VACUUM, a crash in between."""

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

from tests.lake.desks import Desk
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


def truth(desk: Desk, name: str = "orders") -> dict[str, object]:
    return {key: normal(value) for key, value in desk.feed.truth(name).items()}


def optimize(uri: str) -> None:
    if DeltaTable.is_deltatable(uri):
        DeltaTable(uri).optimize.compact()


def part_of(uri: str) -> None:
    """As an OPTIMIZE with a size limit does: one of the files is left alone, the others become one."""
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


def scenario(desk: Desk) -> None:
    """Inserts, updates, deletions of what waits and of what is merged, a rollback, a drop."""
    feed = desk.feed
    for index in range(40):
        feed.put(f"k{index}", {"n": index})
    desk.commit()
    for index in range(0, 20, 2):
        feed.put(f"k{index}", {"n": -index})
    desk.commit()
    for index in range(0, 20, 4):
        feed.delete(f"k{index}")
        feed.put(f"k{index + 21}", {"n": 1, "city": "Bern"})
    desk.commit()
    feed.fail_over(1, feed.histories[1].seqno // 2)
    feed.put("after", {"n": 1})
    desk.commit()
    feed.drop("users")
    feed.put("k1", {"n": 0.5})
    desk.commit()
    for index in range(30, 36):
        feed.delete(f"k{index}")
    desk.commit()


def changes(desk: Desk) -> int:
    """Rows of the log, each once."""
    rows = desk.orders.changes.delta.to_pyarrow_table()
    return int(rows.group_by(["event", "vbucket", "seqno", "epoch"]).aggregate([]).num_rows) if rows.num_rows else 0


@pytest.mark.parametrize("phase", range(3))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("disturb", [optimize, part_of], ids=["all of it", "a part"])
def test_optimize_between_any_two_commits_neither_loses_nor_doubles_a_row(
    tmp_path, monkeypatch, disturb: Callable[[str], None], policy, phase
) -> None:
    """Before every third commit or so, of any of the tables."""
    desk = Desk(tmp_path / "lake", policy=POLICIES[policy])
    write, random, busy = Table._write, Random(phase), [False]

    def disturbed(self, *arguments):
        if random.random() < 0.35 and not busy[0]:
            busy[0] = True
            disturb(f"{desk.root}/{random.choice(TABLES)}/shop.orders")
            busy[0] = False
        return write(self, *arguments)

    monkeypatch.setattr(Table, "_write", disturbed)
    scenario(desk)
    monkeypatch.setattr(Table, "_write", write)
    check(desk)


def check(desk: Desk) -> None:
    assert desk.read() == truth(desk)
    assert read(desk.root, "shop.orders").num_rows == len(truth(desk))
    for _ in range(2):
        desk.feed.put("last", {"n": desk.number})
        desk.commit()
        fold_tail(desk.orders)
        fold_log(desk.orders)
        assert desk.read() == truth(desk)
    desk.orders.advance(desk.number - 1, drain=True)
    current = desk.orders.current.delta.to_pyarrow_table()
    assert sorted(current["_key"].to_pylist()) == sorted(truth(desk))
    log = desk.orders.changes.delta.to_pyarrow_table()
    assert log.num_rows == changes(desk) == desk.orders_changes


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Desks count the rows that their log of orders must have."""
    commit = Desk.commit

    def counting(self) -> None:
        rows = [row for row in self.feed.pending if row.get("collection") in ("orders", None)]
        self.orders_changes = getattr(self, "orders_changes", 0) + len(rows)
        commit(self)

    monkeypatch.setattr(Desk, "commit", counting)


def test_optimize_while_the_sync_runs_leaves_one_row_for_each_key(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES["ranges"])
    for index in range(200):
        desk.feed.put(f"k{index}", {"n": index})
        if index % 20 == 0:
            desk.commit()
    desk.commit()
    for index in range(100):
        desk.feed.put(f"k{index}", {"n": -1})
        if index % 20 == 0:
            optimize(desk.orders.current.uri)
            desk.commit()
    desk.commit()
    keys = desk.orders.current.delta.to_pyarrow_table()["_key"]
    assert len(keys) == len(pc.unique(keys)) == 200


def test_a_partial_optimize_keeps_what_waits_in_the_tail(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(small_rows=0, share=0.5, target_rows=50))
    keys = [f"k{index}" for index in range(80)]
    for key in keys:
        desk.feed.put(key, {"n": 0})
    desk.commit()
    low, high = ([key for key in keys if (desk.feed.vbucket(key) < 2) is side] for side in (True, False))
    desk.feed.put(low[0], {"n": 1})
    desk.commit()
    for key in high[1:]:
        desk.feed.delete(key)
    desk.commit()
    merged = {file.lo: file.last_batch for file in desk.orders.current.files()}
    assert merged == {0: 0, 2: 2}  # the one half has it all, for the other a change waits
    part_of(desk.orders.current.uri)
    assert [file.lo for file in Table(desk.orders.current.uri).files() if not file.foreign] == [2]
    desk.open()
    desk.feed.put(high[0], {"n": 3})
    desk.commit()
    desk.feed.put(high[0], {"n": 4})
    desk.commit()
    assert desk.read() == truth(desk)


def test_a_document_deleted_in_a_merge_stays_deleted_however_many_batches_its_tail_waits_for_others(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(small_rows=0, share=0.5, target_rows=50))
    keys = [f"k{index}" for index in range(100)]
    for key in keys:
        desk.feed.put(key, {"n": 0})
    desk.commit()
    low, high = ([key for key in keys if (desk.feed.vbucket(key) < 2) is side] for side in (True, False))
    desk.feed.put(low[0], {"n": 1})
    desk.commit()
    desk.feed.delete(low[0])
    for key in low[1:]:
        desk.feed.put(key, {"n": 2})
    desk.commit()
    for number in range(4):
        desk.feed.put(high[1], {"n": number})
        desk.commit()
        assert desk.read() == truth(desk), number
    optimize(desk.orders.current.uri)
    desk.feed.put(high[1], {"n": 9})
    desk.commit()
    assert desk.read() == truth(desk)


def test_optimize_and_a_vacuum_at_once_under_a_running_step_are_survived(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES["merged"])
    for index in range(40):
        desk.feed.put(f"k{index}", {"n": index})
    desk.commit()
    run, calls = desk.orders.run, [0]

    def late(tasks: Any, unapplied: pa.Table | None) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            desk_current = DeltaTable(desk.orders.current.uri)
            desk_current.optimize.z_order(["_key"])
            desk_current.vacuum(0, dry_run=False, enforce_retention_duration=False)
        return run(tasks, unapplied)

    desk.orders.run = late
    desk.feed.put("k3", {"n": -1})
    desk.commit()
    assert calls[0] == 2
    assert desk.read() == truth(desk)


def test_duplicates_that_an_earlier_version_left_are_found_and_removed(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(small_rows=0, share=100))
    for index in range(40):
        desk.feed.put(f"k{index}", {"n": index})
    desk.commit()
    one = desk.orders.current.files()[0]
    again = one.path.replace("/b", "/b0")
    shutil.copy(f"{desk.orders.current.uri}/{one.path}", f"{desk.orders.current.uri}/{again}")
    desk.orders.current.commit("earlier", 1, [replace(one, path=again)])
    assert desk.orders.current.delta.to_pyarrow_table().num_rows == 40 + one.rows
    Path(desk.root, "_upriver", "checked.json").unlink(missing_ok=True)
    desk.open()
    desk.tables.prepare()
    assert desk.orders.current.delta.to_pyarrow_table().num_rows == 40
    assert desk.read() == truth(desk)


def test_a_history_that_someone_else_rewrote_has_every_version_once(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES["ranges"])
    for index in range(40):
        desk.feed.put(f"k{index}", {"n": index})
    desk.commit()
    history = HistoryTable(desk.orders)
    history.advance()
    optimize(history.table.uri)
    desk.feed.put("k1", {"n": -1})
    desk.commit()
    history.advance()
    rows = history.table.delta.to_pyarrow_table()
    assert rows.num_rows == 41
    assert rows.group_by(["_key", "_seqno"]).aggregate([]).num_rows == 41


def test_a_batch_replayed_after_optimize_rewrote_its_log_is_there_once(tmp_path) -> None:
    desk = Desk(tmp_path / "lake")
    desk.feed.put("a", {"n": 1})
    batches = desk.feed.batch()
    for _ in range(3):
        desk.tables = Tables(desk.tables.lake, "app", desk.options)
        desk.tables.apply(0, WrittenFiles.from_tasks([write_log(batches, desk.root, 0).to_json()]))
        optimize(desk.orders.changes.uri)
    assert desk.orders.changes.delta.to_pyarrow_table().num_rows == 1
    assert desk.read() == truth(desk)
