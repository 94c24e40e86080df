"""A vbucket: its state, ``append_records`` through which every record enters, and the parts with its operations.

``VBucket`` owns everything that is true of one vbucket: registers, failover log, memory log, key index, snapshot range.
The operations live in its parts, which share that state and nothing else:

* ``documents``, ``bulk``, ``with_meta``: the operations of clients, on one document or many;
* ``durable``: prepare, commit and abort of durable writes;
* ``replication``: what a replica receives from its producer;
* ``collections``: the manifest and its system events.

Everything is built from ``append_records``, ``lookup`` and ``record``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from upriver.errors import InvalidArguments, NotMyVbucket, OutOfRange, UnknownCollection
from upriver.model import SEQNO_MAX, FailoverLog, VbucketState
from upriver.store import registers as r
from upriver.store.bulk import BulkWrites
from upriver.store.collections.events import Collections, default_table
from upriver.store.disk.file import Octets, Words
from upriver.store.documents import Documents
from upriver.store.durable import DurableWrites
from upriver.store.index import kernels as key_kernels
from upriver.store.index.keyindex import UNKNOWN_KEY, IndexEntry, KeyIndex
from upriver.store.log.blocks import blocks_after, record_on_disk
from upriver.store.log.kernels import ingest, runs
from upriver.store.log.memory import MemoryLog, OpenSegment
from upriver.store.log.stream import StreamSource
from upriver.store.record import OnDisk, Tally
from upriver.store.replication import Replication
from upriver.store.shared import Shared
from upriver.store.upkeep.rollback import roll_back
from upriver.store.withmeta import WithMetaWrites
from upriver.wire.packed import HEADER_SIZE, EndReason, RecordHead, unpack

SEVERAL = 4 * 1024  # a run of this many bytes is likely more than one record
BULK = 32 * 1024  # a larger run is taken in without the interpreter lock
NO_CEILING = np.uint64(SEQNO_MAX)
EVICTIONS = 4  # checkpoints that a write tries to evict when the memory log is too large
CLOCK_MASK = ~0xFFFF


class VBucket:
    """One vbucket of a ``Bucket``. ``shared.lock`` guards it; every public operation takes the lock itself."""

    # When a thousand vbuckets are written in turn, speed depends on how few cache lines a write touches.
    __slots__ = (
        "_waiting", "_waiting_for_disk", "bulk", "collection_rows", "collection_table", "collections", "compacted_s",
        "complete_seqno", "content", "documents", "durable", "epoch", "erasing", "expired_count", "failover_log",
        "id", "indexed_seqno", "keys", "keys_loaded", "locks", "log_end", "memory", "numbers", "on_disk", "pending",
        "persisted_seqno", "preparing_level", "purge_seqno", "registers", "replication", "rollback_floor", "shared",
        "snap_end", "snap_start", "snapshot_from_disk", "sources", "state", "stored_log", "tables", "topology",
        "with_meta",
    )  # fmt: skip

    def __init__(self, shared: Shared, vbucket_id: int, state: VbucketState, log: FailoverLog) -> None:
        self.shared = shared
        self.id = vbucket_id
        self.state = state
        self.failover_log = log
        self.stored_log: tuple[FailoverLog | None, list[list[int]]] = (None, [])  # a log, and its form in the record
        self.registers: Words = np.zeros(r.REGISTERS, np.uint64)
        self.registers[r.EXPIRY] = SEQNO_MAX
        self.numbers = self.registers.data  # the same memory as Python integers: three times as fast for single ones
        self.replace_collection_table(default_table())
        self.erasing = False  # collections were dropped or flushed and their records are still on disk
        self.persisted_seqno = 0
        self.content = Tally()
        self.log_end = 0  # where the newest block on disk ends
        self.tables: list[int] = []  # generations of the key tables on disk
        self.compacted_s = shared.now_s
        self.on_disk = OnDisk(0, 0, 0, self.collection_table)
        self.expired_count = 0  # documents expired since the bucket was opened
        self.purge_seqno = 0
        self.rollback_floor = 0  # below this, versions that a rollback needs are gone
        self.indexed_seqno = 0  # the key tables on disk know everything up to here
        self.epoch = 0  # rises when records on disk are rewritten or removed
        self.complete_seqno = 0  # end of the last complete snapshot
        self.snap_start = 0
        self.snap_end = 0
        self.snapshot_from_disk = False
        self.topology: Any = None
        self.memory = MemoryLog(0, shared.checkpoint_bytes, shared.log_gauge, shared.ages)
        self.keys = KeyIndex(shared, vbucket_id, self.registers)
        self.keys_loaded = True  # False after a restart: the overlay lacks what the tables on disk do not know
        self.sources: set[StreamSource] = set()
        self._waiting: dict[Callable[[], None], None] = {}  # in order, each once
        self._waiting_for_disk: dict[Callable[[], None], None] = {}  # those that a commit also wakes
        self.locks: dict[bytes, tuple[int, int]] = {}
        self.preparing_level = 0  # durability level of the writes being made; 0: not durable
        self.pending: dict[bytes, int] = {}  # prepared and neither committed nor aborted: key -> seqno
        self.documents = Documents(self)
        self.bulk = BulkWrites(self)
        self.with_meta = WithMetaWrites(self)
        self.durable = DurableWrites(self)
        self.replication = Replication(self)
        self.collections = Collections(self)

    # ---- numbers ----

    @property
    def high_seqno(self) -> int:
        return self.numbers[r.HIGH]

    @property
    def max_visible_seqno(self) -> int:
        return self.numbers[r.VISIBLE]

    @property
    def high_prepared_seqno(self) -> int:
        return self.numbers[r.PREPARED]

    @property
    def high_completed_seqno(self) -> int:
        return self.numbers[r.COMPLETED]

    @property
    def max_cas(self) -> int:
        return self.numbers[r.CAS]

    @property
    def tombstone_count(self) -> int:
        return self.numbers[r.TOMBSTONES]

    @property
    def item_count(self) -> int:
        return int(self.collection_table[:, r.C_ITEMS].sum())

    @property
    def uuid(self) -> int:
        return self.failover_log.uuid

    @property
    def manifest_uid(self) -> int:
        """The uid of this vbucket's manifest, which may be older than the bucket's."""
        return self.collections.manifest.uid

    @property
    def snapshot(self) -> tuple[int, int]:
        """Range of the snapshot that the last record belongs to."""
        return (self.snap_start, self.snap_end)

    @property
    def snapshot_complete(self) -> bool:
        return self.high_seqno >= self.snap_end

    @property
    def receiving_initial_disk_snapshot(self) -> bool:
        """A replica that has no consistent point yet (docs/protocol/stream-request.md#checks, step 22)."""
        receiving = self.state is not VbucketState.ACTIVE and not self.snapshot_complete
        return receiving and self.snapshot_from_disk and self.complete_seqno == 0

    def collection_row(self, collection_id: int) -> int:
        """The collection's row in the collection table; raises ``UnknownCollection``."""
        row = self.collection_rows.get(collection_id)
        if row is None:
            raise UnknownCollection(f"no collection {collection_id:x} in vbucket {self.id}")
        return row

    def replace_collection_table(self, table: Words) -> None:
        self.collection_table = table
        self.collection_rows = {number: row for row, number in enumerate(table[:, r.C_ID].tolist())}

    def collection_ids(self) -> list[int]:
        return list(self.collection_rows)

    def collection_high_seqno(self, collection_id: int) -> int:
        return self.collection_table.item(self.collection_row(collection_id), r.C_HIGH)

    def visible_high_seqno(self, collection_id: int) -> int:
        return self.collection_table.item(self.collection_row(collection_id), r.C_VISIBLE)

    def collection_start_seqno(self, collection_id: int) -> int:
        return self.collection_table.item(self.collection_row(collection_id), r.C_START)

    def collection_item_count(self, collection_id: int) -> int:
        return self.collection_table.item(self.collection_row(collection_id), r.C_ITEMS)

    def next_cas(self) -> int:
        """The next CAS of the hybrid logical clock (docs/protocol/kv.md#clocks)."""
        return max(self.shared.now_ns() & CLOCK_MASK, self.numbers[r.CAS] + 1)

    def require_active(self) -> None:
        if self.state is not VbucketState.ACTIVE:
            raise NotMyVbucket(f"vbucket {self.id} is {self.state.name.lower()} here")

    def require_replica(self) -> None:
        if self.state not in (VbucketState.REPLICA, VbucketState.PENDING):
            raise NotMyVbucket(f"vbucket {self.id} is {self.state.name.lower()} here")

    # ---- appending records ----

    def append_records(self, run: Octets, *, assign: bool, ceiling: int = SEQNO_MAX) -> None:
        """Append packed records; with ``assign`` they get seqno, CAS and rev here."""
        keys, numbers = self.keys, self.numbers
        if not keys.ready:
            self.load_keys()
        size = run.size
        if size > SEVERAL:
            keys.reserve(size // max(HEADER_SIZE, int(run[:4].view(np.uint32)[0])))
        take_in = ingest.ingest_many if size > BULK else ingest.ingest
        limit = NO_CEILING if ceiling == SEQNO_MAX else np.uint64(ceiling)
        at, before = 0, 0
        while at < size:
            segment = self.open_segment(min(size - at, self.memory.most_bytes))
            checkpoint, used, before = segment.checkpoint, numbers[r.USED], at
            at = take_in(
                run, at, size, checkpoint.data, segment.at, checkpoint.serial, keys.overlay, keys.layers,
                self.collection_table, self.registers, self.shared.seed, assign, limit,
            )  # fmt: skip
            self.appended(segment, used)
            if at < size:
                at = self._resolve_stop(run, at, stuck=at == before)
        if self._waiting:
            self.wake()

    def appended(self, segment: OpenSegment, used: int) -> None:
        """Records were written behind ``used``: update the segment from the registers and tell the flusher."""
        if segment.first == 0:
            segment.first = self.numbers[r.FIRST]
        segment.end = self.numbers[r.USED]
        self.shared.note_dirty(self, segment.end - used)

    def _resolve_stop(self, run: Octets, at: int, stuck: bool) -> int:
        """Do what the kernel could not and return where to continue, or raise why the record at ``at`` is refused."""
        reason = self.numbers[r.STOP]
        if reason == ingest.CROWDED:
            self.keys.make_room(self.high_seqno)
        elif reason == ingest.FULL and not stuck:
            self.close_segment()
        elif reason == ingest.FULL:
            self.open_segment_with_room(unpack(run.data, at)[0].size)
        elif reason == ingest.COLLISION:
            self.close_segment()
            self.memory.close_checkpoint()
        elif reason == ingest.UNKNOWN_COLLECTION:
            raise UnknownCollection(f"no collection {unpack(run.data, at)[0].collection_id:x} in vbucket {self.id}")
        elif reason == ingest.BAD_SEQNO:
            raise OutOfRange(f"seqno {unpack(run.data, at)[0].seqno} does not follow {self.high_seqno} in its snapshot")
        elif reason == ingest.BAD_RECORD:
            raise InvalidArguments(f"the run is not made of packed records (at byte {at})")
        else:
            at = self.collections.receive_event(run, at)
        return at

    def open_segment(self, size: int) -> OpenSegment:
        """The open segment, with room for ``size`` bytes if its checkpoint can grow that far."""
        segment = self.memory.open
        if segment is None:
            return self._begin_segment(size)
        if segment.end + size > segment.checkpoint.data.size:
            self.memory.room(size, segment.end)
        return segment

    def open_segment_with_room(self, size: int) -> OpenSegment:
        """The open segment, or a new one if ``size`` bytes do not fit into its checkpoint."""
        segment = self.open_segment(size)
        if not self.memory.room(size, segment.end):
            self.close_segment()
            segment = self._begin_segment(size)
        return segment

    def _begin_segment(self, size: int) -> OpenSegment:
        if self.shared.log_gauge.bytes > self.shared.log_bytes:
            self.shared.evict(tries=EVICTIONS)
        segment = self.memory.begin_segment(size, self.complete_seqno)
        self.numbers[r.USED] = segment.at
        self.numbers[r.DEDUPED] = 0
        return segment

    def close_segment(self) -> None:
        """Freeze what was written so far: from now on nothing in it is deduplicated."""
        if self.memory.open is None:
            return
        own = self.state is VbucketState.ACTIVE
        high = self.numbers[r.HIGH]
        if own:
            self.complete_seqno = self.snap_start = self.snap_end = high
        # A received snapshot without gaps lacks nothing: every seqno in it is a state that existed.
        exact = self.numbers[r.DEDUPED] == 0 and (own or self.numbers[r.GAPS] == 0)
        self.memory.close_segment(high, high if own else self.snap_end, exact)

    # ---- waiting for changes ----

    def wait(self, wake: Callable[[], None], for_disk: bool = False) -> None:
        """Call ``wake`` once, at the next change; with ``for_disk`` also at the next commit."""
        self._waiting[wake] = None
        if for_disk:
            self._waiting_for_disk[wake] = None

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        """Forget ``wake``; otherwise an idle vbucket would keep all its past readers alive."""
        self._waiting.pop(wake, None)
        self._waiting_for_disk.pop(wake, None)

    def wake(self) -> None:
        """Call everything that waits for changes, in this thread."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                wake()

    def wake_for_disk(self) -> None:
        """Call everything that waits for a commit, in this thread."""
        if self._waiting_for_disk:
            waiting, self._waiting_for_disk = self._waiting_for_disk, {}
            for wake in waiting:
                wake()

    # ---- the key index ----

    def load_keys(self) -> None:
        """Make sure that overlay and tables together contain every key."""
        if not self.keys_loaded:
            self._load_overlay()
        self.keys.prepare()

    def _load_overlay(self) -> None:
        """After a restart: enter the records that are in no key table yet."""
        keys = self.keys
        for _, block in blocks_after(self, self.indexed_seqno):
            while (keys.entries + block.records) * 5 >= keys.overlay.size:
                keys.grow()
            new = runs.index_run(
                block.data, block.at, block.data.size, np.uint64(self.indexed_seqno), keys.overlay, self.shared.seed
            )
            self.registers[r.ENTRIES] += np.uint64(new)
        self.keys_loaded = True  # only now: after a read error the next call tries again

    def lookup(self, wire_key: bytes, salt: int = 0) -> IndexEntry:
        """The key's entry in the key index; prepares are indexed under ``PREPARE_SALT``."""
        keys = self.keys
        if not keys.ready:
            self.load_keys()
        octets = np.frombuffer(wire_key, np.uint8)
        _, known, rev, place = key_kernels.find(octets, np.uint64(salt), self.shared.seed, keys.overlay, keys.layers)
        if not known:
            return UNKNOWN_KEY
        return IndexEntry(int(known) & int(key_kernels.SEQNO_BITS), bool(known >> 63), int(rev), int(place))

    def record(self, entry: IndexEntry) -> tuple[RecordHead, bytes, bytes]:
        """The record that an index entry points at, from memory or from disk."""
        checkpoint = self.memory.by_serial.get(entry.place >> 32)
        if checkpoint is not None:
            return unpack(checkpoint.data.data, entry.place & 0xFFFF_FFFF)
        return record_on_disk(self, entry.seqno)

    # ---- streams and state ----

    def stream(
        self, start: int, end: int = SEQNO_MAX, *, snap_start: int | None = None, snap_end: int | None = None,
        collections: frozenset[int] | None = None, wake: Callable[[], None] | None = None, ignore_purged: bool = False,
        purge_seqno: int = 0, disk_only: bool = False, oso: bool = False, visible_only: bool = False,
    ) -> StreamSource:  # fmt: skip
        """A source of all changes in ``(start, end]``; the caller has checked the history (``protocol.history``)."""
        with self.shared.lock:
            if start > self.high_seqno and start < end:
                raise InvalidArguments(f"start {start} is above the high seqno {self.high_seqno}")
            if end == self.high_seqno:
                self.close_segment()  # so that a snapshot ends exactly there
            if disk_only:
                end = min(end, self.persisted_seqno)
            source = StreamSource(
                self, start, end, snap_start=snap_start, snap_end=snap_end, collections=collections, wake=wake,
                ignore_purged=ignore_purged, purge_seqno=purge_seqno, disk_only=disk_only, oso=oso,
                visible_only=visible_only,
            )  # fmt: skip
            self.sources.add(source)
            return source

    def end_streams(self, reason: EndReason) -> None:
        for source in list(self.sources):
            source.kill(reason)

    def release_memory(self) -> None:
        """Evict every checkpoint that is on disk; the next reader reads from disk."""
        with self.shared.lock:
            log = self.memory
            while log.checkpoints and log.flushed(log.checkpoints[0]):
                log.checkpoints[0].closed = True
                log.evict()

    def change_state(self, state: VbucketState, *, takeover: bool, silent: bool) -> None:
        """Change to ``state``; the caller holds the lock and makes the change durable."""
        self.close_segment()
        if state is VbucketState.ACTIVE:
            self._become_active(takeover)
        self.state = state
        self.locks.clear()
        if state is VbucketState.ACTIVE:
            self.collections.adopt_manifest()
        if not silent:
            self.end_streams(EndReason.STATE_CHANGED)
        self.wake()

    def _become_active(self, takeover: bool) -> None:
        high = self.high_seqno
        if not takeover:
            complete = self.snap_end if self.snapshot_complete else self.complete_seqno
            self.failover_log = self.failover_log.branch(
                self.shared.random_uuid(), min(complete, high), self.shared.options.max_failover_entries
            )
        self.purge_seqno = min(self.purge_seqno, high)  # the missing rest of a snapshot is not history
        self.memory.cut_snapshot(high)
        self.snap_start = self.snap_end = self.complete_seqno = high
        self.registers[r.DEDUPED] = 0

    def rollback(self, to: int) -> int:
        """Undo every change above ``to``; durable on return. Returns the seqno reached, which may be lower.

        A rollback ends only at states that existed. If none is left, the vbucket is emptied and the result is 0.
        """
        with self.shared.commit_lock, self.shared.lock:
            self.require_replica()
            self.shared.flush()
            self.end_streams(EndReason.STATE_CHANGED)
            return roll_back(self, to)
