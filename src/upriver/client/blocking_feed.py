"""A feed that is pumped by the calling thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from upriver.client.positions import Positions
from upriver.client.reader import MakeMaker, Reader
from upriver.errors import ConnectFailed, UpriverError
from upriver.net.blocking import Pipe, Poller
from upriver.net.blocking import connect as connect_socket
from upriver.protocol.feed import Feed, FeedEvent
from upriver.protocol.topology import Address

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client.blocking import Database
    from upriver.client.changes import Change
    from upriver.client.checkpoints import CheckpointStore

ROUND_S = 0.05
_log = logging.getLogger(__name__)


class BlockingFeed:
    """Pumps a ``Feed``: connects, reads, reconnects; a context manager."""

    def __init__(self, reader: Reader, database: Database, checkpoint: CheckpointStore | None = None) -> None:
        self.reader = reader
        self.pacing = reader.pacing
        self._checkpoint = checkpoint
        self._database, self._options = database, database.options
        self._poller = Poller()
        self._pipes: dict[Address, Pipe] = {}
        self._listened_at = time.monotonic()

    def __enter__(self) -> BlockingFeed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for address in list(self._pipes):
            self._disconnect(address)
        self.feed.links.clear()  # with their memory, which should not wait for the garbage collector
        self._poller.close()

    @property
    def feed(self) -> Feed:
        return self.reader.feed

    @property
    def reconnects(self) -> int:
        return self.pacing.reconnects

    def positions(self) -> Positions:
        """What may be claimed of what has been yielded so far; a mapping from vbucket to ``Position``."""
        return self.reader.positions()

    def confirm(self) -> None:
        """Save the position: the caller is done with everything that it has been given."""
        if self._checkpoint:
            self._checkpoint.save(self.positions())

    # ---------------------------------------------------------------------------------------------- items

    def batches(
        self, *, rows: int | None = None, idle_s: float | None = None, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        """Arrow batches until the feed is done, or until nothing came for ``idle_s`` seconds."""
        from upriver.client.arrow import BatchMaker

        return self._items(BatchMaker, idle_s, rows=rows or self.reader.read.rows, **options)

    def changes(self, *, idle_s: float | None = None) -> Iterator[Change]:
        """Changes one by one, as typed objects."""
        from upriver.client.changes import ObjectMaker

        return self._items(ObjectMaker, idle_s, where=self.reader.read.where)

    def _items(self, make: MakeMaker, idle_s: float | None, **options: Any) -> Iterator[Any]:
        delivery = self.reader.deliver(make, **options)
        idle_s = self.reader.read.idle_s if idle_s is None else idle_s
        quiet_since = 0.0  # not before all streams are open
        while True:
            while (items := delivery.take(time.monotonic())) is not None:
                for delivery.given, item in enumerate(items, 1):
                    yield item
                quiet_since = time.monotonic()
            if self.feed.done and delivery.idle:
                return
            now = time.monotonic()
            quiet_since = quiet_since or (now if self.feed.settled else 0.0)
            if idle_s is not None and quiet_since and delivery.idle and now - quiet_since >= idle_s:
                return
            self._round(delivery.wait_s(now))

    def _round(self, wait_s: float | None) -> None:
        """Run chores, and let the feed take what has come."""
        now = time.monotonic()
        if chore := self.reader.chore(now):
            self._database.run(chore)
        for event in self.events(ROUND_S if wait_s is None else min(ROUND_S, wait_s)):
            self.reader.add(event, now)

    # ---------------------------------------------------------------------------------------------- pumping

    def events(self, timeout_s: float) -> Iterator[FeedEvent]:
        """One round: connect what is missing, wait, and yield what came."""
        self._come_back()
        self._maintain_links()
        yield from self.feed.tick(time.monotonic())
        self._flush()
        by_pipe = {pipe: address for address, pipe in self._pipes.items()}
        for pipe in self._poller.wait(timeout_s if self._pipes else 0):
            yield from self._read(by_pipe[pipe], pipe)
        if not self._pipes and not self.feed.done:
            time.sleep(timeout_s)
        for address in self.feed.silent(time.monotonic()):
            self._lost(address, ConnectFailed(f"{address} has been silent for two noop intervals"))

    def _come_back(self) -> None:
        """While the caller was busy nobody listened: that silence is not the peers'."""
        now = time.monotonic()
        away, self._listened_at = now - self._listened_at, now
        for link in self.feed.links.values() if away > 1.0 else ():
            link.heard_at += away

    def _read(self, address: Address, pipe: Pipe) -> Iterator[FeedEvent]:
        if self._pipes.get(address) is not pipe:
            return
        link = self.feed.links[address]
        try:
            size = pipe.read_into(link.buffer())
            if size == 0:
                self._lost(address, ConnectFailed(f"{address} closed the connection"))
            elif size > 0:
                yield from self._progress(address, size)
                if link.ready:
                    self.pacing.ready(address, link.heard_at)
                pipe.write(link.data_to_send())
        except (OSError, UpriverError) as error:
            self._lost(address, error)

    def _progress(self, address: Address, size: int) -> Iterator[FeedEvent]:
        for event in self.feed.received(address, size, time.monotonic()):
            self.pacing.progressed(address)
            yield event

    def _flush(self) -> None:
        for address, pipe in list(self._pipes.items()):
            try:
                pipe.write(self.feed.links[address].data_to_send())
            except OSError as error:
                self._lost(address, error)

    def _maintain_links(self) -> None:
        now = time.monotonic()
        for address in self.feed.wanted() - self._pipes.keys():
            if self.pacing.may_try(address, now):
                self._connect(address)

    def _connect(self, address: Address) -> None:
        try:
            tls = self._options.ssl_context()
            sock = connect_socket(address.host, address.port, self._options.connect_timeout_s, tls)
        except ConnectFailed as error:
            self._lost(address, error)
            return
        pipe = self._pipes[address] = Pipe(sock)
        self._poller.add(pipe)
        pipe.write(self.feed.connected(address, time.monotonic()).data_to_send())

    def _lost(self, address: Address, error: OSError | UpriverError) -> None:
        now = time.monotonic()
        _log.info("lost the connection to %s: %s", address, error)
        self.pacing.failed(address, now)
        self.feed.lost(address, now)
        self._disconnect(address)
        self.reader.want_map()
        self.pacing.forgive(address, error)

    def _disconnect(self, address: Address) -> None:
        if pipe := self._pipes.pop(address, None):
            with suppress(KeyError, ValueError):
                self._poller.remove(pipe)
            pipe.close()
