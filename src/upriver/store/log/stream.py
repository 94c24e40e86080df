"""A stream source: reads a vbucket's history for one reader, from disk if needed, then from memory.

The log on disk only grows at its end, so its last seqno and the list of seqnos dead at that time define a disk
snapshot. No read transaction is held between two polls. Blocks may be rewritten meanwhile, but compaction keeps what a
scan has not read yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from upriver.model import SEQNO_MAX, VbucketState
from upriver.store import registers as r
from upriver.store.log.blocks import DiskScan, blocks_after
from upriver.store.log.kernels import surveys
from upriver.store.log.memory import Stretch, stretch_after
from upriver.wire.packed import End, EndReason, NewSnapshot, OsoEnd, OsoStart, Run, SnapshotStart, StreamEvent

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

MEMORY, DISK, CHECKPOINT = 0x01, 0x02, 0x04
OSO_SHARE_SMALL, OSO_SHARE_LARGE, OSO_SMALL_BYTES = 0.005, 0.04, 256


def live_after(vbucket: VBucket, position: int) -> NewSnapshot | None:
    """What is new for readers at ``position``, if it is exactly one whole snapshot in memory."""
    with vbucket.shared.lock:
        checkpoints = vbucket.memory.checkpoints
        if not checkpoints or position < vbucket.memory.floor:
            return None
        opened, checkpoint = vbucket.memory.open, checkpoints[-1]
        if opened is not None:
            if opened.first != position + 1:
                return None  # readers lack more than the open segment
            vbucket.close_segment()
        row = len(checkpoint.last) - 1
        if row < 0 or checkpoint.first[row] != position + 1 or checkpoint.snap_end[row] > checkpoint.last[row]:
            return None
        at = checkpoint.end[row - 1] if row else 0
        size = checkpoint.end[row] - at
        return NewSnapshot(position + 1, checkpoint.last[row], row == 0, checkpoint.address + at, size, checkpoint.data)


def follow(
    vbucket: VBucket, position: int, most_bytes: int, wake: Callable[[], None]
) -> tuple[bool, NewSnapshot | None]:
    """What is new for readers at ``position``, as (True, snapshot or None); ``wake`` is called once when there is more.

    (False, None), and no call, if each must read on its own: more than ``most_bytes`` are new, or several snapshots.
    """
    with vbucket.shared.lock:
        found = live_after(vbucket, position)
        simple = found.size <= most_bytes if found is not None else vbucket.high_seqno == position
        if simple:
            vbucket.wait(wake)
        return simple, found if simple else None


class StreamSource:
    """One reader's source of stream events; ``VBucket.stream`` makes it, and ``poll`` returns the events."""

    __slots__ = (
        "__weakref__", "_after_backfill", "_announced_end", "_disk_only", "_ended", "_ignore_purged", "_in_oso",
        "_killed", "_known_purge", "_origin", "_oso", "_owed_end", "_queue", "_scan", "_snap_start", "_vbucket",
        "_visible_only", "_wake", "_wanted", "collections", "end", "position",
    )  # fmt: skip

    def __init__(
        self, vbucket: VBucket, start: int, end: int = SEQNO_MAX, *, snap_start: int | None = None,
        snap_end: int | None = None, collections: frozenset[int] | None = None, wake: Callable[[], None] | None = None,
        ignore_purged: bool = False, purge_seqno: int = 0, disk_only: bool = False, oso: bool = False,
        visible_only: bool = False,
    ) -> None:  # fmt: skip
        self._vbucket = vbucket
        self.position = start
        self.end = end
        self.collections = collections
        self._wanted = np.array(sorted(collections or ()), np.int64)
        self._snap_start: int | None = start if snap_start is None else snap_start  # until the first marker
        self._origin = start if snap_start is None else snap_start
        # A reader inside a snapshot lacks versions deduplicated up to its end: the next snapshot must reach that far.
        self._owed_end = snap_end if snap_end is not None and self._origin < start < snap_end else 0
        self._wake = wake
        self._ignore_purged = ignore_purged
        self._known_purge = purge_seqno
        self._disk_only = disk_only
        self._oso = oso
        self._visible_only = visible_only
        self._announced_end = 0
        self._after_backfill = True  # the first memory marker begins a checkpoint
        self._queue: deque[StreamEvent] = deque()
        self._scan: DiskScan | None = None
        self._in_oso = False
        self._killed: EndReason | None = None
        self._ended = False

    @property
    def backfilling(self) -> bool:
        return self._scan is not None

    @property
    def scan_end(self) -> int:
        """The end of the disk snapshot that it is reading; 0 if it reads none."""
        return self._scan.end if self._scan is not None else 0

    @property
    def purgeable_seqno(self) -> int:
        """Up to here it needs no tombstones: a scan from 0 never sends what is deleted at its end."""
        if self._scan is None:
            return SEQNO_MAX
        return self.position if self._scan.after else self._scan.end

    def close(self) -> None:
        self._ended = True
        self._scan = None
        self._queue.clear()
        self._vbucket.sources.discard(self)
        if self._wake is not None:
            self._vbucket.stop_waiting(self._wake)
            self._wake = None  # breaks the cycle between reader and source, so that both are freed at once

    def kill(self, reason: EndReason) -> None:
        """End the stream from outside and drop queued events."""
        self._killed = reason
        self._queue.clear()
        if self._wake is not None:
            self._wake()

    def poll(self) -> StreamEvent | None:
        """The next event, or None if there is none now; then ``wake`` is called once when there may be one."""
        with self._vbucket.shared.lock:
            if self._ended:
                return None
            event = self._next()
            if isinstance(event, End):
                self.close()
            if event is None and self._wake is not None:
                self._vbucket.wait(self._wake, for_disk=self._owed_end > 0)
            return event

    def hand_over(self, wake: Callable[[], None] | None = None) -> int | None:
        """The position, if this source is up to date and its next event will be a snapshot from memory; else None.

        The caller then reads on with ``follow`` instead: ``wake`` is called for changes, not this source's own.
        """
        vbucket, position = self._vbucket, self.position
        with vbucket.shared.lock:
            if (
                self._after_backfill or position != self._announced_end or position >= self.end or self._queue
                or self._killed is not None or self._ended or self._scan is not None or position != vbucket.high_seqno
            ):  # fmt: skip
                return None
            if self._wake is not None:
                vbucket.stop_waiting(self._wake)
            if wake is not None:
                vbucket.wait(wake)
            return position

    def take_back(self, origin: int, position: int) -> None:
        """Continue at ``position``, where ``follow`` has read to; its last snapshot began at ``origin`` (0: none)."""
        self._origin = origin or self._origin
        self.position = self._announced_end = position

    def _next(self) -> StreamEvent | None:
        if self._killed is not None:
            return End(self._killed)
        if self._queue:
            return self._queue.popleft()
        if self._scan is not None:
            return self._continue_scan(self._scan)
        if self.position >= max(self.end, self._announced_end):
            return End(EndReason.OK)
        if self.position < self._vbucket.memory.floor or self._disk_only or self._owes_more_than_memory_has():
            return self._begin_scan()
        return self._from_memory()

    def _owes_more_than_memory_has(self) -> bool:
        """Whether memory cannot give the owed snapshot in one piece; several would look consistent too early."""
        if not self._owed_end:
            return False
        self._vbucket.close_segment()
        stretch = stretch_after(self._vbucket.memory, self.position, max(self.end, self._owed_end))
        return stretch is not None and stretch.snap_end < self._owed_end

    # ---- memory ----

    def _from_memory(self) -> StreamEvent | None:
        vbucket = self._vbucket
        # Inside an announced snapshot, send segments as they are; otherwise merge what can go under one marker.
        upto = max(self.end, self._owed_end) if self.position >= self._announced_end else 0
        stretch = stretch_after(vbucket.memory, self.position, upto)
        if stretch is None:
            vbucket.close_segment()
            stretch = stretch_after(vbucket.memory, self.position, upto)
        if stretch is None:
            return End(EndReason.FILTER_EMPTY) if self._filter_is_empty() else None
        last = stretch.last_seqno
        run = Run(stretch.data.data[stretch.at : stretch.end], self.position, last, memory=True)
        marker = self._memory_marker(stretch) if last > self._announced_end else None
        self.position = last
        if marker is None:
            return run
        self._queue.append(run)
        return marker

    def _memory_marker(self, stretch: Stretch) -> SnapshotStart:
        vbucket, position = self._vbucket, self.position
        first, matching, visible = surveys.survey(
            stretch.data, stretch.at, stretch.end, np.uint64(position), self._wanted, self._visible_only
        )
        start = int(first) or stretch.last_seqno
        begins = stretch.begins_checkpoint or self._after_backfill
        if begins:
            first = stretch.checkpoint.first[0]
            if first > self._announced_end:
                start = max(first, self._snap_start or 0) if first > position else start
        start = self._first_start(start)
        if position < self._announced_end:
            start = self._origin
        self._after_backfill = False
        self._announced_end = stretch.snap_end
        self._origin = start
        flags = MEMORY | (CHECKPOINT if begins else 0)
        matching = max(int(matching), self._last_matching_behind(stretch))
        return SnapshotStart(
            start, self._announced_end, flags, matching, int(visible) or min(vbucket.max_visible_seqno, position),
            vbucket.high_completed_seqno, vbucket.high_prepared_seqno, vbucket.purge_seqno,
        )  # fmt: skip

    def _last_matching_behind(self, stretch: Stretch) -> int:
        """The last matching seqno behind a stretch but in the same snapshot; 0 if none.

        The flusher may have cut a received snapshot into several segments.
        """
        position, found = stretch.last_seqno, 0
        while position < stretch.snap_end and (behind := self._vbucket.memory.after(position)) is not None:
            checkpoint, row, _ = behind
            _, matching, _ = surveys.survey(
                checkpoint.data, checkpoint.at(row), checkpoint.end[row], np.uint64(position), self._wanted,
                self._visible_only,
            )  # fmt: skip
            position, found = checkpoint.last[row], int(matching) or found
        return found if position >= stretch.snap_end else stretch.snap_end  # what is still to come may match

    def _first_start(self, start: int) -> int:
        """The first marker of a stream begins where the reader's snapshot began, as it claims.

        See docs/protocol/snapshots.md#markers.
        """
        if self._snap_start is not None:
            start = min(start, self._snap_start)
            self._snap_start = None
        self._owed_end = 0
        return start

    def _filter_is_empty(self) -> bool:
        alive = self._vbucket.collection_ids()
        return self.collections is not None and not any(number in alive for number in self.collections)

    # ---- disk ----

    def _begin_scan(self) -> StreamEvent | None:
        vbucket = self._vbucket
        if self._is_purged():
            return End(EndReason.ROLLBACK)
        if vbucket.persisted_seqno < min(self._owed_end, vbucket.high_seqno):
            return None  # not on disk yet (docs/protocol/flow.md#backfill)
        if vbucket.persisted_seqno <= self.position:
            return End(EndReason.OK) if self._disk_only else self._from_memory()
        self._scan = DiskScan(vbucket, self.position)
        self._after_backfill = True
        if self._may_go_out_of_order():
            self._in_oso = True
            self._snap_start = None
            self._announced_end = self._scan.end
            return OsoStart()
        if self.position < self._announced_end >= self._disk_end(self._scan.end):
            return self._continue_scan(self._scan)  # the rest of a snapshot that the replica has persisted since
        start = self._first_start(self.position + 1 if self.position >= self._announced_end else self._origin)
        return self._disk_marker(start, self._disk_end(self._scan.end))

    def _disk_end(self, scanned: int) -> int:
        """The end of the snapshot that a scan belongs to: a replica may still be receiving the rest of it."""
        vbucket = self._vbucket
        receiving = vbucket.state is not VbucketState.ACTIVE and vbucket.snap_start < scanned < vbucket.snap_end
        return vbucket.snap_end if receiving else scanned

    def _disk_marker(self, start: int, end: int) -> SnapshotStart:
        vbucket = self._vbucket
        self._announced_end = end
        self._origin = start
        disk = vbucket.on_disk
        return SnapshotStart(
            start, end, DISK | CHECKPOINT, self._last_matching_on_disk(), disk.visible, disk.completed, disk.prepared,
            vbucket.purge_seqno,
        )  # fmt: skip

    def _last_matching_on_disk(self) -> int:
        """The last matching seqno, from the collections' high seqnos as of the last commit."""
        disk = self._vbucket.on_disk
        if self.collections is None:
            last = disk.visible if self._visible_only else self._vbucket.persisted_seqno
        else:
            column = r.C_VISIBLE if self._visible_only else r.C_HIGH
            rows = disk.collections.tolist()
            last = max((row[column] for row in rows if row[r.C_ID] in self.collections), default=0)
        return last if last > self.position else 0

    def _continue_scan(self, scan: DiskScan) -> StreamEvent | None:
        if scan.epoch != self._vbucket.epoch:  # blocks were rewritten
            scan.epoch = self._vbucket.epoch
            if scan.after and self._is_purged():
                return End(EndReason.ROLLBACK)
        after = self.position
        data, self.position = scan.step(self.position)
        if self.position >= scan.end:
            self._scan = None
            if self._in_oso:
                self._in_oso = False
                self._queue.append(OsoEnd(scan.end))
        return Run(data, after, self.position, memory=False)

    def _is_purged(self) -> bool:
        """Whether tombstones that this reader needs were purged since its stream request was accepted.

        This repeats the check of docs/protocol/rollback.md#decision.
        """
        purge = self._vbucket.purge_seqno
        if self._ignore_purged or self.position == 0 or self.position >= purge or self._known_purge == purge:
            return False
        if self.collections is None:
            return True
        alive = [row for row in self._vbucket.collection_table if int(row[r.C_ID]) in self.collections]
        high = max((int(row[r.C_HIGH]) for row in alive), default=0)
        return not (self.position >= high and high <= purge)

    def _may_go_out_of_order(self) -> bool:
        """Whether this reads one small collection from the start (docs/protocol/snapshots.md#oso)."""
        if not self._oso or self.position != 0 or self.collections is None or len(self.collections) != 1:
            return False
        vbucket = self._vbucket
        if self._filter_is_empty():
            return False
        items = vbucket.collection_item_count(next(iter(self.collections)))
        large = self._mean_item_bytes() >= OSO_SMALL_BYTES
        return items == 0 or items < vbucket.item_count * (OSO_SHARE_LARGE if large else OSO_SHARE_SMALL)

    def _mean_item_bytes(self) -> float:
        for _, block in blocks_after(self._vbucket, 0):
            return (block.data.size - block.at) / max(1, block.records)
        return 0.0
