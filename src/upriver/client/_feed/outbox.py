"""The queue between a subscription and its caller: bundles of items in order, and the positions of what was given.

Pure, like the feed: the shells put events in, take items out, and pass in the time. Bytes are acknowledged when the
caller asks for more. A position covers exactly what the caller has been given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from upriver.model import unsigned
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import FeedEvent, FeedRows
from upriver.protocol.feed.positions import FrozenPositions
from upriver.protocol.position import Position

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(slots=True)
class Bundle:
    """Items for the caller, in order, and what to tell the feed once the caller has taken them."""

    items: list[Any]
    held: list[FeedRows] = field(default_factory=list)
    reached: FrozenPositions | None = None  # the positions once all items are taken; None: the feed is already further
    single: bool = False  # the items are single changes, each with a vbucket and a seqno
    rolled_back: tuple[int, int] | None = None  # (vbucket, to_seqno): waiting changes above that seqno are void
    then: Callable[[], None] | None = None  # called when all items are taken


class BundleMaker(Protocol):
    """Turns feed events into bundles."""

    @property
    def holds(self) -> bool: ...
    def add(self, event: FeedEvent) -> Iterator[Bundle]: ...
    def flush(self) -> Iterator[Bundle]: ...


class RowSpan(NamedTuple):
    """The rows of one vbucket in a batch: first and last seqno, and the highest end of the snapshots they belong to.

    If the vbucket silently went back inside the batch, only the rows after that count.
    """

    first: int
    seqno: int
    snapshot_end: int
    vbuuid: int
    epoch: int
    went_back: bool


def row_spans(batch: pa.RecordBatch) -> dict[int, RowSpan]:
    """The span of each vbucket, without rows of out-of-order snapshots: those do not move a position."""
    columns = {name: _numbers(batch, name) for name in ("vbucket", "seqno", "snapshot_end", "vbuuid", "epoch")}
    counted = columns["snapshot_end"] >= columns["seqno"]
    present = np.unique(columns["vbucket"][counted]).tolist()
    return {vb: _span(columns, np.flatnonzero(counted & (columns["vbucket"] == vb))) for vb in present}


def out_of_order(batch: pa.RecordBatch) -> dict[int, int]:
    """By vbucket: the highest seqno among documents of out-of-order snapshots."""
    vbuckets, seqnos, ends = (_numbers(batch, name) for name in ("vbucket", "seqno", "snapshot_end"))
    rows = ends < seqnos
    if not rows.any():
        return {}
    rows &= np.asarray(batch.column("key").is_valid())
    return {vb: int(seqnos[rows & (vbuckets == vb)].max()) for vb in np.unique(vbuckets[rows]).tolist()}


def _span(columns: dict[str, npt.NDArray[np.int64]], rows: npt.NDArray[np.int64]) -> RowSpan:
    seqnos, epochs = columns["seqno"][rows], columns["epoch"][rows]
    back = np.flatnonzero((seqnos[1:] <= seqnos[:-1]) | (epochs[1:] != epochs[:-1]))
    rows = rows[int(back[-1]) + 1 :] if back.size else rows
    last = rows[-1]
    return RowSpan(
        int(columns["seqno"][rows[0]]), int(columns["seqno"][last]), int(columns["snapshot_end"][rows].max()),
        unsigned(int(columns["vbuuid"][last])), int(columns["epoch"][last]), bool(back.size),
    )  # fmt: skip


def _numbers(batch: pa.RecordBatch, name: str) -> Any:
    column = batch.column(name)
    return (column.fill_null(-1) if column.null_count else column).to_numpy(zero_copy_only=False)


LINGER_S = 0.01  # how long rows may wait for others to fill their batch


class Outbox:
    """The queue to one caller."""

    def __init__(
        self, feed: ClusterFeed, maker: BundleMaker, *, linger_s: float = LINGER_S, hold_unsafe: bool = False
    ) -> None:
        self.feed = feed
        self.hold_unsafe = hold_unsafe
        self.given = 0
        self._maker, self._linger_s = maker, linger_s
        self._ready: deque[Bundle] = deque()
        self._current: Bundle | None = None
        self._before = 0  # how many items of the current bundle went to an earlier loop
        self._reached: FrozenPositions = feed.table.frozen()
        self._since: list[Any] = []  # batches given to the caller since ``_reached``
        self._held_since: float | None = None
        self._persisted: dict[int, tuple[int, int]] = {}  # vbucket -> branch, seqno that all disks have

    @property
    def waiting(self) -> int:
        """How many bundles wait for the caller."""
        return len(self._ready)

    @property
    def idle(self) -> bool:
        """Whether the caller has everything."""
        return not self._ready and not self._maker.holds and self._current is None

    def add(self, event: FeedEvent, now: float) -> None:
        """Take an event of the feed."""
        for bundle in self._maker.add(event):
            self._enqueue(bundle)
        if not self._maker.holds:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now

    def went_back(self, then: Callable[[], None]) -> None:
        """Note that the feed went back and repeats changes; call ``then`` once the caller has what came before."""
        self._flush()
        self._enqueue(Bundle([], [], self.feed.table.frozen(), then=then))

    def take(self, now: float) -> list[Any] | None:
        """The next items for the caller, or None. Taking them means that the caller is done with the ones before.

        While the caller gets them one by one, the shell must keep ``given`` at the number it has: the position depends
        on it. A caller that left its loop halfway through gets the rest.
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
        """Seconds until waiting rows are due even if no more come; None if no rows wait."""
        if self._held_since is None or self._ready:
            return None
        return max(0.0, self._held_since + self._linger_s - now)

    def positions(self) -> dict[int, Position]:
        """Where the caller is, counting everything it has been given, including the last item."""
        bundle, given = self._current, self._before + self.given
        if bundle is None:
            return self._all_of(self.feed.table.frozen()) if self.idle else self._all_of(self._reached, self._since)
        if bundle.reached and given == len(bundle.items):
            return self._all_of(bundle.reached)
        if bundle.reached and bundle.single:
            return self._inside(bundle.reached, [(change.vbucket, change.seqno) for change in bundle.items], given)
        return self._all_of(self._reached, [*self._since, *bundle.items[:given]])

    def _all_of(self, reached: FrozenPositions, batches: Sequence[pa.RecordBatch] = ()) -> dict[int, Position]:
        """All positions, moved on by the rows of batches that were given since."""
        found = {vb: reached.position(vb) for vb in self.feed.vbuckets}
        for batch in batches:
            for vb, span in row_spans(batch).items():
                found[vb] = self._moved(vb, found[vb], span)
            for vb, seqno in out_of_order(batch).items():  # the position stays, but the caller has some changes
                found[vb] = found[vb]._replace(snap_end=max(found[vb].snap_end, seqno))
        return found

    def _moved(self, vb: int, at: Position, span: RowSpan) -> Position:
        """If the vbucket went back silently, it went to a consistent point below its first row since then."""
        if span.went_back or span.epoch != at.epoch or span.first <= at.seqno:
            now = self.feed.table.position(vb)
            at = now.rolled_back(now.rollback_target(span.first - 1))
        return at._replace(vbuuid=span.vbuuid, epoch=span.epoch).read(span.seqno, span.snapshot_end)

    def _inside(self, reached: FrozenPositions, changes: list[tuple[int, int]], given: int) -> dict[int, Position]:
        """Positions between two changes of one bundle: rows not yet given to the caller do not count."""
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
        """By vbucket: the branch of changes that wait until they are on disk everywhere."""
        if not self.hold_unsafe:
            return {}
        wanted = {vb for bundle in self._ready for vb in _highest(bundle)}
        return {vb: self.feed.table.vbuuid(vb) for vb in wanted if self.feed.table.vbuuid(vb)}

    def note_persisted(self, branches: Mapping[int, int], seqnos: Mapping[int, int]) -> None:
        """Note up to which seqno these branches (from ``unsafe``) are on disk everywhere."""
        self._persisted.update((vb, (branches[vb], seqno)) for vb, seqno in seqnos.items())

    def _is_safe(self, bundle: Bundle) -> bool:
        return not self.hold_unsafe or all(self._reaches(vb, seqno) for vb, seqno in _highest(bundle).items())

    def _reaches(self, vb: int, seqno: int) -> bool:
        """Whether ``seqno`` is on disk everywhere; what was persisted of another branch does not count."""
        branch, persisted = self._persisted.get(vb, (0, 0))
        return branch == self.feed.table.vbuuid(vb) and seqno <= persisted


def _highest(bundle: Bundle) -> dict[int, int]:
    """By vbucket: the highest seqno among the changes of a bundle. A rollback never waits, so it counts for nothing."""
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
    """Drop waiting changes that a rollback has undone."""
    if not bundle.rolled_back:
        left = (_without_void(item, vbucket, to_seqno) for item in bundle.items)
        bundle.items = [item for item in left if item is not None]


def _without_void(item: Any, vbucket: int, to_seqno: int) -> Any:
    """The change, or the rows of a batch, that the rollback leaves; None if nothing is left."""
    if isinstance(item, tuple):
        void = item.vbucket == vbucket and item.seqno > to_seqno  # type: ignore[attr-defined]
        return None if void else item
    import pyarrow as pa

    counts = (item["vbucket"].to_numpy() != vbucket) | (item["seqno"].to_numpy() <= to_seqno)
    kept = item.filter(pa.array(counts))
    return kept if kept.num_rows else None
