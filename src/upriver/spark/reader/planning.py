"""The plan of a micro-batch, pure: what may be claimed of its start, what was rolled back, where it ends.

**The claim.** A producer deduplicates inside a snapshot, so a reader that stops in the middle of one may lack the old
version of a document whose new version it has not seen yet. If history then forks in between, the old version is
alive again, and it is never sent unless the reader's claim is honest about the snapshot. Spark wants the end of a
batch before the batch is read, so the driver cannot know in which snapshot it will end. What it knows is enough:

1. *Executors read a batch only from the branch it was planned on* (``Range.vbuuid``). If they are told to roll back, or
   find another branch, they do not read the vbucket, and report that; a task that cannot report it fails. The driver
   may have an old map itself, and see nothing wrong. So nothing that the driver sees makes up for what was not read:
   the next plan goes back to a complete seqno and reads again, after a rollback row.
2. Let a batch end at ``(U, s)``, and let ``H`` be the high seqno read *after* the batch was over, and *before* a
   failover log that still has ``U`` on top. Then everything the batch received was deduplicated by writes of branch
   ``U`` no higher than ``H``, because seqnos only grow on a branch. So ``snap_end = H`` covers every snapshot that the
   batch took data from. ``snap_start`` is the newest seqno at which the reader was complete. That claim is honest.
3. The reader is complete at ``s`` if an executor read up to ``s``, and neither a snapshot that it took data from nor
   the ``snap_end`` claimed for its start reaches beyond ``s``, and every other attempt of its task that ended reports
   the same (``reports``). Then ``snap_start = s = snap_end``. Nothing that the driver sees by itself makes a vbucket
   complete. It is harmless to know less.
4. If ``U`` is no longer on top, ``H`` belongs to another branch and says nothing about what ``U`` had deduplicated.
   Then ``snap_end`` is unknown: the largest u64. By docs/protocol/rollback.md#decision the request passes only from a
   complete start; any other start is rolled back to ``snap_start`` or lower.
5. A rollback to ``R`` does not go to ``R`` but to the newest *complete* seqno ``P <= R``. Inside a completed, larger
   snapshot, a write above ``R`` that is now undone may have deduplicated an older version at or below ``R``, so what
   was delivered up to ``R`` is a state that never existed. The state at ``P`` did exist, and ``P`` lies in the common
   history. The batch is a ``rollback`` row with ``P``, and then the new branch from ``P`` on. ``P`` and the new
   ``epoch`` are part of the end offset, so a replay repeats them. Executors never raise an epoch themselves, because
   no offset would record it.
6. *A driver that does not know whether a batch was read must assume that it was not.* The end of a batch says which
   vbuckets it reads (``Offset.reads``). The driver that ran the batch knows what was left unread. A later driver does
   not, unless the reports were kept (a sync keeps them in its lake), so it treats all of them as unread (1). To save
   that cost when a query ends in order or is idle, an empty batch *closes* the last one: its end says that everything
   was read, and where the reader is complete.
7. *The filter is part of the position.* A position says which filter everything up to it was read with. If more is
   wanted, one batch reads the missing part of this vbucket, from 0 up to the position; then the position has the new
   filter. Its older points are dropped: later writes may have deduplicated what was new there. The position itself is
   complete if it was complete before and the missing part was read completely. If some of the missing part was wanted
   once before, the reader may hold documents whose deletions it has missed since, so it is rolled back to 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from upriver.errors import HistoryLost
from upriver.model import SEQNO_MAX, FailoverLog
from upriver.protocol.filters import Filter, Wanted
from upriver.protocol.history import History, RollbackTo, decide
from upriver.protocol.offsets import FILTERS_KEPT, Offset
from upriver.protocol.position import Position

EVERYTHING_WANTED = Wanted()
LOOKS = 10
ROWS_WORTH_A_TASK = 2_000
STREAM_COST = 20  # opening a stream costs about as much as so many rows
N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, slots=True)
class View:
    """What the cluster said after the last batch was over; made by ``look``.

    ``matching`` is the seqno of the last change of each vbucket that the filter lets through, None if unknown. It only
    decides how much of a limit a range uses up; what is delivered does not depend on it.
    """

    highs: Mapping[int, int]
    logs: Mapping[int, FailoverLog]
    purges: Mapping[int, int] = field(default_factory=dict)
    matching: Mapping[int, int] | None = None


def look(
    start: Offset,
    read_highs: Callable[[], Mapping[int, int]],
    read_logs: Callable[[Sequence[int]], Mapping[int, FailoverLog]],
    *,
    everything: bool = False,
    also: Iterable[int] = (),
    revision: Callable[[], Any] = lambda: None,
) -> View:
    """Ask the cluster until all answers belong to one ``revision`` of its map; if it keeps changing, nothing is known.

    A high seqno from one owner says nothing about the log of another, even if that log has our branch on top.
    """
    for _ in range(LOOKS):
        before = revision()
        view = _look(start, read_highs, read_logs, everything, also)
        if revision() == before:
            return view
    return View({}, {})


def _look(
    start: Offset,
    read_highs: Callable[[], Mapping[int, int]],
    read_logs: Callable[[Sequence[int]], Mapping[int, FailoverLog]],
    everything: bool,
    also: Iterable[int],
) -> View:
    """Ask for high seqnos first, then for failover logs.

    Then a log with the offset's branch on top proves that the high seqno belongs to that branch (2). Where another
    branch is on top, the high seqno may belong to the lost one, so it is read again after the log. Logs are read of
    vbuckets that moved and of ``also``, or of all.
    """
    highs = dict(read_highs())
    wanted = highs.keys() if everything else {*moved(start, highs), *also} & highs.keys()
    logs = dict(read_logs(sorted(wanted)))
    if forked := [vb for vb, log in logs.items() if log.uuid != start.positions[vb].vbuuid]:
        again = read_highs()
        for vb in forked:
            highs[vb] = again.get(vb, -1)
    return View({vb: high for vb, high in highs.items() if high >= 0}, logs)


def behind(start: Offset, wanted: Wanted) -> list[int]:
    """The vbuckets whose positions lack some of what is wanted."""
    return [vb for vb, at in enumerate(refiltered(start, wanted).positions) if at.filter]


def moved(start: Offset, highs: Mapping[int, int]) -> list[int]:
    """The vbuckets whose high seqno is not at their position."""
    return [vb for vb, at in enumerate(start.positions) if highs.get(vb, at.seqno) != at.seqno]


@dataclass(slots=True)
class Known:
    """What tasks said about the batch that ended where we plan from (3, 6).

    If ``reported``, all that was left unread is in ``unread``, and everything else that the batch planned was read.
    """

    complete: dict[int, tuple[int, int]] = field(default_factory=dict)  # vbucket: (vbuuid, seqno)
    unread: dict[int, int] = field(default_factory=dict)  # vbucket: a seqno to go back to, or below
    reported: bool = False

    def was_read(self, vb: int, offset: Offset) -> bool:
        """Whether everything up to the position in ``offset`` was delivered."""
        if vb in offset.unread:
            return False
        return vb not in offset.reads or (self.reported and vb not in self.unread)

    def left(self, offset: Offset) -> list[int]:
        """The vbuckets that were not read up to their positions."""
        return [vb for vb in sorted(offset.reads | offset.unread) if not self.was_read(vb, offset)]

    def is_complete(self, vb: int, at: Position) -> bool:
        """Whether what was delivered up to a position is a whole state (3)."""
        return at.is_consistent or self.complete.get(vb) == (at.vbuuid, at.seqno)


@dataclass(frozen=True, slots=True)
class Range:
    """One vbucket's part of a batch, as plain values that travel to an executor."""

    vbucket: int
    start: Position  # with the snapshot that may be claimed
    end: int
    vbuuid: int  # the branch it was planned on; 0: any
    rolled_back: bool = False  # begin with a rollback row at the seqno of the start
    lost_vbuuid: int = 0
    filter: bytes = b""  # the value of the stream request
    without: tuple[int, ...] = ()  # collections to leave out of what comes
    addition: bool = False  # to a position that is not complete itself (7)

    @property
    def backlog(self) -> int:
        return self.end - self.start.seqno


