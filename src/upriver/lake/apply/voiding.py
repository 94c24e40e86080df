"""Changes that a rollback took back stay in the change log, marked ``voided`` in the commit that has the rollback.

Files that hold such changes are written again. They are few: a failover loses recent changes, and recent files are
small. Readers leave voided changes out with ``voided IS NOT TRUE`` and need not know what an epoch is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Add the column ``voided`` to a log of an earlier version, and void what was taken back until then.

    The files come first: after a crash before the column is there, the next run does all of it again.
    """
    if "voided" in log.schema().names:
        return
    old = log.files()
    rewritten = void(log.uri, old, [mark for mark in marks if mark.event == Event.ROLLBACK])
    if rewritten:
        removes = [file for file in old if file.path in rewritten]
        log.commit(VOIDED, log.next_version(VOIDED), rewritten.values(), removes, rearrange=True)
    log.add_columns([LOG.field("voided").with_nullable(True)])  # Delta adds no other
