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
from upriver.spark.tables.log import Mark, write_marks
from upriver.spark.tables.options import SyncOptions
from upriver.spark.tables.read import read_arrow

logger = logging.getLogger("upriver.sync")
RECONCILED = "upriver.reconciled"


def reconcile(tables: Tables, found: bucket.Survey, options: SyncOptions) -> list[str]:
    """Empty the tables of collections that are gone; their names."""
    gone = []
    for name in tables.names():
        if bucket.wanted(options, name) and _gone(tables, found, name) and _has_rows(tables, name):
            logger.warning("%s was dropped while the sync was away: its rows are removed", name)
            forget(tables, name)
            gone.append(name)
    return gone


def _gone(tables: Tables, found: bucket.Survey, name: str) -> bool:
    """The id in the manifest is none that the table has seen; if the log is trimmed, only its absence tells."""
    known, live = tables.collection_ids(name), found.collections.get(name)
    return live not in known if known else live is None


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
    if not marks:
        return
    seen = collection.changes.version(RECONCILED)
    piece = write_marks(tables.lake.root, name, marks, batch + 1)
    collection.changes.commit(RECONCILED, 0 if seen is None else seen + 1, [piece])
    collection.advance(batch, 0, tables.run, tables.reread, force=True)


def _newest(tables: Tables, name: str) -> dict[int, tuple[int, int]]:
    """The last (epoch, seqno) that the table has of each vbucket; with the epoch that the vbucket has reached since."""
    rows = read_arrow(tables.lake.root, name, deleted=True).select(["_vbucket", "_epoch", "_seqno"])
    newest = pa.TableGroupBy(rows, ["_vbucket"]).aggregate([("_epoch", "max"), ("_seqno", "max")])
    floors = tables.lake.epochs()
    return {
        row["_vbucket"]: (max(row["_epoch_max"], floors.get(row["_vbucket"], 0)), row["_seqno_max"])
        for row in newest.to_pylist()
    }
