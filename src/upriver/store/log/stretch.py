"""What a reader gets from memory at once: a segment, or several that lie side by side, as one snapshot.

Together they are what one larger segment would have been, had nobody looked in between: of each key only the last
version is in it, and it ends in a state that existed.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from upriver.store.disk.file import Octets
from upriver.store.log.kernels import runs, surveys
from upriver.store.log.memory import MemoryCheckpoint, MemoryLog
from upriver.store.log.scan import in_order
from upriver.wire.packed import HEADER_SIZE

_NO_COLLECTIONS = np.zeros((0, 0), np.uint64)


class Stretch(NamedTuple):
    """Records ``data[at:end]``: segments ``first`` to ``last`` of a checkpoint."""

    checkpoint: MemoryCheckpoint
    first: int
    last: int
    data: Octets
    at: int
    end: int

    @property
    def begins_checkpoint(self) -> bool:
        return self.first == 0

    @property
    def last_seqno(self) -> int:
        return self.checkpoint.last[self.last]

    @property
    def snap_end(self) -> int:
        """Where the snapshot ends that the last record is part of."""
        return max(self.last_seqno, self.checkpoint.snap_end[self.last])


def stretch_after(log: MemoryLog, seqno: int, upto: int) -> Stretch | None:
    """What comes after ``seqno`` and is closed; no further than the segment that reaches ``upto``."""
    found = log.after(seqno, upto)
    if found is None:
        return None
    checkpoint, first, last = found
    return _plain(checkpoint, first, last) if first == last else _merged(checkpoint, first, last, seqno)


def _plain(checkpoint: MemoryCheckpoint, first: int, last: int) -> Stretch:
    return Stretch(checkpoint, first, last, checkpoint.data, checkpoint.at(first), checkpoint.end[last])


def _merged(checkpoint: MemoryCheckpoint, first: int, last: int, after: int) -> Stretch:
    data, at, end = checkpoint.data, checkpoint.at(first), checkpoint.end[last]
    most = (end - at) // HEADER_SIZE + 1
    replaced = np.empty(most, np.uint64)
    count, stop = surveys.replaced(data, at, end, np.uint64(after), np.zeros(2 * most, np.int64), replaced)
    if stop < end:  # a durable write: what comes before it can still be one snapshot
        return _merged_before(checkpoint, first, bisect_right(checkpoint.end, stop) - 1, after)
    if not count:
        return _plain(checkpoint, first, last)
    return Stretch(checkpoint, first, last, _without(data[at:end], in_order(replaced[:count])), 0, end - at)


def _merged_before(checkpoint: MemoryCheckpoint, first: int, last: int, after: int) -> Stretch:
    while last > first and checkpoint.snap_end[last] > checkpoint.last[last]:
        last -= 1
    return _merged(checkpoint, first, last, after) if last > first else _plain(checkpoint, first, first)


def _without(records: Octets, dead: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> Octets:
    """A copy in which the versions that were replaced are marked; others still read the original."""
    copy = np.empty(records.size, np.uint8)
    copy[:] = records
    runs.mark_dead(copy, 0, copy.size, dead, 0, False, _NO_COLLECTIONS)
    return copy
