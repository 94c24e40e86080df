"""Connections that outlive a task: Spark reuses its Python workers, so a worker keeps its connections open.

A connection returns to the pool only when all its streams have ended normally. It is checked before it is used again,
and closed when it has been idle for longer than a server waits between two noops.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from socket import MSG_DONTWAIT, MSG_PEEK

from upriver.client.blocking import Database
from upriver.client.options import ConnectOptions
from upriver.net.blocking import Pipe
from upriver.protocol.feed.node_link import NodeLink
from upriver.protocol.topology import Address

IDLE_S = 15.0


def _opaques() -> Iterator[int]:
    while True:
        yield from range(1, 1 << 31)


@dataclass(slots=True)
class IdleConnection:
    """A connection that no task uses."""

    pipe: Pipe
    link: NodeLink
    since: float


@dataclass
class ConnectionPool:
    """The open connections of one worker process, whose tasks run one after the other. A thread closes idle ones."""

    _links: dict[tuple[Hashable, Address], list[IdleConnection]] = field(default_factory=dict)
    _databases: dict[ConnectOptions, Database] = field(default_factory=dict)
    opaques: Iterator[int] = field(default_factory=_opaques)  # shared by all feeds of this process
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sweeping: bool = False

    def database(self, options: ConnectOptions) -> Database:
        """The connections for key-value requests, which reconnect by themselves."""
        if options not in self._databases:
            # The driver has connected with these options before.
            self._databases[options] = Database(options, again=True)
        return self._databases[options]

    def forget_database(self, options: ConnectOptions) -> None:
        if database := self._databases.pop(options, None):
            database.close()

    def acquire(self, kind: Hashable, address: Address) -> tuple[Pipe, NodeLink] | None:
        """An open connection of this kind, if there is one that is alive."""
        with self._lock:
            kept = self._links.get((kind, address), [])
            while kept:
                one = kept.pop()
                if _alive(one):
                    return one.pipe, one.link
                one.pipe.close()
        return None

    def release(self, kind: Hashable, address: Address, pipe: Pipe, link: NodeLink) -> None:
        """Keep a connection whose streams have all ended normally."""
        with self._lock:
            self._links.setdefault((kind, address), []).append(IdleConnection(pipe, link, time.monotonic()))
            if not self._sweeping:
                self._sweeping = True
                threading.Thread(target=self._sweep, name="dcp-pool", daemon=True).start()

    def _sweep(self) -> None:
        """Close connections that are idle for too long; ends when none is left."""
        while self._sweeping:
            time.sleep(IDLE_S / 3)
            with self._lock:
                self._close_idle()
                self._sweeping = any(self._links.values())

    def _close_idle(self) -> None:
        now = time.monotonic()
        for key, kept in self._links.items():
            for one in kept:
                if now - one.since > IDLE_S:
                    one.pipe.close()
            self._links[key] = [one for one in kept if now - one.since <= IDLE_S]


@dataclass(frozen=True, slots=True)
class PooledConnections:
    """The connections of a pool that were opened with the same options, so they can replace each other."""

    pool: ConnectionPool
    kind: Hashable

    def acquire(self, address: Address) -> tuple[Pipe, NodeLink] | None:
        return self.pool.acquire(self.kind, address)

    def release(self, address: Address, pipe: Pipe, link: NodeLink) -> None:
        self.pool.release(self.kind, address, pipe, link)


def _alive(kept: IdleConnection) -> bool:
    if time.monotonic() - kept.since > IDLE_S:
        return False
    if isinstance(kept.pipe.sock, ssl.SSLSocket):
        return True  # TLS cannot be peeked; a dead connection is noticed at the first read
    try:
        return kept.pipe.sock.recv(1, MSG_PEEK | MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


POOL = ConnectionPool()
