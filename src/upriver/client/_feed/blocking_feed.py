"""A feed that the calling thread pumps, and takes items from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from upriver.client._feed.pump import Pump
from upriver.client._feed.subscription import MakeBundles, Subscription
from upriver.client.positions import Positions
from upriver.errors import LocalProtocolError
from upriver.protocol.feed.cluster_feed import ClusterFeed

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client.blocking import Database
    from upriver.client.changes import Change
    from upriver.client.checkpoints import CheckpointStore

ROUND_S = 0.05


class BlockingFeed:
    """A subscription with its pump; a context manager.

    ``earlier`` feeds read what the positions lack, because their filter was narrower. They come first.
    """

    def __init__(
        self,
        subscription: Subscription,
        database: Database,
        checkpoint: CheckpointStore | None = None,
        earlier: Sequence[BlockingFeed] = (),
    ) -> None:
        self.subscription = subscription
        self._checkpoint, self._database = checkpoint, database
        self._pump = Pump(subscription.feed, database.options, subscription.reconnects, subscription.want_map)
        self._closed = False
        self._earlier = list(earlier)
        subscription.lacking = {vb for one in earlier for vb in one.feed.vbuckets}
        subscription.earlier = [one.subscription for one in earlier]

    def __enter__(self) -> BlockingFeed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; positions stay readable."""
        self._closed = True
        for one in (*self._earlier, self):
            one._pump.close()

    @property
    def catching_up(self) -> bool:
        """Whether what comes is older than the positions: if they were saved now, it would come again."""
        return bool(self._earlier)

    @property
    def feed(self) -> ClusterFeed:
        return self.subscription.feed

    @property
    def reconnects(self) -> int:
        return self.subscription.reconnects.count

    def positions(self) -> Positions:
        """Where the caller is with what was yielded so far; a mapping from vbucket to ``Position``."""
        return self.subscription.positions()

    def confirm(self) -> None:
        """Save the positions: the caller is done with everything that it was given."""
        if self._checkpoint:
            self._checkpoint.save(self.positions())

    def batches(
        self, *, rows: int | None = None, idle_s: float | None = None, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        """Arrow batches until the feed is done, or until nothing came for ``idle_s`` seconds."""
        from upriver.client._feed.arrow import BatchMaker

        return self._items(BatchMaker, idle_s, rows=rows or self.subscription.read.rows, **options)

    def changes(self, *, idle_s: float | None = None) -> Iterator[Change]:
        """Changes one by one, as typed objects."""
        from upriver.client.changes import ObjectMaker

        return self._items(ObjectMaker, idle_s, where=self.subscription.read.where)

    def _items(self, make: MakeBundles, idle_s: float | None, **options: Any) -> Iterator[Any]:
        self._must_be_open()
        while self._earlier:
            one = self._earlier[0]
            yield from one._items(make, idle_s, **options)
            if not one._is_over:
                return  # it was idle for too long
            one.close()
            self.subscription.begin_behind(one.subscription)
            del self._earlier[0]
        outbox = self.subscription.deliver(make, **options)
        idle_s = self.subscription.read.idle_s if idle_s is None else idle_s
        quiet_since = 0.0  # not before all streams are open
        while True:
            while (items := outbox.take(time.monotonic())) is not None:
                for outbox.given, item in enumerate(items, 1):
                    yield item
                quiet_since = time.monotonic()
            if self.feed.done and outbox.idle:
                return
            now = time.monotonic()
            quiet_since = quiet_since or (now if self.feed.settled else 0.0)
            if idle_s is not None and quiet_since and outbox.idle and now - quiet_since >= idle_s:
                return
            self._must_be_open()
            self._round(outbox.wait_s(now))

    @property
    def _is_over(self) -> bool:
        return self.feed.done and (self.subscription.outbox is None or self.subscription.outbox.idle)

    def _must_be_open(self) -> None:
        if self._closed:
            raise LocalProtocolError("the feed is closed; begin another one at its positions()")

    def _round(self, wait_s: float | None) -> None:
        """Run chores, and let the feed take what has come."""
        now = time.monotonic()
        if chore := self.subscription.chore(now):
            self._database.run(chore)
        for event in self._pump.events(ROUND_S if wait_s is None else min(ROUND_S, wait_s)):
            self.subscription.add(event, now)
