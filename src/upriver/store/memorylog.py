"""The recent history of one vbucket in memory: checkpoints, cut into segments of packed records.

A segment is what dedup works inside: while it is open a newer write of a key supersedes the older one in place. It is
closed, and immutable from then on, as soon as anybody (a stream, the flusher) has taken it. A stream therefore never
sees half of a dedup, and every closed segment of an active vbucket ends in a state that existed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

import numpy as np

from upriver.model import SEQNO_MAX
from upriver.store.arrays import MAPPED, octets
from upriver.store.disk import Octets
from upriver.wire.columns import address_of

SMALLEST = 4096
MERGED_BYTES = 128 * 1024  # of segments that a reader who is behind gets as one snapshot
NOTHING: Octets = np.empty(0, np.uint8)


class Segment:
    """Records ``data[at:end]`` of a checkpoint, seqnos ``first..last``.

    ``safe`` is the last state that surely existed before it; ``snap_end`` where the snapshot that it is part of ends.
    """

    __slots__ = ("at", "begins_checkpoint", "checkpoint", "closed", "end", "exact", "first", "last",
                 "persisted", "safe", "snap_end")

    def __init__(self, checkpoint: Checkpoint, at: int, safe: int, begins_checkpoint: bool) -> None:
        self.checkpoint = checkpoint
        self.at = at
        self.end = at
        self.first = 0
        self.last = 0
        self.safe = safe
        self.snap_end = 0
        self.exact = True
        self.closed = False
        self.persisted = False
        self.begins_checkpoint = begins_checkpoint


class Checkpoint:
    """One growing buffer of records.

    A large one has addresses for all that it may become from the start: the system gives memory only to what was
    written, and growing copies nothing. ``data`` is the part that counts.
    """

    __slots__ = ("_reserved", "address", "closed", "data", "log", "segments", "serial")

    def __init__(self, log: MemoryLog, serial: int, size: int) -> None:
        self.log = log
        self.serial = serial
        self.segments: list[Segment] = []
        self.closed = False
        self._reserved: Octets = NOTHING
        self.data: Octets = NOTHING
        self.address = 0  # of the data
        self.resize(size, 0)

    def resize(self, size: int, used: int) -> None:
        """Hold ``size`` bytes, of which the first ``used`` are kept."""
        if size > self._reserved.size or self._reserved.size < MAPPED:
            self._reserved = octets(size if size < MAPPED else max(size, self.log.most_bytes))
            self._reserved[:used] = self.data[:used]
            self.address = address_of(self._reserved)
        self.log.gauge.bytes += size - self.data.size
        self.data = self._reserved[:size]

    def grow(self, needed: int, used: int) -> None:
        """Hold at least ``needed`` bytes, and some more, so that this is not called for every record."""
        ahead = self.data.size if self.data.size < MAPPED // 2 else MAPPED // 4
        self.resize(min(max(needed, self.data.size + ahead), self.log.most_bytes), used)

    def let_go(self) -> None:
        """Give the memory back now: a checkpoint and its segments know each other, so only the collector would."""
        self.log.gauge.bytes -= self.data.size
        self.data = self._reserved = NOTHING
        self.segments = []


class Gauge:
    """A number of bytes that many vbuckets share."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


def _last(segment: Segment) -> int:
    return segment.last


def _reach(checkpoint: Checkpoint) -> int:
    """The last seqno of its closed segments; one that has none yet is the newest, and still ahead."""
    for segment in reversed(checkpoint.segments):
        if segment.closed:
            return segment.last
    return SEQNO_MAX


