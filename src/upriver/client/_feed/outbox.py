"""What waits between a feed and its caller: items in order, positions of what was handed over, and what is held back.

Pure, like the feed: the shells put events in, take items out, and say what time it is. Bytes are acknowledged when
the caller comes back for more; a position covers exactly what the caller has been given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from upriver.client._feed.bundle import Bundle, BundleMaker
from upriver.client._feed.progress import Step, begun, last_rows, moved
from upriver.client.positions import Standpoint
from upriver.model import Position
from upriver.protocol.feed.cluster_feed import ClusterFeed, FeedEvent
from upriver.protocol.standing import Mark

LINGER_S = 0.01  # how long rows may wait for company


class Outbox:
    """The queue towards one caller."""

    def __init__(
        self, feed: ClusterFeed, maker: BundleMaker, *, linger_s: float = LINGER_S, hold_unsafe: bool = False
    ) -> None:
        self.feed = feed
        self.hold_unsafe = hold_unsafe
        self.given = 0
        self._maker, self._linger_s = maker, linger_s
        self._ready: deque[Bundle] = deque()
        self._current: Bundle | None = None
        self._before = 0  # how many items of the current bundle an earlier loop was given
        self._mark: Mark = feed.standing.mark()
        self._since_mark: list[Any] = []  # batches that were given since
        self._held_since: float | None = None
        self._persisted: dict[int, tuple[int, int]] = {}  # by vbucket: the branch, and up to where it is on all disks

    @property
    def waiting(self) -> int:
        """How many bundles the caller could take."""
        return len(self._ready)

    @property
    def idle(self) -> bool:
        """Whether the caller has everything."""
        return not self._ready and not self._maker.holds and self._current is None

    def add(self, event: FeedEvent, now: float) -> None:
        """Something came from the feed."""
        for made in self._maker.add(event):
            self._enqueue(made)
        if not self._maker.holds:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now

    def went_back(self, then: Callable[[], None]) -> None:
        """The feed has gone back, and repeats changes; do ``then`` once the caller has all that came before."""
        self._flush()
        self._enqueue(Bundle([], [], self.feed.standing.mark(), then=then))

    def take(self, now: float) -> list[Any] | None:
        """Items for the caller, or None; taking them means that those before are done with.

        While the caller gets them one by one, ``given`` must say how many it has: it is part of the position. A caller
        that left its loop in the middle of them gets the rest.
        """
        while True:
            if self._current is not None:
                if rest := self._rest(self._current):
                    return rest
                self._finish(self._current)
            if not self._ready and self._lingered(now):
                self._flush()
            if not self._ready or not self._is_safe(self._ready[0]):
                return None
            self._current, self.given, self._before = self._ready.popleft(), 0, 0
            if self._current.items:
                return self._current.items

    def _rest(self, made: Bundle) -> list[Any]:
        self._before, self.given = self._before + self.given, 0
        return made.items[self._before :]

    def wait_s(self, now: float) -> float | None:
        """When to call ``next`` again even if nothing comes: rows wait for company. None: no need."""
        if self._held_since is None or self._ready:
            return None
        return max(0.0, self._held_since + self._linger_s - now)

    def standpoints(self) -> dict[int, Standpoint]:
        """What may be claimed of what the caller has been given, including the item that it was given last."""
        made, standing, given = self._current, self.feed.standing, self._before + self.given
        if made is None:
            place = standing.mark() if self.idle else self._mark
            return self._all_of(place, batches=[] if self.idle else self._since_mark)
        if made.mark and given == len(made.items):
            return self._all_of(made.mark)
        if made.single and made.mark:
            positions = self._inside(made.mark, [(change.vbucket, change.seqno) for change in made.items], given)
            epoch = made.mark.epoch
            return {vb: Standpoint(p, self._points(vb, p, epoch[vb]), epoch[vb]) for vb, p in positions.items()}
        return self._all_of(self._mark, batches=[*self._since_mark, *made.items[:given]])

    def _all_of(self, mark: Mark, batches: list[Any] | None = None) -> dict[int, Standpoint]:
        """The place of ``mark``, moved on by the rows of some batches that were given after it."""
        found = {}
        for vb in self.feed.vbuckets:
            position = mark.position(vb)
            found[vb] = Standpoint(position, self._points(vb, position, mark.epoch[vb]), mark.epoch[vb])
        for batch in batches or ():
            for vb, step in last_rows(batch).items():
                found[vb] = self._stepped(vb, found[vb], step)
            for vb, seqno in begun(batch).items():
                found[vb] = _begun_upto(found[vb], seqno)
        return found

    def _stepped(self, vb: int, before: Standpoint, step: Step) -> Standpoint:
        """Where a vbucket has gone back without a word, it was consistent at a point below its first row since."""
        position, points = before.position, before.points
        if step.went_back or step.epoch != before.epoch or step.first <= position.seqno:
            back = max((point for point in self.feed.standing.points(vb) if point < step.first), default=0)
            position = Position(step.vbuuid, back, back, back)
            points = tuple(point for point in points if point < back)
        return Standpoint(moved(position, step), points, step.epoch)

    def _points(self, vb: int, position: Position, epoch: int) -> tuple[int, ...]:
        """Older points of the reader. Those of a feed that has gone back where the caller has not yet are not his."""
        if epoch != self.feed.standing.epoch[vb]:
            return ()
        return tuple(point for point in self.feed.standing.points(vb) if 0 < point < position.snap_start)

    def _inside(self, mark: Mark, places: list[tuple[int, int]], given: int) -> dict[int, Position]:
        """Between two changes of one run: rows that were not handed over yet do not count."""
        reached = dict(places[:given])
        ahead = {vb for vb, _ in places[given:]} - reached.keys()
        return {
            vb: self._mark.position(vb) if vb in ahead else mark.position(vb, reached.get(vb))
            for vb in self.feed.vbuckets
        }

    # ---------------------------------------------------------------------------------------------- inside

    def _enqueue(self, made: Bundle) -> None:
        if made.rolled_back and self.hold_unsafe:
            vbucket, to_seqno = made.rolled_back
            self._persisted.pop(vbucket, None)
            for waiting in self._ready:
                _drop_void(waiting, vbucket, to_seqno)
        self._ready.append(made)

    def _lingered(self, now: float) -> bool:
        return self._held_since is not None and (now - self._held_since >= self._linger_s or self.feed.done)

    def _flush(self) -> None:
        for made in self._maker.flush():
            self._enqueue(made)
        self._held_since = None

    def _finish(self, made: Bundle) -> None:
        for documents in made.held:
            self.feed.taken(documents)
        if made.mark:
            self._mark = made.mark
            self._since_mark.clear()
        else:
            self._since_mark += made.items
        if made.then:
            made.then()
        self._current = None

    # ---------------------------------------------------------------------------------------------- holding back

    def unsafe(self) -> dict[int, int]:
        """Branches of the vbuckets whose changes wait for being on disk everywhere."""
        if not self.hold_unsafe:
            return {}
        wanted = {vb for made in self._ready for vb in _highest(made)}
        return {vb: self.feed.standing.vbuuid[vb] for vb in wanted if self.feed.standing.vbuuid[vb]}

    def note_persisted(self, branches: Mapping[int, int], seqnos: Mapping[int, int]) -> None:
        """Up to where these branches, which ``unsafe`` gave, are on disk everywhere."""
        self._persisted.update((vb, (branches[vb], seqno)) for vb, seqno in seqnos.items())

    def _is_safe(self, made: Bundle) -> bool:
        return not self.hold_unsafe or all(self._reaches(vb, seqno) for vb, seqno in _highest(made).items())

    def _reaches(self, vb: int, seqno: int) -> bool:
        """What was on disk of another branch says nothing about the one that we are on now."""
        branch, persisted = self._persisted.get(vb, (0, 0))
        return branch == self.feed.standing.vbuuid[vb] and seqno <= persisted


def _begun_upto(before: Standpoint, seqno: int) -> Standpoint:
    """After a part of an out-of-order snapshot: no further, but the reader holds something up to there."""
    at = before.position
    return replace(before, position=replace(at, snap_end=max(at.snap_end, seqno)))


def _highest(made: Bundle) -> dict[int, int]:
    """The highest seqno of each vbucket among changes that wait; being told of a rollback need not wait."""
    found: dict[int, int] = {}
    if made.rolled_back:
        return found
    for item in made.items:
        if isinstance(item, tuple):
            found[item.vbucket] = max(item.seqno, found.get(item.vbucket, 0))  # type: ignore[attr-defined]
            continue
        vbuckets, seqnos = item.column("vbucket").to_numpy(), item.column("seqno").to_numpy()
        for vb in set(vbuckets.tolist()):
            found[vb] = max(found.get(vb, 0), int(seqnos[vbuckets == vb].max()))
    return found


def _drop_void(made: Bundle, vbucket: int, to_seqno: int) -> None:
    """Changes that were never handed over and never will have happened."""
    if not made.rolled_back:
        left = (_without_void(item, vbucket, to_seqno) for item in made.items)
        made.items = [item for item in left if item is not None]


def _without_void(item: Any, vbucket: int, to_seqno: int) -> Any:
    """A change, or a batch of those that still count; None if nothing is left."""
    if isinstance(item, tuple):
        void = item.vbucket == vbucket and item.seqno > to_seqno  # type: ignore[attr-defined]
        return None if void else item
    import pyarrow as pa

    counts = (item["vbucket"].to_numpy() != vbucket) | (item["seqno"].to_numpy() <= to_seqno)
    kept = item.filter(pa.array(counts))
    return kept if kept.num_rows else None
