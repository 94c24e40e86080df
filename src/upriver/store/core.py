"""The heart of a vbucket: its registers, its memory log, its key index, and the one door that records go in by.

Everything else (documents, replication, streams, rollback) is built from ``_append`` and ``_lookup``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from upriver.errors import DamagedVbucket, InvalidArguments, OutOfRange, UnknownCollection
from upriver.model import SEQNO_MAX, FailoverLog, VbucketState
from upriver.store import kernels as k
from upriver.store.disk.file import BLOCK_KEY, Block, Octets, Words
from upriver.store.index.keyindex import KeyIndex
from upriver.store.log import runs
from upriver.store.log.memory import MemoryLog, OpenSegment
from upriver.store.shared import Shared
from upriver.wire.packed import HEADER_SIZE, RecordHead, RecordKind, unpack

if TYPE_CHECKING:
    from upriver.store.log.stream import StreamSource

SEVERAL = 4 * 1024  # a run of this many bytes is likely more than one record
BULK = 32 * 1024  # from this many bytes on a run is taken in without the interpreter lock
NO_CEILING = np.uint64(SEQNO_MAX)
EVICTIONS = 4  # checkpoints looked at when a write finds the memory log too large


class Found(NamedTuple):
    """What the key index knows of a key: seqno 0 if nothing; ``place`` is where it lies in memory."""

    seqno: int
    deleted: bool
    rev_seqno: int
    place: int


NOTHING = Found(0, False, 0, 0)


class Tally(NamedTuple):
    """How much a vbucket has on disk; ``dead`` counts the records that others have replaced."""

    blocks: int = 0
    records: int = 0
    dead: int = 0


class OnDisk(NamedTuple):
    """What a snapshot of the disk says about itself, as of the last commit."""

    visible: int
    prepared: int
    completed: int
    collections: Words


class Core:
    """One vbucket. Callers hold ``shared.lock`` around anything that changes it."""

    # With a thousand vbuckets written in turn what counts is how few cache lines a write touches.
    __slots__ = (
        "_loaded", "_log_fields", "_waiting", "_waiting_for_disk", "collections", "compacted_s", "complete_seqno",
        "content", "epoch", "erasing", "expired_count", "failover_log", "id", "indexed_seqno", "keys", "locks",
        "log_end", "manifest_uid", "memory", "numbers", "on_disk", "pending", "persisted_seqno", "purge_seqno",
        "registers", "rollback_floor", "shared", "snap_end", "snap_start", "snapshot_from_disk", "sources", "state",
        "tables", "topology",
    )  # fmt: skip

    def __init__(self, shared: Shared, vbucket_id: int, state: VbucketState, log: FailoverLog) -> None:
        self.shared = shared
        self.id = vbucket_id
        self.state = state
        self.failover_log = log
        self._log_fields: tuple[FailoverLog | None, list[list[int]]] = (None, [])  # the log, and how it is stored
        self.registers: Words = np.zeros(k.REGISTERS, np.uint64)
        self.registers[k.EXPIRY] = SEQNO_MAX
        self.numbers = self.registers.data  # the same, as Python's integers: three times as fast one by one
        self.collections: Words = np.zeros((1, k.C_WORDS), np.uint64)
        self.erasing = False  # collections were dropped or flushed and their records are still on disk
        self.manifest_uid = 0
        self.persisted_seqno = 0
        self.content = Tally()
        self.log_end = 0  # where the newest block on disk ends
        self.tables: list[int] = []  # generations of the key tables on disk
        self.compacted_s = shared.now_s
        self.on_disk = OnDisk(0, 0, 0, self.collections)
        self.expired_count = 0  # documents that it let expire since it was opened
        self.purge_seqno = 0
        self.rollback_floor = 0  # below this the versions that a rollback would need are gone
        self.indexed_seqno = 0  # the key tables on disk know everything up to here
        self.epoch = 0  # moves when records on disk are rewritten or taken away
        self.complete_seqno = 0  # end of the last snapshot that is wholly here
        self.snap_start = 0
        self.snap_end = 0
        self.snapshot_from_disk = False
        self.topology: Any = None
        self.memory = MemoryLog(0, shared.checkpoint_bytes, shared.log_gauge, shared.ages)
        self.keys = KeyIndex(shared, vbucket_id, self.registers)
        self._loaded = True
        self.sources: set[StreamSource] = set()
        self._waiting: dict[Callable[[], None], None] = {}  # in order, each once
        self._waiting_for_disk: dict[Callable[[], None], None] = {}  # those of them that a commit may help
        self.locks: dict[bytes, tuple[int, int]] = {}
        self.pending: dict[bytes, int] = {}  # prepared and neither committed nor aborted: key -> seqno

    # ---- numbers ----

    @property
    def high_seqno(self) -> int:
        return self.numbers[k.HIGH]

    @property
    def max_visible_seqno(self) -> int:
        return self.numbers[k.VISIBLE]

    @property
    def high_prepared_seqno(self) -> int:
        return self.numbers[k.PREPARED]

    @property
    def high_completed_seqno(self) -> int:
        return self.numbers[k.COMPLETED]

    @property
    def max_cas(self) -> int:
        return self.numbers[k.CAS]

    @property
    def tombstone_count(self) -> int:
        return self.numbers[k.TOMBSTONES]

    @property
    def item_count(self) -> int:
        return int(self.collections[:, k.C_ITEMS].sum())

    @property
    def uuid(self) -> int:
        return self.failover_log.uuid

    @property
    def snapshot(self) -> tuple[int, int]:
        """Range of the snapshot that the last record came in."""
        return (self.snap_start, self.snap_end)

    @property
    def snapshot_complete(self) -> bool:
        return self.high_seqno >= self.snap_end

    def collection_row(self, collection_id: int) -> Words:
        for row in self.collections:
            if row[k.C_ID] == collection_id:
                found: Words = row
                return found
        raise UnknownCollection(f"no collection {collection_id:x} in vbucket {self.id}")

    def collection_ids(self) -> list[int]:
        return [int(number) for number in self.collections[:, k.C_ID]]

    def collection_high_seqno(self, collection_id: int) -> int:
        return int(self.collection_row(collection_id)[k.C_HIGH])

    def visible_high_seqno(self, collection_id: int) -> int:
        return int(self.collection_row(collection_id)[k.C_VISIBLE])

    def collection_start_seqno(self, collection_id: int) -> int:
        return int(self.collection_row(collection_id)[k.C_START])

    def collection_item_count(self, collection_id: int) -> int:
        return int(self.collection_row(collection_id)[k.C_ITEMS])

    def persisted(self, high_seqno: int, meta: dict[str, Any]) -> None:
        """Everything up to here is durable; ``meta`` is what was put down with it."""
        self.persisted_seqno = high_seqno
        self.content = Tally(*meta["content"])
        self.log_end, self.tables = meta["log_end"], meta["tables"]
        visible, prepared, completed = (int(meta["registers"][at]) for at in (k.VISIBLE, k.PREPARED, k.COMPLETED))
        self.on_disk = OnDisk(visible, prepared, completed, np.asarray(meta["collections"], np.uint64))

    # ---- the door in ----

    def _append(self, run: Octets, *, assign: bool, ceiling: int = SEQNO_MAX) -> None:
        """Take in packed records; with ``assign`` they get seqno, CAS and rev here."""
        self.load_keys()
        size, keys = run.size, self.keys
        if size > SEVERAL:
            keys.reserve(size // max(HEADER_SIZE, int(run[:4].view(np.uint32)[0])))
        ingest = k.ingest_many if size > BULK else k.ingest
        limit = NO_CEILING if ceiling == SEQNO_MAX else np.uint64(ceiling)
        at, before = 0, 0
        while at < size:
            segment = self._open_segment(min(size - at, self.memory.most_bytes))
            checkpoint, used, before = segment.checkpoint, self.numbers[k.USED], at
            at = ingest(
                run, at, size, checkpoint.data, segment.at, checkpoint.serial, keys.overlay, keys.layers,
                self.collections, self.registers, self.shared.seed, assign, limit,
            )  # fmt: skip
            self._took_in(segment, used)
            if at < size:
                at = self._resolve_stop(run, at, stuck=at == before)
        self.wake()

    def _took_in(self, segment: OpenSegment, used: int) -> None:
        if segment.first == 0:
            segment.first = self.numbers[k.FIRST]
        segment.end = self.numbers[k.USED]
        self.shared.note_dirty(self, segment.end - used)

    def _resolve_stop(self, run: Octets, at: int, stuck: bool) -> int:
        """Do what the kernel could not and return where to go on, or say why the record at ``at`` is refused."""
        reason = self.numbers[k.STOP]
        if reason == k.CROWDED:
            self.keys.make_room(self.high_seqno)
        elif reason == k.FULL and not stuck:
            self.close_segment()
        elif reason == k.FULL:
            self._make_room(unpack(run.data, at)[0].size)
        elif reason == k.COLLISION:
            self.close_segment()
            self.memory.close_checkpoint()
        elif reason == k.UNKNOWN_COLLECTION:
            raise UnknownCollection(f"no collection {unpack(run.data, at)[0].collection_id:x} in vbucket {self.id}")
        elif reason == k.BAD_SEQNO:
            raise OutOfRange(f"seqno {unpack(run.data, at)[0].seqno} does not follow {self.high_seqno} in its snapshot")
        elif reason == k.BAD_RECORD:
            raise InvalidArguments(f"the run is not made of packed records (at byte {at})")
        else:
            at = self._take_event(run, at)
        return at

    def _take_event(self, run: Octets, at: int) -> int:
        """A system event among replicated records; returns where the next record begins."""
        raise InvalidArguments(f"a system event at byte {at}")

    def _make_room(self, size: int) -> None:
        used = self.numbers[k.USED]
        if not self.memory.room(size, used):
            self.close_segment()
            self._begin_segment(size)

    def _open_segment(self, size: int) -> OpenSegment:
        segment = self.memory.open
        if segment is None:
            return self._begin_segment(size)
        if segment.end + size > segment.checkpoint.data.size:
            self.memory.room(size, segment.end)
        return segment

    def _begin_segment(self, size: int) -> OpenSegment:
        if self.shared.log_gauge.bytes > self.shared.log_bytes:
            self.shared.evict(tries=EVICTIONS)
        segment = self.memory.begin_segment(size, self.complete_seqno)
        self.numbers[k.USED] = segment.at
        self.numbers[k.DEDUPED] = 0
        return segment

    def close_segment(self) -> None:
        """Freeze what was written so far: nothing in it will be deduplicated away any more."""
        if self.memory.open is None:
            return
        own = self.state is VbucketState.ACTIVE
        high = self.numbers[k.HIGH]
        if own:
            self.complete_seqno = self.snap_start = self.snap_end = high
        # A received snapshot without a gap had nothing left out: every seqno in it is a state that existed.
        exact = self.numbers[k.DEDUPED] == 0 and (own or self.numbers[k.GAPS] == 0)
        self.memory.close_segment(high, high if own else self.snap_end, exact)

    def wait(self, wake: Callable[[], None], for_disk: bool = False) -> None:
        """Call ``wake`` once, when something happens; ``for_disk``: also when something was persisted."""
        self._waiting[wake] = None
        if for_disk:
            self._waiting_for_disk[wake] = None

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        """Forget it; else an idle vbucket would hold on to every reader that ever was."""
        self._waiting.pop(wake, None)
        self._waiting_for_disk.pop(wake, None)

    def wake(self) -> None:
        """Call everybody who waits; in whatever thread this is."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                wake()

    def wake_for_disk(self) -> None:
        """Call those who wait for a commit."""
        if self._waiting_for_disk:
            waiting, self._waiting_for_disk = self._waiting_for_disk, {}
            for wake in waiting:
                wake()

    # ---- the key index ----

    def load_keys(self) -> None:
        """Make sure that overlay and tables together know every key."""
        if not self._loaded:
            self._load_overlay()
        self.keys.prepare()

    def _load_overlay(self) -> None:
        """After a restart: enter the records that the tables on disk do not know yet."""
        keys = self.keys
        for _, block in self.blocks(self.indexed_seqno):
            while (keys.entries + block.records) * 5 >= keys.overlay.size:
                keys.grow()
            new = runs.index_run(
                block.data, block.at, block.data.size, np.uint64(self.indexed_seqno), keys.overlay, self.shared.seed
            )
            self.registers[k.ENTRIES] += np.uint64(new)
        self._loaded = True  # not before: what could not be read is no reason to know nothing

    def blocks(self, after: int, upto: int = SEQNO_MAX) -> Iterator[tuple[int, Block]]:
        """(last seqno, block) of what is on disk above ``after``, in order, each whole and none missing.

        A block lives for one step.
        """
        disk, reached = self.shared.disk, after
        with disk.read(self.id) as transaction:
            cursor = transaction.cursor(db=disk.log)
            more = cursor.set_range(BLOCK_KEY.pack(self.id, after + 1))
            while more:
                vbucket, last = BLOCK_KEY.unpack(cursor.key())
                if vbucket != self.id:
                    break
                block = disk.block(vbucket, last, disk.value(cursor, vbucket))
                if block.link is not None and (block.link > reached or (reached > after and block.link != reached)):
                    raise self.gap(reached)
                yield last, block
                if last >= upto:
                    return
                reached, more = last, cursor.next()
            self.check_end(reached)

    def gap(self, reached: int) -> DamagedVbucket:
        return self.shared.disk.damaged(self.id, f"the block behind seqno {reached} is missing")

    def check_end(self, reached: int) -> None:
        """There are no more blocks: raise if there should be."""
        if reached < self.log_end:
            raise self.gap(reached)

    def _lookup(self, wire_key: bytes, salt: int = 0) -> Found:
        self.load_keys()
        octets = np.frombuffer(wire_key, np.uint8)
        _, known, rev, place = k.find(octets, np.uint64(salt), self.shared.seed, self.keys.overlay, self.keys.layers)
        if not known:
            return NOTHING
        return Found(int(known) & int(k.SEQNO_BITS), bool(known >> 63), int(rev), int(place))

    def _record(self, found: Found) -> tuple[RecordHead, bytes, bytes]:
        """The record that the index points at, from memory or from disk."""
        checkpoint = self.memory.by_serial.get(found.place >> 32)
        if checkpoint is not None:
            return unpack(checkpoint.data.data, found.place & 0xFFFF_FFFF)
        return self.record_on_disk(found.seqno)

    def record_on_disk(self, seqno: int) -> tuple[RecordHead, bytes, bytes]:
        for _, block in self.blocks(seqno - 1, seqno):
            at = runs.locate(block.data, block.at, block.data.size, np.uint64(seqno))
            if at >= 0:
                return unpack(block.data.data, at)
        raise self.shared.disk.damaged(self.id, f"seqno {seqno} is in the key index but not in the log")

    # ---- what is kept in the meta tree ----

    def describe(self) -> dict[str, Any]:
        """All that is kept, for ``seal_vbucket``; of few objects, since those of a thousand vbuckets live at once."""
        names = ("manifest_uid", "purge_seqno", "rollback_floor", "indexed_seqno", "complete_seqno", "snap_start",
                 "snap_end", "topology", "erasing", "snapshot_from_disk", "compacted_s", "log_end",
                 "tables")  # fmt: skip
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields["content"] = list(self.content)
        fields["state"] = int(self.state)
        fields["pending"] = [[key.hex(), seqno] for key, seqno in self.pending.items()] if self.pending else ()
        if self._log_fields[0] is not self.failover_log:
            self._log_fields = (self.failover_log, [list(entry) for entry in self.failover_log])
        fields["failover_log"] = self._log_fields[1]
        fields["registers"] = self.registers.copy()
        fields["collections"] = self.collections.copy()
        return fields

    def restore(self, data: Any) -> None:
        """The inverse of ``describe``, for a vbucket just opened."""
        fields = self.shared.disk.vbucket_record(self.id, data)
        try:
            self._restore(fields)
        except (KeyError, TypeError, ValueError, OverflowError) as failure:
            raise self.shared.disk.damaged(self.id, "its record makes no sense") from failure

    def _restore(self, fields: dict[str, Any]) -> None:
        if "log_end" not in fields:  # of a version without checksums
            self._count_anew(fields)
        log = FailoverLog.load((uuid, seqno) for uuid, seqno in fields.pop("failover_log"))
        self.failover_log = log or FailoverLog.new(self.shared.random_uuid())
        self.persisted(fields["registers"][k.HIGH], fields)
        del fields["content"], fields["collections"]
        self.state = VbucketState(fields.pop("state"))
        self.registers[:] = fields.pop("registers")
        self.collections = self.on_disk.collections.reshape(-1, k.C_WORDS).copy()
        self.pending = {bytes.fromhex(key): seqno for key, seqno in fields.pop("pending")}
        for register in (k.USED, k.ENTRIES, k.DEDUPED):
            self.numbers[register] = 0
        if self.registers[k.CAS] >= k.NO_CLOCK:  # a document's CAS was believed once that no clock can follow
            self.numbers[k.CAS] = 0
        for name, value in fields.items():
            setattr(self, name, value)
        self.memory.clear(self.high_seqno)
        self.keys.clear()
        self._loaded = False

    def _count_anew(self, fields: dict[str, Any]) -> None:
        """What such a version did not note: where the log ends, which tables there are, how many records are dead."""
        disk = self.shared.disk
        with disk.read(self.id) as transaction:
            fields["log_end"] = disk.last_block(transaction, self.id)
            fields["tables"] = [each for each, _ in disk.tables_in(transaction, self.id, guarded=True)]
            fields["content"][2] = disk.dead_in(transaction, self.id, fields["registers"][k.HIGH], guarded=True).size

    def is_tombstone(self, head: RecordHead) -> bool:
        kind = head.kind & 0x7F
        return kind in (RecordKind.DELETION, RecordKind.EXPIRATION) or (
            kind == RecordKind.COMMIT and bool(head.extra >> 63)
        )
