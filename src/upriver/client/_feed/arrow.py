"""Turns feed events into Arrow batches: rows gather in the decoder's columns and leave in order, as one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from upriver.client._feed.outbox import Bundle
from upriver.client.names import Names
from upriver.model import signed
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import CollectionChange, FeedEvent, FeedRows, RolledBack
from upriver.protocol.topology import Address
from upriver.records.batches import ChangeOptions, change_batch, rollback_row, row_batch
from upriver.records.schema import Event
from upriver.wire.bulk.decode import Columns
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, CollectionEvent, ScopeCreated

DEFAULT_ROWS = 16_384
COPY_BELOW = 1 / 16  # a batch that uses less of its columns than this is copied, so that it does not pin them


class BatchMaker:
    """Gathers rows per connection until there are ``rows`` of them, or another event must come first."""

    def __init__(
        self, feed: ClusterFeed, names: Names, rows: int = DEFAULT_ROWS, *, system_events: bool = True, **options: Any
    ) -> None:
        self.names, self.feed = names, feed
        self._rows, self._system_events = rows, system_events
        self._options = options
        self._held: dict[Address, list[FeedRows]] = {}
        self._moves = feed.moves

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def add(self, event: FeedEvent) -> Iterator[Bundle]:
        """Take an event; yields the bundles that are ready now."""
        if isinstance(event, FeedRows):
            yield from self._add_rows(event)
        elif isinstance(event, RolledBack):
            yield from self._flush_before()
            told = row_batch([rollback_row(event.vbucket, event.to_seqno, event.lost_branch, event.epoch)])
            yield Bundle([told], [], self.feed.table.frozen(), rolled_back=(event.vbucket, event.to_seqno))
        elif isinstance(event, CollectionChange):
            row = self._collection_row(event)
            if self._system_events:
                yield from self._flush_before()
                yield Bundle([row_batch([row])], [], self.feed.table.frozen())

    def _add_rows(self, event: FeedRows) -> Iterator[Bundle]:
        if self.feed.moves != self._moves:
            self._moves = self.feed.moves
            yield from self._flush_before()  # a vbucket moved: its rows must not wait on two connections
        held = self._held.get(event.link)
        if held and held[-1].rows.columns is not event.rows.columns:
            yield self._emit(event.link)  # rows of earlier columns, which the decoder no longer uses
            held = None
        if held is None:
            held = self._held[event.link] = []
        held.append(event)
        if event.rows.full or event.rows.last - held[0].rows.first >= self._rows:
            yield from self.flush()

    def flush(self) -> Iterator[Bundle]:
        """All rows that wait, of all connections; after the last of them, the caller is where the feed is."""
        while self._held:
            made = self._emit(next(iter(self._held)))
            if not self._held:
                made.reached = self.feed.table.frozen()
            yield made

    def _flush_before(self) -> Iterator[Bundle]:
        """The same before another event, which the feed's positions already include."""
        while self._held:
            yield self._emit(next(iter(self._held)))

    def _emit(self, address: Address) -> Bundle:
        held = self._held.pop(address)
        first, last, columns = held[0].rows.first, held[-1].rows.last, held[0].rows.columns
        options = ChangeOptions(names=self.names.collections, **self._options)
        batch = change_batch(columns, options, first, last)
        link = self.feed.links.get(address)
        ours = link is not None and link.decoder.columns is columns
        if last - first < columns.sizes.rows * COPY_BELOW and _used(columns) < columns.sizes.value_bytes * COPY_BELOW:
            batch = batch.take(pa.array(np.arange(batch.num_rows)))
            if link and ours and last == columns.rows:
                link.decoder.clear()
        elif link and ours:
            link.decoder.take()  # the batch keeps the memory; the decoder gets new memory
        return Bundle(self._cut(batch), held)

    def _cut(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Split a batch that has far more rows than requested; slices cost nothing."""
        if batch.num_rows < 2 * self._rows:
            return [batch] if batch.num_rows else []
        return [batch.slice(at, self._rows) for at in range(0, batch.num_rows, self._rows)]

    def _collection_row(self, event: CollectionChange) -> dict[str, Any]:
        content = event.message.content()
        self.names.note(content)
        scope, collection = self.names.path(content)
        return {
            "event": kind_of(content), "vbucket": event.vbucket, "seqno": event.message.by_seqno,
            "epoch": event.epoch, "vbuuid": signed(event.vbuuid), "scope": scope, "collection": collection,
            "collection_id": getattr(content, "collection_id", None),
        }  # fmt: skip


def _used(columns: Columns) -> int:
    return int(columns.view("value_at")[columns.rows])


def kind_of(content: CollectionEvent) -> Event:
    """The change feed's name for a collection event of the protocol."""
    if isinstance(content, CollectionBegun):
        if content.modified:
            return Event.COLLECTION_MODIFIED
        return Event.COLLECTION_FLUSHED if content.flush_uid else Event.COLLECTION_CREATED
    if isinstance(content, CollectionEnded):
        return Event.COLLECTION_DROPPED
    return Event.SCOPE_CREATED if isinstance(content, ScopeCreated) else Event.SCOPE_DROPPED
