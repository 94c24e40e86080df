"""Every version of every document with the time it was valid (SCD type 2), built from the log, range by range.

A range of vbuckets is written again once its log has grown by the same share that ``current`` waits for, so the cost
per change stays flat; or when a change has waited for as long as it may. A rollback writes its range again at once,
because the past has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.apply.policy import Policy, Range, in_doubt, ranges_of
from upriver.lake.apply.rows import as_rows, standing_wipes, voided, wiped
from upriver.lake.change_log import Mark, read_changes, read_log, read_marks
from upriver.lake.collection import CollectionTables
from upriver.lake.columns import row_schema, shape_of
from upriver.lake.delta import Moved
from upriver.lake.files import Piece, gather, now_ms, place, uncompressed, write_piece
from upriver.records.schema import Event

HISTORY = "upriver.history"
VALIDITY = [
    pa.field("_valid_from", pa.timestamp("us", tz="UTC")),
    pa.field("_valid_to", pa.timestamp("us", tz="UTC")),
    pa.field("_version", pa.int64()),
]


class History:
    """The history table of one collection."""

    def __init__(self, tables: CollectionTables) -> None:
        self.tables = tables
        self.table = tables.lake.table("history", tables.name)

    def advance(self, *, force: bool = False, settle: bool = False) -> int:
        """Write the ranges again that are worth it, or have waited for too long; the number of them.

        ``settle`` leaves no change waiting; ``force`` writes every range.
        """
        tables = self.tables
        if not tables.current.exists:
            return 0
        schema = pa.schema([*row_schema(tables.shape), *VALIDITY])
        self.table.create(schema, f"all versions of documents of {tables.name}")
        shape_changed = shape_of(self.table.schema()) != tables.shape
        log, batch = tables.log(), tables.applied
        self.table.refresh()
        pieces = self.table.pieces()
        doubt = in_doubt(pieces)  # another writer was here: all of it is written again
        marks = read_marks(tables.changes.uri, log)
        wide = Policy(target_rows=tables.options.policy.target_rows * 2)
        known = [] if doubt else pieces
        size = 0 if known else uncompressed(tables.changes.uri, log)
        ranges = ranges_of(known, tables.options.vbuckets, sum(piece.rows for piece in log), wide, size)
        urgent = self._urgent(ranges, log, settle)
        due = [
            part for part in ranges if force or doubt or shape_changed or part in urgent or self._due(part, log, marks)
        ]
        adds = [self._write(part, batch, log, marks) for part in due]
        stretches = {(part.lo, part.hi) for part in due}
        old = [piece for piece in pieces if doubt or shape_changed or (piece.lo, piece.hi) in stretches]
        try:
            self._commit(adds, old, schema if shape_changed else None)
        except Moved:
            self.table.drop_uncommitted(adds)
            return self.advance(force=force, settle=settle)
        return len(due)

    def _due(self, part: Range, log: Sequence[Piece], marks: Sequence[Mark]) -> bool:
        waiting = sum(piece.rows for piece in log if piece.last > part.merged and not piece.marks)
        new = -(-waiting * part.width // self.tables.options.vbuckets)
        shaken = any(mark.batch > part.merged and part.lo <= mark.vbucket <= part.hi for mark in marks)
        policy = self.tables.options.policy
        return shaken or (new > 0 and (new >= policy.share * part.rows or part.rows + new <= policy.small_rows))

    def _urgent(self, ranges: Sequence[Range], log: Sequence[Piece], settle: bool) -> set[Range]:
        """Ranges with changes that must not wait any longer."""
        limit_s = 0.0 if settle else self.tables.options.policy.staleness_s / 2
        found: set[Range] = set()
        for piece in log:
            behind = {part for part in ranges if piece.last > part.merged and piece.overlaps(part.lo, part.hi)} - found
            if behind and not piece.marks and now_ms() - piece.made_ms >= limit_s * 1000:
                rows = read_changes(self.tables.changes.uri, [piece], ["vbucket"])
                present = rows.column("vbucket").unique().to_pylist()
                found |= {part for part in behind if any(part.lo <= vbucket <= part.hi for vbucket in present)}
        return found

    def _write(self, part: Range, batch: int, log: Sequence[Piece], marks: Sequence[Mark]) -> Piece:
        rows = read_log(self.tables.changes.uri, log, part.lo, part.hi)
        rows = versions(rows, marks, self.tables)
        return write_piece(self.table.uri, place(part.lo, part.hi, 0, batch), rows)

    def _commit(self, adds: Sequence[Piece], old: Sequence[Piece], schema: pa.Schema | None) -> None:
        seen = self.table.version(HISTORY)
        version = 0 if seen is None else seen + 1
        if schema is not None:
            self.table.replace(HISTORY, version, adds, schema, old)
        elif adds:
            self.table.commit(HISTORY, version, adds, old)


def versions(log: pa.Table, marks: Sequence[Mark], tables: CollectionTables) -> pa.Table:
    """Versions of documents with the time from which and to which they were true; deletions only end them."""
    rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK]
    wipes = standing_wipes(marks)
    log = log.filter(pa.array(~voided(log, rollbacks)))
    order = pc.sort_indices(log, [("key", "ascending"), ("epoch", "ascending"), ("seqno", "ascending")])
    log = _once(gather(log, order))
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


def _once(log: pa.Table) -> pa.Table:
    """A change that was delivered twice, as after a rollback that lost nothing, is one version."""
    if log.num_rows < 2:
        return log
    repeated = None
    for name in ("key", "cas", "seqno"):
        column = log.column(name).combine_chunks()
        equal = pc.equal(column.slice(0, len(column) - 1), column.slice(1)).fill_null(False)
        repeated = equal if repeated is None else pc.and_(repeated, equal)
    return log.filter(pa.concat_arrays([_flat(pc.invert(repeated)), pa.array([True])]))


def _ended_by_drop(log: pa.Table, until: pa.Array, wipes: Sequence[Mark]) -> pa.Array:
    """A version that was open when its collection was dropped ends there; nobody knows when, so at its own time."""
    gone = pa.array(wiped(log, wipes))
    open_end = pc.and_(gone, pc.is_null(until))
    return pc.if_else(open_end, log.column("timestamp").combine_chunks(), until)