def claimable(vb: int, at: Position, view: View, known: Known) -> Position:
    """A position with the snapshot that a stream request from there may truthfully claim (2, 3, 4)."""
    if at.seqno == 0:
        return Position(epoch=at.epoch)
    if known.is_complete(vb, at):
        return at.complete()
    log = view.logs.get(vb)
    on_top = log is not None and log.uuid == at.vbuuid and vb in view.highs
    return at._replace(snap_end=max(at.seqno, view.highs[vb]) if on_top else SEQNO_MAX)


def rollback_of(vb: int, at: Position, view: View, known: Known) -> int | None:
    """Where the producer would roll a reader at this position back to; None if it would accept the request."""
    history = History(view.logs[vb], view.highs[vb], view.purges.get(vb, 0))
    decision = decide(history, claimable(vb, at, view, known).claim)
    return decision.seqno if isinstance(decision, RollbackTo) else None


def plan(
    start: Offset,
    view: View,
    known: Known,
    *,
    most: int | None = None,
    ceiling: Mapping[int, int] | None = None,
    fail_on_rollback: bool = False,
    close: bool = False,
    wanted: Wanted = EVERYTHING_WANTED,
) -> Offset:
    """The end of the next batch: at most ``most`` seqnos further, no vbucket beyond ``ceiling``.

    ``start`` itself if there is nothing to do; with ``close``, an end that only says what the last batch did (6).
    Vbuckets without a failover log in the view stay where they are.
    """
    given, start = start, refiltered(start, wanted)
    left = frozenset(known.left(start))
    positions = [at.complete() if vb not in left and known.is_complete(vb, at) else at
                 for vb, at in enumerate(start.positions)]  # fmt: skip
    bases: dict[int, Position] = {}
    rollbacks: set[int] = set()
    for vb in sorted(view.highs.keys() & view.logs.keys()):
        at = positions[vb]
        target = _target(vb, start.positions[vb], view, known, unread=vb in left)
        if target is not None and fail_on_rollback:
            raise HistoryLost(vb, target, at.vbuuid)
        if target is None and _again(start, at, wanted):
            target = 0
        if target is not None:
            rollbacks.add(vb)
            if at.filter is not None and not wanted.exists(at.filter):
                target = 0  # its filter names something that is gone, so nothing can be read with it
        bases[vb] = at if target is None else _rolled_back(at, target, start.baseline, vb in left)
    additions, waiting, spent = _additions(bases, rollbacks, most)
    moving = {vb: base for vb, base in bases.items() if vb not in additions and vb not in waiting}
    ends = _ends(moving, view, None if most is None else max(0, most - spent), ceiling or {})
    reads = frozenset(vb for vb, base in moving.items() if ends[vb] > base.seqno) | additions
    if not reads and not rollbacks and not (close and start.reads - left):
        return given
    for vb in (reads | rollbacks) - additions:
        positions[vb] = bases[vb].read(ends[vb], SEQNO_MAX)._replace(vbuuid=view.logs[vb].uuid)
    for vb in additions:
        positions[vb] = Position.of_points(view.logs[vb].uuid, bases[vb].seqno, epoch=bases[vb].epoch)
    return replace(start, positions=tuple(positions), rollbacks=frozenset(rollbacks), anchor=False,
                   reads=reads, unread=left - rollbacks)  # fmt: skip


