"""The history table: every version of every document with the time it was valid (SCD type 2), built from the log.

A range of vbuckets is rewritten when its log has grown by ``share``, as in ``current``, so the cost per change stays
flat; or when a change has waited for as long as it may. A rollback rewrites its range at once, because it changes the
past.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.apply.policy import MergePolicy, VbucketRange, in_doubt, ranges_of
from upriver.lake.apply.rows import as_rows, standing_wipes, voided, wiped
from upriver.lake.change_log import LogMark, read_changes, read_log, read_marks
from upriver.lake.collection import CollectionTables
from upriver.lake.columns import row_schema, shape_of
from upriver.lake.delta import CommitConflict
from upriver.lake.files import DataFile, bytes_in_memory, gather, new_file_name, now_ms, write_file
from upriver.records.schema import Event

HISTORY = "upriver.history"
VALIDITY = [
    pa.field("_valid_from", pa.timestamp("us", tz="UTC")),
    pa.field("_valid_to", pa.timestamp("us", tz="UTC")),
    pa.field("_version", pa.int64()),
]


class HistoryTable:
    """The history table of one collection."""

    def __init__(self, tables: CollectionTables) -> None:
        self.tables = tables
        self.table = tables.lake.table("history", tables.name)

    def advance(self, *, force: bool = False, drain: bool = False) -> int:
        """Rewrite the ranges that are worth it, or have waited too long; how many.

        ``drain`` leaves no change waiting; ``force`` rewrites every range.
        """
        tables = self.tables
        if not tables.current.exists:
            return 0
        schema = pa.schema([*row_schema(tables.shape), *VALIDITY])
        self.table.create(schema, f"all versions of documents of {tables.name}")
        shape_changed = shape_of(self.table.schema()) != tables.shape
        log, batch = tables.log(), tables.applied
        self.table.refresh()
        files = self.table.files()
        doubt = in_doubt(files)  # another tool wrote some files: rewrite all of them
        marks = read_marks(tables.changes.uri, log)
        wide = MergePolicy(target_rows=tables.options.policy.target_rows * 2)
        known = [] if doubt else files
        size = 0 if known else bytes_in_memory(tables.changes.uri, log)
        ranges = ranges_of(known, tables.options.vbuckets, sum(file.rows for file in log), wide, size)
        urgent = self._urgent(ranges, log, drain)
        due = [
            part for part in ranges if force or doubt or shape_changed or part in urgent or self._due(part, log, marks)
        ]
        adds = [self._write(part, batch, log, marks) for part in due]
        spans = {(part.lo, part.hi) for part in due}
        old = [file for file in files if doubt or shape_changed or (file.lo, file.hi) in spans]
        try:
            self._commit(adds, old, schema if shape_changed else None)
        except CommitConflict:
            self.table.drop_uncommitted(adds)
            return self.advance(force=force, drain=drain)
        return len(due)

    def _due(self, part: VbucketRange, log: Sequence[DataFile], marks: Sequence[LogMark]) -> bool:
        waiting = sum(file.rows for file in log if file.last_batch > part.merged and not file.marks)
        new = -(-waiting * part.width // self.tables.options.vbuckets)
        marked = any(mark.batch > part.merged and part.lo <= mark.vbucket <= part.hi for mark in marks)
        policy = self.tables.options.policy
        return marked or (new > 0 and (new >= policy.share * part.rows or part.rows + new <= policy.small_rows))

    def _urgent(self, ranges: Sequence[VbucketRange], log: Sequence[DataFile], drain: bool) -> set[VbucketRange]:
        """Ranges with changes that must not wait longer."""
        limit_s = 0.0 if drain else self.tables.options.policy.staleness_s / 2
        found: set[VbucketRange] = set()
        for file in log:
            behind = {
                part for part in ranges if file.last_batch > part.merged and file.overlaps(part.lo, part.hi)
            } - found
            if behind and not file.marks and now_ms() - file.made_ms >= limit_s * 1000:
                rows = read_changes(self.tables.changes.uri, [file], ["vbucket"])
                present = rows.column("vbucket").unique().to_pylist()
                found |= {part for part in behind if any(part.lo <= vbucket <= part.hi for vbucket in present)}
        return found

    def _write(self, part: VbucketRange, batch: int, log: Sequence[DataFile], marks: Sequence[LogMark]) -> DataFile:
        rows = read_log(self.tables.changes.uri, log, part.lo, part.hi)
        rows = versions(rows, marks, self.tables)
        return write_file(self.table.uri, new_file_name(part.lo, part.hi, 0, batch), rows)

    def _commit(self, adds: Sequence[DataFile], old: Sequence[DataFile], schema: pa.Schema | None) -> None:
        version = self.table.next_version(HISTORY)
        if schema is not None:
            self.table.replace(HISTORY, version, adds, schema, old)
        elif adds:
            self.table.commit(HISTORY, version, adds, old)


def versions(log: pa.Table, marks: Sequence[LogMark], tables: CollectionTables) -> pa.Table:
    """Versions of documents with the times from and to which they were valid; a deletion only ends a version."""
    rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK]
    wipes = standing_wipes(marks)
    log = log.filter(pa.array(~voided(log, rollbacks)))
    order = pc.sort_indices(log, [("key", "ascending"), ("epoch", "ascending"), ("seqno", "ascending")])
    log = _without_repeats(gather(log, order))
    rows = as_rows(log, tables.shape)
    count = rows.num_rows
    keys, times = log.column("key").combine_chunks(), log.column("timestamp").combine_chunks()
    same = pc.equal(keys.slice(0, max(count - 1, 0)), keys.slice(1)) if count else pa.array([], pa.bool_())
    following = pa.concat_arrays([times.slice(1), pa.nulls(min(count, 1), times.type)])
    has_next = pa.concat_arrays([_flat(same), pa.array([False] * min(count, 1), pa.bool_())])
    until = pc.if_else(has_next, following, pa.scalar(None, times.type))
    until = _ended_by_drop(log, until, wipes)
    rows = rows.append_column(VALIDITY[0], times).append_column(VALIDITY[1], until)
    rows = rows.append_column(VALIDITY[2], log.column("rev_seqno"))
    return rows.filter(pc.invert(rows.column("_deleted")))


def _flat(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _without_repeats(log: pa.Table) -> pa.Table:
    """Leave out repeated changes, which follow a rollback that lost nothing."""
    if log.num_rows < 2:
        return log
    repeated = None
    for name in ("key", "cas", "seqno"):
        column = log.column(name).combine_chunks()
        equal = pc.equal(column.slice(0, len(column) - 1), column.slice(1)).fill_null(False)
        repeated = equal if repeated is None else pc.and_(repeated, equal)
    return log.filter(pa.concat_arrays([_flat(pc.invert(repeated)), pa.array([True])]))


def _ended_by_drop(log: pa.Table, until: pa.Array, wipes: Sequence[LogMark]) -> pa.Array:
    """End versions that were valid when their collection was dropped; a drop has no time, so they end as they begin."""
    gone = pa.array(wiped(log, wipes))
    open_end = pc.and_(gone, pc.is_null(until))
    return pc.if_else(open_end, log.column("timestamp").combine_chunks(), until)
