"""The receiving end of replication: snapshots as announced, records as they come (``protocol.md`` 15.2, 15.3)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from upriver.errors import InvalidArguments, NotMyVbucket, OutOfRange
from upriver.model import FailoverLog, VbucketState
from upriver.store import kernels as k
from upriver.store.collections.events import Collections
from upriver.store.disk.file import Octets

DISK_FLAG, CHECKPOINT_FLAG = 0x02, 0x04


class Replica(Collections):
    """Needs state replica or pending."""

    def _require_replica(self) -> None:
        if self.state not in (VbucketState.REPLICA, VbucketState.PENDING):
            raise NotMyVbucket(f"vbucket {self.id} is {self.state.name.lower()} here")

    def begin_snapshot(self, start: int, end: int, flags: int = 0x01, purge_seqno: int = 0) -> None:
        """What follows, up to ``end``, belongs together; tombstones up to ``purge_seqno`` may be missing in it."""
        with self.shared.lock:
            self._require_replica()
            if start > end:
                raise InvalidArguments(f"a snapshot cannot start at {start} and end at {end}")
            if end > k.SEQNO_BITS:
                raise OutOfRange(f"the snapshot ends at {end}, beyond the seqnos that a vbucket can have")
            high = self.high_seqno
            if start < high and end <= high:
                raise OutOfRange(f"the snapshot {start}..{end} lies behind seqno {high}")
            self.close_segment()
            if flags & CHECKPOINT_FLAG:
                self.memory.close_checkpoint()
            if self.snapshot_complete:
                self.complete_seqno = max(self.complete_seqno, self.snap_end)
                self.registers[k.GAPS] = 0
            self.snap_start, self.snap_end = start, end
            self.snapshot_from_disk = bool(flags & DISK_FLAG)
            if min(purge_seqno, end) > self.purge_seqno:
                self._raise_purge_seqno(min(purge_seqno, end))

    def _raise_purge_seqno(self, purge_seqno: int) -> None:
        """Whoever reads from us, once we are active, may have missed the deletions that the producer had purged."""
        self.purge_seqno = purge_seqno
        self.shared.note_dirty(self, 0)

    def apply_records(self, run: bytes | bytearray | memoryview | Octets) -> int:
        """Take packed records as they are; their seqnos rise inside the snapshot. Returns the high seqno."""
        octets = np.frombuffer(bytes(run) if isinstance(run, bytearray) else run, np.uint8)
        octets = octets.view()
        octets.flags.writeable = False
        with self.shared.lock:
            self._require_replica()
            self._apply(octets)
            self._finish_snapshot()
            return self.high_seqno

    def _apply(self, octets: Octets) -> None:
        self._append(octets, assign=False, ceiling=self.snap_end)

    def _finish_snapshot(self) -> None:
        if self.high_seqno == self.snap_end:
            self.close_segment()
            self.complete_seqno = self.snap_end

    def advance(self, seqno: int) -> None:
        """The sender has nothing for us up to ``seqno`` (SEQNO_ADVANCED)."""
        with self.shared.lock:
            self._require_replica()
            if not self.high_seqno < seqno <= self.snap_end:
                raise OutOfRange(f"seqno {seqno} does not follow {self.high_seqno} in its snapshot")
            self.close_segment()
            self.registers[k.GAPS] += np.uint64(1)
            self.registers[k.HIGH] = seqno
            self.memory.add_empty(seqno, self.complete_seqno, self.snap_end)
            self._finish_snapshot()
            self.shared.note_dirty(self, 0)
            self.wake()

    def replace_failover_log(self, entries: Iterable[tuple[int, int]]) -> None:
        """The producer's log replaces ours."""
        log = FailoverLog.load(entries)
        if log is None:
            raise InvalidArguments("the failover log has no usable entry")
        with self.shared.lock:
            self.failover_log = FailoverLog(log.entries[: self.shared.options.max_failover_entries])
            self.shared.note_dirty(self, 0)
