"""How far a batch of changes brings a reader, worked out from its rows: for positions between two batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from upriver.model import unsigned

if TYPE_CHECKING:
    import pyarrow as pa


class RowSpan(NamedTuple):
    """The rows of a vbucket in a batch: first and last, and the furthest end of a snapshot that they belong to.

    If the vbucket silently went back inside the batch, only the rows after that count.
    """

    first: int
    seqno: int
    snapshot_end: int
    vbuuid: int
    epoch: int
    went_back: bool


def row_spans(batch: pa.RecordBatch) -> dict[int, RowSpan]:
    """The rows of each vbucket; without those of out-of-order snapshots, which bring nobody any further."""
    columns = {name: _numbers(batch, name) for name in ("vbucket", "seqno", "snapshot_end", "vbuuid", "epoch")}
    counted = columns["snapshot_end"] >= columns["seqno"]
    present = np.unique(columns["vbucket"][counted]).tolist()
    return {vb: _span(columns, np.flatnonzero(counted & (columns["vbucket"] == vb))) for vb in present}


def out_of_order(batch: pa.RecordBatch) -> dict[int, int]:
    """The highest seqno of each vbucket among documents of out-of-order snapshots."""
    vbuckets, seqnos, ends = (_numbers(batch, name) for name in ("vbucket", "seqno", "snapshot_end"))
    rows = ends < seqnos
    if not rows.any():
        return {}
    rows &= np.asarray(batch.column("key").is_valid())
    return {vb: int(seqnos[rows & (vbuckets == vb)].max()) for vb in np.unique(vbuckets[rows]).tolist()}


def _span(columns: dict[str, npt.NDArray[np.int64]], rows: npt.NDArray[np.int64]) -> RowSpan:
    seqnos, epochs = columns["seqno"][rows], columns["epoch"][rows]
    back = np.flatnonzero((seqnos[1:] <= seqnos[:-1]) | (epochs[1:] != epochs[:-1]))
    rows = rows[int(back[-1]) + 1 :] if back.size else rows
    last = rows[-1]
    return RowSpan(
        int(columns["seqno"][rows[0]]), int(columns["seqno"][last]), int(columns["snapshot_end"][rows].max()),
        unsigned(int(columns["vbuuid"][last])), int(columns["epoch"][last]), bool(back.size),
    )  # fmt: skip


def _numbers(batch: pa.RecordBatch, name: str) -> Any:
    column = batch.column(name)
    return (column.fill_null(-1) if column.null_count else column).to_numpy(zero_copy_only=False)
