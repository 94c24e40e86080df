"""Where a reader stands in every vbucket, and what it may truthfully claim about it.

The one place that knows the rules of ``design.md``, "offsets and rollback": a position never claims a snapshot that
was not fully received, and ``rollback_target`` only ever gives a seqno at which this reader really was consistent.
The arithmetic per row is done by kernels on the same numbers (``wire.bulk_streams``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from upriver.model import SEQNO_MAX, Position
from upriver.wire.bulk.decode import Columns
from upriver.wire.bulk.streams import SlotState, StreamTable

POINTS_KEPT = 32


@dataclass(slots=True)
class Mark:
    """The place in all vbuckets at one moment; cheap to take, and turned into positions only when asked."""

    vbuuid: list[int]
    epoch: list[int]
    _seqno: npt.NDArray[Any]
    _upto: list[int]
    _claimed_end: list[int]
    _point: list[int]
    _out_of_order: dict[int, int] = field(default_factory=dict)
    _interrupted: dict[int, tuple[int, int]] = field(default_factory=dict)

    def position(self, vb: int, seqno: int | None = None) -> Position:
        """What may be claimed; with ``seqno``, as if only the rows up to it had come."""
        reached = int(self._seqno[vb]) if seqno is None else seqno
        if vb in self._out_of_order or vb in self._interrupted:
            highest = max(int(self._seqno[vb]), self._interrupted.get(vb, (0, 0))[1])
            return _begun(self.vbuuid[vb], self._out_of_order.get(vb, reached), highest)
        return _claim(self.vbuuid[vb], reached, self._upto[vb], self._point[vb], self._claimed_end[vb])


def _begun(vbuuid: int, start: int, highest: int) -> Position:
    """Inside an out-of-order snapshot: nothing is complete, but the reader has some of what is up to ``highest``."""
    return Position(vbuuid, start, start, max(start, highest))


def _claim(vbuuid: int, reached: int, upto: int, point: int, end: int) -> Position:
    """Rows above ``upto`` came but were not wanted, so the reader is at ``upto``, inside what came."""
    last, end = min(reached, upto), max(reached, end)
    if last >= end or last == 0:  # at 0 there is nothing of any snapshot
        return Position(vbuuid, last, last, last)
    return Position(vbuuid, last, min(point, last), end)


class Standing:
    """The reader's place in all vbuckets of a bucket."""

    def __init__(self, vbuckets: int) -> None:
        self.streams = StreamTable(vbuckets)
        self.vbuuid = [0] * vbuckets
        self.epoch = [0] * vbuckets
        self.interrupted: dict[int, tuple[int, int]] = {}  # out-of-order reads cut short: their branch, highest seqno
        self._upto = [SEQNO_MAX] * vbuckets
        self._claimed_end = [0] * vbuckets  # at least the end of every snapshot that data were taken from
        self._point = [0] * vbuckets  # the newest of the points
        self._points = [[0] for _ in range(vbuckets)]  # seqnos at which we were consistent, oldest first
        self._out_of_order: dict[int, int] = {}

    def resume(self, vb: int, position: Position, *, epoch: int = 0, points: tuple[int, ...] = ()) -> None:
        """Begin at a saved position; ``points`` are older seqnos at which the reader was consistent."""
        self.vbuuid[vb], self.epoch[vb] = position.vbuuid, epoch
        older = {p for p in points if p < position.snap_start}
        self._points[vb] = sorted({0, position.snap_start, *older})
        self._point[vb] = position.snap_start
        nothing_of_it = position.seqno == position.snap_start  # of the snapshot: the producer sees it so too (5.6 D)
        self._go_to(vb, position.seqno, position.seqno if nothing_of_it else position.snap_end)

    def open(self, vb: int, opaque: int, upto: int = SEQNO_MAX) -> None:
        """A stream begins where we stand; its messages will carry ``opaque``, rows above ``upto`` are not wanted."""
        seqno = self.streams.seqno(vb)
        self._upto[vb] = upto
        self.streams.open(vb, opaque=opaque, seqno=seqno, vbuuid=self.vbuuid[vb], epoch=self.epoch[vb], upto=upto)

    def adopt(self, vb: int, vbuuid: int, opaque: int, upto: int = SEQNO_MAX) -> None:
        """The producer accepted us: from here on, history is the branch ``vbuuid``."""
        self.vbuuid[vb] = vbuuid
        self.open(vb, opaque, upto)

    def close(self, vb: int) -> None:
        """The stream is gone; rows that still trickle in are dropped, and the place stays where it is."""
        if vb in self._out_of_order:
            start, highest = self._out_of_order.pop(vb), self.streams.seqno(vb)
            if highest > start:
                self.interrupted[vb] = self.vbuuid[vb], highest
            self._go_to(vb, start, start)
        self.streams.set_state(vb, SlotState.IGNORED)

    def seqno(self, vb: int) -> int:
        """The last seqno that came, wanted or not."""
        return self.streams.seqno(vb)

    def position(self, vb: int) -> Position:
        """What may be claimed when this vbucket is resumed now."""
        reached = self.streams.seqno(vb)
        if vb in self._out_of_order or vb in self.interrupted:
            highest = max(reached, self.interrupted.get(vb, (0, 0))[1])
            return _begun(self.vbuuid[vb], self._out_of_order.get(vb, reached), highest)
        return _claim(self.vbuuid[vb], reached, self._upto[vb], self._point[vb], self._claimed_end[vb])

    def mark(self) -> Mark:
        """The place in all vbuckets, as a value."""
        return Mark(
            self.vbuuid.copy(), self.epoch.copy(), self.streams.seqnos(), self._upto.copy(),
            self._claimed_end.copy(), self._point.copy(), dict(self._out_of_order), dict(self.interrupted),
        )  # fmt: skip

    def covered(self, vb: int) -> int:
        """No snapshot that data were taken from reaches beyond this seqno."""
        return max(self._claimed_end[vb], self.streams.seqno(vb))

    def points(self, vb: int) -> tuple[int, ...]:
        """Seqnos at which the reader was consistent, oldest first; the older, the sparser."""
        self._note_point(vb)
        return tuple(self._points[vb])

    def begin_snapshot(self, vb: int, start: int, end: int) -> None:
        """A marker arrived: the snapshot before it is complete if its end was reached, or lies wholly behind."""
        reached = self.streams.seqno(vb)
        if start > self._claimed_end[vb]:
            self._claimed_end[vb] = reached
        self._note_point(vb)
        # A marker inside an unfinished snapshot extends it; claims must cover both.
        complete = reached >= self._claimed_end[vb]
        self._claimed_end[vb] = end if complete else max(end, self._claimed_end[vb])
        self.streams.snapshot(vb, start, end)

    def advance(self, columns: Columns, first: int, last: int) -> int:
        """Take rows: checks their order, stamps them with snapshot, branch and epoch; the first bad row, or -1."""
        return self.streams.advance(columns, first, last)

    def move(self, vb: int, seqno: int) -> bool:
        """A seqno was reached without a row; false if it lies behind, or beyond the snapshot that was announced."""
        if vb not in self._out_of_order and not self.streams.seqno(vb) <= seqno <= self.streams.snapshot_of(vb)[1]:
            return False
        self.streams.seqno_advanced(vb, seqno)
        return True

    def begin_out_of_order(self, vb: int) -> None:
        """Until the end comes, only the seqno held before may be resumed from (protocol.md 6.5)."""
        self._out_of_order[vb] = self.streams.seqno(vb)
        self.streams.set_state(vb, SlotState.OUT_OF_ORDER)

    def end_out_of_order(self, vb: int) -> int:
        """The seqno that was reached: the greatest of those that came."""
        self._out_of_order.pop(vb, None)
        self.streams.set_state(vb, SlotState.OPEN)
        self._claimed_end[vb] = self.streams.seqno(vb)
        return self.streams.seqno(vb)

    def rollback_target(self, vb: int, seqno: int) -> int:
        """The newest seqno no higher than ``seqno`` at which the reader was consistent.

        Going to ``seqno`` itself could lose a document: a version below it that a later write, now undone, had
        deduplicated away was never sent to us.
        """
        self._note_point(vb)
        return max((point for point in self._points[vb] if point <= seqno), default=0)

    def roll_back(self, vb: int, target: int) -> None:
        """Forget everything above ``target``, which came from ``rollback_target``."""
        self._out_of_order.pop(vb, None)
        self.interrupted.pop(vb, None)
        self._points[vb] = [point for point in self._points[vb] if point <= target] or [0]
        self._point[vb] = self._points[vb][-1]
        self._go_to(vb, target, target)
        if target == 0:
            self.vbuuid[vb] = 0

    def _go_to(self, vb: int, seqno: int, claimed_end: int) -> None:
        self._claimed_end[vb] = claimed_end
        self.streams.open(vb, opaque=0, seqno=seqno)
        self.streams.set_state(vb, SlotState.CLOSED)

    def _note_point(self, vb: int) -> None:
        point = self.streams.seqno(vb)
        if point < self._claimed_end[vb] or point > self._upto[vb] or vb in self._out_of_order:
            return
        points = self._points[vb]
        if point > points[-1]:
            self._point[vb] = point
            points.append(point)
            if len(points) > POINTS_KEPT:
                points[:] = points[:1] + points[1:-8:2] + points[-8:]
