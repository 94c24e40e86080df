"""A trimmed log knows how far it reaches; where it does not reach back, vbuckets are read again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lake.feed_sync import FeedSync
from tests.lake.feeds import BASE_NS
from tests.lake.test_truth import normal
from upriver.lake.apply import reread, upkeep
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.layout import Lake
from upriver.protocol.offsets import Offset
from upriver.protocol.position import Position
from upriver.spark.sync.committed import CommittedBatch

TAIL = MergePolicy(small_rows=0, share=100, tail_files=2)


def truth(sync: FeedSync) -> dict[str, object]:
    return {key: normal(value) for key, value in sync.feed.truth().items()}


def trim(sync: FeedSync, clock: int) -> int:
    """Forget what was written up to this moment of the feed."""
    return upkeep.trim_log(sync.orders, BASE_NS // 1000 + clock * 1_000_000 + 500_000)


def reading(sync: FeedSync) -> list[int]:
    asked: list[int] = []

    def scan(vbuckets: Any) -> Any:
        asked.extend(vbuckets)
        return sync.feed.scan(vbuckets)

    sync.open(reread=scan)
    return asked


def test_a_rollback_restores_no_value_that_was_replaced_before_the_log_was_trimmed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(upkeep, "LARGE_ROWS", 5)
    sync = FeedSync(tmp_path / "lake", policy=TAIL)
    sync.feed.put("k", {"n": 0})
    sync.commit()
    for index in range(10):
        sync.feed.put(f"other{index}", {"n": index})
    sync.feed.put("k", {"n": 1})
    sync.commit()
    large = sync.feed.clock
    sync.feed.put("small", {"n": 0})
    sync.commit()
    assert upkeep.fold_log(sync.orders) == 1  # the small files around the large one
    trim(sync, large)
    vbucket = sync.feed.vbucket("k")
    good = sync.feed.histories[vbucket].seqno
    sync.feed.put("k", {"n": 2})
    sync.commit()
    reading(sync)
    sync.feed.fail_over(vbucket, good)
    sync.commit()
    assert sync.read() == truth(sync)
    assert sync.read()["k"] == {"n": 1}


def test_a_rollback_below_what_was_trimmed_reads_the_vbucket_again(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=TAIL)
    vbucket = sync.feed.vbucket("k")
    sync.feed.put("k", {"n": 0})
    good = sync.feed.histories[vbucket].seqno
    sync.feed.put("k", {"n": 1})
    sync.commit()
    assert trim(sync, sync.feed.clock) == 1
    asked = reading(sync)
    sync.feed.fail_over(vbucket, good)  # the log has nothing about what is lost
    sync.commit()
    assert sync.read() == truth(sync) == {"k": {"n": 0}}
    assert asked == [vbucket]


def test_a_vbucket_of_which_nothing_was_trimmed_is_not_read_again(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=TAIL)
    key = [next(key for key in map(str, range(99)) if sync.feed.vbucket(key) == vbucket) for vbucket in range(4)]
    sync.feed.put(key[0], {"n": 0})
    sync.commit()
    assert trim(sync, sync.feed.clock) == 1
    good = sync.feed.histories[1].seqno
    sync.feed.put(key[1], {"n": 1})
    sync.commit()
    asked = reading(sync)
    sync.feed.fail_over(1, good)
    sync.commit()
    assert sync.read() == truth(sync) == {key[0]: {"n": 0}}
    assert asked == []


def test_a_lake_trimmed_by_an_earlier_version_reads_every_vbucket_again_that_rolls_back(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=TAIL)
    vbucket = sync.feed.vbucket("k")
    sync.feed.put("k", {"n": 0})
    good = sync.feed.histories[vbucket].seqno
    sync.feed.put("k", {"n": 1})
    sync.commit()
    file = sync.orders.changes.files()[0]
    sync.orders.changes.commit("upriver.trimmed", 0, [], [file])
    asked = reading(sync)
    for _ in range(2):
        sync.feed.fail_over(vbucket, good)
        sync.commit()
        assert sync.read() == truth(sync) == {"k": {"n": 0}}
    assert asked == [vbucket]  # the second time the log knows


def test_a_rollback_below_where_a_vbucket_was_read_again_does_not_trust_what_was_read_then(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=TAIL)
    vbucket = sync.feed.vbucket("k")
    for n in range(4):
        sync.feed.put("k", {"n": n})
    sync.commit()
    assert trim(sync, sync.feed.clock) == 1
    asked = reading(sync)
    sync.feed.fail_over(vbucket, 2)
    sync.feed.put("k", {"n": 9})  # replaces, in what is read again, the version that the next rollback brings back
    sync.commit()
    assert sync.read() == truth(sync) == {"k": {"n": 9}}
    sync.feed.fail_over(vbucket, 2)
    sync.commit()
    assert sync.read() == truth(sync) == {"k": {"n": 1}}
    assert asked == [vbucket, vbucket]


def branches(sync: FeedSync) -> Any:
    def of(vbuckets: Any) -> dict[int, list[tuple[int, int]]]:
        return {vbucket: sync.feed.histories[vbucket].branches[::-1] for vbucket in vbuckets}

    return of


@pytest.mark.parametrize("idle", [True, False], ids=["nothing is written after it", "the new branch goes on"])
def test_what_a_reread_read_beyond_the_offset_is_removed_when_a_second_failover_loses_it(tmp_path, idle) -> None:
    sync = FeedSync(tmp_path / "lake", policy=TAIL)
    vbucket = sync.feed.vbucket("k")
    extra = [key for key in map(str, range(99)) if sync.feed.vbucket(key) == vbucket]
    for n in range(4):
        sync.feed.put("k", {"n": n})
    sync.commit()
    assert trim(sync, sync.feed.clock) == 1
    reading(sync)
    sync.tables.branches = branches(sync)
    sync.feed.fail_over(vbucket, 2)
    batch = sync.feed.batch()  # the batch is planned up to here
    offset = sync.feed.histories[vbucket].seqno
    sync.feed.put(extra[0], {"ahead": True})
    sync.tables.apply(sync.number, WrittenFiles.from_tasks([write_log(batch, sync.root, sync.number).to_json()]))
    sync.number += 1
    assert extra[0] in sync.read()  # read again, beyond the offset
    sync.feed.fail_over(vbucket, offset)  # loses it; the source has not read it, so it sees no rollback
    sync.feed.histories[vbucket].epoch -= 1
    sync.feed.batch()
    if idle:
        sync.tables.freshen()
    else:
        sync.feed.put(extra[1], {"n": 2})
        sync.commit()
    assert sync.read() == truth(sync)
    sync.feed.put(extra[2], {"n": 3})
    sync.feed.pending = [row | {"epoch": sync.tables.lake.epochs()[vbucket]} for row in sync.feed.pending]
    sync.commit()
    assert sync.read() == truth(sync)


def test_the_bucket_is_not_asked_about_vbuckets_that_the_sync_has_passed(tmp_path) -> None:
    lake = Lake(str(tmp_path))
    reread.note_ahead(lake, "shop.orders", {1: reread.Ahead(7, 50)})
    asked: list[int] = []

    def branches(vbuckets: Any) -> dict[int, list[tuple[int, int]]]:
        asked.extend(vbuckets)
        return {1: [(8, 40), (7, 0)]}

    assert reread.find_lost(lake, branches) == {"shop.orders": [1]}
    CommittedBatch(3, Offset((Position.of_points(7, 9), Position.of_points(7, 50))).to_json()).store(lake)
    assert reread.find_lost(lake, branches) == {}
    assert asked == [1]
