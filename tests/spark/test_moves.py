"""Vbuckets that move without an error: a node reports only those that it owns."""

from __future__ import annotations

import pytest

from tests.spark.spark_world import ClusterWorld, wait_until
from upriver.client.blocking import connect
from upriver.cluster.local import local_cluster
from upriver.spark.options import ReadOptions
from upriver.spark.reader.cluster import Cluster


@pytest.fixture
def world():
    """One of two nodes was failed over, and everything is on the other."""
    with local_cluster(nodes=2, replicas=1, vbuckets=8, lazy=True) as cluster, ClusterWorld(cluster) as world:
        world.put(100)
        cluster.nodes[1].kill()
        cluster.fail_over(1, force=True)
        yield world


def test_vbuckets_that_moved_to_a_node_that_the_map_does_not_know_are_found(world: ClusterWorld):
    """A stream with the old map would wait for them for ever, and a batch would end without them."""
    options = ReadOptions.parse({"connection": world.connection_string, "timeoutSeconds": "30"})
    streaming, asked_once = Cluster(options), connect(world.connection_string, "default")
    wait_until(lambda: len(streaming.reachable_highs()) == 8)
    world.cluster.nodes[1].restart()
    assert world.cluster.rebalance() > 0
    everything = set(range(8))
    assert set(asked_once.high_seqnos()) == everything
    wait_until(lambda: set(streaming.reachable_highs()) == everything)
    asked_once.close()
    streaming.close()
