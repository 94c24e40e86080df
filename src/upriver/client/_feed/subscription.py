"""A subscription: a cluster feed with its outbox, names and filters; everything of a feed that is not I/O.

The shells put events in, take items out, and run chores: requests that a feed needs now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from upriver.client._feed.link_policy import Reconnects, jitter
from upriver.client._feed.outbox import BundleMaker, Outbox
from upriver.client._requests.connections import make_session
from upriver.client._requests.operations import Operation, Operations, Pause
from upriver.client.names import Names
from upriver.client.positions import Positions
from upriver.client.reading import Content, FeedOptions, collection_ids, filter_of, filter_value
from upriver.errors import ConnectFailed, LocalProtocolError, RemoteProtocolError, StatusError, UpriverError
from upriver.model import OnRollback
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import CollectionChange, FeedEvent, FeedRequest, FeedRows, FilterGone
from upriver.protocol.filters import Filter
from upriver.protocol.position import Position
from upriver.protocol.session import FeedSettings
from upriver.wire.messages.events import CollectionEnded

POLL_PERSISTENCE_S = 0.1
POLL_LAG_S = 5.0
ASK_OTHERS_S = 1.0
MakeBundles = Callable[..., BundleMaker]
_log = logging.getLogger(__name__)


class Subscription:
    """A feed being read, and the position of its caller."""

    def __init__(
        self,
        operations: Operations,
        request: FeedRequest,
        settings: FeedSettings,
        names: Names,
        read: FeedOptions,
        filter: Filter | None,
    ) -> None:
        self.operations, self.read, self.names = operations, read, names
        self.filter = filter  # what is read; None if the caller keeps track of it
        self.lacking: set[int] = set()  # vbuckets of which earlier subscriptions must read a part first
        self.earlier: list[Subscription] = []  # the ones that still read such parts
        self.reconnects = Reconnects()
        options = operations.options
        self.feed = ClusterFeed(
            request, operations.topology, lambda: make_session(options, settings), settings.buffer_bytes,
            parse=options.parse_map, noop_interval_s=settings.noop_interval_s, jitter=jitter,
        )  # fmt: skip
        self.rows = self.bytes = 0
        self.track_lag = False
        self._high_seqnos: dict[int, int] = {}
        self._lag_at = 0.0
        self.outbox: Outbox | None = None
        self._made_by: tuple[MakeBundles, dict[str, Any]] | None = None
        self._filter_stale, self._filter_at, self._filter_tries = False, 0.0, 0
        self._dropped: dict[int, Position] = {}  # by vbucket: where a collection that we read was dropped
        self._persistence_at = 0.0
        self._map_wanted, self._map_at = False, 0.0

    def deliver(self, make: MakeBundles, **options: Any) -> Outbox:
        """The outbox, with items made by ``make``; the same one if it is asked for again."""
        if self.outbox and self._made_by == (make, options):
            return self.outbox
        if self.outbox and not self.outbox.idle:
            raise LocalProtocolError("changes are waiting in another form; a feed gives either batches or objects")
        self._made_by = make, options
        asked = {
            "values": self.read.content is Content.VALUES, "xattrs": self.read.xattrs,
            "system_events": self.read.system_events,
        }  # fmt: skip
        maker = make(self.feed, self.names, **{**asked, **options})
        self.outbox = Outbox(self.feed, maker, linger_s=self.read.linger_s, hold_unsafe=self.read.wait_for_disk)
        return self.outbox

    def add(self, event: FeedEvent, now: float) -> None:
        """Take an event of the feed."""
        if isinstance(event, FeedRows):
            self.rows += event.rows.last - event.rows.first
            self.bytes += event.rows.bytes
        elif isinstance(event, FilterGone):
            self._filter_stale = True
        elif isinstance(event, CollectionChange) and self.read.collections:
            self._watch_drop(event)
        if self.outbox:
            self.outbox.add(event, now)

    def _watch_drop(self, event: CollectionChange) -> None:
        """Note that a collection was dropped: if it is created again, none of its changes may be missed."""
        content = event.message.content()
        if isinstance(content, CollectionEnded) and self.names.path(content) in self.read.paths:
            self.feed.remember(event.vbucket)
            self._dropped.setdefault(event.vbucket, self.feed.table.position(event.vbucket))
            self._filter_stale = True

    def positions(self) -> Positions:
        """The positions that the caller may claim with what it has been given."""
        topology = self.feed.topology
        given = self.feed.positions() if self.outbox is None else self.outbox.positions()
        found = {vb: self._not_beyond_drop(vb, at)._replace(filter=self._filter_of(vb)) for vb, at in given.items()}
        for one in self.earlier:
            found |= {vb: Position(epoch=epoch, filter=self.filter) for vb, epoch in self._undone_by(one)}
        return Positions(found, topology.bucket_uuid, topology.vbuckets)

    def _undone_by(self, one: Subscription) -> Iterator[tuple[int, int]]:
        """The vbuckets that the caller was told to undo completely, with their epochs."""
        if self.read.on_rollback is OnRollback.EMIT and one.outbox:
            for vb, at in one.outbox.positions().items():
                if at.epoch != self.feed.table.epoch(vb):
                    yield vb, at.epoch

    def begin_after(self, one: Subscription) -> None:
        """An earlier subscription has read everything that was lacking; both together are at our position."""
        undone = dict(self._undone_by(one))
        for vb in one.feed.vbuckets:
            epoch = undone.get(vb, self.feed.table.epoch(vb))
            self.feed.begin_after(vb, one.feed.table.position(vb), epoch)
        self.lacking.difference_update(one.feed.vbuckets)
        self.earlier.remove(one)

    def _filter_of(self, vb: int) -> Filter | None:
        if vb in self.lacking and isinstance(self.read.start, Positions):
            return self.read.start[vb].filter
        return self.filter

    def _not_beyond_drop(self, vb: int, at: Position) -> Position:
        """Stay at the drop of a collection: our filter would not pass it if it is created again."""
        dropped = self._dropped.get(vb)
        if dropped is None or dropped.epoch != at.epoch or dropped.seqno >= at.seqno:
            return at
        return dropped

    # ---------------------------------------------------------------------------------------------- chores

    def want_map(self) -> None:
        """A node cannot be reached: ask others for a newer map."""
        self._map_wanted = True

    def chore(self, now: float) -> Operation[None] | None:
        """An operation that is due now, if any. If it fails, the feed goes on: its streams report what matters."""
        if self._map_wanted and now >= self._map_at:
            self._map_wanted, self._map_at = False, now + ASK_OTHERS_S
            return _chore(self._refresh_map())
        if self._filter_stale and now >= self._filter_at:
            self._filter_tries += 1
            self._filter_at = now + min(5.0, 0.1 * 2 ** min(self._filter_tries, 6))
            return _chore(self._look_names_up())
        if self.outbox and now >= self._persistence_at and (unsafe := self.outbox.unsafe()):
            self._persistence_at = now + POLL_PERSISTENCE_S
            return _chore(self._observe(unsafe))
        if self.track_lag and now >= self._lag_at:
            self._lag_at = now + POLL_LAG_S
            return _chore(self._poll_seqnos())
        return None

    def _refresh_map(self) -> Operation[None]:
        try:
            self.feed.use((yield from self.operations.bootstrap()))
        except UpriverError:
            self._map_wanted = True
            raise

    def _look_names_up(self) -> Operation[None]:
        if self.read.scope:
            value, complete = (yield from filter_value(self.operations, self.read)), True
        else:
            found = yield from collection_ids(self.operations, self.read, missing_ok=True)
            if not found:
                return
            value, complete = filter_of(found.values()), found.keys() == self.read.paths
        self.feed.refilter(value, again=complete)
        if complete:
            self._filter_stale, self._filter_tries = False, 0
            if self.outbox and self._dropped:
                self.outbox.went_back(self._dropped.clear)

    def _poll_seqnos(self) -> Operation[None]:
        self._high_seqnos = yield from self.operations.high_seqnos(complete=False)

    def lag(self) -> dict[int, int]:
        """How many seqnos each vbucket was behind at the last poll; needs ``track_lag``."""
        seqno = self.feed.table.seqno
        return {vb: max(0, self._high_seqnos[vb] - seqno(vb)) for vb in self.feed.vbuckets if vb in self._high_seqnos}

    def _observe(self, branches: dict[int, int]) -> Operation[None]:
        persisted = yield from self.operations.persisted(branches)
        if self.outbox:
            self.outbox.note_persisted(branches, persisted)


def _chore(operation: Operation[None]) -> Operation[None]:
    """A single attempt of an operation: chores repeat anyway, and a blocking feed cannot read while one waits."""
    try:
        step = next(operation)
        while not isinstance(step, Pause):
            try:
                answer = yield step
            except (ConnectFailed, StatusError, RemoteProtocolError) as error:
                step = operation.throw(error)
            else:
                step = operation.send(answer)
        operation.close()
    except StopIteration:
        return
    except (ConnectFailed, StatusError, RemoteProtocolError) as error:
        _log.info("%s failed and will be tried again: %s", getattr(operation, "__name__", "").strip("_"), error)
