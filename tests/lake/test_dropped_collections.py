"""Collections that are dropped, while followed or while the sync is away, and created again under the same name."""

from __future__ import annotations

import pyarrow.compute as pc
import pytest

from tests.lake.feed_sync import FeedSync
from tests.lake.test_truth import normal
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.apply.reconcile import reconcile
from upriver.lake.apply.upkeep import fold_log, fold_tail, trim_log
from upriver.lake.bucket import Survey, wanted
from upriver.lake.options import SyncOptions

OPTIONS = SyncOptions(connection="couchbase://nowhere", to="lake")
POLICIES = {
    "tail": MergePolicy(small_rows=0, share=100),
    "merged": MergePolicy(small_rows=10**6),
    "paid": MergePolicy(small_rows=0),
}


def restart(sync: FeedSync, live: int | None) -> list[str]:
    """Begin a new run; the manifest has this id of orders."""
    sync.open()
    sync.tables.prepare()
    return reconcile(sync.tables, Survey(4, 0, {} if live is None else {"shop.orders": live}), OPTIONS)


def put(sync: FeedSync, count: int, **fields: object) -> None:
    for index in range(count):
        sync.feed.put(f"k{index}", {"n": index, **fields})
    sync.commit()
    fold_tail(sync.orders)
    fold_log(sync.orders)


def truth(sync: FeedSync) -> dict[str, object]:
    return {key: normal(value) for key, value in sync.feed.truth().items()}


def in_current(sync: FeedSync) -> int:
    return int(sync.orders.current.delta.to_pyarrow_table().num_rows)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_collection_dropped_while_followed_leaves_current_empty_through_restarts_and_later_drops(
    tmp_path, policy
) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES[policy])
    put(sync, 40)
    for life in range(3):
        sync.feed.drop("orders")
        sync.commit()
        assert (in_current(sync), sync.read()) == (0, {}), life
        for _ in range(3):
            assert restart(sync, None) == []
            assert (in_current(sync), sync.read()) == (0, {}), life
        put(sync, 30 + life)
        assert sync.read() == truth(sync), life
        assert restart(sync, sync.feed.ids["orders"]) == []
        put(sync, 5, life=life)
        assert sync.read() == truth(sync), life
        sync.feed.drop("orders")
        sync.feed.batch()  # the sync does not see it
        assert restart(sync, sync.feed.ids["orders"] if life % 2 else None) == ["shop.orders"]
        assert (in_current(sync), sync.read()) == (0, {}), life
        assert restart(sync, sync.feed.ids["orders"] if life % 2 else None) == []
        put(sync, 20)
        assert sync.read() == truth(sync), life


def test_a_tail_file_that_an_earlier_version_named_backwards_does_not_stop_the_sync(tmp_path) -> None:
    from upriver.lake.files import parse_file_name

    backwards = parse_file_name("vb0000-0003/b00000008-00000007-ab.parquet")
    assert (backwards.first_batch, backwards.last_batch) == (7, 7)


def trim_everything(sync: FeedSync) -> int:
    newest = pc.max(sync.orders.changes.delta.to_pyarrow_table()["timestamp"])
    return trim_log(sync.orders, newest.value + 1)


def test_a_collection_created_again_after_its_log_was_trimmed_has_only_its_new_documents(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES["tail"])
    put(sync, 40)
    assert trim_everything(sync) > 0
    sync.feed.drop("orders")
    sync.feed.batch()  # away
    assert restart(sync, sync.feed.ids["orders"]) == ["shop.orders"]
    put(sync, 5)
    assert sync.read() == truth(sync)


def test_a_drop_of_a_collection_that_has_lost_its_name_is_applied_after_its_log_was_trimmed(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES["tail"])
    put(sync, 40)
    assert trim_everything(sync) > 0
    sync.open()
    sync.feed.drop("orders")
    for row in sync.feed.pending:
        row |= {"scope": None, "collection": None}  # the manifest has forgotten it
    sync.commit()
    assert (in_current(sync), sync.read()) == (0, {})


