"""How far a batch of changes brings a reader, worked out from its rows: for positions between two batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from upriver.model import Position


class Step(NamedTuple):
    """The rows of a vbucket in a batch: first and last, and the furthest end of a snapshot that they belong to.

    Where the vbucket went back in the batch, silently, only the rows after that count.
    """

    first: int
    seqno: int
    snapshot_end: int
    vbuuid: int
    epoch: int
    went_back: bool


def last_rows(batch: Any) -> dict[int, Step]:
    """Where the documents of a batch bring each vbucket; rows of out-of-order snapshots bring nobody anywhere."""
    columns = {name: _numbers(batch, name) for name in ("vbucket", "seqno", "snapshot_end", "vbuuid", "epoch")}
    counted = columns["snapshot_end"] >= columns["seqno"]
    present = np.unique(columns["vbucket"][counted]).tolist()
    return {vb: _step(columns, np.flatnonzero(counted & (columns["vbucket"] == vb))) for vb in present}


def begun(batch: Any) -> dict[int, int]:
    """The highest seqno of each vbucket among documents of out-of-order snapshots."""
    vbuckets, seqnos, ends = (_numbers(batch, name) for name in ("vbucket", "seqno", "snapshot_end"))
    rows = ends < seqnos
    if not rows.any():
        return {}
    rows &= np.asarray(batch.column("key").is_valid())
    return {vb: int(seqnos[rows & (vbuckets == vb)].max()) for vb in np.unique(vbuckets[rows]).tolist()}


def _step(columns: dict[str, Any], rows: Any) -> Step:
    seqnos, epochs = columns["seqno"][rows], columns["epoch"][rows]
    back = np.flatnonzero((seqnos[1:] <= seqnos[:-1]) | (epochs[1:] != epochs[:-1]))
    rows = rows[int(back[-1]) + 1 :] if back.size else rows
    last = rows[-1]
    return Step(
        int(columns["seqno"][rows[0]]), int(columns["seqno"][last]), int(columns["snapshot_end"][rows].max()),
        int(columns["vbuuid"][last]) & 0xFFFF_FFFF_FFFF_FFFF, int(columns["epoch"][last]), bool(back.size),
    )  # fmt: skip


def _numbers(batch: Any, name: str) -> Any:
    column = batch.column(name)
    return (column.fill_null(-1) if column.null_count else column).to_numpy(zero_copy_only=False)


def moved(position: Position, step: Step) -> Position:
    """The position after a step: consistent only if every snapshot that was begun has been received to its end."""
    end = max(step.snapshot_end, position.snap_end if position.snap_end > position.seqno else 0)
    if step.seqno >= end:
        return Position(step.vbuuid, step.seqno, step.seqno, step.seqno)
    return Position(step.vbuuid, step.seqno, position.snap_start, end)
