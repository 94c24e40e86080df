"""A blocking feed: the calling thread reads from the nodes and gets the items.

The flow-control window of each node bounds the memory: bytes are acknowledged when the caller asks for more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from upriver.client._feed.feed_base import FeedBase
from upriver.client._feed.pump import Pump
from upriver.client.reading import FeedOptions, missed, plan, settled
from upriver.errors import LocalProtocolError

if TYPE_CHECKING:
    from upriver.client.blocking import Database

T = TypeVar("T")
ROUND_S = 0.05


class ChangeFeed(FeedBase[T]):
    """An iterable of changes or batches that also knows its position.

    ``for`` opens it, and closes it when the loop ends. Inside ``with``, a loop may be left, and the next one continues
    there. A closed feed still has its positions, but cannot be opened again.
    """

    def __init__(self, database: Database, options: FeedOptions, *, batches: bool) -> None:
        super().__init__(options, batches=batches)
        self._database = database
        self._pump: Pump | None = None
        self._earlier: list[ChangeFeed[T]] = []  # they read what the position lacks, because its filter was narrower

    def __enter__(self) -> ChangeFeed[T]:
        self._must_not_be_closed()
        if self._subscription is None:
            self._open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self.items()

    def _open(self) -> None:
        database, operations, options = self._database, self._database.operations, self.options
        if options.checkpoint and (saved := options.checkpoint.load()):
            options = replace(options, start=saved)
        read = database.run(settled(operations, options))
        earlier = database.run(missed(operations, read))
        self._subscribe(operations, read, database.run(plan(operations, read)), database.manifest())
        self.subscription.lacking = {vb for one in earlier for vb in one.vbuckets or ()}
        self._earlier = [ChangeFeed(database, one, batches=self._batches) for one in earlier]
        self._pump = Pump(self.feed, database.options, self.subscription.reconnects, self.subscription.want_map)
        database._feeds.add(self)

    def close(self) -> None:
        """Close the connections; positions stay readable."""
        self._closed = True
        self._database._feeds.discard(self)
        for one in self._earlier:
            one.close()
        if self._pump:
            self._pump.close()

    @property
    def catching_up(self) -> bool:
        """Whether the feed still reads changes from before the position, which stays until they are complete."""
        return bool(self._earlier)

    def confirm(self) -> None:
        """Save the position to the ``checkpoint``: the caller has processed everything that it was given."""
        if self.options.checkpoint:
            self.options.checkpoint.save(self.positions())

    def lag(self) -> dict[int, int]:
        """How many seqnos the caller is behind in each vbucket. Asks the nodes; moving vbuckets are left out."""
        return self._lag(self._database.high_seqnos(complete=False))

    def items(self, *, idle_s: float | None = None) -> Iterator[T]:
        """Like a loop over the feed, but it ends when nothing has come for ``idle_s`` seconds.

        None means the feed's own ``idle_s``. Inside ``with``, another loop can continue later.
        """
        opens_it = self._subscription is None
        self.__enter__()
        try:
            yield from self._items(self.subscription.read.idle_s if idle_s is None else idle_s)
        finally:
            if opens_it:
                self.close()

    def _items(self, idle_s: float | None) -> Iterator[T]:
        yield from self._earlier_items(idle_s)
        if self._earlier:
            return  # they were idle for too long
        outbox, feed = self._outbox, self.feed
        quiet_since = 0.0  # 0 until all streams are open
        while True:
            while (items := outbox.take(time.monotonic())) is not None:
                for outbox.given, item in enumerate(items, 1):
                    yield item
                quiet_since = time.monotonic()
            if self._is_over:
                return
            now = time.monotonic()
            quiet_since = quiet_since or (now if feed.settled else 0.0)
            if idle_s is not None and quiet_since and outbox.idle and now - quiet_since >= idle_s:
                return
            if self._closed:
                raise LocalProtocolError("the feed was closed while it was being read")
            self._round(outbox.wait_s(now))

    def _earlier_items(self, idle_s: float | None) -> Iterator[T]:
        while self._earlier:
            one = self._earlier[0].__enter__()  # so that leaving the loop does not close it
            self.subscription.earlier = [one.subscription]
            yield from one._items(idle_s)
            if not one._is_over:
                return
            one.close()
            self.subscription.begin_after(one.subscription)
            del self._earlier[0]

    def _round(self, wait_s: float | None) -> None:
        """Run a chore if one is due, and pass events to the subscription."""
        now = time.monotonic()
        if chore := self.subscription.chore(now):
            self._database.run(chore)
        assert self._pump is not None
        for event in self._pump.events(ROUND_S if wait_s is None else min(ROUND_S, wait_s)):
            self.subscription.add(event, now)
