"""Rollbacks in the change log: epochs that only grow, and changes marked as voided.

The source counts the rollbacks of a vbucket, but it may miss one that an executor met and could not report. The log
misses none: no row has a lower epoch than the last rollback of its vbucket, and every new rollback has a higher one.

Changes that a rollback took back stay in the log. The commit that adds the rollback rewrites the files that hold them,
with ``voided`` set. These files are few: a failover loses recent changes, and recent files are small. Readers leave
voided changes out with ``voided IS NOT TRUE`` and need not know what an epoch is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.apply.rows import Mask, voided
from upriver.lake.change_log import LOG, LogMark, read_changes
from upriver.lake.delta import Table
from upriver.lake.files import DataFile, new_file_name, write_file
from upriver.records.schema import Event

VOIDED = "upriver.voided"
_NEEDED = ["event", "vbucket", "seqno", "epoch", "collection_id", "voided"]


class Epochs:
    """Lifts the rows of one task, in order, to the epochs of the log. ``floors`` are the log's epochs by vbucket."""

    def __init__(self, floors: Mapping[int, int]) -> None:
        self._floors = dict(floors)

    def lift(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same rows, with a higher epoch where the log needs it."""
        for rows in batches:
            is_rollback = pc.equal(rows.column("event"), Event.ROLLBACK.value)
            rollbacks = pc.indices_nonzero(is_rollback).to_pylist()
            if not rollbacks and not self._floors:
                yield rows
                continue
            start = 0
            for at in rollbacks:
                yield from self._segment(rows.slice(start, at - start))
                yield self._rollback(rows.slice(at, 1))
                start = at + 1
            yield from self._segment(rows.slice(start))

    def _segment(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if rows.num_rows == 0:
            return
        vbuckets = rows.column("vbucket").to_numpy()
        floors = np.zeros(int(vbuckets.max()) + 1, dtype=np.int32)
        for vbucket, floor in self._floors.items():
            if vbucket < len(floors):
                floors[vbucket] = floor
        yield _with_epochs(rows, np.maximum(rows.column("epoch").to_numpy(), floors[vbuckets]))

    def _rollback(self, row: pa.RecordBatch) -> pa.RecordBatch:
        vbucket = row.column("vbucket")[0].as_py()
        epoch = max(row.column("epoch")[0].as_py(), self._floors.get(vbucket, 0) + 1)
        self._floors[vbucket] = epoch
        return _with_epochs(row, np.array([epoch], dtype=np.int32))


def _with_epochs(rows: pa.RecordBatch, epochs: object) -> pa.RecordBatch:
    position = rows.schema.get_field_index("epoch")
    return rows.set_column(position, rows.schema.field(position), pa.array(epochs, pa.int32()))


def void(root: str, files: Sequence[DataFile], rollbacks: Sequence[LogMark]) -> dict[str, DataFile]:
    """Rewrite the log files that hold changes to be voided; the new files, by their old paths."""
    if not rollbacks:
        return {}
    span = min(mark.vbucket for mark in rollbacks), max(mark.vbucket for mark in rollbacks)
    rewritten = {}
    for file in files:
        if file.overlaps(*span) and _lost(read_changes(root, [file], _NEEDED, span), rollbacks).any():
            rewritten[file.path] = _rewritten(root, file, rollbacks)
    return rewritten


def _lost(rows: pa.Table, rollbacks: Sequence[LogMark]) -> Mask:
    """Changes that these rollbacks took back and that are not voided yet.

    A rollback itself is never voided, nor is a drop for good (`LogMark.for_good`), which has no collection id.
    """
    events = rows.column("event")
    dropped = pc.and_(pc.equal(events, Event.COLLECTION_DROPPED.value), pc.is_null(rows.column("collection_id")))
    stands = pc.or_(pc.or_(pc.equal(events, Event.ROLLBACK.value), dropped), rows.column("voided"))
    lost: Mask = voided(rows, rollbacks) & ~stands.to_numpy().astype(bool)
    return lost


def _rewritten(root: str, file: DataFile, rollbacks: Sequence[LogMark]) -> DataFile:
    rows = read_changes(root, [file])
    marked = pa.array(np.logical_or(rows.column("voided").to_numpy(), _lost(rows, rollbacks)))
    rows = rows.set_column(LOG.get_field_index("voided"), LOG.field("voided"), marked)
    again = write_file(root, new_file_name(file.lo, file.hi, file.first_batch, file.last_batch, marks=file.marks), rows)
    return replace(again, made_ms=file.made_ms)


def add_voided_column(log: Table, marks: Sequence[LogMark]) -> None:
    """Add the column ``voided`` to a log of an earlier version, and void what earlier rollbacks took back.

    The files come first: after a crash before the column is added, the next run does all of it again.
    """
    if "voided" in log.schema().names:
        return
    old = log.files()
    rewritten = void(log.uri, old, [mark for mark in marks if mark.event == Event.ROLLBACK])
    if rewritten:
        removes = [file for file in old if file.path in rewritten]
        log.commit(VOIDED, log.next_version(VOIDED), rewritten.values(), removes, rearrange=True)
    log.add_columns([LOG.field("voided").with_nullable(True)])  # Delta adds only nullable columns
