"""The recent history of one vbucket in memory: checkpoints, cut into segments of packed records.

While a segment is open, a newer write of a key supersedes the older one in place. Before a stream or the flusher reads
a segment, it is closed and becomes immutable. So a stream never sees half of a deduplication, and every closed segment
of an active vbucket ends in a state that existed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from typing import NamedTuple

import numpy as np

from upriver.model import SEQNO_MAX
from upriver.store.arrays import MAPPED, octets
from upriver.store.disk.file import Octets, Words
from upriver.store.log.blocks import in_order
from upriver.store.log.kernels import runs, surveys
from upriver.wire.bulk.decode import address_of
from upriver.wire.packed import HEADER_SIZE

SMALLEST = 4096
MERGED_BYTES = 128 * 1024  # the most that a slow reader gets as one snapshot of several segments
NOTHING: Octets = np.empty(0, np.uint8)
NO_COLLECTIONS: Words = np.zeros((0, 0), np.uint64)


class Segment(NamedTuple):
    """A closed segment for the flusher: bytes ``at`` to ``end`` of a checkpoint.

    ``safe`` is the last consistent point before it. ``exact``: every seqno in it is a state that existed.
    """

    checkpoint: MemoryCheckpoint
    at: int
    end: int
    safe: int
    exact: bool


class OpenSegment:
    """The segment that records are written to."""

    __slots__ = ("at", "checkpoint", "end", "first", "safe")

    def __init__(self, checkpoint: MemoryCheckpoint, at: int, safe: int) -> None:
        self.checkpoint = checkpoint
        self.at = self.end = at
        self.first = 0
        self.safe = safe


class MemoryCheckpoint:
    """One growing buffer of records, cut into adjacent segments.

    A large one reserves all the memory that it may need, so growing copies nothing; ``data`` is the part in use. There
    can be as many segments as records, so they are rows of numbers and not objects: ``first`` and ``last`` are seqnos,
    ``end`` is a byte offset, and ``snap_end`` is the end of the snapshot that the segment belongs to.
    """

    __slots__ = (
        "_reserved",
        "address",
        "closed",
        "data",
        "end",
        "exact",
        "first",
        "last",
        "log",
        "persisted",
        "safe",
        "seen",
        "serial",
        "snap_end",
    )  # fmt: skip

    def __init__(self, log: MemoryLog, serial: int, size: int, expected: int) -> None:
        self.log = log
        self.serial = serial
        self.closed = False
        self.end, self.first, self.last, self.safe, self.snap_end = (array("Q") for _ in range(5))
        self.exact = bytearray()
        self.seen = 0  # segments that the flusher has seen
        self.persisted = 0  # segments that are on disk
        self._reserved: Octets = NOTHING
        self.data: Octets = NOTHING
        self.address = 0  # of the data
        self.resize(size, 0, expected)

    @property
    def used(self) -> int:
        """Bytes in closed segments."""
        return self.end[-1] if self.end else 0

    def at(self, row: int) -> int:
        """The byte at which the segment begins."""
        return self.end[row - 1] if row else 0

    def resize(self, size: int, used: int, expected: int = 0) -> None:
        """Hold ``size`` bytes and keep the first ``used``; ``expected`` is the size it will probably reach."""
        if size > self._reserved.size or self._reserved.size < MAPPED:
            expected = max(size, expected)
            self._hold(octets(expected if expected < MAPPED else max(size, self.log.most_bytes)), used)
        self.data = self._reserved[:size]

    def shrink(self) -> None:
        """Give back unused memory, if it is more than half."""
        if self.used < self._reserved.size // 2:
            self._hold(octets(self.used), self.used)
            self.data = self._reserved

    def _hold(self, reserved: Octets, used: int) -> None:
        reserved[:used] = self.data[:used]
        self.log.gauge.bytes += reserved.size - self._reserved.size
        self._reserved = reserved
        self.address = address_of(reserved)

    def grow(self, needed: int, used: int) -> None:
        """Hold at least ``needed`` bytes, and some more so that this is not called for every record."""
        ahead = self.data.size if self.data.size < MAPPED // 2 else MAPPED // 4
        self.resize(min(max(needed, self.data.size + ahead), self.log.most_bytes), used)

    def add(self, end: int, first: int, last: int, safe: int, snap_end: int, exact: bool) -> None:
        """Add a closed segment."""
        self.end.append(end)
        self.first.append(first)
        self.last.append(last)
        self.safe.append(safe)
        self.snap_end.append(snap_end)
        self.exact.append(exact)

    def collect_unseen(self) -> list[Segment]:
        """Segments that the flusher has not seen yet; adjacent exact segments are joined."""
        found: list[Segment] = []
        row, rows = self.seen, len(self.end)
        while row < rows:
            after = row + 1
            if self.exact[row]:
                after = self.exact.find(0, row)
                after = rows if after < 0 else after
            found.append(Segment(self, self.at(row), self.end[after - 1], self.safe[row], bool(self.exact[row])))
            row = after
        self.seen = rows
        return found

    def release(self) -> None:
        """Free the memory now: checkpoint and log refer to each other, so only the garbage collector would."""
        self.log.gauge.bytes -= self._reserved.size
        self.data = self._reserved = NOTHING


class Gauge:
    """A count of bytes that many vbuckets share."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


