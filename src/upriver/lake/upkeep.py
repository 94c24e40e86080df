"""Housekeeping that readers never notice: small files become larger ones, and old ones go after the retention.

Files are only folded with others of their own size class (up to 1,000 rows, 32 times that, ...), so a row is copied
once per class, not once per batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.apply.policy import frontier, in_doubt, ranges_of
from upriver.lake.apply.rows import winners
from upriver.lake.change_log import read_changes
from upriver.lake.collection import CollectionTables
from upriver.lake.columns import row_schema, spill
from upriver.lake.delta import Moved, Table
from upriver.lake.files import Piece, gather, place, read_pieces, uncompressed, write_piece
from upriver.lake.layout import TRIMMED

logger = logging.getLogger("upriver.sync")
FOLDS = "upriver.folds"
LARGE_BYTES = 8 << 20  # a file of this size is left alone,
LARGE_ROWS = 1 << 17  # or of so many rows: folding such ones would stall a batch for seconds
FOLD_BYTES = 64 << 20  # at a time,
FOLD_MEMORY = 128 << 20  # and no more than this in memory


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


def _fitting(root: str, run: Sequence[Piece]) -> list[Piece]:
    """Those of a run that fit into memory together; none if that is only one."""
    small = [piece for piece in run if uncompressed(root, [piece]) <= FOLD_MEMORY // 4]
    totals = accumulate(uncompressed(root, [piece]) for piece in small)
    fitting = [piece for piece, total in zip(small, totals, strict=True) if total <= FOLD_MEMORY]
    return fitting if len(fitting) > 1 else []


def _another_time(fold: Callable[[CollectionTables], int]) -> Callable[[CollectionTables], int]:
    """A fold whose files another writer replaced, or even deleted, is left for the next batch."""

    @wraps(fold)
    def attempt(tables: CollectionTables) -> int:
        try:
            return fold(tables)
        except (Moved, FileNotFoundError):
            return 0

    return attempt


@_another_time
def fold_tail(tables: CollectionTables) -> int:
    """Make many small tail files one, without documents that ``current`` has by now. The number of files gone.

    Tombstones stay: an older file of the tail may still have the document.
    """
    current, tail = tables.current.pieces(), tables.tail.pieces()
    run = [] if in_doubt(current) else fold_run(tail, tables.options.policy.tail_files)
    run = [] if any(piece.foreign for piece in tail) else _fitting(tables.tail.uri, run)
    if not run:
        return 0
    merged, schema = frontier(current, tables.options.vbuckets), row_schema(tables.shape)
    rows = [_unmerged(read_pieces(tables.tail.uri, [piece], schema, adapt=spill), piece, merged) for piece in run]
    table = pa.concat_tables(rows)
    last = winners(table.column("_key"), table.column("_epoch"), table.column("_seqno"))
    vbuckets = table.column("_vbucket").to_numpy()[last]
    order = np.argsort(vbuckets, kind="stable")
    starts = [part.lo for part in ranges_of(current, len(merged), 0, tables.options.policy)]
    edges = np.searchsorted(vbuckets[order], starts).tolist()  # ranges are merged one at a time
    return _swap(tables.tail, run, gather(table, last[order]), edges)


def _unmerged(rows: pa.Table, piece: Piece, merged: npt.NDArray[np.int64]) -> pa.Table:
    ahead = pa.array(merged[rows.column("_vbucket").to_numpy()] < piece.last)
    return rows.filter(pc.or_(ahead, rows.column("_deleted").combine_chunks()))


@_another_time
def fold_log(tables: CollectionTables) -> int:
    """Make many small log files one, sorted by vbucket; only of batches that the tables have."""
    applied = tables.applied
    settled = [
        piece for piece in tables.changes.pieces() if piece.last <= applied and not piece.marks and not piece.foreign
    ]
    run = _fitting(tables.changes.uri, fold_run(settled, tables.options.policy.tail_files))
    if not run:
        return 0
    rows = read_changes(tables.changes.uri, run)
    order = pc.sort_indices(rows, [("vbucket", "ascending"), ("epoch", "ascending"), ("seqno", "ascending")])
    return _swap(tables.changes, run, gather(rows, order))


def _swap(table: Table, run: Sequence[Piece], rows: pa.Table, edges: Sequence[int] = ()) -> int:
    """One file in the place of many; the number gone."""
    lo, hi = min(piece.lo for piece in run), max(piece.hi for piece in run)
    first, last = min(piece.first for piece in run), max(piece.last for piece in run)
    folded = write_piece(table.uri, place(lo, hi, first, last), rows, edges)
    folded = replace(folded, made_ms=min(piece.made_ms for piece in run))
    seen = table.version(FOLDS)
    try:
        table.commit(FOLDS, 0 if seen is None else seen + 1, [folded], run, rearrange=True)
    except Moved:
        table.drop_uncommitted([folded])
        raise
    return len(run) - 1


def trim_log(tables: CollectionTables, before_us: int) -> int:
    """Forget the oldest batches of the log, if every change of theirs is older than that; the number of files gone.

    What stays is a history without gaps, and up to where it is gone is noted, vbucket by vbucket, before it is: a
    rollback that needs what was forgotten reads its vbucket again.
    """
    pieces = [piece for piece in tables.log() if not piece.marks]
    old = _prefix(pieces, lambda piece: piece.last <= tables.applied and _newest_us(tables, piece) < before_us)
    if not old:
        return 0
    logger.info("%s: %d log files are past the retention", tables.name, len(old))
    floors = tables.floors()
    for piece in old:
        rows = read_changes(tables.changes.uri, [piece], ["vbucket", "seqno"])
        newest = rows.group_by("vbucket").aggregate([("seqno", "max")])
        for vbucket, seqno in zip(newest["vbucket"].to_pylist(), newest["seqno_max"].to_pylist(), strict=True):
            floors[vbucket] = max(seqno, floors.get(vbucket, 0))
    tables.lake.write_floors(tables.name, floors)
    seen = tables.changes.version(TRIMMED)
    try:
        tables.changes.commit(TRIMMED, 0 if seen is None else seen + 1, [], old)
    except Moved:  # another time
        return 0
    return len(old)


def _prefix(pieces: Sequence[Piece], is_old: Callable[[Piece], bool]) -> list[Piece]:
    """The files of the oldest batches, as many as are old together: none that stays has a batch as old as theirs."""
    keep = [piece for piece in pieces if not is_old(piece)]
    old = [piece for piece in pieces if piece not in keep]
    while True:
        limit = min((piece.first for piece in keep), default=None)
        late = [piece for piece in old if limit is not None and piece.last >= limit]
        if not late:
            return old
        keep, old = [*keep, *late], [piece for piece in old if piece not in late]


def _newest_us(tables: CollectionTables, piece: Piece) -> float:
    newest = pc.max(read_changes(tables.changes.uri, [piece], ["timestamp"]).column("timestamp"))
    return newest.value if newest.is_valid else math.inf


def vacuum(tables: CollectionTables, retention_hours: int) -> int:
    """Delete files that left the tables longer ago than the retention, and Delta logs nobody needs."""
    every = [tables.changes, tables.tail, tables.current, tables.lake.table("history", tables.name)]
    return sum(table.vacuum(retention_hours) for table in every if table.exists)
