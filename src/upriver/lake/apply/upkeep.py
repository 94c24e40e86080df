"""Upkeep of the tables, unnoticed by readers: small files are folded into larger ones, and old files are deleted.

Files are only folded with others of their size class (up to 1,000 rows, 32 times that, ...), so a row is copied once
per class, not once per batch.
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
from upriver.lake.apply.rows import latest_indices
from upriver.lake.change_log import LOG_ORDER, read_changes
from upriver.lake.collection import CollectionTables
from upriver.lake.columns import row_schema, spill
from upriver.lake.delta import CommitConflict, Table
from upriver.lake.files import DataFile, bytes_in_memory, gather, new_file_name, read_files, write_file
from upriver.lake.layout import TRIMMED

logger = logging.getLogger("upriver.sync")
FOLDS = "upriver.folds"
LARGE_BYTES = 8 << 20  # a file of this size is left alone,
LARGE_ROWS = 1 << 17  # and so is one of this many rows: folding it would stall a batch for seconds
FOLD_BYTES = 64 << 20  # folded at a time, as files,
FOLD_MEMORY = 128 << 20  # and in memory


def fold_candidates(files: Sequence[DataFile], fan: int) -> list[DataFile]:
    """The smallest size class that has enough files to be worth folding; its files, oldest first."""
    classes: dict[int, list[DataFile]] = {}
    for file in files:
        size_class, limit = 0, 1_000
        while file.rows > limit:
            size_class, limit = size_class + 1, limit * fan
        if file.size <= LARGE_BYTES and file.rows <= LARGE_ROWS:
            classes.setdefault(size_class, []).append(file)
    found = next((classes[size_class] for size_class in sorted(classes) if len(classes[size_class]) >= fan), [])
    return [file for file, total in zip(found, accumulate(p.size for p in found), strict=True) if total <= FOLD_BYTES]


def _fitting(root: str, run: Sequence[DataFile]) -> list[DataFile]:
    """The files of a run that fit into memory together; none if it is only one."""
    small = [file for file in run if bytes_in_memory(root, [file]) <= FOLD_MEMORY // 4]
    totals = accumulate(bytes_in_memory(root, [file]) for file in small)
    fitting = [file for file, total in zip(small, totals, strict=True) if total <= FOLD_MEMORY]
    return fitting if len(fitting) > 1 else []


def _skip_on_conflict(fold: Callable[[CollectionTables], int]) -> Callable[[CollectionTables], int]:
    """Leave a fold to the next batch when another writer has replaced or deleted its files."""

    @wraps(fold)
    def attempt(tables: CollectionTables) -> int:
        try:
            return fold(tables)
        except (CommitConflict, FileNotFoundError):
            return 0

    return attempt


@_skip_on_conflict
def fold_tail(tables: CollectionTables) -> int:
    """Fold small tail files into one, without documents that ``current`` has by now; how many files it saves.

    Tombstones stay: an older file of the tail may still have the document.
    """
    current, tail = tables.current.files(), tables.tail.files()
    run = [] if in_doubt(current) else fold_candidates(tail, tables.options.policy.tail_files)
    run = [] if any(file.foreign for file in tail) else _fitting(tables.tail.uri, run)
    if not run:
        return 0
    merged, schema = frontier(current, tables.options.vbuckets), row_schema(tables.shape)
    rows = [_unmerged(read_files(tables.tail.uri, [file], schema, adapt=spill), file, merged) for file in run]
    table = pa.concat_tables(rows)
    last = latest_indices(table.column("_key"), table.column("_epoch"), table.column("_seqno"))
    vbuckets = table.column("_vbucket").to_numpy()[last]
    order = np.argsort(vbuckets, kind="stable")
    starts = [part.lo for part in ranges_of(current, len(merged), 0, tables.options.policy)]
    edges = np.searchsorted(vbuckets[order], starts).tolist()  # ranges are merged one at a time
    return _swap(tables.tail, run, gather(table, last[order]), edges)


def _unmerged(rows: pa.Table, file: DataFile, merged: npt.NDArray[np.int64]) -> pa.Table:
    ahead = pa.array(merged[rows.column("_vbucket").to_numpy()] < file.last_batch)
    return rows.filter(pc.or_(ahead, rows.column("_deleted").combine_chunks()))


@_skip_on_conflict
def fold_log(tables: CollectionTables) -> int:
    """Fold small log files of applied batches into one, sorted by vbucket; how many files it saves."""
    applied = tables.applied
    candidates = [
        file for file in tables.changes.files() if file.last_batch <= applied and not file.marks and not file.foreign
    ]
    run = _fitting(tables.changes.uri, fold_candidates(candidates, tables.options.policy.tail_files))
    if not run:
        return 0
    rows = read_changes(tables.changes.uri, run)
    return _swap(tables.changes, run, gather(rows, pc.sort_indices(rows, LOG_ORDER)))


def _swap(table: Table, run: Sequence[DataFile], rows: pa.Table, edges: Sequence[int] = ()) -> int:
    """Replace many files by one; how many files it saves."""
    lo, hi = min(file.lo for file in run), max(file.hi for file in run)
    first, last = min(file.first_batch for file in run), max(file.last_batch for file in run)
    folded = write_file(table.uri, new_file_name(lo, hi, first, last), rows, edges)
    folded = replace(folded, made_ms=min(file.made_ms for file in run))
    try:
        table.commit(FOLDS, table.next_version(FOLDS), [folded], run, rearrange=True)
    except CommitConflict:
        table.drop_uncommitted([folded])
        raise
    return len(run) - 1


def trim_log(tables: CollectionTables, before_us: int) -> int:
    """Remove the oldest batches of the log whose changes are all older than ``before_us``; the number of files removed.

    What remains has no gaps. The lake notes first up to which seqno each vbucket is trimmed, so a rollback that needs
    trimmed changes reads its vbucket again.
    """
    files = [file for file in tables.log() if not file.marks]
    old = _prefix(files, lambda file: file.last_batch <= tables.applied and _newest_us(tables, file) < before_us)
    if not old:
        return 0
    logger.info("%s: %d log files are past the retention", tables.name, len(old))
    floors = tables.floors()
    for file in old:
        rows = read_changes(tables.changes.uri, [file], ["vbucket", "seqno"])
        newest = rows.group_by("vbucket").aggregate([("seqno", "max")])
        for vbucket, seqno in zip(newest["vbucket"].to_pylist(), newest["seqno_max"].to_pylist(), strict=True):
            floors[vbucket] = max(seqno, floors.get(vbucket, 0))
    tables.lake.write_floors(tables.name, floors)
    try:
        tables.changes.commit(TRIMMED, tables.changes.next_version(TRIMMED), [], old)
    except CommitConflict:  # the next upkeep tries again
        return 0
    return len(old)


def _prefix(files: Sequence[DataFile], is_old: Callable[[DataFile], bool]) -> list[DataFile]:
    """The old files that form a prefix of the log: no remaining file has a batch as old as theirs."""
    keep = [file for file in files if not is_old(file)]
    old = [file for file in files if file not in keep]
    while True:
        limit = min((file.first_batch for file in keep), default=None)
        late = [file for file in old if limit is not None and file.last_batch >= limit]
        if not late:
            return old
        keep, old = [*keep, *late], [file for file in old if file not in late]


def _newest_us(tables: CollectionTables, file: DataFile) -> float:
    newest = pc.max(read_changes(tables.changes.uri, [file], ["timestamp"]).column("timestamp"))
    return newest.value if newest.is_valid else math.inf


def vacuum(tables: CollectionTables, retention_hours: int) -> int:
    """Delete files that left the tables longer ago than the retention, and old entries of Delta logs."""
    every = [tables.changes, tables.tail, tables.current, tables.lake.table("history", tables.name)]
    return sum(table.vacuum(retention_hours) for table in every if table.exists)
