"""The plan of a micro-batch, pure: what may be claimed of its start, what was rolled back, where it ends.

**The claim.** A producer deduplicates inside a snapshot, so a reader that stops in the middle of one may lack the old
version of a document whose new version it has not seen yet. If history then forks in between, the old version is
alive again and never sent, unless the reader is honest about the snapshot. Spark wants the end of a batch before the
batch is read, so the driver cannot know in which snapshot it will end. What it knows is enough:

1. *Executors read a batch only from the branch it was planned on* (``Range.vbuuid``). Told to roll back, or let in on
   another branch, they leave the vbucket alone; the end offset names the planned branch, and the next plan finds it
   superseded (4). A batch that is replayed after a failover does the same, so it converges too.
2. Let a batch end at ``(U, s)`` and let ``H`` be the high seqno read *after* the batch was over, and *before* a
   failover log that still has ``U`` on top. Then everything the batch received was deduplicated by writes of branch
   ``U`` no higher than ``H``: seqnos only grow on a branch. So ``snap_end = H`` covers every snapshot that data were
   taken from. ``snap_start`` is the newest seqno at which the reader was complete. That claim is honest.
3. The reader is complete at ``s`` if ``H == s``, by (2); or if an executor saw a snapshot end at exactly ``s``, where
   ``s`` is no lower than the ``snap_end`` that was claimed for its start, and no other attempt of its task read too
   (``reports``). Then ``snap_start = s = snap_end``. Knowing less than that is harmless.
4. If ``U`` is not on top any more, ``H`` belongs to another branch and says nothing of what ``U`` had deduplicated:
   ``snap_end`` is unknown, the largest u64. By 5.6 the request then passes only from a complete start; any other is
   rolled back to ``snap_start`` or lower. A batch that was left alone by (1) ended above its start, and was not
   reported complete, so it is among the others: what it did not read is read again.
5. A rollback to ``R`` does not go to ``R`` but to the newest *complete* seqno ``P <= R``. Inside a completed, larger
   snapshot an older version at or below ``R`` may have been deduplicated by a write above ``R`` that is now undone;
   what was delivered up to ``R`` is no state that ever was. At ``P`` it is, and ``P`` lies in the common history. The
   batch is a ``rollback`` row with ``P``, and then the new branch from ``P`` on. ``P`` and the new ``epoch`` are part
   of the end offset, so a replay repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from upriver.errors import HistoryLost
from upriver.model import SEQNO_MAX, FailoverLog, Position
from upriver.protocol.history import History, RollbackTo, decide
from upriver.spark.offsets import Offset, Place, with_point


@dataclass(frozen=True, slots=True)
class View:
    """What the cluster said after the last batch was over; made by ``look``."""

    highs: Mapping[int, int]
    logs: Mapping[int, FailoverLog]
    purges: Mapping[int, int] = field(default_factory=dict)


def look(
    start: Offset,
    read_highs: Callable[[], Mapping[int, int]],
    read_logs: Callable[[Sequence[int]], Mapping[int, FailoverLog]],
    *,
    everything: bool = False,
) -> View:
    """Ask the cluster, in the order that makes the answers mean something.

    High seqnos before logs: a log with the offset's branch on top then says that the high seqno was of that branch
    (2). Where another branch is on top, the high seqno may be of the lost one, and its end must not be planned on
    the new one; so it is read again after the log. Logs are read of vbuckets that moved, or of all.
    """
    highs = dict(read_highs())
    wanted = sorted(highs) if everything else moved(start, highs)
    logs = dict(read_logs(wanted))
    if forked := [vb for vb, log in logs.items() if log.uuid != start.places[vb].vbuuid]:
        again = read_highs()
        for vb in forked:
            highs[vb] = again.get(vb, -1)
    return View({vb: high for vb, high in highs.items() if high >= 0}, logs)


def moved(start: Offset, highs: Mapping[int, int]) -> list[int]:
    """The vbuckets about which the high seqnos say that something happened."""
    return [vb for vb, place in enumerate(start.places) if highs.get(vb, place.seqno) != place.seqno]


@dataclass(slots=True)
class Known:
    """What this driver learned about the offset it starts from. In memory only: losing it costs nothing but time."""

    complete: dict[int, tuple[int, int]] = field(default_factory=dict)  # vbucket: (vbuuid, seqno)
    quiet: dict[int, tuple[int, int]] = field(default_factory=dict)  # the same, if the branch is still on top
    epochs: dict[int, int] = field(default_factory=dict)  # vbucket: epoch of rows that an executor sent

    def is_complete(self, vb: int, place: Place, log: FailoverLog | None) -> bool:
        """Whether what was delivered up to ``place`` is a whole state (3)."""
        at = (place.vbuuid, place.seqno)
        if place.seqno == place.consistent or self.complete.get(vb) == at:
            return True
        return self.quiet.get(vb) == at and log is not None and log.uuid == place.vbuuid

    def observe(self, offset: Offset, view: View) -> None:
        """A vbucket whose high seqno is still where the last batch ended is complete there (2, 3)."""
        for vb, high in view.highs.items():
            place = offset.places[vb] if vb < offset.vbuckets else None
            if place and place.seqno == high > 0:
                self.quiet[vb] = (place.vbuuid, high)
                if vb in view.logs and view.logs[vb].uuid == place.vbuuid:
                    self.complete[vb] = (place.vbuuid, high)


@dataclass(frozen=True, slots=True)
class Range:
    """One vbucket's part of a batch, as plain values that travel to an executor."""

    vbucket: int
    claim: Position
    end: int
    vbuuid: int  # the branch it was planned on; 0: any
    epoch: int
    points: tuple[int, ...] = ()  # older complete seqnos, newest first
    rolled_back: bool = False  # begin with a rollback row at the claim's seqno
    lost_vbuuid: int = 0

    @property
    def backlog(self) -> int:
        return self.end - self.claim.seqno


