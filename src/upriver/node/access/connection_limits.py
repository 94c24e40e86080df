"""Limits that connections share: how many there may be, and how much memory their requests and answers may take.

A connection is new until it has logged in and sent something. New connections have their own limit: when there are too
many, the oldest one of the peer with the most of them is closed. So a peer that opens connections and stays silent
only closes its own.

A request that fits into one receive needs no permission. A larger one gets a share of the memory when its first bytes
arrive. If none is left, its connection is not read from until another request is complete; the smallest request is
served first, and a quarter of the memory is kept for small ones. A connection that holds a share and sends more slowly
than ``SLOWEST_BYTES_PER_S`` while others wait is closed, so a few unfinished requests cannot stop the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.node.options import Limits

GRACE_S = 2.0
SLOWEST_BYTES_PER_S = 4 << 20
SMALL = 64  # a request of up to a 64th of the limit is small

Conn = TypeVar("Conn", bound=Hashable)


class NewConnections(Generic[Conn]):
    """A bounded number of new connections, by peer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._by_peer: dict[str, dict[Conn, None]] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, conn: Conn, peer: str) -> Conn | None:
        """Add a connection; returns the one that has to be closed for it, if there are too many."""
        self._by_peer.setdefault(peer, {})[conn] = None
        self._count += 1
        if self._count <= self._most:
            return None
        busiest = max(self._by_peer, key=lambda host: len(self._by_peer[host]))
        oldest = next(iter(self._by_peer[busiest]))
        self.remove(oldest, busiest)
        return oldest

    def remove(self, conn: Conn, peer: str) -> bool:
        """Forget a connection that has logged in or is gone; returns whether it was new."""
        here = self._by_peer.get(peer, {})
        if conn not in here:
            return False
        del here[conn]
        self._count -= 1
        if not here:
            del self._by_peer[peer]
        return True


class ConnectionLimits:
    """The limits of the KV ports."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._new_connections: NewConnections[ClientConnection] = NewConnections(limits.max_new_connections)
        self._known: dict[ClientConnection, str] = {}
        self._per_peer: Counter[str] = Counter()
        self.refused = 0

    def connected(self, conn: ClientConnection) -> None:
        leaving = self._new_connections.add(conn, conn.host)
        if leaving is not None:
            self._refuse(leaving, "too many connections that have not logged in")

    def logged_in(self, conn: ClientConnection) -> None:
        """Count a connection as logged in once it has sent something; close it if there are too many."""
        if not conn.has_spoken or not self._new_connections.remove(conn, conn.host):
            return
        limits = self._limits
        self._known[conn] = conn.host
        self._per_peer[conn.host] += 1
        if len(self._known) > limits.max_connections:
            self._refuse(conn, "too many connections")
        elif self._per_peer[conn.host] > limits.max_connections_per_peer:
            self._refuse(conn, f"too many connections from {conn.host}")

    def disconnected(self, conn: ClientConnection) -> None:
        self._new_connections.remove(conn, conn.host)
        host = self._known.pop(conn, None)
        if host is not None:
            self._per_peer[host] -= 1
            if not self._per_peer[host]:
                del self._per_peer[host]

    def _refuse(self, conn: ClientConnection, reason: str) -> None:
        self.refused += 1
        self.disconnected(conn)
        conn.abort(reason)


# ---------------------------------------------------------------------------------------------- memory


@dataclass(slots=True)
class _Share:
    size: int
    since: float

    def is_overdue(self, now: float) -> bool:
        return now - self.since > GRACE_S + self.size / SLOWEST_BYTES_PER_S


class Shares(Generic[Conn]):
    """A number of bytes, given out in shares. Pure: ``now`` is a parameter."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        self._held: dict[Conn, _Share] = {}
        self._waiting: dict[Conn, int] = {}

    def ask(self, conn: Conn, size: int, now: float) -> bool:
        """Give out a share if it fits, or if no other is held; otherwise the connection waits."""
        if conn in self._held:
            return True
        if not self._fits(size):
            self._waiting[conn] = size
            return False
        self._give(conn, size, now)
        return True

    def release(self, conn: Conn, now: float) -> list[Conn]:
        """Take a share back; returns the waiting connections that now get theirs."""
        self._waiting.pop(conn, None)
        share = self._held.pop(conn, None)
        if share is not None:
            self.used -= share.size
        served = []
        for waiting, size in sorted(self._waiting.items(), key=lambda item: item[1]):
            if not self._fits(size):
                break
            del self._waiting[waiting]
            self._give(waiting, size, now)
            served.append(waiting)
        return served

    def overdue(self, now: float) -> list[Conn]:
        """The connections that have held a share for too long while others wait."""
        return [conn for conn, share in self._held.items() if share.is_overdue(now)] if self._waiting else []

    def _fits(self, size: int) -> bool:
        allowed = self._limit if size <= self._limit // SMALL else self._limit * 3 // 4
        return not self.used or self.used + size <= allowed

    def _give(self, conn: Conn, size: int, now: float) -> None:
        self._held[conn] = _Share(size, now)
        self.used += size


class Unread(Generic[Conn]):
    """A bounded number of bytes of answers that clients have not read yet.

    When there are too many, the client whose answers have waited longest is disconnected.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        self._held: dict[Conn, int] = {}

    def hold(self, conn: Conn, size: int) -> list[Conn]:
        """Set how many bytes wait for a client; returns the clients to disconnect."""
        self.release(conn)
        self._held[conn] = size
        self.used += size
        leaving = []
        while self.used > self._limit and len(self._held) > 1:
            oldest = next(iter(self._held))
            leaving.append(oldest)
            self.release(oldest)
        return leaving

    def release(self, conn: Conn) -> None:
        self.used -= self._held.pop(conn, 0)


class MemoryLimits:
    """Both memory limits, applied to the connections of a node."""

    def __init__(self, limits: Limits) -> None:
        self._shares: Shares[ClientConnection] = Shares(limits.unfinished_bytes)
        self._unread: Unread[ClientConnection] = Unread(limits.unread_bytes)

    def ask(self, conn: ClientConnection, size: int) -> bool:
        return self._shares.ask(conn, size, time.monotonic())

    def release(self, conn: ClientConnection) -> None:
        for waiting in self._shares.release(conn, time.monotonic()):
            waiting.memory_granted()

    def unread(self, conn: ClientConnection, size: int) -> None:
        for leaving in self._unread.hold(conn, size):
            leaving.abort("does not read its answers, and others need the memory")

    def read(self, conn: ClientConnection) -> None:
        self._unread.release(conn)

    def forget(self, conn: ClientConnection) -> None:
        self.release(conn)
        self.read(conn)

    def close_slow(self) -> None:
        for conn in self._shares.overdue(time.monotonic()):
            conn.abort("its request arrives too slowly, and others need the memory")
