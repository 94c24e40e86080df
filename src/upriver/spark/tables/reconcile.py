"""What happened to collections while nobody looked: a drop that left no event in the stream, told by ids.

Ids of collections are never used again. So a table whose newest id is not the one in the manifest holds documents of
a collection that is gone.
"""

from __future__ import annotations

import logging

import pyarrow as pa

from upriver.records.schema import Event
from upriver.spark.tables import bucket
from upriver.spark.tables.apply import Tables
from upriver.spark.tables.log import Mark, read_log, write_marks
from upriver.spark.tables.options import SyncOptions

logger = logging.getLogger("upriver.sync")
RECONCILED = "upriver.reconciled"


def reconcile(tables: Tables, found: bucket.Survey, options: SyncOptions) -> list[str]:
    """Empty the tables of collections that are gone; their names."""
    gone = []
    for name in tables.names():
        known = tables.collection_ids(name) if bucket.wanted(options, name) else set()
        if known and found.collections.get(name) not in known and _has_rows(tables, name):
            logger.warning("%s was dropped while the sync was away: its rows are removed", name)
            forget(tables, name)
            gone.append(name)
    return gone


def _has_rows(tables: Tables, name: str) -> bool:
    collection = tables.collection(name)
    return any(piece.rows for table in (collection.tail, collection.current) for piece in table.pieces())


def forget(tables: Tables, name: str) -> None:
    """End every document of a table, as if each of its vbuckets had said that the collection was dropped."""
    collection, batch = tables.collection(name), tables.last_batch()
    marks = [
        Mark(Event.COLLECTION_DROPPED.value, vbucket, seqno + 1, epoch, batch + 1)
        for vbucket, (epoch, seqno) in _newest(tables, name).items()
    ]
    seen = collection.changes.version(RECONCILED)
    piece = write_marks(tables.lake.root, name, marks, batch + 1)
    collection.changes.commit(RECONCILED, 0 if seen is None else seen + 1, [piece])
    collection.advance(batch, 0, tables.run, tables.reread, force=True)


def _newest(tables: Tables, name: str) -> dict[int, tuple[int, int]]:
    """The last (epoch, seqno) that the log has of each vbucket; with the epoch that the vbucket has reached since."""
    log = tables.collection(name).changes
    rows = read_log(log.uri, log.pieces(), 0, tables.options.vbuckets - 1, ["vbucket", "epoch", "seqno"])
    newest = pa.TableGroupBy(rows, ["vbucket"]).aggregate([("epoch", "max"), ("seqno", "max")])
    floors = tables.lake.epochs()
    return {
        row["vbucket"]: (max(row["epoch_max"], floors.get(row["vbucket"], 0)), row["seqno_max"])
        for row in newest.to_pylist()
    }