def refiltered(start: Offset, wanted: Wanted) -> Offset:
    """The same positions, with what is wanted now as the first filter; one that lacks nothing names no filter."""
    first = start.filters[0] if start.filters else wanted.filter
    have = [at.filter or first for at in start.positions]
    lacking = {one for one, at in zip(have, start.positions, strict=True) if at.seqno and wanted.missing(one)}
    filters = (wanted.filter, *sorted(lacking, key=Filter.text))
    former = dict.fromkeys((*start.former, *((first,) if first != wanted.filter else ())))
    if len(filters) + len(former) > FILTERS_KEPT:
        former = {Filter(): None}
    positions = tuple(_with_filter(at, one if at.seqno and one in lacking else None)
                      for one, at in zip(have, start.positions, strict=True))  # fmt: skip
    if (positions, filters, tuple(former)) == (start.positions, start.filters, start.former):
        return start
    return replace(start, positions=positions, filters=filters, former=tuple(former))


def _with_filter(at: Position, filter: Filter | None) -> Position:
    return at if at.filter == filter else at._replace(filter=filter)


def _again(start: Offset, at: Position, wanted: Wanted) -> bool:
    """Whether a position lacks something that its reader once had."""
    missing = wanted.missing(at.filter) if at.filter else None
    if missing is None or at.filter is None:
        return False
    more = [one for one in start.former if replace(wanted, filter=one).missing(at.filter)]
    return any(wanted.overlaps(missing, one) for one in more)