def test_documents_of_an_old_collection_end_when_a_new_one_of_its_name_comes_without_a_drop(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES["tail"])
    put(sync, 40)
    sync.feed.drop("orders")
    sync.feed.batch()  # the filter of the stream hides it
    put(sync, 5, new=True)
    assert sync.read() == truth(sync)
    assert len(sync.read()) == 5
    put(sync, 7)
    assert sync.read() == truth(sync)
    assert restart(sync, sync.feed.ids["orders"]) == []


def test_a_late_vbucket_that_still_sends_the_old_collection_does_not_end_the_new_one(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES["tail"])
    put(sync, 40)
    old = next(key for key in map(str, range(99)) if sync.feed.vbucket(key) == 3)
    sync.feed.put(old, {"n": 1})
    sync.feed.drop("orders")
    late = [row for row in sync.feed.pending if row["vbucket"] == 3]
    sync.feed.pending = [row for row in sync.feed.pending if row["vbucket"] != 3]
    sync.feed.put(next(key for key in map(str, range(99)) if sync.feed.vbucket(key) == 0), {"n": 2})
    sync.commit()
    sync.feed.pending = late
    sync.commit()
    assert sync.read() == truth(sync) != {}
    assert restart(sync, sync.feed.ids["orders"]) == []
    assert sync.read() == truth(sync)


def test_a_rollback_below_a_drop_known_only_from_the_manifest_does_not_bring_documents_back(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=POLICIES["tail"])
    put(sync, 40)
    before = [history.seqno for history in sync.feed.histories]
    sync.feed.drop("orders")
    sync.feed.batch()  # away
    assert restart(sync, sync.feed.ids["orders"]) == ["shop.orders"]
    put(sync, 5)
    for vbucket, seqno in enumerate(before):
        sync.feed.fail_over(vbucket, seqno - 2)  # the new branch has the drop again, and the filter hides it
    sync.commit()
    assert sync.read() == {}
    assert restart(sync, sync.feed.ids["orders"]) == []
    put(sync, 3, again=True)
    assert set(sync.read()) == {"k0", "k1", "k2"}
    log = sync.orders.changes.delta.to_pyarrow_table()
    told = log.filter((pc.field("event") == "collection_dropped") & pc.field("collection_id").is_null())
    assert told.num_rows == 4
    assert not pc.any(told["voided"]).as_py()  # readers of the log see it, too


@pytest.mark.parametrize("policy", [MergePolicy(small_rows=0), MergePolicy(small_rows=10**6)], ids=["tail", "merged"])
def test_documents_of_a_collection_with_another_id_are_removed_and_new_ones_stay(tmp_path, policy) -> None:
    sync = FeedSync(tmp_path / "lake", policy=policy)
    for index in range(30):
        sync.feed.put(f"k{index}", {"n": index})
    sync.commit()
    for index in range(5):
        sync.feed.put(f"k{index}", {"n": -1})
    sync.commit()
    assert reconcile(sync.tables, Survey(4, 0, {"shop.orders": 8}), OPTIONS) == []
    sync.feed.drop("orders")
    sync.feed.batch()  # the sync does not see it
    assert reconcile(sync.tables, Survey(4, 0, {"shop.orders": 10}), OPTIONS) == ["shop.orders"]
    assert sync.read() == {}
    sync.feed.put("k3", {"n": 3})
    sync.commit()
    assert sync.read() == {key: normal(value) for key, value in sync.feed.truth().items()} == {"k3": {"n": 3}}
    assert reconcile(sync.tables, Survey(4, 0, {"shop.orders": 10}), OPTIONS) == []


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({}, "a.b", True),
        ({"collections": "a.b"}, "a.b", True),
        ({"collections": "a.b"}, "a.c", False),
        ({"scope": "a"}, "a.c", True),
        ({"scope": "a"}, "b.c", False),
        ({"scope": "a", "collections": "c"}, "a.c", True),
        ({"collections": "orders"}, "_default.orders", True),
    ],
)
def test_which_collections_are_part_of_a_sync(options, name, expected) -> None:
    given = {"connection": "couchbase://nowhere", "to": "lake", **options}
    assert wanted(SyncOptions.parse(given), name) is expected
