"""A feed that is pumped by the calling thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from upriver.client.names import Names
from upriver.client.pacing import Pacing
from upriver.errors import ConnectFailed, UpriverError
from upriver.model import Position
from upriver.net.blocking import Pipe, Poller
from upriver.net.blocking import connect as connect_socket
from upriver.protocol.feed import Feed, FeedEvent
from upriver.protocol.standing import Mark
from upriver.protocol.topology import Address

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client.arrow import BatchMaker, Made
    from upriver.client.blocking import Database

ROUND_S = 0.05


class BlockingFeed:
    """Pumps a ``Feed``: connects, reads, reconnects; a context manager."""

    def __init__(self, feed: Feed, database: Database, names: Names) -> None:
        self.feed, self.names = feed, names
        self.pacing = Pacing()
        self._database, self._options = database, database.options
        self._poller = Poller()
        self._pipes: dict[Address, Pipe] = {}
        self._maker: BatchMaker | None = None
        self._mark: Mark = feed.standing.mark()
        self._behind = False  # something came that the caller does not have yet
        self._listened_at = time.monotonic()

    def __enter__(self) -> BlockingFeed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for address in list(self._pipes):
            self._disconnect(address)
        self._poller.close()

    @property
    def reconnects(self) -> int:
        return self.pacing.reconnects

    def positions(self) -> dict[int, Position]:
        """What may be claimed of what has been yielded so far."""
        place = self._mark if self._behind else self.feed.standing
        return {vb: place.position(vb) for vb in self.feed.vbuckets}

    # ---------------------------------------------------------------------------------------------- batches

    def batches(self, *, rows: int = 16_384, idle_s: float | None = None, **options: Any) -> Iterator[pa.RecordBatch]:
        """Arrow batches until the feed is done, or until nothing came for ``idle_s`` seconds."""
        from upriver.client.arrow import BatchMaker

        maker = BatchMaker(self.feed, self.names, rows, **options)
        quiet_since = time.monotonic()
        while not self.feed.done:
            came = False
            for event in self.events(ROUND_S):
                came = True
                self._behind = True
                for made in maker.add(event):
                    yield from self._hand_over(made)
            for made in maker.flush():
                yield from self._hand_over(made)
            self._behind = False
            if came:
                quiet_since = time.monotonic()
            elif idle_s is not None and time.monotonic() - quiet_since >= idle_s:
                return

    def _hand_over(self, made: Made) -> Iterator[pa.RecordBatch]:
        if made.mark:
            self._mark = made.mark
        if made.batch is not None:
            yield made.batch
        for documents in made.held:
            self.feed.taken(documents)

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
        if not self._pipes:
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
                yield from self.feed.received(address, size, time.monotonic())
                if link.ready:
                    self.pacing.worked(address)
                pipe.write(link.data_to_send())
        except (OSError, UpriverError) as error:
            self._lost(address, error)

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
            self._ask_others()
            return
        pipe = self._pipes[address] = Pipe(sock)
        self._poller.add(pipe)
        pipe.write(self.feed.connected(address, time.monotonic()).data_to_send())

    def _ask_others(self) -> None:
        """A node is gone: perhaps another one knows who owns its vbuckets now."""
        with suppress(ConnectFailed):
            self.feed.use(self._database.refresh())

    def _lost(self, address: Address, error: OSError | UpriverError) -> None:
        now = time.monotonic()
        self.pacing.failed(address, now)
        self.feed.lost(address, now)
        self._disconnect(address)
        self.pacing.forgive(address, error)

    def _disconnect(self, address: Address) -> None:
        if pipe := self._pipes.pop(address, None):
            with suppress(KeyError, ValueError):
                self._poller.remove(pipe)
            pipe.close()
