"""The receiving end of replication: takes snapshots and records from a producer (docs/protocol/consumer.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from upriver.errors import InvalidArguments, OutOfRange
from upriver.model import FailoverLog
from upriver.store import registers as r
from upriver.store.disk.file import Octets
from upriver.store.index import kernels as key_kernels
from upriver.wire.packed import RecordKind, pack

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

DISK_FLAG, CHECKPOINT_FLAG = 0x02, 0x04


class Replication:
    """What a vbucket in state replica or pending takes from its producer."""

    __slots__ = ("_shared", "_unchecked", "_vb")

    def __init__(self, vbucket: VBucket) -> None:
        self._vb = vbucket
        self._shared = vbucket.shared
        # A document from a disk snapshot, or from before a restart, may complete a prepare without a COMMIT.
        self._unchecked = True

    def begin_snapshot(self, start: int, end: int, flags: int = 0x01, purge_seqno: int = 0) -> None:
        """The records that follow, up to ``end``, are one snapshot; it may lack tombstones up to ``purge_seqno``."""
        vb = self._vb
        with self._shared.lock:
            vb.require_replica()
            if start > end:
                raise InvalidArguments(f"a snapshot cannot start at {start} and end at {end}")
            if end > key_kernels.SEQNO_BITS:
                raise OutOfRange(f"the snapshot ends at {end}, beyond the seqnos that a vbucket can have")
            high = vb.high_seqno
            if start < high and end <= high:
                raise OutOfRange(f"the snapshot {start}..{end} lies behind seqno {high}")
            vb.close_segment()
            if flags & CHECKPOINT_FLAG:
                vb.memory.close_checkpoint()
            if vb.snapshot_complete:
                vb.complete_seqno = max(vb.complete_seqno, vb.snap_end)
                vb.registers[r.GAPS] = 0
            vb.snap_start, vb.snap_end = start, end
            vb.snapshot_from_disk = bool(flags & DISK_FLAG)
            self._unchecked = self._unchecked or vb.snapshot_from_disk
            if min(purge_seqno, end) > vb.purge_seqno:
                # Once we are active, our readers may have missed deletions that the producer had purged.
                vb.purge_seqno = min(purge_seqno, end)
                self._shared.note_dirty(vb, 0)

    def apply_records(self, run: bytes | bytearray | memoryview | Octets) -> int:
        """Append packed records, whose seqnos rise inside the snapshot. Returns the high seqno."""
        octets = np.frombuffer(bytes(run) if isinstance(run, bytearray) else run, np.uint8)
        octets = octets.view()
        octets.flags.writeable = False
        with self._shared.lock:
            self._vb.require_replica()
            self._apply(octets)
            self._end_snapshot()
            return self._vb.high_seqno

    def _apply(self, octets: Octets) -> None:
        vb = self._vb
        before = (vb.high_prepared_seqno, vb.high_completed_seqno)
        vb.append_records(octets, assign=False, ceiling=vb.snap_end)
        if before != (vb.high_prepared_seqno, vb.high_completed_seqno):
            vb.durable.note_received(octets)

    def _end_snapshot(self) -> None:
        """If the snapshot is complete, note that its end is a consistent point."""
        vb = self._vb
        if vb.high_seqno == vb.snap_end:
            vb.close_segment()
            vb.complete_seqno = vb.snap_end
            if self._unchecked:
                vb.durable.drop_completed()
                self._unchecked = False

    def commit(self, key: bytes, collection_id: int, prepared_seqno: int, commit_seqno: int) -> None:
        """DCP's COMMIT, which names the document prepared here."""
        self._complete(RecordKind.COMMIT, key, collection_id, prepared_seqno, commit_seqno)

    def abort(self, key: bytes, collection_id: int, prepared_seqno: int, abort_seqno: int) -> None:
        """DCP's ABORT."""
        self._complete(RecordKind.ABORT, key, collection_id, prepared_seqno, abort_seqno)

    def _complete(self, kind: RecordKind, key: bytes, collection_id: int, prepared: int, seqno: int) -> None:
        vb = self._vb
        with self._shared.lock:
            vb.require_replica()
            wire_key = vb.documents.wire_key(key, collection_id)
            if kind is RecordKind.ABORT and vb.pending.get(wire_key) != prepared and vb.snapshot_from_disk:
                # In a disk snapshot the abort has replaced its prepare.
                record = pack(RecordKind.ABORT, wire_key, b"", seqno=seqno, collection_id=collection_id, extra=prepared)
            else:
                record = vb.durable.completion(kind, wire_key, prepared, seqno)
            self._apply(np.frombuffer(record, np.uint8))
            vb.pending.pop(wire_key, None)  # even if a later prepare was completed before this one
            self._end_snapshot()

    def advance(self, seqno: int) -> None:
        """The producer has no records for us up to ``seqno`` (SEQNO_ADVANCED)."""
        vb = self._vb
        with self._shared.lock:
            vb.require_replica()
            if not vb.high_seqno < seqno <= vb.snap_end:
                raise OutOfRange(f"seqno {seqno} does not follow {vb.high_seqno} in its snapshot")
            vb.close_segment()
            vb.registers[r.GAPS] += np.uint64(1)
            vb.registers[r.HIGH] = seqno
            vb.memory.add_empty(seqno, vb.complete_seqno, vb.snap_end)
            self._end_snapshot()
            self._shared.note_dirty(vb, 0)
            vb.wake()

    def replace_failover_log(self, entries: Iterable[tuple[int, int]]) -> None:
        """Replace our failover log with the producer's."""
        log = FailoverLog.load(entries)
        if log is None:
            raise InvalidArguments("the failover log has no usable entry")
        with self._shared.lock:
            self._vb.failover_log = FailoverLog(log.entries[: self._shared.options.max_failover_entries])
            self._shared.note_dirty(self._vb, 0)
