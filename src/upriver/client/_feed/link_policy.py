"""Which nodes a feed is to be connected to, and what it means that a connection speaks, is silent or is gone.

Pure: the blocking pump and the asyncio feed share it, connect where it says, move bytes, and say what time it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Set

from upriver.client._feed.reconnects import Reconnects
from upriver.errors import ConnectFailed, UpriverError
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import FeedEvent
from upriver.protocol.topology import Address

AWAY_S = 1.0  # a longer time between two rounds is ours, and must not count as silence of the nodes
_log = logging.getLogger(__name__)


class LinkPolicy:
    """The rules for the connections of one feed. ``on_lost`` is called when one is gone that will be tried again."""

    def __init__(
        self, feed: ClusterFeed, reconnects: Reconnects, accept_s: float, on_lost: Callable[[], None], now: float
    ) -> None:
        self._feed, self._reconnects, self._accept_s, self._on_lost = feed, reconnects, accept_s, on_lost
        self._listened_at = now

    def begin_round(self, now: float) -> None:
        """Somebody listens again. While the caller was busy nobody did: that silence is not the nodes'."""
        away, self._listened_at = now - self._listened_at, now
        if away > AWAY_S:
            self._feed.was_away(away)

    def dead(self, now: float) -> Iterator[tuple[Address, ConnectFailed]]:
        """The connections to be given up, and why."""
        for address in self._feed.silent(now):
            yield address, ConnectFailed(f"{address} has been silent for two noop intervals")
        for address in self._feed.late(now, self._accept_s):
            yield address, ConnectFailed(f"{address} did not accept us within {self._accept_s:g} s")

    def due(self, now: float, connected: Set[Address]) -> list[Address]:
        """The nodes to connect to now."""
        return [each for each in self._feed.wanted() - connected if self._reconnects.may_try(each, now)]

    def received(self, address: Address, size: int, now: float) -> Iterator[FeedEvent]:
        """Bytes were read into the buffer of a link; iterate to the end before reading again."""
        link = self._feed.links[address]
        for event in self._feed.received(address, size, now):
            self._reconnects.progressed(address)
            yield event
        if link.ready:
            self._reconnects.ready(address, now)

    def lost(self, address: Address, error: OSError | UpriverError, now: float) -> None:
        """A connection is gone, or could not be made; raises an error that no other try can mend."""
        _log.info("lost the connection to %s: %s", address, error)
        self._reconnects.failed(address, now)
        self._feed.lost(address, now)
        self._reconnects.forgive(address, error)
        self._on_lost()
