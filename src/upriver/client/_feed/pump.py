"""The blocking pump: moves bytes between a feed and its nodes in the calling thread, and reconnects.

All readers without asyncio use it: the client's ``ChangeFeed`` and Spark tasks. Tasks last only for a micro-batch, so
they keep connections for the tasks that follow (``IdleConnections``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from upriver.client._feed.link_policy import LinkPolicy, Reconnects
from upriver.client.options import ConnectOptions
from upriver.errors import ConnectFailed, UpriverError
from upriver.net.blocking import Pipe, Poller
from upriver.net.blocking import connect as connect_socket
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import FeedEvent
from upriver.protocol.feed.node_link import NodeLink
from upriver.protocol.topology import Address


class IdleConnections(Protocol):
    """Keeps connections of finished feeds for later feeds."""

    def acquire(self, address: Address) -> tuple[Pipe, NodeLink] | None: ...
    def release(self, address: Address, pipe: Pipe, link: NodeLink) -> None: ...


class Pump:
    """Pumps one feed; a context manager. ``on_lost`` is called when a connection is lost and will be tried again."""

    def __init__(
        self,
        feed: ClusterFeed,
        options: ConnectOptions,
        reconnects: Reconnects,
        on_lost: Callable[[], None],
        idle_connections: IdleConnections | None = None,
    ) -> None:
        self.feed, self.reconnects = feed, reconnects
        self._options, self._idle_connections = options, idle_connections
        self._policy = LinkPolicy(feed, reconnects, options.connect_timeout_s, on_lost, time.monotonic())
        self._poller = Poller()
        self._pipes: dict[Address, Pipe] = {}

    def __enter__(self) -> Pump:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep connections whose streams have all ended in order for later feeds; close the others."""
        for address, pipe in list(self._pipes.items()):
            if self._idle_connections and (link := self.feed.release(address)):
                self._poller.remove(pipe)
                del self._pipes[address]
                pipe.write(link.data_to_send())
                self._idle_connections.release(address, pipe, link)
            else:
                self._disconnect(address)
        self.feed.links.clear()  # frees their memory now, not when garbage is collected
        self._poller.close()

    def events(self, timeout_s: float) -> Iterator[FeedEvent]:
        """One round: connect to missing nodes, wait, and yield the events that came."""
        self._policy.begin_round(time.monotonic())
        for address, error in self._policy.dead(time.monotonic()):  # first: our own time in this round must not count
            self._lost(address, error)
        for address in self._policy.due(time.monotonic(), self._pipes.keys()):
            self._connect(address)
        yield from self.feed.tick(time.monotonic())
        self._flush()
        by_pipe = {pipe: address for address, pipe in self._pipes.items()}
        for pipe in self._poller.wait(timeout_s if self._pipes else 0):
            yield from self._read(by_pipe[pipe], pipe)
        if not self._pipes and not self.feed.done:
            time.sleep(timeout_s)

    def _read(self, address: Address, pipe: Pipe) -> Iterator[FeedEvent]:
        if self._pipes.get(address) is not pipe:
            return
        link = self.feed.links[address]
        try:
            size = pipe.read_into(link.buffer())
            if size == 0:
                self._lost(address, ConnectFailed(f"{address} closed the connection"))
            elif size > 0:
                yield from self._policy.received(address, size, time.monotonic())
                pipe.write(link.data_to_send())
        except (OSError, UpriverError) as error:
            self._lost(address, error)

    def _flush(self) -> None:
        for address, pipe in list(self._pipes.items()):
            try:
                pipe.write(self.feed.links[address].data_to_send())
            except OSError as error:
                self._lost(address, error)

    def _connect(self, address: Address) -> None:
        now = time.monotonic()
        if self._idle_connections and (kept := self._idle_connections.acquire(address)):
            pipe, link = kept
            self.feed.adopt(address, link, now)
        else:
            try:
                tls = self._options.ssl_context()
                pipe = Pipe(connect_socket(address.host, address.port, self._options.connect_timeout_s, tls))
            except ConnectFailed as error:
                self._lost(address, error)
                return
            pipe.write(self.feed.connected(address, now).data_to_send())
        self._pipes[address] = pipe
        self._poller.add(pipe)

    def _lost(self, address: Address, error: OSError | UpriverError) -> None:
        self._disconnect(address)
        self._policy.lost(address, error, time.monotonic())

    def _disconnect(self, address: Address) -> None:
        if pipe := self._pipes.pop(address, None):
            with suppress(KeyError, ValueError):
                self._poller.remove(pipe)
            pipe.close()
