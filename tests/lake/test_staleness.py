"""`current` alone is as fresh as was asked for: at the end of `--once`, and within `--max-staleness` otherwise."""

from __future__ import annotations

import time

import pytest

from tests.lake.feed_sync import FeedSync
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
LAZY = {"small_rows": 0, "share": 100, "tail_files": 3, "target_rows": 20}  # no merge is ever worth it


def truth(sync: FeedSync) -> dict[str, object]:
    return {key: normal(value) for key, value in sync.feed.truth().items()}


def current(sync: FeedSync) -> dict[str, object]:
    """What a plain reader of that one table sees."""
    table = sync.orders.current.delta.to_pyarrow_table()
    assert len(set(table["_key"].to_pylist())) == table.num_rows
    return {row["_key"]: to_document(row, shape_of(sync.orders.current.schema())) for row in table.to_pylist()}


@pytest.fixture
def clock(monkeypatch):
    """Sets the time that the tables see."""

    def later(seconds: float) -> None:
        for module in (collection, plan, deltas):
            monkeypatch.setattr(module, "now_ms", lambda: int((time.time() + seconds) * 1000))

    return later


def load(sync: FeedSync) -> None:
    for index in range(80):
        sync.feed.put(f"k{index}", {"n": index})
    sync.commit()
    for index in range(0, 80, 8):
        sync.feed.delete(f"k{index}")
        sync.feed.put(f"k{index + 1}", {"n": -1})
    sync.commit()


def test_a_run_that_ends_leaves_deletions_and_changes_in_current_itself(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(**LAZY))
    load(sync)
    assert current(sync) != truth(sync) == sync.read()
    sync.tables.drain()
    assert current(sync) == truth(sync) == sync.read()
    sync.feed.delete("k2")
    sync.commit()
    sync.open()
    sync.tables.drain()
    assert current(sync) == truth(sync) == sync.read()
    files = {file.path for file in sync.orders.current.files()}
    sync.tables.drain()  # nothing waits, nothing is written
    assert {file.path for file in sync.orders.current.files()} == files
    assert sync.orders.tail.files() == []


def test_a_change_of_one_document_does_not_rewrite_parts_that_have_none(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(**LAZY))
    load(sync)
    sync.tables.drain()
    before = {file.path for file in sync.orders.current.files()}
    sync.feed.delete("k2")
    sync.commit()
    sync.tables.drain()
    assert len(before - {file.path for file in sync.orders.current.files()}) == 1
    assert current(sync) == truth(sync)


@pytest.mark.parametrize("folded", [False, True])
def test_what_waits_is_in_current_within_the_limit_although_no_batch_comes(tmp_path, clock, folded) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(**LAZY, staleness_s=5 * MINUTE))
    load(sync)
    sync.feed.delete("k2")
    sync.commit()
    sync.tables.freshen()
    assert current(sync) != truth(sync)  # not yet
    if folded:
        clock(2 * MINUTE)
        sync.feed.put("k3", {"n": -3})
        sync.commit()
        assert fold_tail(sync.orders) > 0  # the age of the oldest counts
    clock(4.6 * MINUTE)
    sync.tables.freshen()
    stale = {key for key in truth(sync) | current(sync) if truth(sync).get(key) != current(sync).get(key)}
    assert stale <= {"k3"}
    clock(10 * MINUTE)
    sync.tables.freshen()
    assert current(sync) == truth(sync) == sync.read()


def test_parts_of_a_table_take_turns_so_that_not_all_are_written_at_once(tmp_path, clock) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(**LAZY, staleness_s=5 * MINUTE))
    load(sync)
    ranges = []
    for minutes in (2.6, 3.1, 3.6, 4.1, 4.6):
        clock(minutes * MINUTE)
        ranges.append(sum(step.merged_ranges for step in sync.tables.freshen()))
    assert sum(ranges) == 4
    assert max(ranges) == 1
    assert current(sync) == truth(sync)


def test_with_no_staleness_at_all_every_batch_is_in_current(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(**LAZY, staleness_s=0))
    load(sync)
    assert current(sync) == truth(sync)


def test_a_rollback_and_a_replayed_batch_reach_current_within_the_limit(tmp_path, clock) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(**LAZY, staleness_s=5 * MINUTE))
    load(sync)
    for vbucket in range(4):
        sync.feed.fail_over(vbucket, sync.feed.histories[vbucket].seqno - 3)
    batches = sync.feed.batch()
    for _ in range(2):
        sync.open()
        sync.tables.apply(sync.number, WrittenFiles.from_tasks([write_log(batches, sync.root, sync.number).to_json()]))
    clock(4.6 * MINUTE)
    sync.tables.freshen()
    assert current(sync) == truth(sync) == sync.read()


def test_a_batch_held_back_for_batches_that_do_not_come_is_applied(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(**LAZY))
    for index in range(20):
        sync.feed.put(f"k{index}", {"n": index})
    written = write_log(sync.feed.batch(), sync.root, 0)
    (step,) = sync.tables.apply(0, written, lag=10**6)  # the last batch was full, so more seemed to come
    assert step.held
    sync.tables.freshen()
    assert sync.read() == truth(sync)


def test_a_following_sync_has_a_limit_of_minutes_unless_told_otherwise() -> None:
    def staleness(**given: str) -> float:
        options = SyncOptions.parse({"connection": "couchbase://nowhere", "to": "lake", **given})
        return table_options(options, 4).policy.staleness_s

    assert staleness() == 300.0
    assert staleness(max_staleness="90s") == 90.0
    assert staleness(max_staleness="") == float("inf")
