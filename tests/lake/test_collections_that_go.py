"""The whole life of a name: a collection is dropped, while followed or while away, and made again, again and again."""

from __future__ import annotations

import pyarrow.compute as pc
import pytest

from tests.lake.desks import Desk
from tests.lake.test_reconcile import OPTIONS
from tests.lake.test_truth import normal
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.apply.reconcile import reconcile
from upriver.lake.apply.upkeep import fold_log, fold_tail, trim_log
from upriver.lake.bucket import Survey

POLICIES = {
    "tail": MergePolicy(small_rows=0, share=100),
    "merged": MergePolicy(small_rows=10**6),
    "paid": MergePolicy(small_rows=0),
}


def restart(desk: Desk, live: int | None) -> list[str]:
    """As a new run begins: the manifest has this id of orders."""
    desk.open()
    desk.tables.prepare()
    return reconcile(desk.tables, Survey(4, 0, {} if live is None else {"shop.orders": live}), OPTIONS)


def put(desk: Desk, count: int, **fields: object) -> None:
    for index in range(count):
        desk.feed.put(f"k{index}", {"n": index, **fields})
    desk.commit()
    fold_tail(desk.orders)
    fold_log(desk.orders)


def truth(desk: Desk) -> dict[str, object]:
    return {key: normal(value) for key, value in desk.feed.truth().items()}


def in_current(desk: Desk) -> int:
    return int(desk.orders.current.delta.to_pyarrow_table().num_rows)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_collection_dropped_while_followed_leaves_current_empty_through_restarts_and_its_next_lives(
    tmp_path, policy
) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES[policy])
    put(desk, 40)
    for life in range(3):
        desk.feed.drop("orders")
        desk.commit()
        assert (in_current(desk), desk.read()) == (0, {}), life
        for _ in range(3):
            assert restart(desk, None) == []
            assert (in_current(desk), desk.read()) == (0, {}), life
        put(desk, 30 + life)
        assert desk.read() == truth(desk), life
        assert restart(desk, desk.feed.ids["orders"]) == []
        put(desk, 5, life=life)
        assert desk.read() == truth(desk), life
        desk.feed.drop("orders")
        desk.feed.batch()  # nobody hears of it
        assert restart(desk, desk.feed.ids["orders"] if life % 2 else None) == ["shop.orders"]
        assert (in_current(desk), desk.read()) == (0, {}), life
        assert restart(desk, desk.feed.ids["orders"] if life % 2 else None) == []
        put(desk, 20)
        assert desk.read() == truth(desk), life


def test_a_tail_file_that_an_earlier_version_named_backwards_does_not_stop_the_sync(tmp_path) -> None:
    from upriver.lake.files import parse_file_name

    backwards = parse_file_name("vb0000-0003/b00000008-00000007-ab.parquet")
    assert (backwards.first_batch, backwards.last_batch) == (7, 7)


def trim_everything(desk: Desk) -> int:
    newest = pc.max(desk.orders.changes.delta.to_pyarrow_table()["timestamp"])
    return trim_log(desk.orders, newest.value + 1)


def test_a_collection_made_again_after_its_log_was_trimmed_has_only_its_new_documents(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES["tail"])
    put(desk, 40)
    assert trim_everything(desk) > 0
    desk.feed.drop("orders")
    desk.feed.batch()  # away
    assert restart(desk, desk.feed.ids["orders"]) == ["shop.orders"]
    put(desk, 5)
    assert desk.read() == truth(desk)


def test_a_drop_of_a_collection_that_has_no_name_any_more_is_heard_after_its_log_was_trimmed(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES["tail"])
    put(desk, 40)
    assert trim_everything(desk) > 0
    desk.open()
    desk.feed.drop("orders")
    for row in desk.feed.pending:
        row |= {"scope": None, "collection": None}  # the manifest has forgotten it
    desk.commit()
    assert (in_current(desk), desk.read()) == (0, {})


def test_documents_of_an_old_collection_end_when_a_new_one_of_its_name_comes_and_no_drop_was_heard(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES["tail"])
    put(desk, 40)
    desk.feed.drop("orders")
    desk.feed.batch()  # the filter of the stream hides it
    put(desk, 5, new=True)
    assert desk.read() == truth(desk)
    assert len(desk.read()) == 5
    put(desk, 7)
    assert desk.read() == truth(desk)
    assert restart(desk, desk.feed.ids["orders"]) == []


def test_a_late_vbucket_that_still_sends_the_old_collection_does_not_end_the_new_one(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES["tail"])
    put(desk, 40)
    old = next(key for key in map(str, range(99)) if desk.feed.vbucket(key) == 3)
    desk.feed.put(old, {"n": 1})
    desk.feed.drop("orders")
    late = [row for row in desk.feed.pending if row["vbucket"] == 3]
    desk.feed.pending = [row for row in desk.feed.pending if row["vbucket"] != 3]
    desk.feed.put(next(key for key in map(str, range(99)) if desk.feed.vbucket(key) == 0), {"n": 2})
    desk.commit()
    desk.feed.pending = late
    desk.commit()
    assert desk.read() == truth(desk) != {}
    assert restart(desk, desk.feed.ids["orders"]) == []
    assert desk.read() == truth(desk)


def test_a_rollback_below_a_drop_that_only_the_manifest_told_does_not_bring_its_documents_back(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=POLICIES["tail"])
    put(desk, 40)
    before = [history.seqno for history in desk.feed.histories]
    desk.feed.drop("orders")
    desk.feed.batch()  # away
    assert restart(desk, desk.feed.ids["orders"]) == ["shop.orders"]
    put(desk, 5)
    for vbucket, seqno in enumerate(before):
        desk.feed.fail_over(vbucket, seqno - 2)  # the new branch says the drop again, and the filter hides it
    desk.commit()
    assert desk.read() == {}
    assert restart(desk, desk.feed.ids["orders"]) == []
    put(desk, 3, again=True)
    assert set(desk.read()) == {"k0", "k1", "k2"}
    log = desk.orders.changes.delta.to_pyarrow_table()
    told = log.filter((pc.field("event") == "collection_dropped") & pc.field("collection_id").is_null())
    assert told.num_rows == 4
    assert not pc.any(told["voided"]).as_py()  # readers of the log hear of it, too