def _reach(checkpoint: MemoryCheckpoint) -> int:
    """The last seqno of its closed segments; the newest checkpoint may have none yet and sorts last."""
    return checkpoint.last[-1] if checkpoint.last else SEQNO_MAX


class SegmentRange(NamedTuple):
    """Segments ``first`` to ``last`` of a checkpoint."""

    checkpoint: MemoryCheckpoint
    first: int
    last: int


class MemoryLog:
    """The checkpoints of one vbucket, oldest first. They contain everything above seqno ``floor``."""

    __slots__ = ("_ages", "_busy", "_serial", "by_serial", "checkpoints", "floor", "gauge", "most_bytes", "open")

    def __init__(self, floor: int, most_bytes: int, gauge: Gauge, ages: deque[MemoryCheckpoint]) -> None:
        self.floor = floor
        self.gauge = gauge
        self._ages = ages  # all checkpoints of the bucket, oldest first: the order of eviction
        self.most_bytes = most_bytes
        self.checkpoints: deque[MemoryCheckpoint] = deque()
        self.by_serial: dict[int, MemoryCheckpoint] = {}
        self.open: OpenSegment | None = None
        self._serial = 0
        self._busy = False  # the last checkpoint became large, so the next probably will

    def room(self, size: int, used: int) -> bool:
        """Make room for ``size`` more bytes in the open checkpoint; False if a new checkpoint is needed."""
        if self.open is None:
            return False
        checkpoint = self.open.checkpoint
        needed = used + size
        if needed <= checkpoint.data.size:
            return True
        if needed > self.most_bytes:
            return False
        checkpoint.grow(needed, used)
        return True

    def begin_segment(self, size: int, safe: int) -> OpenSegment:
        """Open a segment with room for ``size`` bytes, behind the last one if its checkpoint has room."""
        last = self.checkpoints[-1] if self.checkpoints else None
        used = last.end[-1] if last is not None and last.end else 0
        if last is None or last.closed or used + size > last.data.size:
            if last is None or last.closed or used + size > self.most_bytes:
                last, used = self._begin_checkpoint(size), 0
            self.open = OpenSegment(last, used, safe)
            self.room(size, used)
            return self.open
        self.open = segment = OpenSegment(last, used, safe)
        return segment

    def _begin_checkpoint(self, size: int) -> MemoryCheckpoint:
        self.close_checkpoint()
        if self.checkpoints and not self.checkpoints[-1].end:  # still empty: give it a larger buffer
            unused = self.checkpoints[-1]
            unused.resize(size, 0)
            return unused
        self._serial += 1
        smallest = max(size, min(SMALLEST, self.most_bytes))
        fresh = MemoryCheckpoint(self, self._serial, smallest, self.most_bytes if self._busy else 0)
        self._ages.append(fresh)
        self.checkpoints.append(fresh)
        self.by_serial[fresh.serial] = fresh
        return fresh

    def close_checkpoint(self) -> None:
        """Close the last checkpoint and give back the rest of its buffer. An empty one stays open."""
        if not self.checkpoints or self.checkpoints[-1].closed or not self.checkpoints[-1].end:
            return
        last = self.checkpoints[-1]
        last.closed = True
        self._busy = last.used >= MAPPED
        last.shrink()

    def close_segment(self, last: int, snap_end: int, exact: bool) -> None:
        """Close the open segment, ready for the flusher."""
        segment = self.open
        self.open = None
        if segment is not None and segment.end > segment.at:
            segment.checkpoint.add(segment.end, segment.first, last, segment.safe, snap_end, exact)

    def add_empty(self, last: int, safe: int, snap_end: int) -> None:
        """Add a segment without records: the history advances to ``last``."""
        segment = self.begin_segment(0, safe)
        self.open = None
        segment.checkpoint.add(segment.at, last, last, safe, snap_end, False)

    def cut_snapshot(self, high: int) -> None:
        """End an incomplete snapshot at ``high``: the rest of it will not come."""
        for checkpoint in self.checkpoints:
            for row, snap_end in enumerate(checkpoint.snap_end):
                if snap_end > high:
                    checkpoint.snap_end[row] = high

    def after(self, seqno: int, upto: int = 0) -> SegmentRange | None:
        """The first closed segment that reaches above ``seqno``, and the next ones that can form one snapshot with it.

        They are adjacent in one checkpoint, not too large together, and end where a snapshot ends; none is added once
        ``upto`` is reached.
        """
        at = bisect_right(self.checkpoints, seqno, key=_reach)
        if at == len(self.checkpoints) or not self.checkpoints[at].end:
            return None
        checkpoint = self.checkpoints[at]
        first = bisect_right(checkpoint.last, seqno)
        fits = bisect_right(checkpoint.end, checkpoint.at(first) + MERGED_BYTES) - 1
        last = min(fits, bisect_left(checkpoint.last, upto), len(checkpoint.end) - 1)
        while last > first and checkpoint.snap_end[last] > checkpoint.last[last]:
            last -= 1
        return SegmentRange(checkpoint, first, max(first, last))

    # ---- flushing and eviction ----

    @property
    def unflushed_bytes(self) -> int:
        """Bytes in closed segments that are not on disk yet."""
        return sum(checkpoint.used - checkpoint.at(checkpoint.persisted) for checkpoint in self.checkpoints)

    def collect_unflushed(self) -> list[Segment]:
        """Closed segments that the flusher has not seen; it calls ``flush_ended`` when they are written or not."""
        found: list[Segment] = []
        for checkpoint in reversed(self.checkpoints):
            if checkpoint.end and checkpoint.seen == len(checkpoint.end):
                break
            found[:0] = checkpoint.collect_unseen()
        return found

    def flush_ended(self, on_disk: bool) -> None:
        """All segments that the flusher has seen are on disk now, or wait again."""
        for checkpoint in reversed(self.checkpoints):
            if checkpoint.seen and checkpoint.seen == checkpoint.persisted:
                break
            if on_disk:
                checkpoint.persisted = checkpoint.seen
            else:
                checkpoint.seen = checkpoint.persisted

    def flushed(self, checkpoint: MemoryCheckpoint) -> bool:
        """Whether all of the checkpoint is on disk; an empty one is."""
        is_open = self.open is not None and self.open.checkpoint is checkpoint
        return not is_open and checkpoint.persisted == len(checkpoint.end)

    def evict(self) -> None:
        """Drop the oldest checkpoint; the caller has checked that it is on disk."""
        oldest = self.checkpoints.popleft()
        del self.by_serial[oldest.serial]
        if oldest.last:
            self.floor = max(self.floor, oldest.last[-1])
        if not self.checkpoints:
            self._busy = oldest.used >= MAPPED
        oldest.release()

    def clear(self, floor: int) -> None:
        """Drop everything; the history continues above ``floor``."""
        for checkpoint in self.checkpoints:
            checkpoint.release()
        self.checkpoints.clear()
        self.by_serial.clear()
        self.open = None
        self.floor = floor


