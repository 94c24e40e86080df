"""Feed events to Arrow batches: rows pile up in the decoder's columns and leave as one batch, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from upriver.protocol.feed import CollectionChange, Documents, Feed, FeedEvent, RollbackEvent
from upriver.protocol.topology import Address
from upriver.records.batches import ChangeOptions, change_batch, row_batch
from upriver.records.schema import Event
from upriver.wire.columns import Columns
from upriver.wire.events import CollectionBegun, CollectionEnded, ScopeCreated


class BatchMaker:
    """Gathers rows per connection until there are ``rows`` of them, or something else must come between."""

    def __init__(
        self, names: Mapping[int, tuple[str, str]], rows: int, options: Mapping[str, Any] | None = None
    ) -> None:
        self.names = dict(names)
        self._rows = rows
        self._options = dict(options or {})
        self._held: dict[Address, list[Documents]] = {}

    def add(self, feed: Feed, event: FeedEvent) -> Iterator[pa.RecordBatch]:
        """Batches that are ready because of this event."""
        if isinstance(event, Documents):
            held = self._held.setdefault(event.link, [])
            held.append(event)
            columns = event.rows.columns
            if event.rows.full or columns.rows - held[0].rows.first >= self._rows:
                yield from self._emit(feed, event.link)
        elif isinstance(event, RollbackEvent):
            yield from self.flush(feed)
            yield row_batch([_rollback_row(event)])
        elif isinstance(event, CollectionChange):
            yield from self.flush(feed)
            yield row_batch([self._collection_row(feed, event)])

    def flush(self, feed: Feed) -> Iterator[pa.RecordBatch]:
        for address in list(self._held):
            yield from self._emit(feed, address)

    def _emit(self, feed: Feed, address: Address) -> Iterator[pa.RecordBatch]:
        held = self._held.pop(address, [])
        if not held:
            return
        columns: Columns = held[0].rows.columns
        first, last = held[0].rows.first, held[-1].rows.last
        link = feed.links.get(address)
        if link is not None and link.decoder.columns is columns:
            link.decoder.take()  # the batch keeps the memory; the decoder goes on with other
        batch = change_batch(columns, ChangeOptions(names=self.names, **self._options), first, last)
        if batch.num_rows:
            yield batch
        for documents in held:
            feed.taken(documents)

    def _collection_row(self, feed: Feed, event: CollectionChange) -> dict[str, Any]:
        content = event.message.content()
        row: dict[str, Any] = {
            "vbucket": event.vbucket, "seqno": event.message.by_seqno, "epoch": feed.standing.epoch[event.vbucket],
            "vbuuid": feed.standing.vbuuid[event.vbucket],
        }  # fmt: skip
        if isinstance(content, CollectionBegun):
            scope = next((s for s, _ in self.names.values() if s), "_default")
            self.names.setdefault(content.collection_id, (scope, content.name))
            kind = Event.COLLECTION_MODIFIED if content.modified else Event.COLLECTION_CREATED
            return {**row, "event": kind, **self._named(content.collection_id)}
        if isinstance(content, CollectionEnded):
            return {**row, "event": Event.COLLECTION_DROPPED, **self._named(content.collection_id)}
        if isinstance(content, ScopeCreated):
            return {**row, "event": Event.SCOPE_CREATED, "scope": content.name}
        return {**row, "event": Event.SCOPE_DROPPED}

    def _named(self, collection_id: int) -> dict[str, Any]:
        scope, name = self.names.get(collection_id) or (None, None)
        return {"scope": scope, "collection": name, "collection_id": collection_id}


def _rollback_row(event: RollbackEvent) -> dict[str, Any]:
    return {
        "event": Event.ROLLBACK, "vbucket": event.vbucket, "seqno": event.to_seqno, "epoch": event.epoch,
        "vbuuid": event.lost_branch,
    }  # fmt: skip