def claim(vb: int, place: Place, view: View, known: Known) -> Position:
    """What a stream request from ``place`` may truthfully say."""
    if place.seqno == 0:
        return Position()
    log = view.logs.get(vb)
    if known.is_complete(vb, place, log):
        return Position(place.vbuuid, place.seqno, place.seqno, place.seqno)
    on_top = log is not None and log.uuid == place.vbuuid and vb in view.highs
    snap_end = max(place.seqno, view.highs[vb]) if on_top else SEQNO_MAX
    return Position(place.vbuuid, place.seqno, place.consistent, snap_end)


def rollback_of(vb: int, place: Place, view: View, known: Known) -> int | None:
    """Where the producer would send a reader at ``place`` back to, or None if it would let it in."""
    history = History(view.logs[vb], view.highs[vb], view.purges.get(vb, 0))
    decision = decide(history, claim(vb, place, view, known))
    return decision.seqno if isinstance(decision, RollbackTo) else None


def plan(
    start: Offset,
    view: View,
    known: Known,
    *,
    most: int | None = None,
    ceiling: Mapping[int, int] | None = None,
    fail_on_rollback: bool = False,
) -> Offset:
    """The end of the next batch: at most ``most`` seqnos further, no vbucket beyond ``ceiling``.

    ``start`` itself if there is nothing to do. Vbuckets without a failover log in the view stay where they are.
    """
    bases: dict[int, Place] = {}
    rollbacks: set[int] = set()
    for vb, place in enumerate(start.places):
        if vb not in view.highs or vb not in view.logs:
            continue
        target = rollback_of(vb, place, view, known)
        if target is None:
            bases[vb] = _going_on(vb, place, view, known, start.baseline)
        elif fail_on_rollback:
            raise HistoryLost(vb, target, place.vbuuid)
        else:
            bases[vb] = _rolled_back(vb, place, target, known, start.baseline)
            rollbacks.add(vb)
    ends = _ends(bases, view, most, ceiling or {})
    return _offset(start, view, bases, rollbacks, ends)


