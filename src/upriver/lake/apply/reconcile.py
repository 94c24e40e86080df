"""Collections that were dropped while the sync was away, without an event in the stream.

Ids of collections are never reused. So a table whose newest id is not the one in the manifest holds documents of a
collection that is gone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake import bucket
from upriver.lake.apply.policy import ranges_of
from upriver.lake.apply.rows import latest
from upriver.lake.change_log import LogMark, write_marks
from upriver.lake.collection import CollectionTables
from upriver.lake.columns import META
from upriver.lake.files import Span, read_files
from upriver.lake.options import SyncOptions
from upriver.records.schema import Event

if TYPE_CHECKING:
    from upriver.lake.tables import Tables

logger = logging.getLogger("upriver.sync")
RECONCILED = "upriver.reconciled"
_ORDER = ["_vbucket", "_epoch", "_seqno"]


def reconcile(tables: Tables, found: bucket.Survey, options: SyncOptions) -> list[str]:
    """Empty the tables of collections that are gone; return their names."""
    gone = []
    for name in tables.names():
        if not bucket.wanted(options, name):
            continue
        known, live = tables.collection_ids(name), found.collections.get(name)
        if live == known[-1] if known else live is not None:
            continue
        collection = tables.collection(name)
        if has_documents(collection):
            logger.warning("%s was dropped while the sync was away: its rows are removed", name)
            end_all_documents(collection, tables.last_batch())
            gone.append(name)
        tables.note_ids(name, [] if live is None else [live])
    return gone


def has_documents(collection: CollectionTables) -> bool:
    """Whether the fresh table has a document; ranges are read one by one until one has."""
    collection.refresh()
    ranges = ranges_of(collection.current.files(), collection.options.vbuckets, 0, collection.options.policy)
    return any(_has_documents(collection, (part.lo, part.hi)) for part in ranges)


def _has_documents(collection: CollectionTables, span: Span) -> bool:
    columns, parts = ["_key", "_epoch", "_seqno", "_deleted"], []
    for table in (collection.tail, collection.current):
        here = [file for file in table.files() if file.overlaps(*span)]
        parts.append(read_files(table.uri, here, pa.schema(META), columns, span))
    return bool(pc.any(pc.invert(latest(pa.concat_tables(parts)).column("_deleted"))).as_py())


def has_duplicates(collection: CollectionTables) -> bool:
    """Whether ``current`` has two rows of a key; ranges are read one by one."""
    files = collection.current.files()
    ranges = ranges_of(files, collection.options.vbuckets, 0, collection.options.policy)
    for part in ranges:
        here = [file for file in files if file.overlaps(part.lo, part.hi)]
        keys = read_files(collection.current.uri, here, pa.schema(META), ["_key"], (part.lo, part.hi)).column("_key")
        if pc.count_distinct(keys).as_py() < len(keys):
            return True
    return False


def end_all_documents(collection: CollectionTables, batch: int) -> None:
    """End every document of a table, as if each of its vbuckets had seen the drop of the collection.

    ``batch`` is the last one of the lake. No rollback takes this back: a collection that is gone does not come back.
    """
    marks = [
        LogMark(Event.COLLECTION_DROPPED.value, vbucket, seqno + 1, epoch, batch + 1)
        for vbucket, (epoch, seqno) in _newest(collection).items()
    ]
    if not marks:
        return
    log = collection.changes
    file = write_marks(collection.lake.root, collection.name, marks, batch + 1)
    log.commit(RECONCILED, log.next_version(RECONCILED), [file])
    collection.advance(batch, force=True)


def _newest(collection: CollectionTables) -> dict[int, tuple[int, int]]:
    """The last (epoch, seqno) that the table has of each vbucket, with the epoch that the vbucket has reached since."""
    newest = np.full((2, collection.options.vbuckets), -1, dtype=np.int64)
    for table in (collection.tail, collection.current):
        for file in table.files():
            rows = read_files(table.uri, [file], pa.schema(META), _ORDER)
            vbuckets, epochs, seqnos = (rows.column(name).to_numpy() for name in _ORDER)
            np.maximum.at(newest[0], vbuckets, epochs)
            np.maximum.at(newest[1], vbuckets, seqnos)
    floors = collection.lake.epochs()
    return {
        int(vbucket): (max(int(newest[0, vbucket]), floors.get(int(vbucket), 0)), int(newest[1, vbucket]))
        for vbucket in np.flatnonzero(newest[1] >= 0)
    }
