"""`current` alone is as fresh as was asked for: at the end of `--once`, and within `--max-staleness` otherwise."""

from __future__ import annotations

import time

import pytest

from tests.lake.desks import Desk
from tests.lake.test_truth import normal
from upriver.lake import collection
from upriver.lake import delta as deltas
from upriver.lake.apply import plan
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.apply.upkeep import fold_tail
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.columns import shape_of, to_document
from upriver.lake.options import SyncOptions
from upriver.spark.sync.job import table_options

MINUTE = 60.0
LAZY = {"small_rows": 0, "share": 100, "tail_files": 3, "target_rows": 20}  # nothing is merged because it is worth it


def truth(desk: Desk) -> dict[str, object]:
    return {key: normal(value) for key, value in desk.feed.truth().items()}


def current(desk: Desk) -> dict[str, object]:
    """What a plain reader of that one table sees."""
    table = desk.orders.current.delta.to_pyarrow_table()
    assert len(set(table["_key"].to_pylist())) == table.num_rows
    return {row["_key"]: to_document(row, shape_of(desk.orders.current.schema())) for row in table.to_pylist()}


@pytest.fixture
def clock(monkeypatch):
    """Tells the tables how late it is."""

    def later(seconds: float) -> None:
        for module in (collection, plan, deltas):
            monkeypatch.setattr(module, "now_ms", lambda: int((time.time() + seconds) * 1000))

    return later


def load(desk: Desk) -> None:
    for index in range(80):
        desk.feed.put(f"k{index}", {"n": index})
    desk.commit()
    for index in range(0, 80, 8):
        desk.feed.delete(f"k{index}")
        desk.feed.put(f"k{index + 1}", {"n": -1})
    desk.commit()


def test_a_run_that_ends_leaves_deletions_and_changes_in_current_itself(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(**LAZY))
    load(desk)
    assert current(desk) != truth(desk) == desk.read()
    desk.tables.drain()
    assert current(desk) == truth(desk) == desk.read()
    desk.feed.delete("k2")
    desk.commit()
    desk.open()
    desk.tables.drain()
    assert current(desk) == truth(desk) == desk.read()
    files = {file.path for file in desk.orders.current.files()}
    desk.tables.drain()  # nothing waits, nothing is written
    assert {file.path for file in desk.orders.current.files()} == files
    assert desk.orders.tail.files() == []


def test_a_change_of_one_document_does_not_rewrite_parts_that_have_none(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(**LAZY))
    load(desk)
    desk.tables.drain()
    before = {file.path for file in desk.orders.current.files()}
    desk.feed.delete("k2")
    desk.commit()
    desk.tables.drain()
    assert len(before - {file.path for file in desk.orders.current.files()}) == 1
    assert current(desk) == truth(desk)


@pytest.mark.parametrize("folded", [False, True])
def test_what_waits_is_in_current_within_the_limit_although_no_batch_comes(tmp_path, clock, folded) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(**LAZY, staleness_s=5 * MINUTE))
    load(desk)
    desk.feed.delete("k2")
    desk.commit()
    desk.tables.freshen()
    assert current(desk) != truth(desk)  # not yet
    if folded:
        clock(2 * MINUTE)
        desk.feed.put("k3", {"n": -3})
        desk.commit()
        assert fold_tail(desk.orders) > 0  # the age of the oldest counts
    clock(4.6 * MINUTE)
    desk.tables.freshen()
    stale = {key for key in truth(desk) | current(desk) if truth(desk).get(key) != current(desk).get(key)}
    assert stale <= {"k3"}
    clock(10 * MINUTE)
    desk.tables.freshen()
    assert current(desk) == truth(desk) == desk.read()


def test_parts_of_a_table_take_turns_so_that_not_all_are_written_at_once(tmp_path, clock) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(**LAZY, staleness_s=5 * MINUTE))
    load(desk)
    ranges = []
    for minutes in (2.6, 3.1, 3.6, 4.1, 4.6):
        clock(minutes * MINUTE)
        ranges.append(sum(step.merged_ranges for step in desk.tables.freshen()))
    assert sum(ranges) == 4
    assert max(ranges) == 1
    assert current(desk) == truth(desk)


def test_with_no_staleness_at_all_every_batch_is_in_current(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(**LAZY, staleness_s=0))
    load(desk)
    assert current(desk) == truth(desk)


def test_a_rollback_and_a_replayed_batch_reach_current_within_the_limit(tmp_path, clock) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(**LAZY, staleness_s=5 * MINUTE))
    load(desk)
    for vbucket in range(4):
        desk.feed.fail_over(vbucket, desk.feed.histories[vbucket].seqno - 3)
    batches = desk.feed.batch()
    for _ in range(2):
        desk.open()
        desk.tables.apply(desk.number, WrittenFiles.from_tasks([write_log(batches, desk.root, desk.number).to_json()]))
    clock(4.6 * MINUTE)
    desk.tables.freshen()
    assert current(desk) == truth(desk) == desk.read()


def test_a_batch_held_back_for_others_that_do_not_come_is_applied(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(**LAZY))
    for index in range(20):
        desk.feed.put(f"k{index}", {"n": index})
    written = write_log(desk.feed.batch(), desk.root, 0)
    (step,) = desk.tables.apply(0, written, lag=10**6)  # the last batch was full, so more seemed to come
    assert step.held
    desk.tables.freshen()
    assert desk.read() == truth(desk)


def test_a_following_sync_has_a_limit_of_minutes_unless_told_otherwise() -> None:
    def staleness(**given: str) -> float:
        options = SyncOptions.parse({"connection": "couchbase://nowhere", "to": "lake", **given})
        return table_options(options, 4).policy.staleness_s

    assert staleness() == 300.0
    assert staleness(max_staleness="90s") == 90.0
    assert staleness(max_staleness="") == float("inf")
