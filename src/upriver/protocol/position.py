"""A position: what a reader may claim in one vbucket, where it was consistent, and where a rollback leads.

The client, Spark's offsets and the tables all use these rules. Two of them decide whether data is lost:

* A producer deduplicates inside a snapshot. A reader that stopped inside one may lack the old version of a document
  whose new version it has not seen. So it never claims a snapshot that it has not fully received.
* If history is cut below a write that the reader has seen, the version that this write replaced is valid again, but
  it may never have been sent. So a reader that is told to roll back to R goes to the newest consistent point at or
  below R.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from upriver.model import SEQNO_MAX, Claim
from upriver.protocol.filters import Filter

POINTS_KEPT = 16  # consistent points of a position; with fewer, a rollback goes back further but loses nothing


class Position(NamedTuple):
    """A reader's position in one vbucket, as an immutable value.

    ``snap_start`` is the newest consistent point: a seqno at which the reader had every key of the history up to it.
    ``points`` are older consistent points, rising; 0 is always one and is not listed. No snapshot of which the reader
    has changes ends after ``snap_end`` (``SEQNO_MAX`` if unknown). ``epoch`` counts the rollbacks. ``filter`` says
    which collections were read; None if it is kept elsewhere or unknown.
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
        """A position at a seqno at which the reader has every key."""
        return cls(vbuuid, seqno, seqno, seqno, points, epoch)

    @classmethod
    def of_points(cls, vbuuid: int, seqno: int, points: tuple[int, ...] = (), epoch: int = 0) -> Position:
        """A position with known consistent points but an unknown snapshot; ``ValueError`` if the points do not rise.

        >>> Position.of_points(7, 30, (10, 20))[:5], Position.of_points(7, 30, (10, 30))[:5]
        ((7, 30, 20, 18446744073709551615, (10,)), (7, 30, 30, 30, (10,)))
        """
        newest = points[-1] if points else 0
        return cls(vbuuid, seqno, newest, seqno if seqno == newest else SEQNO_MAX, points[:-1], epoch).checked()

    def checked(self) -> Position:
        """This position; ``ValueError`` if its numbers contradict each other."""
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
        """What a stream request from here may claim; at 0, no snapshot."""
        if self.seqno == 0:
            return Claim(self.vbuuid)
        return Claim(self.vbuuid, self.seqno, self.snap_start, self.snap_end)

    # ---------------------------------------------------------------------------------------------- going on

    def begin_snapshot(self, start: int, end: int) -> Position:
        """The position after a snapshot marker.

        If the previous snapshot ends before this one starts, it is complete. If it overlaps and its end was not
        reached, the new snapshot continues it, and the claim covers both.
        """
        vbuuid, seqno, snap_start, snap_end, points, epoch, filter = self.complete() if start > self.snap_end else self
        least = seqno if seqno == snap_start else snap_end
        return Position(vbuuid, seqno, snap_start, max(end, least), points, epoch, filter)

    def read(self, seqno: int, snapshot_end: int) -> Position:
        """The position after changes up to ``seqno``, all in snapshots that end at ``snapshot_end`` or below.

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
        """The same seqno as a consistent point: nothing up to here is missing."""
        vbuuid, seqno, snap_start, _, points, epoch, filter = self
        return Position(vbuuid, seqno, seqno, seqno, _with_point(points, snap_start, seqno), epoch, filter)

    def resume(self) -> Position:
        """Where a reader that saved this position begins: consistent, unless it is inside its snapshot."""
        return self.complete() if self.is_consistent or self.seqno == self.snap_end else self

    # ---------------------------------------------------------------------------------------------- going back

    def rollback_target(self, seqno: int) -> int:
        """Where a rollback to ``seqno`` leads: the newest consistent point at or below it."""
        return max((point for point in (*self.points, self.snap_start) if point <= seqno), default=0)

    def rolled_back(self, target: int) -> Position:
        """The position after forgetting everything above ``target``, from ``rollback_target``; in the same epoch."""
        points = tuple(point for point in (*self.points, self.snap_start) if 0 < point < target)
        return Position(self.vbuuid if target else 0, target, target, target, points, self.epoch, self.filter)


def _with_point(points: tuple[int, ...], point: int, newest: int) -> tuple[int, ...]:
    """``points`` with ``point`` added, if it is below ``newest``; halved when there are too many."""
    if not 0 < point < newest:
        return points
    points = (*points, point)
    return points if len(points) < POINTS_KEPT else thinned((*points, newest), POINTS_KEPT // 2)[:-1]


def thinned(points: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most ``most`` (two or more) of some rising points.

    Keeps the oldest, the newest, and others with gaps that grow with age, so that a rollback goes back at most a few
    times as far as it must.

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