def _additions(
    bases: Mapping[int, Position], rollbacks: set[int], most: int | None
) -> tuple[frozenset[int], frozenset[int], int]:
    """The vbuckets that catch up with a wider filter now, those that must wait, and how many seqnos it takes.

    A vbucket that is rolled back keeps its filter, and catches up in a later batch. If its filter cannot be requested
    any more, it was rolled back to 0, where it begins with what is wanted.
    """
    lacking = [vb for vb, base in bases.items() if base.filter and vb not in rollbacks]
    chosen: list[int] = []
    spent = 0
    for vb in lacking:
        if most is not None and chosen and spent + bases[vb].seqno > most:
            break
        chosen.append(vb)
        spent += bases[vb].seqno
    return frozenset(chosen), frozenset(lacking[len(chosen) :]), spent


def _target(vb: int, at: Position, view: View, known: Known, *, unread: bool) -> int | None:
    """The seqno to go back to, or below; None to continue."""
    target = rollback_of(vb, at, view, known)
    if not unread:
        return target
    return min(at.seqno if target is None else target, known.unread.get(vb, at.seqno))


def _rolled_back(at: Position, target: int, baseline: bool, unread: bool) -> Position:
    """The position after a rollback (5). Below its baseline a query promises nothing, so any seqno will do there."""
    anywhere = baseline and (not unread or at.snap_start)
    point = at.rollback_target(target) or (target if anywhere else 0)
    return at.rolled_back(point)._replace(epoch=at.epoch + 1, filter=at.filter if point else None)


def _ends(bases: Mapping[int, Position], view: View, most: int | None, ceiling: Mapping[int, int]) -> dict[int, int]:
    tops = {vb: max(at.seqno, min(view.highs[vb], ceiling.get(vb, SEQNO_MAX))) for vb, at in bases.items()}
    matching = tops if view.matching is None else view.matching
    # Changes that the filter hides do not count towards the limit, as far as they are known.
    costs = {vb: min(tops[vb], matching.get(vb, tops[vb])) - at.seqno for vb, at in bases.items()}
    shares = share({vb: cost for vb, cost in costs.items() if cost > 0}, most)
    return {vb: tops[vb] if shares.get(vb, 0) >= costs[vb] else at.seqno + shares.get(vb, 0)
            for vb, at in bases.items()}  # fmt: skip


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


