"""Collections that went while nobody looked."""

from __future__ import annotations

import pytest

from tests.lake.desks import Desk
from tests.lake.test_truth import normal
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.apply.reconcile import reconcile
from upriver.lake.bucket import Survey, wanted
from upriver.lake.options import SyncOptions

OPTIONS = SyncOptions(connection="couchbase://nowhere", to="lake")


@pytest.mark.parametrize("policy", [MergePolicy(small_rows=0), MergePolicy(small_rows=10**6)], ids=["tail", "merged"])
def test_documents_of_a_collection_with_another_id_are_removed_and_new_ones_stay(tmp_path, policy) -> None:
    desk = Desk(tmp_path / "lake", policy=policy)
    for index in range(30):
        desk.feed.put(f"k{index}", {"n": index})
    desk.commit()
    for index in range(5):
        desk.feed.put(f"k{index}", {"n": -1})
    desk.commit()
    assert reconcile(desk.tables, Survey(4, 0, {"shop.orders": 8}), OPTIONS) == []
    desk.feed.drop("orders")
    desk.feed.batch()  # nobody hears of it
    assert reconcile(desk.tables, Survey(4, 0, {"shop.orders": 10}), OPTIONS) == ["shop.orders"]
    assert desk.read() == {}
    desk.feed.put("k3", {"n": 3})
    desk.commit()
    assert desk.read() == {key: normal(value) for key, value in desk.feed.truth().items()} == {"k3": {"n": 3}}
    assert reconcile(desk.tables, Survey(4, 0, {"shop.orders": 10}), OPTIONS) == []


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
