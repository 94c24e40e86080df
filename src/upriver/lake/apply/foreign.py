"""Log files that another tool wrote, as ``OPTIMIZE`` does: written again as ours, whose names say what they hold.

Such a file has marks among its changes, and batches that the tables have beside batches that they lack. Ours never do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.change_log import DOCUMENTS, LOG, with_voided
from upriver.lake.delta import Moved, Table
from upriver.lake.files import Piece, foreign_slices, gather, place, write_piece

ADOPTED = "upriver.adopted"
SLICE_BYTES = 128 << 20
_ORDER = [("vbucket", "ascending"), ("epoch", "ascending"), ("seqno", "ascending")]


def adopt(log: Table, applied: int) -> None:
    """Put ours in the place of files of others, one by one; ``applied`` is the last batch that the tables have."""
    for piece in log.pieces():
        if piece.foreign:
            slices = foreign_slices(log.uri, piece, LOG, SLICE_BYTES)
            seen = log.version(ADOPTED)
            ours = [replace(made, made_ms=piece.made_ms) for rows in slices for made in _ours(log.uri, rows, applied)]
            try:
                log.commit(ADOPTED, 0 if seen is None else seen + 1, ours, [piece], rearrange=True)
            except Moved:
                log.drop_uncommitted(ours)
                raise


def _ours(root: str, rows: pa.Table, applied: int) -> Iterator[Piece]:
    rows = with_voided(rows, LOG)
    rows = gather(rows, pc.sort_indices(rows, _ORDER))
    old = pc.less_equal(rows.column("batch"), applied)
    documents = pc.is_in(rows.column("event"), value_set=pa.array(DOCUMENTS))
    for part, marks in (
        (rows.filter(pc.and_(documents, old)), False),
        (rows.filter(pc.and_not(documents, old)), False),
        (rows.filter(pc.invert(documents)), True),
    ):
        if part.num_rows:
            span, batches = (pc.min_max(part.column(name)).as_py() for name in ("vbucket", "batch"))
            path = place(span["min"], span["max"], batches["min"], batches["max"], marks=marks)
            yield write_piece(root, path, part)
