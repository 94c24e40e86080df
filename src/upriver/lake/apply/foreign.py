"""Log files that another tool wrote, as ``OPTIMIZE`` does, are rewritten as ours, whose names say what they hold.

Such a file mixes marks with changes, and applied batches with unapplied ones. Ours never do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.change_log import DOCUMENTS, LOG, with_voided
from upriver.lake.delta import CommitConflict, Table
from upriver.lake.files import DataFile, foreign_slices, gather, new_file_name, write_file

ADOPTED = "upriver.adopted"
SLICE_BYTES = 128 << 20
_ORDER = [("vbucket", "ascending"), ("epoch", "ascending"), ("seqno", "ascending")]


def adopt(log: Table, applied: int) -> None:
    """Replace the files of other tools one by one; ``applied`` is the last batch that tail and current have."""
    for file in log.files():
        if file.foreign:
            slices = foreign_slices(log.uri, file, LOG, SLICE_BYTES)
            ours = [replace(made, made_ms=file.made_ms) for rows in slices for made in _ours(log.uri, rows, applied)]
            try:
                log.commit(ADOPTED, log.next_version(ADOPTED), ours, [file], rearrange=True)
            except CommitConflict:
                log.drop_uncommitted(ours)
                raise


def _ours(root: str, rows: pa.Table, applied: int) -> Iterator[DataFile]:
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
            path = new_file_name(span["min"], span["max"], batches["min"], batches["max"], marks=marks)
            yield write_file(root, path, part)
