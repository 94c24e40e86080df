"""Where a reader is in one vbucket: what it may claim, where it was consistent, where a rollback leads.

The only place with these rules, for the client, for Spark's offsets and for the tables. Two of them decide whether
data is lost. A producer deduplicates inside a snapshot, so a reader that stopped inside one may lack the old version
of a document whose new version it has not seen: it never claims a snapshot that it has not fully received. And if
history is cut below a write that it has seen, the version which that write had replaced is alive again, though nobody
ever sent it: told to roll back to R, a reader goes to the newest seqno no higher than R at which it was consistent.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from upriver.model import SEQNO_MAX, Claim
from upriver.protocol.filters import Filter

POINTS_KEPT = 16  # consistent points of a position: with fewer, a rollback goes back further, and loses nothing


class Position(NamedTuple):
    """A reader's position in one vbucket, as an immutable value.

    ``snap_start`` is the newest consistent point: a seqno at which the reader had every key of the history up to it.
    ``points`` are older ones, rising; 0 always is one, and is not listed. No snapshot that the reader took changes
    from ends beyond ``snap_end``; ``SEQNO_MAX`` if nobody knows. ``epoch`` counts the rollbacks. ``filter`` says which
    collections were read; None if whoever keeps the position says it, or nobody knows.
    """

    vbuuid: int = 0
    seqno: int = 0
    snap_start: int = 0
    snap_end: int = 0
    points: tuple[int, ...] = ()
    epoch: int = 0
    filter: Filter | None = None

    @classmethod
    def consistent_at(cls, vbuuid: int, seqno: int, points: tuple[int, ...] = (), epoch: int = 0) -> Position:
        """At a seqno at which the reader has every key."""
        return cls(vbuuid, seqno, seqno, seqno, points, epoch)

    @classmethod
    def of_points(cls, vbuuid: int, seqno: int, points: tuple[int, ...] = (), epoch: int = 0) -> Position:
        """Of which only the consistent points are known, rising, and not the snapshot; ``ValueError`` if they are not.

        >>> Position.of_points(7, 30, (10, 20))[:5], Position.of_points(7, 30, (10, 30))[:5]
        ((7, 30, 20, 18446744073709551615, (10,)), (7, 30, 30, 30, (10,)))
        """
        newest = points[-1] if points else 0
        return cls(vbuuid, seqno, newest, seqno if seqno == newest else SEQNO_MAX, points[:-1], epoch).checked()

    def checked(self) -> Position:
        """The same; ``ValueError`` if the numbers contradict each other."""
        if not 0 <= self.snap_start <= self.seqno <= self.snap_end:
            raise ValueError(f"seqno {self.seqno} is outside its snapshot {self.snap_start}..{self.snap_end}")
        steps = (0, *self.points, self.snap_start)
        if self.points and any(older >= newer for older, newer in pairwise(steps)):
            raise ValueError(f"points {self.points} are not rising seqnos below {self.snap_start}")
        return self

    @property
    def is_consistent(self) -> bool:
        """Whether the reader has every key of the history up to here."""
        return self.seqno == self.snap_start

    @property
    def consistent_points(self) -> tuple[int, ...]:
        """All consistent points, rising, from 0 on."""
        return (0, *self.points, self.snap_start) if self.snap_start else (0,)

    @property
    def claim(self) -> Claim:
        """What a stream request from here may say; at 0, nothing of any snapshot."""
        if self.seqno == 0:
            return Claim(self.vbuuid)
        return Claim(self.vbuuid, self.seqno, self.snap_start, self.snap_end)

    # ---------------------------------------------------------------------------------------------- going on

    def begin_snapshot(self, start: int, end: int) -> Position:
        """A snapshot marker has come.

        If the snapshot before ends below it, nothing more comes of that one. If not, and its end was not reached, this
        one only goes on with it, and the claim covers both.
        """
        vbuuid, seqno, snap_start, snap_end, points, epoch, filter = self.complete() if start > self.snap_end else self
        least = seqno if seqno == snap_start else snap_end
        return Position(vbuuid, seqno, snap_start, max(end, least), points, epoch, filter)

    def read(self, seqno: int, snapshot_end: int) -> Position:
        """Changes have come up to ``seqno``, all of them of snapshots that end at ``snapshot_end`` or below.

        >>> Position(7, 10, 10, 10).read(15, 20)[:4], Position(7, 15, 10, 20).read(20, 20)[:4]
        ((7, 15, 10, 20), (7, 20, 20, 20))
        """
        vbuuid, before, snap_start, snap_end, points, epoch, filter = self
        if seqno == before:
            return self
        end = max(snapshot_end, snap_end) if snap_end > before else snapshot_end
        if seqno >= end:
            return Position(vbuuid, seqno, seqno, seqno, _with_point(points, snap_start, seqno), epoch, filter)
        return Position(vbuuid, seqno, snap_start, end, points, epoch, filter)

    def complete(self) -> Position:
        """Nothing is lacking up to here: the newest consistent point."""
        vbuuid, seqno, snap_start, _, points, epoch, filter = self
        return Position(vbuuid, seqno, seqno, seqno, _with_point(points, snap_start, seqno), epoch, filter)

    def resume(self) -> Position:
        """Where a reader begins that was saved here: it has nothing, all, or some of its snapshot."""
        return self.complete() if self.is_consistent or self.seqno == self.snap_end else self

    # ---------------------------------------------------------------------------------------------- going back

    def rollback_target(self, seqno: int) -> int:
        """Where a rollback to ``seqno`` leads: the newest consistent point that is no higher."""
        return max((point for point in (*self.points, self.snap_start) if point <= seqno), default=0)

    def rolled_back(self, target: int) -> Position:
        """After everything above ``target``, which came from ``rollback_target``, was forgotten; in the same epoch."""
        points = tuple(point for point in (*self.points, self.snap_start) if 0 < point < target)
        return Position(self.vbuuid if target else 0, target, target, target, points, self.epoch, self.filter)


def _with_point(points: tuple[int, ...], point: int, newest: int) -> tuple[int, ...]:
    """``points`` and one more, if it is one below ``newest``; only half of them once they are too many."""
    if not 0 < point < newest:
        return points
    points = (*points, point)
    return points if len(points) < POINTS_KEPT else thinned((*points, newest), POINTS_KEPT // 2)[:-1]


def thinned(points: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most so many of some rising points, two or more: the oldest, the newest, and others that lie further apart
    the older they are, so that a rollback goes back by a few times what it must.

    >>> thinned((10, 5000, 9000, 9900, 9950, 9990, 9998, 9999, 10000), 5)
    (10, 5000, 9950, 9999, 10000)
    """
    if len(points) <= most:
        return points
    newest, kept = points[-1], [points[-1]]
    ratio = (newest - points[0]) ** (1 / max(1, most - 2))
    age = 1.0
    for point in points[-2:0:-1]:
        if newest - point >= age and len(kept) < most - 1:
            kept.append(point)
            age = (newest - point) * ratio
    return (points[0], *reversed(kept))