def _going_on(vb: int, place: Place, view: View, known: Known, baseline: bool) -> Place:
    points, epoch = place.points, max(place.epoch, known.epochs.get(vb, 0))
    if known.is_complete(vb, place, view.logs[vb]):
        points = with_point(points, place.seqno, keep_oldest=baseline)
    return replace(place, points=points, epoch=epoch)


def _rolled_back(vb: int, place: Place, target: int, known: Known, baseline: bool) -> Place:
    """The place after the rollback (5). Below its baseline a query promised nothing, so it may stand anywhere."""
    point = place.newest_point(target) or (target if baseline else 0)
    points = tuple(p for p in place.points if p <= point)
    epoch = max(place.epoch, known.epochs.get(vb, 0)) + 1
    return Place(place.vbuuid, point, with_point(points, point, keep_oldest=baseline), epoch)


def _ends(bases: Mapping[int, Place], view: View, most: int | None, ceiling: Mapping[int, int]) -> dict[int, int]:
    tops = {vb: min(view.highs[vb], ceiling.get(vb, SEQNO_MAX)) for vb in bases}
    backlogs = {vb: tops[vb] - place.seqno for vb, place in bases.items() if tops[vb] > place.seqno}
    shares = share(backlogs, most)
    return {vb: place.seqno + shares.get(vb, 0) for vb, place in bases.items()}


def _offset(
    start: Offset, view: View, bases: Mapping[int, Place], rollbacks: set[int], ends: Mapping[int, int]
) -> Offset:
    places = list(start.places)
    for vb, base in bases.items():
        if vb in rollbacks or ends[vb] > base.seqno:
            places[vb] = replace(base, vbuuid=view.logs[vb].uuid, seqno=ends[vb])
    if tuple(places) == start.places:
        return start
    return replace(start, places=tuple(places), rollbacks=frozenset(rollbacks), anchor=False)


def share(backlogs: Mapping[int, int], most: int | None) -> dict[int, int]:
    """``most`` seqnos divided in proportion to the backlogs, to the last one.

    >>> share({0: 100, 1: 50, 2: 1}, 30)
    {0: 20, 1: 10}
    """
    total = sum(backlogs.values())
    if most is None or total <= most:
        return dict(backlogs)
    shares = {vb: backlog * most // total for vb, backlog in backlogs.items()}
    left = most - sum(shares.values())
    by_remainder = sorted(backlogs, key=lambda vb: (-(backlogs[vb] * most % total), vb))
    for vb in by_remainder[:left]:
        shares[vb] += 1
    return {vb: size for vb, size in shares.items() if size}


def ranges(start: Offset, end: Offset, view: View, known: Known) -> list[Range]:
    """What executors must read to get from ``start`` to ``end``; nothing for an anchor."""
    if end.anchor:
        return []
    pairs = enumerate(zip(start.places, end.places, strict=True))
    return [_range(vb, a, b, end, view, known) for vb, (a, b) in pairs if a != b]


def _range(vb: int, place: Place, goal: Place, end: Offset, view: View, known: Known) -> Range:
    if vb not in end.rollbacks:
        # The plan wrote down whether the start was consistent. A driver that died since has forgotten it; were it to
        # claim less than the plan did, the producer would refuse a batch that no later plan would make good.
        complete = place.seqno != 0 and place.seqno in goal.points
        here = Position(place.vbuuid, place.seqno, place.seqno, place.seqno)
        at = here if complete else claim(vb, place, view, known)
        return Range(vb, at, goal.seqno, goal.vbuuid, goal.epoch, place.points)
    to = goal.consistent
    at = Position(place.vbuuid if to else 0, to, to, to)
    return Range(vb, at, goal.seqno, goal.vbuuid, goal.epoch, goal.points, rolled_back=True, lost_vbuuid=place.vbuuid)
