"""Limits on the number of connections: separate ones for new connections and for those that have logged in.

A connection is new until it has logged in and sent something. New connections never take the places of others: when
there are too many, the oldest one of the peer with the most of them is closed. So a peer that opens connections and
stays silent only closes its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.node.options import Limits

Who = TypeVar("Who", bound=Hashable)


class NewConnections(Generic[Who]):
    """A bounded number of connections of which only the peer is known."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._by_peer: dict[str, dict[Who, None]] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, who: Who, peer: str) -> Who | None:
        """Add a connection; returns the one that has to be closed for it, if there are too many."""
        self._by_peer.setdefault(peer, {})[who] = None
        self._count += 1
        if self._count <= self._most:
            return None
        busiest = max(self._by_peer, key=lambda host: len(self._by_peer[host]))
        oldest = next(iter(self._by_peer[busiest]))
        self.remove(oldest, busiest)
        return oldest

    def remove(self, who: Who, peer: str) -> bool:
        """Forget a connection that has logged in or is gone; returns whether it was new."""
        here = self._by_peer.get(peer, {})
        if who not in here:
            return False
        del here[who]
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
