"""A feed over several nodes: one dies, its vbuckets move, and the reader follows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

import upriver
from upriver.client._feed.blocking_feed import ChangeFeed
from upriver.client.blocking import connect
from upriver.client.changes import Deletion, Mutation, RolledBack
from upriver.cluster.local import LocalCluster, local_cluster


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(nodes=2, replicas=1, vbuckets=8, lazy=True) as running:
        yield running


class Table:
    """The documents of a reader of change objects."""

    def __init__(self) -> None:
        self.changes: dict[tuple[int, int], Any] = {}

    def apply(self, change: Any) -> None:
        if isinstance(change, RolledBack):
            void = [at for at in self.changes if at[0] == change.vbucket and at[1] > change.to_seqno]
            for at in void:
                del self.changes[at]
        elif isinstance(change, Mutation | Deletion):
            self.changes[change.vbucket, change.seqno] = change

    def follow(self, feed: ChangeFeed, wanted: dict[bytes, bytes]) -> None:
        """Read until the documents are these."""
        deadline = time.monotonic() + 60
        while self.documents != wanted and time.monotonic() < deadline:
            for change in feed.items(idle_s=0.2):
                self.apply(change)

    @property
    def documents(self) -> dict[bytes, bytes]:
        latest = {change.key: change for _, change in sorted(self.changes.items(), key=lambda entry: entry[0])}
        return {key: change.value for key, change in latest.items() if isinstance(change, Mutation)}


def test_a_reader_survives_the_death_of_a_node(cluster: LocalCluster) -> None:
    before = {b"before:%d" % n: b"%d" % n for n in range(200)}
    after = {b"after:%d" % n: b"%d" % n for n in range(200)}
    with connect(cluster.connection_string) as db:
        assert len(db.topology.nodes) == 2
        db.set_many(before)
        cluster.sync()  # let the replicas catch up: what they do not have is lost
        table = Table()
        with db.changes() as feed:
            table.follow(feed, before)
            assert table.documents == before
            assert len(feed.feed.links) == 2
            cluster.nodes[0].kill()
            cluster.fail_over(0)
            db.refresh()
            db.set_many(after)
            table.follow(feed, {**before, **after})
            assert table.documents == {**before, **after}


def test_the_async_client_survives_it_too(cluster: LocalCluster) -> None:
    before = {b"before:%d" % n: b"%d" % n for n in range(200)}
    after = {b"after:%d" % n: b"%d" % n for n in range(200)}

    async def scenario() -> None:
        table, killed = Table(), False
        async with upriver.aio.connect(cluster.connection_string) as db:
            await db.set_many(before)
            await asyncio.to_thread(cluster.sync)
            async for change in db.changes():
                table.apply(change)
                if not killed and table.documents == before:
                    killed = True
                    cluster.nodes[1].kill()
                    await asyncio.to_thread(cluster.fail_over, 1)
                    await db.refresh()
                    await db.set_many(after)
                if table.documents == {**before, **after}:
                    return

    asyncio.run(asyncio.wait_for(scenario(), 60))


def follow(feed: ChangeFeed, seen: list[tuple[int, int]], count: int) -> None:
    """Read until so many changes have come."""
    deadline = time.monotonic() + 60
    while len(seen) < count and time.monotonic() < deadline:
        seen += [(change.vbucket, change.seqno) for change in feed.items(idle_s=0.3)]


def test_vbuckets_that_move_are_followed_without_a_gap_or_a_repetition(cluster: LocalCluster) -> None:
    with connect(cluster.connection_string) as db, db.changes() as feed:
        seen: list[tuple[int, int]] = []
        db.set_many({b"first:%d" % n: b"x" for n in range(200)})
        follow(feed, seen, 200)
        cluster.add()
        assert cluster.rebalance() > 0
        db.refresh()
        db.set_many({b"second:%d" % n: b"x" for n in range(200)})
        follow(feed, seen, 400)
        assert len(seen) == len(set(seen)) == 400
        assert len({feed.feed.topology.active(vb) for vb in range(8)}) == 3