def ranges(start: Offset, end: Offset, view: View, known: Known, wanted: Wanted = EVERYTHING_WANTED) -> list[Range]:
    """What executors must read to get from ``start`` to ``end``; nothing for an anchor."""
    if end.anchor:
        return []
    first = (start.filters or end.filters or (wanted.filter,))[0]
    found = []
    for vb, (at, goal) in enumerate(zip(start.positions, end.positions, strict=True)):
        if at.seqno != goal.seqno or vb in end.rollbacks:
            filter = goal.filter or (end.filters[0] if end.filters else wanted.filter)
            found.append(replace(_range(vb, at, goal, end, view, known), filter=filter.wire()))
        elif vb in end.reads and (missing := wanted.missing(at.filter or first)):
            found.append(Range(vb, Position(epoch=goal.epoch), goal.seqno, goal.vbuuid, filter=missing.filter.wire(),
                               without=missing.without, addition=not known.is_complete(vb, at)))  # fmt: skip
    return found


def _range(vb: int, at: Position, goal: Position, end: Offset, view: View, known: Known) -> Range:
    if vb in end.rollbacks:
        to = goal.snap_start
        back = Position.consistent_at(at.vbuuid if to else 0, to, goal.points, goal.epoch)
        return Range(vb, back, goal.seqno, goal.vbuuid, rolled_back=True, lost_vbuuid=at.vbuuid)
    # The end offset says whether the start was consistent, and a driver that has restarted must claim no less: the
    # producer would refuse the batch, and no later plan would read it.
    complete = at.seqno != 0 and at.seqno in goal.consistent_points
    start = at.complete() if complete else claimable(vb, at, view, known)
    return Range(vb, start._replace(epoch=goal.epoch), goal.seqno, goal.vbuuid)


# Packing: a task costs Spark more than a stream costs us, so a batch has few tasks. Each reads from as few nodes as
# possible (one connection each), and all have about the same work.


def tasks_for(ranges: Sequence[Range], most: int) -> int:
    """How many tasks the ranges are worth: one for few rows, up to ``most`` for many."""
    work = sum(weight(one) for one in ranges)
    return max(1, min(most, len(ranges), -(-work // ROWS_WORTH_A_TASK)))


def weight(one: Range) -> int:
    return one.backlog + STREAM_COST


def pack(ranges: Sequence[Range], owners: Mapping[int, N], most: int) -> list[list[Range]]:
    """At most ``most`` groups of equal weight; ranges of one node (``owners`` by vbucket) stay together."""
    if not ranges:
        return []
    tasks = tasks_for(ranges, most)
    by_node: dict[N | None, list[Range]] = {}
    for one in ranges:
        by_node.setdefault(owners.get(one.vbucket), []).append(one)
    if tasks <= len(by_node):
        return _spread(list(by_node.values()), tasks)
    return [group for node, count in _divide(by_node, tasks) for group in _spread([[one] for one in node], count)]


def _divide(by_node: Mapping[N | None, list[Range]], tasks: int) -> list[tuple[list[Range], int]]:
    """How many tasks each node gets: one, and more where a task has the most work."""
    counts = dict.fromkeys(by_node, 1)
    work = {node: sum(map(weight, members)) for node, members in by_node.items()}
    for _ in range(tasks - len(by_node)):
        open_nodes = [node for node, members in by_node.items() if counts[node] < len(members)]
        counts[max(open_nodes, key=lambda node: work[node] / counts[node])] += 1
    return [(by_node[node], count) for node, count in counts.items()]


def _spread(parts: Sequence[Sequence[Range]], tasks: int) -> list[list[Range]]:
    """Put each part, the heaviest first, into the lightest group."""
    heap = [(0, index) for index in range(min(tasks, len(parts)))]
    groups: list[list[Range]] = [[] for _ in heap]
    for part in sorted(parts, key=lambda part: -sum(map(weight, part))):
        load, index = heapq.heappop(heap)
        groups[index].extend(part)
        heapq.heappush(heap, (load + sum(map(weight, part)), index))
    return [sorted(group, key=lambda one: one.vbucket) for group in groups]
