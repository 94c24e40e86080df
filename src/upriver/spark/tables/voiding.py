"""Changes that a rollback took back stay in the log, marked ``voided``, from the very commit that has the rollback.

Files that hold such changes are written again. They are few: what a failover loses is recent, and recent files are
small. Then any reader filters with ``NOT voided``, without knowing what an epoch is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.records.schema import Event
from upriver.spark.tables.log import LOG, Mark
from upriver.spark.tables.pieces import Piece, place, read_pieces, write_piece
from upriver.spark.tables.state import Mask, voided

_NEEDED = ["event", "vbucket", "seqno", "epoch", "voided"]


def void(root: str, pieces: Sequence[Piece], rollbacks: Sequence[Mark]) -> dict[str, Piece]:
    """Write those files of a log again that hold changes to be marked; the new ones, by their old paths."""
    if not rollbacks:
        return {}
    span = min(mark.vbucket for mark in rollbacks), max(mark.vbucket for mark in rollbacks)
    again = {}
    for piece in pieces:
        if piece.overlaps(*span) and _lost(read_pieces(root, [piece], LOG, _NEEDED, span), rollbacks).any():
            again[piece.path] = _written_again(root, piece, rollbacks)
    return again


def _lost(rows: pa.Table, rollbacks: Sequence[Mark]) -> Mask:
    """Changes that these rollbacks took back and that are not marked yet; a rollback itself always stands."""
    stands = pc.or_(pc.equal(rows.column("event"), Event.ROLLBACK.value), pc.fill_null(rows.column("voided"), False))
    lost: Mask = voided(rows, rollbacks) & ~stands.to_numpy().astype(bool)
    return lost


def _written_again(root: str, piece: Piece, rollbacks: Sequence[Mark]) -> Piece:
    rows = read_pieces(root, [piece], LOG)
    known = pc.fill_null(rows.column("voided"), False).to_numpy()
    marked = pa.array(np.logical_or(known, _lost(rows, rollbacks)))
    rows = rows.set_column(LOG.get_field_index("voided"), LOG.field("voided"), marked)
    return write_piece(root, place(piece.lo, piece.hi, piece.first, piece.last, marks=piece.marks), rows)
