"""How far a batch of changes brings a reader, worked out from its rows: for positions between two batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from upriver.model import Position


class Step(NamedTuple):
    """The last row of a vbucket in a batch, and the furthest end of a snapshot that its rows belong to."""

    seqno: int
    snapshot_end: int
    vbuuid: int
    epoch: int


def last_rows(batch: Any) -> dict[int, Step]:
    """Where the documents of a batch bring each vbucket; rows of out-of-order snapshots bring nobody anywhere."""
    vbuckets, seqnos, ends = (_numbers(batch, name) for name in ("vbucket", "seqno", "snapshot_end"))
    vbuuids, epochs = _numbers(batch, "vbuuid"), _numbers(batch, "epoch")
    counted = np.flatnonzero(ends >= seqnos)
    found = {}
    for vb in np.unique(vbuckets[counted]).tolist():
        rows = counted[vbuckets[counted] == vb]
        last = rows[-1]
        branch = int(vbuuids[last]) & 0xFFFF_FFFF_FFFF_FFFF
        found[vb] = Step(int(seqnos[last]), int(ends[rows].max()), branch, int(epochs[last]))
    return found


def _numbers(batch: Any, name: str) -> Any:
    column = batch.column(name)
    return (column.fill_null(-1) if column.null_count else column).to_numpy(zero_copy_only=False)


def moved(position: Position, step: Step) -> Position:
    """The position after a step: consistent only if every snapshot that was begun has been received to its end."""
    end = max(step.snapshot_end, position.snap_end if position.snap_end > position.seqno else 0)
    if step.seqno >= end:
        return Position(step.vbuuid, step.seqno, step.seqno, step.seqno)
    return Position(step.vbuuid, step.seqno, position.snap_start, end)
