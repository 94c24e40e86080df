"""What waits between a subscription and its caller: items in order, and the positions of what was handed over.

Pure, like the feed: the shells put events in, take items out, and say what time it is. Bytes are acknowledged when
the caller comes back for more; a position covers exactly what the caller has been given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from upriver.client._feed.bundle import Bundle, BundleMaker
from upriver.client._feed.progress import RowSpan, out_of_order, row_spans
from upriver.protocol.feed.cluster_feed import ClusterFeed, FeedEvent
from upriver.protocol.feed.positions import FrozenPositions
from upriver.protocol.position import Position

if TYPE_CHECKING:
    import pyarrow as pa

LINGER_S = 0.01  # how long rows may wait for more


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
        self._reached: FrozenPositions = feed.table.frozen()
        self._since: list[Any] = []  # batches that were given since
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
        for bundle in self._maker.add(event):
            self._enqueue(bundle)
        if not self._maker.holds:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now

    def went_back(self, then: Callable[[], None]) -> None:
        """The feed has gone back, and repeats changes; do ``then`` once the caller has all that came before."""
        self._flush()
        self._enqueue(Bundle([], [], self.feed.table.frozen(), then=then))

    def take(self, now: float) -> list[Any] | None:
        """Items for the caller, or None; taking them means that the caller is done with those before.

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

    def _rest(self, bundle: Bundle) -> list[Any]:
        self._before, self.given = self._before + self.given, 0
        return bundle.items[self._before :]

    def wait_s(self, now: float) -> float | None:
        """How long until rows that wait for more are due, even if nothing comes; None if none wait."""
        if self._held_since is None or self._ready:
            return None
        return max(0.0, self._held_since + self._linger_s - now)

    def positions(self) -> dict[int, Position]:
        """Where the caller is with what it has been given, including the item that it was given last."""
        bundle, given = self._current, self._before + self.given
        if bundle is None:
            return self._all_of(self.feed.table.frozen()) if self.idle else self._all_of(self._reached, self._since)
        if bundle.reached and given == len(bundle.items):
            return self._all_of(bundle.reached)
        if bundle.reached and bundle.single:
            return self._inside(bundle.reached, [(change.vbucket, change.seqno) for change in bundle.items], given)
        return self._all_of(self._reached, [*self._since, *bundle.items[:given]])

    def _all_of(self, reached: FrozenPositions, batches: Sequence[pa.RecordBatch] = ()) -> dict[int, Position]:
        """Positions, moved on by the rows of some batches that were given since."""
        found = {vb: reached.position(vb) for vb in self.feed.vbuckets}
        for batch in batches:
            for vb, span in row_spans(batch).items():
                found[vb] = self._moved(vb, found[vb], span)
            for vb, seqno in out_of_order(batch).items():  # no further, but the caller holds something up to there
                found[vb] = found[vb]._replace(snap_end=max(found[vb].snap_end, seqno))
        return found

    def _moved(self, vb: int, at: Position, span: RowSpan) -> Position:
        """A vbucket that went back without a word went to a consistent point below its first row since."""
        if span.went_back or span.epoch != at.epoch or span.first <= at.seqno:
            now = self.feed.table.position(vb)
            at = now.rolled_back(now.rollback_target(span.first - 1))
        return at._replace(vbuuid=span.vbuuid, epoch=span.epoch).read(span.seqno, span.snapshot_end)

    def _inside(self, reached: FrozenPositions, changes: list[tuple[int, int]], given: int) -> dict[int, Position]:
        """Between two changes of one run: rows that were not handed over yet do not count."""
        seqnos = dict(changes[:given])
        ahead = {vb for vb, _ in changes[given:]} - seqnos.keys()
        return {
            vb: self._reached.position(vb) if vb in ahead else reached.position(vb, seqnos.get(vb))
            for vb in self.feed.vbuckets
        }

    # ---------------------------------------------------------------------------------------------- inside

    def _enqueue(self, bundle: Bundle) -> None:
        if bundle.rolled_back and self.hold_unsafe:
            vbucket, to_seqno = bundle.rolled_back
            self._persisted.pop(vbucket, None)
            for waiting in self._ready:
                _drop_void(waiting, vbucket, to_seqno)
        self._ready.append(bundle)

    def _lingered(self, now: float) -> bool:
        return self._held_since is not None and (now - self._held_since >= self._linger_s or self.feed.done)

    def _flush(self) -> None:
        for bundle in self._maker.flush():
            self._enqueue(bundle)
        self._held_since = None

    def _finish(self, bundle: Bundle) -> None:
        for documents in bundle.held:
            self.feed.taken(documents)
        if bundle.reached:
            self._reached = bundle.reached
            self._since.clear()
        else:
            self._since += bundle.items
        if bundle.then:
            bundle.then()
        self._current = None

    # ---------------------------------------------------------------------------------------------- holding back

    def unsafe(self) -> dict[int, int]:
        """Branches of the vbuckets whose changes wait until they are on disk everywhere."""
        if not self.hold_unsafe:
            return {}
        wanted = {vb for bundle in self._ready for vb in _highest(bundle)}
        return {vb: self.feed.table.vbuuid(vb) for vb in wanted if self.feed.table.vbuuid(vb)}

    def note_persisted(self, branches: Mapping[int, int], seqnos: Mapping[int, int]) -> None:
        """Up to where these branches, which ``unsafe`` gave, are on disk everywhere."""
        self._persisted.update((vb, (branches[vb], seqno)) for vb, seqno in seqnos.items())

    def _is_safe(self, bundle: Bundle) -> bool:
        return not self.hold_unsafe or all(self._reaches(vb, seqno) for vb, seqno in _highest(bundle).items())

    def _reaches(self, vb: int, seqno: int) -> bool:
        """What was on disk of another branch says nothing about the one that we are on now."""
        branch, persisted = self._persisted.get(vb, (0, 0))
        return branch == self.feed.table.vbuuid(vb) and seqno <= persisted


def _highest(bundle: Bundle) -> dict[int, int]:
    """The highest seqno of each vbucket among changes that wait; news of a rollback need not wait."""
    found: dict[int, int] = {}
    if bundle.rolled_back:
        return found
    for item in bundle.items:
        if isinstance(item, tuple):
            found[item.vbucket] = max(item.seqno, found.get(item.vbucket, 0))  # type: ignore[attr-defined]
            continue
        vbuckets, seqnos = item.column("vbucket").to_numpy(), item.column("seqno").to_numpy()
        for vb in set(vbuckets.tolist()):
            found[vb] = max(found.get(vb, 0), int(seqnos[vbuckets == vb].max()))
    return found


def _drop_void(bundle: Bundle, vbucket: int, to_seqno: int) -> None:
    """Drop changes that were never handed over, and that a rollback took back."""
    if not bundle.rolled_back:
        left = (_without_void(item, vbucket, to_seqno) for item in bundle.items)
        bundle.items = [item for item in left if item is not None]


def _without_void(item: Any, vbucket: int, to_seqno: int) -> Any:
    """A change, or a batch of those that still count; None if nothing is left."""
    if isinstance(item, tuple):
        void = item.vbucket == vbucket and item.seqno > to_seqno  # type: ignore[attr-defined]
        return None if void else item
    import pyarrow as pa

    counts = (item["vbucket"].to_numpy() != vbucket) | (item["seqno"].to_numpy() <= to_seqno)
    kept = item.filter(pa.array(counts))
    return kept if kept.num_rows else None
