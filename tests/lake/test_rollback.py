"""A rollback is repaired from the log, and from the bucket itself where the log does not reach back."""

from __future__ import annotations

import copy

import pyarrow as pa
import pyarrow.compute as pc

from tests.lake.feed_sync import FeedSync
from tests.lake.test_truth import normal
from upriver.lake.apply.rollbacks import Epochs
from upriver.lake.apply.upkeep import trim_log
from upriver.records.schema import CHANGES


def test_what_lost_changes_had_overwritten_comes_back_and_the_log_still_has_them(sync: FeedSync) -> None:
    import duckdb

    vbucket = sync.feed.vbucket("a")
    sync.feed.put("a", {"n": 1})
    sync.commit()
    good = sync.feed.histories[vbucket].seqno
    sync.feed.put("a", {"n": 2})
    new = next(key for key in map(str, range(99)) if sync.feed.vbucket(key) == vbucket)
    sync.feed.put(new, {"n": 3})
    sync.commit()
    sync.feed.fail_over(vbucket, good)
    sync.commit()
    assert sync.read() == {"a": {"n": 1}}
    changes = duckdb.read_parquet(list(sync.orders.changes.delta.file_uris()))
    assert changes.aggregate("count(*)").fetchall() == [(4,)]
    assert changes.filter("voided").project("seqno").order("seqno").fetchall() == [(good + 1,), (good + 2,)]
    assert changes.filter("NOT voided AND event <> 'rollback'").project("key").fetchall() == [(b"a",)]


def test_plain_readers_of_current_see_the_repair_when_it_is_merged(sync: FeedSync) -> None:
    for index in range(40):
        sync.feed.put(f"k{index}", {"n": index})
    sync.commit()
    for index in range(40):
        sync.feed.put(f"k{index}", {"n": -1})
    sync.commit()
    for vbucket in range(4):
        sync.feed.fail_over(vbucket, sync.feed.histories[vbucket].seqno // 2)
    sync.commit()
    sync.orders.advance(sync.number - 1, force=True)
    plain = sync.orders.current.delta.to_pyarrow_table()
    assert {row["_key"]: row["n"] for row in plain.to_pylist()} == {f"k{index}": index for index in range(40)}


def test_a_vbucket_is_read_again_when_the_log_was_trimmed(sync: FeedSync) -> None:
    goods = sync.change_half()
    first = sync.orders.changes.files()[0]
    everything = pc.max(sync.orders.changes.delta.to_pyarrow_table().filter(pc.field("batch") == 0)["timestamp"])
    assert trim_log(sync.orders, everything.value + 1) == 1
    assert first.path not in {file.path for file in sync.orders.changes.files()}
    for vbucket, good in enumerate(goods):
        sync.feed.fail_over(vbucket, good)
    asked: list[int] = []
    sync.open(reread=lambda vbuckets: reread(sync, vbuckets, asked))
    sync.commit()
    assert sync.read() == {key: normal(value) for key, value in sync.feed.truth().items()}
    assert asked  # the vbucket was read again


def reread(sync: FeedSync, vbuckets: list[int], asked: list[int]) -> list[pa.RecordBatch]:
    """What the bucket holds, as a feed from the beginning says it, without epochs."""
    asked.extend(vbuckets)
    again = copy.deepcopy(sync.feed)
    again.pending = []
    for vbucket in vbuckets:
        for seqno, (key, value) in enumerate(again.histories[vbucket].states[-1][1].get("orders", {}).items(), start=1):
            again._emit("mutation", vbucket, collection="orders", key=key.encode(), value=value, datatype=1)
            again.pending[-1] |= {"seqno": seqno, "epoch": 0}
    return again.batch()


def test_an_epoch_that_the_source_forgot_is_not_used_twice() -> None:
    def row(event: str, seqno: int, epoch: int) -> dict[str, object]:
        return dict.fromkeys(CHANGES.names) | {
            "event": event,
            "vbucket": 1,
            "seqno": seqno,
            "epoch": epoch,
            "vbuuid": 1,
        }

    rows = [
        row("mutation", 7, 0),
        row("rollback", 5, 1),
        row("mutation", 6, 1),
        row("rollback", 3, 1),
        row("mutation", 4, 1),
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=CHANGES)
    lifted = pa.concat_tables(pa.table(part) for part in Epochs({1: 1}).lift([batch]))
    assert lifted.column("epoch").to_pylist() == [1, 2, 2, 3, 3]
