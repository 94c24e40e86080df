"""Limits of a batch, by rows and by bytes, without Spark."""

from __future__ import annotations

from spark_batches import Batches
from spark_world import World, fold


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
