"""Moves bytes between a feed and its nodes for one task, over connections that the worker keeps.

The client's own blocking feed is for callers who stay; this one comes and goes with every micro-batch, so it takes
connections from the pool, gives them back, and cares for full batches rather than for prompt ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from upriver.client.arrow import BatchMaker
from upriver.client.blocking import Database
from upriver.client.made import Made
from upriver.client.names import Names
from upriver.client.pacing import Pacing
from upriver.errors import ConnectFailed, UpriverError
from upriver.net.blocking import Pipe, Poller
from upriver.net.blocking import connect as connect_socket
from upriver.protocol.feed import Documents, Feed, FeedEvent
from upriver.protocol.feed_link import LinkEvent, Opened, RolledBack
from upriver.protocol.topology import Address
from upriver.spark.pool import POOL

ROUND_S = 0.02


class PlannedFeed(Feed):
    """A feed that leaves a vbucket alone when its history is not the one that was planned on."""

    def __init__(self, branches: Mapping[int, int], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._branches = branches
        self.left: set[int] = set()  # another branch is on top
        self.refused: set[int] = set()  # told to roll back, for whatever reason

    def _opened_as_planned(self, address: Address, event: Opened, now: float) -> None:
        if event.log.uuid == self._branches[event.vbucket]:
            # The end was planned on this branch, even if we come from an older one: it will be reached.
            self.standing.vbuuid[event.vbucket] = event.log.uuid
            self._opened(address, event, now)
            return
        self._opening -= 1
        self.links[address].close_stream(event.vbucket)
        self.left.add(event.vbucket)
        self._finish(event.vbucket)

    def _not_as_planned(self, address: Address, event: RolledBack, now: float) -> None:
        self._opening -= 1
        self.refused.add(event.vbucket)
        self._finish(event.vbucket)

    _HANDLERS: dict[type[LinkEvent], Callable[[Any, Address, Any, float], None]] = {
        **Feed._HANDLERS, Opened: _opened_as_planned, RolledBack: _not_as_planned,
    }  # fmt: skip


class Pump:
    """Pumps one feed to its end; a context manager."""

    def __init__(self, feed: Feed, database: Database, kind: object) -> None:
        self.feed = feed
        self._database, self._kind = database, (database.options, kind)
        self._poller = Poller()
        self._pipes: dict[Address, Pipe] = {}
        self._pacing = Pacing()
        feed._opaque = POOL.opaques()

    def __enter__(self) -> Pump:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep the connections whose streams have all ended in order; close the others."""
        for address, pipe in list(self._pipes.items()):
            link = self.feed.links.get(address)
            if self.feed.done and link is not None and link.ready and not link.streams and not link.decoder.pending:
                link.flush_acknowledgements()
                pipe.write(link.data_to_send())
                self._poller.remove(pipe)
                del self._pipes[address]
                POOL.give(self._kind, address, pipe, link)
            else:
                self._disconnect(address)
        self._poller.close()

    def batches(self, names: Names, rows: int, hold_bytes: int, patience_s: float, **options: Any) -> Iterator[Made]:
        """Batches of ``rows`` where the network allows it; smaller only when nothing more comes, or the rows weigh
        ``hold_bytes``: what is held must stay well below the flow-control window, or nobody would move."""
        maker = BatchMaker(self.feed, names, rows, **options)
        quiet_since, held = time.monotonic(), 0
        while not self.feed.done:
            came = False
            for event in self._events():
                came = True
                if isinstance(event, Documents):
                    held += event.rows.bytes
                for made in maker.add(event):
                    yield made
                    held = 0
            if held >= hold_bytes or (held and not came):
                yield from maker.flush()
                held = 0
            if came:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > patience_s:
                last = self._pacing.last_error
                raise ConnectFailed(f"no data for {patience_s:.0f} s (timeoutSeconds); the last error was: {last}")
        yield from maker.flush()

    def _events(self) -> Iterator[FeedEvent]:
        """One round: connect what is missing, wait, and yield what came."""
        now = time.monotonic()
        for address in self.feed.wanted() - self._pipes.keys():
            if self._pacing.may_try(address, now):
                self._connect(address)
        yield from self.feed.tick(now)
        self._flush()
        by_pipe = {pipe: address for address, pipe in self._pipes.items()}
        for pipe in self._poller.wait(ROUND_S if self._pipes else 0):
            yield from self._read(by_pipe[pipe], pipe)
        if not self._pipes and not self.feed.done:
            time.sleep(ROUND_S)

    def _read(self, address: Address, pipe: Pipe) -> Iterator[FeedEvent]:
        link = self.feed.links[address]
        try:
            size = pipe.read_into(link.buffer())
            if size == 0:
                self._lost(address, ConnectFailed(f"{address} closed the connection"))
            elif size > 0:
                for event in self.feed.received(address, size, time.monotonic()):
                    self._pacing.progressed(address)
                    yield event
                if link.ready:
                    self._pacing.ready(address, time.monotonic())
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
        if kept := POOL.take(self._kind, address):
            pipe, link = kept
            link.standing, link.heard_at = self.feed.standing, time.monotonic()
            self.feed.links[address], self._pipes[address] = link, pipe
            self._poller.add(pipe)
            return
        options = self._database.options
        try:
            sock = connect_socket(address.host, address.port, options.connect_timeout_s, options.ssl_context())
        except ConnectFailed as error:
            self._lost(address, error)
            return
        pipe = self._pipes[address] = Pipe(sock)
        self._poller.add(pipe)
        pipe.write(self.feed.connected(address, time.monotonic()).data_to_send())

    def _lost(self, address: Address, error: OSError | UpriverError) -> None:
        now = time.monotonic()
        self._pacing.failed(address, now)
        self.feed.lost(address, now)
        self._disconnect(address)
        self._pacing.forgive(address, error)
        with suppress(ConnectFailed):  # perhaps another node knows who owns its vbuckets now
            self.feed.use(self._database.refresh())

    def _disconnect(self, address: Address) -> None:
        if pipe := self._pipes.pop(address, None):
            with suppress(KeyError, ValueError):
                self._poller.remove(pipe)
            pipe.close()
