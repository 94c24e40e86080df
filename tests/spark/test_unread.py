"""Driver and executors with different maps, without Spark: what was left unread is read in a later batch."""

from __future__ import annotations

import pytest

from tests.spark.spark_batches import Batches
from tests.spark.spark_world import DOCUMENT, World, fold
from upriver.errors import ConfigError
from upriver.testing import node


@pytest.fixture
def other():
    """The node that an executor with a wrong map reaches: other branches, and none of the documents."""
    with node(vbuckets=4, enable_faults=True, lazy=True) as running, World(running) as made:
        yield made


@pytest.mark.parametrize("restarted", [False, True], ids=["the same driver", "a new driver"])
def test_documents_that_executors_could_not_read_come_in_a_later_batch(world: World, other: World, restarted):
    world.put(20)
    other.put(5, "elsewhere")
    batches = Batches(world)
    batches.next()
    world.put(10, "late")
    assert batches.next(other) == []
    if restarted:
        batches.restart()
    batches.drain()
    assert fold(batches.rows) == world.state()
    assert len(world.state()) == 30


def test_a_run_that_ends_in_order_is_not_read_again_by_the_next(world: World):
    world.put(30)
    batches = Batches(world)
    batches.drain()
    batches.restart()
    batches.drain()
    assert len(batches.rows) == 30


def test_a_crash_of_an_idle_node_costs_the_next_run_only_what_was_lost(world: World):
    """The cron pattern: every run ends with a batch, and none may begin at 0 because of it."""
    batches: Batches | None = None
    for prefix in ("a", "b"):
        world.put(50, prefix)
        batches = batches or Batches(world)
        batches.drain()
        batches.restart()
    world.fault("failover", vbucket=1, lose=2)
    before = len(batches.rows)
    batches.drain()
    assert fold(batches.rows) == world.state()
    told = [row for row in batches.rows[before:] if row["event"] == "rollback"]
    assert [row["vbucket"] for row in told] == [1]
    assert told[0]["seqno"] > 0
    assert len(batches.rows) - before < 20


def test_epochs_do_not_go_back_after_a_purge_and_a_restart(world: World):
    """A MERGE that compares (epoch, seqno) would ignore every later change."""
    world.put(40)
    batches = Batches(world)
    batches.drain()
    world.db.delete(world.key_of(2, "k"))
    world.put(20, "more")
    batches.next()
    world.db.delete(world.key_of(2, "more"))
    world.put(20, "again")
    for vb in range(world.vbuckets):
        world.fault("purge", vbucket=vb)  # the driver looked for it when it started: an executor meets it
    batches.next()
    batches.drain()
    batches.restart()
    world.put(10, "last")
    batches.drain()
    assert fold(batches.rows) == world.state()
    last: dict[int, tuple[int, int]] = {}
    for row in (row for row in batches.rows if row["event"] in DOCUMENT):
        assert (row["epoch"], row["seqno"]) > last.get(row["vbucket"], (-1, -1))
        last[row["vbucket"]] = row["epoch"], row["seqno"]


def test_a_checkpoint_of_another_bucket_is_refused_until_it_is_adopted(world: World, other: World):
    world.put(20)
    other.put(8, "elsewhere")
    batches = Batches(world)
    batches.drain()
    batches.restart(other)
    with pytest.raises(ConfigError, match="it was deleted and created again"):
        batches.drain()
    batches.restart(other, adopt="true")
    batches.drain()
    assert fold(batches.rows) == other.state()
