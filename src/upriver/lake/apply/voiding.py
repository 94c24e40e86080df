"""Changes that a rollback took back stay in the log, marked ``voided``, from the very commit that has the rollback.

Files that hold such changes are written again. They are few: what a failover loses is recent, and recent files are
small. Then any reader filters with ``voided IS NOT TRUE``, without knowing what an epoch is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.apply.rows import Mask, voided
from upriver.lake.change_log import LOG, Mark, read_changes
from upriver.lake.delta import Table
from upriver.lake.files import Piece, place, write_piece
from upriver.records.schema import Event

VOIDED = "upriver.voided"
_NEEDED = ["event", "vbucket", "seqno", "epoch", "collection_id", "voided"]


def void(root: str, pieces: Sequence[Piece], rollbacks: Sequence[Mark]) -> dict[str, Piece]:
    """Write those files of a log again that hold changes to be marked; the new ones, by their old paths."""
    if not rollbacks:
        return {}
    span = min(mark.vbucket for mark in rollbacks), max(mark.vbucket for mark in rollbacks)
    again = {}
    for piece in pieces:
        if piece.overlaps(*span) and _lost(read_changes(root, [piece], _NEEDED, span), rollbacks).any():
            again[piece.path] = _written_again(root, piece, rollbacks)
    return again


def _lost(rows: pa.Table, rollbacks: Sequence[Mark]) -> Mask:
    """Changes that these rollbacks took back and that are not marked yet.

    A rollback itself always stands, and so does a drop for good (`Mark.for_good`), which has no collection's id.
    """
    events = rows.column("event")
    dropped = pc.and_(pc.equal(events, Event.COLLECTION_DROPPED.value), pc.is_null(rows.column("collection_id")))
    stands = pc.or_(pc.or_(pc.equal(events, Event.ROLLBACK.value), dropped), rows.column("voided"))
    lost: Mask = voided(rows, rollbacks) & ~stands.to_numpy().astype(bool)
    return lost


def _written_again(root: str, piece: Piece, rollbacks: Sequence[Mark]) -> Piece:
    rows = read_changes(root, [piece])
    marked = pa.array(np.logical_or(rows.column("voided").to_numpy(), _lost(rows, rollbacks)))
    rows = rows.set_column(LOG.get_field_index("voided"), LOG.field("voided"), marked)
    again = write_piece(root, place(piece.lo, piece.hi, piece.first, piece.last, marks=piece.marks), rows)
    return replace(again, made_ms=piece.made_ms)


def catch_up(log: Table, marks: Sequence[Mark]) -> None:
    """Give a log that was made before there was ``voided`` the column, and mark what was taken back until then.

    The files first: a crash before the column is there leaves all of it to the next run, which finds them marked.
    """
    if "voided" in log.schema().names:
        return
    old = log.pieces()
    again = void(log.uri, old, [mark for mark in marks if mark.event == Event.ROLLBACK])
    if again:
        seen = log.version(VOIDED)
        removes = [piece for piece in old if piece.path in again]
        log.commit(VOIDED, 0 if seen is None else seen + 1, again.values(), removes, rearrange=True)
    log.add_columns([LOG.field("voided").with_nullable(True)])  # Delta adds no other
