"""What a reader gets from memory at once: a segment, or several that lie side by side, as one snapshot.

Together they are what one larger segment would have been, had nobody looked in between: of each key only the last
version is in it, and it ends in a state that existed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from upriver.store import runs, surveys
from upriver.store.disk import Octets
from upriver.store.memorylog import MemoryLog, Segment
from upriver.wire.packed import HEADER_SIZE

_NO_COLLECTIONS = np.zeros((0, 0), np.uint64)


class Stretch(NamedTuple):
    """Records ``data[at:end]``, from the segment ``first`` to the segment ``last``."""

    first: Segment
    last: Segment
    data: Octets
    at: int
    end: int

    @property
    def snap_end(self) -> int:
        """Where the snapshot ends that the last record is part of."""
        return max(self.last.last, self.last.snap_end)


def stretch_after(log: MemoryLog, seqno: int, upto: int) -> Stretch | None:
    """What comes after ``seqno`` and is closed; no further than the segment that reaches ``upto``."""
    segments = log.after(seqno, upto)
    if not segments:
        return None
    if len(segments) > 1:
        return _merged(segments, seqno)
    [only] = segments
    return Stretch(only, only, only.checkpoint.data, only.at, only.end)


def _merged(segments: list[Segment], after: int) -> Stretch:
    first, data = segments[0], segments[0].checkpoint.data
    size = segments[-1].end - first.at
    found = np.empty(size // HEADER_SIZE + 1, np.uint64)
    count, stop = surveys.replaced(data, first.at, segments[-1].end, np.uint64(after), found)
    if stop < segments[-1].end:  # a durable write: what comes before it can still be one snapshot
        before = [segment for segment in segments if segment.end <= stop]
        while before and before[-1].snap_end > before[-1].last:
            before.pop()
        if len(before) > 1:
            return _merged(before, after)
        return Stretch(first, first, data, first.at, first.end)
    if count:
        data = _without(data[first.at : segments[-1].end], np.sort(found[:count]))
        return Stretch(first, segments[-1], data, 0, size)
    return Stretch(first, segments[-1], data, first.at, segments[-1].end)


def _without(records: Octets, dead: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> Octets:
    """A copy in which the versions that were replaced are marked; others still read the original."""
    copy = np.empty(records.size, np.uint8)
    copy[:] = records
    runs.mark_dead(copy, 0, copy.size, dead, 0, False, _NO_COLLECTIONS)
    return copy
