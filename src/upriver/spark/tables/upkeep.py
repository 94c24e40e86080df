"""Housekeeping that readers never notice: small files become larger ones, and old ones go after the retention.

Files are only folded with others of their own size class (up to 1,000 rows, 32 times that, ...), so a row is copied
once per class, not once per batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from upriver.spark.tables.apply import CollectionTables
from upriver.spark.tables.columns import row_schema, spill
from upriver.spark.tables.deltas import Table
from upriver.spark.tables.lake import TRIMMED
from upriver.spark.tables.log import read_changes
from upriver.spark.tables.pieces import Piece, gather, place, read_pieces, write_piece
from upriver.spark.tables.policy import ranges_of
from upriver.spark.tables.state import winners

logger = logging.getLogger("upriver.sync")
FOLDS = "upriver.folds"
LARGE_BYTES = 8 << 20  # a file of this size is left alone,
LARGE_ROWS = 1 << 17  # or of so many rows: folding such ones would stall a batch for seconds
FOLD_BYTES = 64 << 20  # at a time


def fold_run(pieces: Sequence[Piece], fan: int) -> list[Piece]:
    """The smallest size class that has enough files to be worth folding; its files, oldest first."""
    classes: dict[int, list[Piece]] = {}
    for piece in pieces:
        size_class, limit = 0, 1_000
        while piece.rows > limit:
            size_class, limit = size_class + 1, limit * fan
        if piece.size <= LARGE_BYTES and piece.rows <= LARGE_ROWS:
            classes.setdefault(size_class, []).append(piece)
    found = next((classes[size_class] for size_class in sorted(classes) if len(classes[size_class]) >= fan), [])
    return [piece for piece, total in zip(found, accumulate(p.size for p in found), strict=True) if total <= FOLD_BYTES]


def fold_tail(tables: CollectionTables) -> int:
    """Make many small tail files one, without documents that ``current`` has by now. The number of files gone.

    Tombstones stay: an older file of the tail may still have the document.
    """
    run = fold_run(tables.tail.pieces(), tables.options.policy.tail_files)
    if not run:
        return 0
    merged, schema = tables.merged(), row_schema(tables.shape)
    rows = [_unmerged(read_pieces(tables.tail.uri, [piece], schema, adapt=spill), piece, merged) for piece in run]
    table = pa.concat_tables(rows)
    last = winners(table.column("_key"), table.column("_epoch"), table.column("_seqno"))
    vbuckets = table.column("_vbucket").to_numpy()[last]
    order = np.argsort(vbuckets, kind="stable")
    starts = [part.lo for part in ranges_of(tables.current.pieces(), len(merged), 0, tables.options.policy)]
    edges = np.searchsorted(vbuckets[order], starts).tolist()  # ranges are merged one at a time
    _swap(tables.tail, run, gather(table, last[order]), edges)
    return len(run) - 1


def _unmerged(rows: pa.Table, piece: Piece, merged: npt.NDArray[np.int64]) -> pa.Table:
    ahead = pa.array(merged[rows.column("_vbucket").to_numpy()] < piece.last)
    return rows.filter(pc.or_(ahead, rows.column("_deleted").combine_chunks()))


def fold_log(tables: CollectionTables) -> int:
    """Make many small log files one, sorted by vbucket; only of batches that the tables have."""
    applied = tables.applied
    settled = [piece for piece in tables.changes.pieces() if piece.last <= applied and not piece.marks]
    run = fold_run(settled, tables.options.policy.tail_files)
    if not run:
        return 0
    rows = read_changes(tables.changes.uri, run)
    order = pc.sort_indices(rows, [("vbucket", "ascending"), ("epoch", "ascending"), ("seqno", "ascending")])
    _swap(tables.changes, run, gather(rows, order))
    return len(run) - 1


def _swap(table: Table, run: Sequence[Piece], rows: pa.Table, edges: Sequence[int] = ()) -> None:
    lo, hi = min(piece.lo for piece in run), max(piece.hi for piece in run)
    first, last = min(piece.first for piece in run), max(piece.last for piece in run)
    folded = write_piece(table.uri, place(lo, hi, first, last), rows, edges)
    seen = table.version(FOLDS)
    table.commit(FOLDS, 0 if seen is None else seen + 1, [folded], run, rearrange=True)


def trim_log(tables: CollectionTables, before_us: int) -> int:
    """Forget log files whose every change is older than that; the number of files gone.

    From then on a rollback may find that the log does not reach back, and its vbucket is read again.
    """
    old = []
    for piece in tables.changes.pieces():
        if piece.marks or piece.last > tables.applied:
            continue
        newest = pc.max(read_changes(tables.changes.uri, [piece], ["timestamp"]).column("timestamp"))
        if newest.is_valid and newest.value < before_us:
            old.append(piece)
    if old:
        logger.info("%s: %d log files are past the retention", tables.name, len(old))
        seen = tables.changes.version(TRIMMED)
        tables.changes.commit(TRIMMED, 0 if seen is None else seen + 1, [], old)
    return len(old)


def vacuum(tables: CollectionTables, retention_hours: int) -> int:
    """Delete files that left the tables longer ago than the retention, and Delta logs nobody needs."""
    every = [tables.changes, tables.tail, tables.current, tables.lake.table("history", tables.name)]
    return sum(table.vacuum(retention_hours) for table in every if table.exists)