class MemoryLog:
    """Checkpoints of one vbucket, oldest first. Everything above seqno ``floor`` is in here."""

    def __init__(self, floor: int, most_bytes: int, gauge: Gauge, ages: deque[Checkpoint]) -> None:
        self.floor = floor
        self.gauge = gauge
        self._ages = ages  # all checkpoints of the bucket, oldest first: the order of eviction
        self.most_bytes = most_bytes
        self.checkpoints: deque[Checkpoint] = deque()
        self.by_serial: dict[int, Checkpoint] = {}
        self.unflushed: deque[Segment] = deque()
        self.open: Segment | None = None
        self._serial = 0

    def room(self, size: int, used: int) -> bool:
        """Make the open checkpoint hold ``size`` more bytes; False if a new checkpoint must be begun."""
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

    def begin_segment(self, size: int, safe: int) -> Segment:
        """Open a segment with room for ``size`` bytes, behind the last one if its checkpoint has room."""
        last = self.checkpoints[-1] if self.checkpoints else None
        used = last.segments[-1].end if last is not None and last.segments else 0
        if last is None or last.closed or used + size > max(last.data.size, self.most_bytes):
            last = self._begin_checkpoint(size)
            used = 0
        segment = Segment(last, used, safe, begins_checkpoint=used == 0)
        last.segments.append(segment)
        self.open = segment
        self.room(size, used)
        return segment

    def _begin_checkpoint(self, size: int) -> Checkpoint:
        self.close_checkpoint()
        if self.checkpoints and not self.checkpoints[-1].segments:  # nothing is in it yet: take a larger buffer
            unused = self.checkpoints[-1]
            unused.resize(size, 0)
            return unused
        self._serial += 1
        fresh = Checkpoint(self, self._serial, max(size, min(SMALLEST, self.most_bytes)))
        self._ages.append(fresh)
        self.checkpoints.append(fresh)
        self.by_serial[fresh.serial] = fresh
        return fresh

    def close_checkpoint(self) -> None:
        """No more segments for the last checkpoint; give back the rest of its buffer. An empty one stays open."""
        if not self.checkpoints or self.checkpoints[-1].closed or not self.checkpoints[-1].segments:
            return
        last = self.checkpoints[-1]
        last.closed = True
        used = last.segments[-1].end if last.segments else 0
        if used < last.data.size * 3 // 4:
            last.resize(used, used)

    def close_segment(self, last: int, snap_end: int, exact: bool) -> None:
        """Freeze the open segment; the flusher will find it."""
        segment = self.open
        self.open = None
        if segment is None:
            return
        if segment.end == segment.at:
            segment.checkpoint.segments.pop()
            return
        segment.last = last
        segment.snap_end = snap_end
        segment.exact = exact
        segment.closed = True
        self.unflushed.append(segment)

    def add_empty(self, last: int, safe: int, snap_end: int) -> None:
        """A segment of no records: history went on to ``last`` without anything to see."""
        segment = self.begin_segment(0, safe)
        segment.first = segment.last = last
        segment.snap_end = snap_end
        segment.exact = False
        segment.closed = True
        self.open = None
        self.unflushed.append(segment)

    def settle(self, high: int) -> None:
        """What is here is all that there will be of a snapshot that was under way."""
        for checkpoint in self.checkpoints:
            for segment in checkpoint.segments:
                segment.snap_end = min(segment.snap_end, high)

    def after(self, seqno: int, upto: int = 0) -> list[Segment]:
        """The first closed segment that reaches above ``seqno``, and those behind it that can be one snapshot with it.

        They are side by side in one checkpoint, not too large together, and end where a snapshot does; none is added
        once ``upto`` is reached.
        """
        at = bisect_right(self.checkpoints, seqno, key=_reach)
        if at == len(self.checkpoints):
            return []
        segments = self.checkpoints[at].segments
        closed = len(segments) - (bool(segments) and not segments[-1].closed)
        at = bisect_right(segments, seqno, hi=closed, key=_last)
        last = at
        for number in range(at + 1, closed):
            segment = segments[number]
            if segments[number - 1].last >= upto or segment.end - segments[at].at > MERGED_BYTES:
                break
            if segment.snap_end <= segment.last:
                last = number
        return segments[at : last + 1] if at < closed else []

    def flushed(self, checkpoint: Checkpoint) -> bool:
        """Whether all of the checkpoint is on disk (or was never anything)."""
        return not any(not segment.persisted for segment in checkpoint.segments)

    def evict(self) -> None:
        """Forget the oldest checkpoint; the caller knows that it is on disk."""
        oldest = self.checkpoints.popleft()
        del self.by_serial[oldest.serial]
        if oldest.segments:
            self.floor = max(self.floor, oldest.segments[-1].last)
        oldest.let_go()

    def clear(self, floor: int) -> None:
        """Forget everything; history goes on above ``floor``."""
        for checkpoint in self.checkpoints:
            checkpoint.let_go()
        self.checkpoints.clear()
        self.by_serial.clear()
        self.unflushed.clear()
        self.open = None
        self.floor = floor