class Stretch(NamedTuple):
    """What a reader gets from memory at once: the records ``data[at:end]`` of segments ``first`` to ``last``.

    Several segments are merged into what one larger segment would have been: it has only the last version of each key
    and ends in a state that existed.
    """

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
        """The end of the snapshot that the last record belongs to."""
        return max(self.last_seqno, self.checkpoint.snap_end[self.last])


def stretch_after(log: MemoryLog, seqno: int, upto: int) -> Stretch | None:
    """The closed segments after ``seqno``, no further than the segment that reaches ``upto``."""
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
    if stop < end:  # a durable write: the segments before it can still be one snapshot
        return _merged_before(checkpoint, first, bisect_right(checkpoint.end, stop) - 1, after)
    if not count:
        return _plain(checkpoint, first, last)
    return Stretch(checkpoint, first, last, _without(data[at:end], in_order(replaced[:count])), 0, end - at)


def _merged_before(checkpoint: MemoryCheckpoint, first: int, last: int, after: int) -> Stretch:
    while last > first and checkpoint.snap_end[last] > checkpoint.last[last]:
        last -= 1
    return _merged(checkpoint, first, last, after) if last > first else _plain(checkpoint, first, first)


def _without(records: Octets, dead: Words) -> Octets:
    """A copy with the replaced versions marked; other readers still use the original."""
    copy = np.empty(records.size, np.uint8)
    copy[:] = records
    runs.mark_dead(copy, 0, copy.size, dead, 0, False, NO_COLLECTIONS)
    return copy
