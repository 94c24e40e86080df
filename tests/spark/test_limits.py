"""Limits of a batch, by rows and by bytes, without Spark."""

from __future__ import annotations

import pytest

from tests.spark.spark_batches import Batches
from tests.spark.spark_world import World, fold
from tests.support.by_id import ById


def test_a_limit_of_bytes_holds_from_the_first_batch_on(world: World):
    """Nothing was reported yet, but the nodes know how much there is."""
    world.put(64, value="x" * 100_000)
    batches = Batches(world)
    batches.most = None, 1_000_000
    sizes = []
    while rows := batches.next():
        sizes.append(sum(len(row["value"]) for row in rows))
    assert sum(sizes) == 6_400_000
    assert max(sizes) <= 2_000_000
    assert fold(batches.rows) == world.state()


def test_both_limits_hold_at_once(world: World):
    world.put(64, value="x" * 1000)
    batches = Batches(world)
    batches.most = 10, 1_000_000
    assert len(batches.next()) == 10


@pytest.fixture
def shop(world: World) -> World:
    world.set_manifest(
        {
            "uid": "1",
            "scopes": [
                {
                    "name": "_default",
                    "uid": "0",
                    "collections": [{"name": "_default", "uid": "0"}, {"name": "rare", "uid": "8"}],
                }
            ],
        }
    )
    return world


def test_a_limit_of_rows_with_a_filter_makes_few_empty_batches(shop: World):
    for turn in range(4):
        shop.put(1000, f"other{turn}")
        ById(shop.db, 8).set_many({b"rare%d%d" % (turn, n): b"1" for n in range(10)})
    shop.put(1000, "at the end")
    batches = Batches(shop, collections="rare", maxRowsPerTrigger="20")
    batches.most = 20, None
    batches.drain()
    assert sum(row["event"] == "mutation" for row in batches.rows) == 40
    assert batches.count < 40  # five thousand seqnos, twenty at a time, would be 250


def test_changes_that_the_filter_hides_make_no_batches_while_a_query_runs(shop: World):
    batches = Batches(shop, collections="rare")
    while batches.next():
        pass
    at = batches.at
    shop.put(100)
    assert batches.driver.latest_offset(at, batches.most) == at
    ById(shop.db, 8).set(b"rare", b"1")
    assert [row["key"] for row in batches.next() if row["event"] == "mutation"] == [b"rare"]
