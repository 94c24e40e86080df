"""Which nodes a feed connects to, when it tries again, and what a silent or lost connection means.

No I/O: the blocking pump and the asyncio feed share these rules. They connect where ``LinkPolicy`` says, move the
bytes, and pass in the time. ``Reconnects`` keeps the failures of each node, for backoff with jitter.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field

from upriver.errors import TEMPORARY, ConnectFailed, RemoteProtocolError, Status, StatusError, UpriverError
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import FeedEvent
from upriver.protocol.feed.stream_states import backoff
from upriver.protocol.topology import Address

TRIES_OF_A_BROKEN_PEER = 5  # failures in a row without a useful message in between
LONG_ENOUGH_S = 10.0  # a connection that lasted this long counts as a success


def jitter() -> float:
    """A factor between 0.5 and 1.5."""
    return 0.5 + secrets.randbelow(1000) / 1000


def located(error: StatusError, address: Address) -> StatusError:
    """The error with the node's address in its text."""
    if str(address) in error.context:
        return error
    return StatusError.of(getattr(error, "code", error.status), f"{error.context} at {address}")


def refusal(error: StatusError, address: Address, again: bool) -> StatusError | ConnectFailed:
    """The error for a handshake that a node refused.

    A restarting node listens before it has its buckets. For a client that has been connected before (``again``), such
    a node counts as unreachable.
    """
    if again and error.status in (*_RESTARTING, *TEMPORARY):
        return ConnectFailed(f"{address} has just started, or has lost the bucket: {error}")
    return located(error, address)


@dataclass(slots=True)
class Reconnects:
    """How often each node has failed in a row, and when it may be tried again."""

    failures: dict[Address, int] = field(default_factory=dict)
    count: int = 0
    last_error: UpriverError | OSError | None = None
    _try_at: dict[Address, float] = field(default_factory=dict)
    _ready_at: dict[Address, float] = field(default_factory=dict)
    _worked: set[Address] = field(default_factory=set)

    def may_try(self, address: Address, now: float) -> bool:
        return self._try_at.get(address, 0.0) <= now

    def failed(self, address: Address, now: float) -> None:
        self.count += 1
        if now - self._ready_at.pop(address, now) > LONG_ENOUGH_S:
            self.progressed(address)
        self.failures[address] = self.failures.get(address, 0) + 1
        self._try_at[address] = now + backoff(self.failures[address]) * jitter()

    def ready(self, address: Address, now: float) -> None:
        """The handshake is over; a later refusal means that the node is restarting."""
        self._ready_at.setdefault(address, now)
        self._worked.add(address)

    def progressed(self, address: Address) -> None:
        """The node has sent something useful: earlier failures no longer count."""
        self.failures.pop(address, None)

    def forgive(self, address: Address, error: UpriverError | OSError) -> None:
        """Note an error that another attempt may fix; raise any other."""
        self.last_error = error
        if isinstance(error, StatusError):
            restarting = address in self._worked and error.status in _RESTARTING
            if not (restarting or error.status in (*TEMPORARY, *_NO_BUCKET)):
                raise located(error, address)
        elif isinstance(error, RemoteProtocolError):
            if self.failures.get(address, 0) >= TRIES_OF_A_BROKEN_PEER:
                raise error
        elif not isinstance(error, OSError | ConnectFailed):
            raise error


_NO_BUCKET = (Status.NO_BUCKET, Status.KEY_ENOENT)  # the bucket existed when the feed began
_RESTARTING = (*_NO_BUCKET, Status.EACCESS, Status.NOT_SUPPORTED)


AWAY_S = 1.0  # a longer gap between two rounds is our fault and must not count as silence of the nodes
_log = logging.getLogger(__name__)


class LinkPolicy:
    """The rules for one feed's connections. ``on_lost`` is called when a connection is lost and will be tried again."""

    def __init__(
        self, feed: ClusterFeed, reconnects: Reconnects, accept_s: float, on_lost: Callable[[], None], now: float
    ) -> None:
        self._feed, self._reconnects, self._accept_s, self._on_lost = feed, reconnects, accept_s, on_lost
        self._listened_at = now

    def begin_round(self, now: float) -> None:
        """Begin to listen again. Time during which the caller was busy does not count as silence of the nodes."""
        away, self._listened_at = now - self._listened_at, now
        if away > AWAY_S:
            self._feed.was_away(away)

    def dead(self, now: float) -> Iterator[tuple[Address, ConnectFailed]]:
        """The connections to give up, each with the reason."""
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
        """A connection was lost or could not be made; raises errors that another attempt cannot fix."""
        _log.info("lost the connection to %s: %s", address, error)
        self._reconnects.failed(address, now)
        self._feed.lost(address, now)
        self._reconnects.forgive(address, error)
        self._on_lost()
