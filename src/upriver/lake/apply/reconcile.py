"""What happened to collections while nobody looked: a drop that left no event in the stream, told by ids.

Ids of collections are never used again. So a table whose newest id is not the one in the manifest holds documents of
a collection that is gone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake import bucket
from upriver.lake.apply.merge import latest
from upriver.lake.apply.policy import ranges_of
from upriver.lake.change_log import Mark, write_marks
from upriver.lake.collection import CollectionTables, Reread, Runner
from upriver.lake.columns import META
from upriver.lake.files import Span, read_pieces
from upriver.lake.options import SyncOptions
from upriver.records.schema import Event

if TYPE_CHECKING:
    from upriver.lake.tables import Tables

logger = logging.getLogger("upriver.sync")
RECONCILED = "upriver.reconciled"
_ORDER = ["_vbucket", "_epoch", "_seqno"]


def reconcile(tables: Tables, found: bucket.Survey, options: SyncOptions) -> list[str]:
    """Empty the tables of collections that are gone; their names."""
    gone = []
    for name in tables.names():
        if not bucket.wanted(options, name) or not _gone(tables, found, name):
            continue
        collection = tables.collection(name)
        if has_documents(collection):
            logger.warning("%s was dropped while the sync was away: its rows are removed", name)
            forget(collection, tables.last_batch(), tables.run, tables.reread)
            gone.append(name)
        live = found.collections.get(name)
        tables.note_ids(name, [] if live is None else [live])
    return gone


def _gone(tables: Tables, found: bucket.Survey, name: str) -> bool:
    """The id in the manifest is not the newest that the table has seen."""
    known, live = tables.collection_ids(name), found.collections.get(name)
    return live != known[-1] if known else live is None


def has_documents(collection: CollectionTables) -> bool:
    """Is there a row in the fresh table? Looked up range by range, up to the first that has one."""
    collection.refresh()
    ranges = ranges_of(collection.current.pieces(), collection.options.vbuckets, 0, collection.options.policy)
    return any(_has_documents(collection, (part.lo, part.hi)) for part in ranges)


def _has_documents(collection: CollectionTables, span: Span) -> bool:
    columns, parts = ["_key", "_epoch", "_seqno", "_deleted"], []
    for table in (collection.tail, collection.current):
        here = [piece for piece in table.pieces() if piece.overlaps(*span)]
        parts.append(read_pieces(table.uri, here, pa.schema(META), columns, span))
    return bool(pc.any(pc.invert(latest(pa.concat_tables(parts)).column("_deleted"))).as_py())


def has_duplicates(collection: CollectionTables) -> bool:
    """Does ``current`` have a key twice? Looked up range by range."""
    pieces = collection.current.pieces()
    ranges = ranges_of(pieces, collection.options.vbuckets, 0, collection.options.policy)
    for part in ranges:
        here = [piece for piece in pieces if piece.overlaps(part.lo, part.hi)]
        keys = read_pieces(collection.current.uri, here, pa.schema(META), ["_key"], (part.lo, part.hi)).column("_key")
        if pc.count_distinct(keys).as_py() < len(keys):
            return True
    return False


def forget(collection: CollectionTables, batch: int, run: Runner, reread: Reread | None) -> None:
    """End every document of a table, as if each of its vbuckets had said that the collection was dropped.

    ``batch`` is the last one of the lake. No rollback takes this back: a collection that is gone does not come again.
    """
    marks = [
        Mark(Event.COLLECTION_DROPPED.value, vbucket, seqno + 1, epoch, batch + 1)
        for vbucket, (epoch, seqno) in _newest(collection).items()
    ]
    if not marks:
        return
    seen = collection.changes.version(RECONCILED)
    piece = write_marks(collection.lake.root, collection.name, marks, batch + 1)
    collection.changes.commit(RECONCILED, 0 if seen is None else seen + 1, [piece])
    collection.advance(batch, 0, run, reread, force=True)


def _newest(collection: CollectionTables) -> dict[int, tuple[int, int]]:
    """The last (epoch, seqno) that the table has of each vbucket; with the epoch that the vbucket has reached since."""
    newest = np.full((2, collection.options.vbuckets), -1, dtype=np.int64)
    for table in (collection.tail, collection.current):
        for piece in table.pieces():
            rows = read_pieces(table.uri, [piece], pa.schema(META), _ORDER)
            vbuckets, epochs, seqnos = (rows.column(name).to_numpy() for name in _ORDER)
            np.maximum.at(newest[0], vbuckets, epochs)
            np.maximum.at(newest[1], vbuckets, seqnos)
    floors = collection.lake.epochs()
    return {
        int(vbucket): (max(int(newest[0, vbucket]), floors.get(int(vbucket), 0)), int(newest[1, vbucket]))
        for vbucket in np.flatnonzero(newest[1] >= 0)
    }
