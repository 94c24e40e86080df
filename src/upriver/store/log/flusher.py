"""Group commit: writes waiting changes to disk as blocks, many vbuckets in one transaction.

A batch is frozen under the lock, written without it, and acknowledged under it. Nothing leaves memory before its commit
is durable, so a full disk loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from upriver.errors import DiskFull, TemporaryFailure
from upriver.store.disk.file import BLOCK_KEY, EXACT, Disk, Octets, Words, meta_key, seal_vbucket
from upriver.store.disk.kernels import checksum
from upriver.store.disk.sealed import BLOCK, seal_dead
from upriver.store.index.keyindex import FrozenOverlay, put_table
from upriver.store.log.kernels import runs
from upriver.store.log.memory import Segment
from upriver.store.record import Tally, describe, note_persisted
from upriver.store.shared import Shared

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

RETRY_S = 1.0
REST = 4  # the flusher rests this many times longer than it works: it shares the interpreter with the node
SLICE_S = 0.01


class Frozen(NamedTuple):
    """What one commit writes of a vbucket."""

    vbucket: VBucket
    segments: list[Segment]
    high_seqno: int
    meta: dict[str, Any]
    overlays: list[FrozenOverlay]  # to be written as a key table
    size: int


class BlockWriter:
    """Packs segments into blocks and puts them into a transaction."""

    def __init__(self, disk: Disk, block_bytes: int) -> None:
        self._disk = disk
        self._scratch: Octets = np.empty(block_bytes, np.uint8)
        self._replaced: Words = np.empty(block_bytes // 65 + 1, np.uint64)
        self._counts = np.zeros(4, np.int64)
        self._used = BLOCK.size
        self._safe = 0
        self._exact = True
        self.put = Tally()
        self.end = 0  # where the block before the next one ends

    def write(self, transaction: Any, vbucket_id: int, segments: Iterable[Segment], log_end: int) -> Tally:
        """Write the segments behind the block that ends at ``log_end``; returns how much was written."""
        self.put, self.end = Tally(), log_end
        for segment in segments:
            data = segment.checkpoint.data
            self.add(transaction, vbucket_id, data, segment.at, segment.end, segment.safe, segment.exact)
        self.finish(transaction, vbucket_id)
        return self.put

    def add(self, transaction: Any, vbucket_id: int, data: Octets, at: int, end: int, safe: int, exact: bool) -> None:
        """Append the records of ``data[at:end]`` that are not superseded; write every block that is full."""
        if self._counts[0] and safe != self._safe and not (exact and self._exact):
            self.finish(transaction, vbucket_id)  # a rollback can end at the border between the two
        while at < end:
            if self._counts[0] == 0:
                self._safe, self._exact = safe, True
            self._exact = self._exact and exact
            at, self._used = runs.gather(data, at, end, self._scratch, self._used, self._replaced, self._counts)
            if at < end and self._counts[0] == 0:
                at = self._put_giant(transaction, vbucket_id, data, at, safe, exact)
            elif at < end:
                self.finish(transaction, vbucket_id)

    def _put_giant(self, transaction: Any, vbucket_id: int, data: Octets, at: int, safe: int, exact: bool) -> int:
        """Write a record that is larger than a block as a block of its own."""
        size = int(data[at : at + 4].view(np.uint32)[0])
        giant, self._scratch = self._scratch, np.empty(BLOCK.size + size, np.uint8)
        self._safe, self._exact = safe, exact
        at, self._used = runs.gather(data, at, at + size, self._scratch, self._used, self._replaced, self._counts)
        self.finish(transaction, vbucket_id)
        self._scratch = giant
        return at

    def finish(self, transaction: Any, vbucket_id: int) -> None:
        """Write the block under construction, unless it is empty."""
        records, replaced, first, last = (int(number) for number in self._counts)
        if records:
            flags = checksum.SEALED | (EXACT if self._exact else 0)
            BLOCK.pack_into(self._scratch.data, 0, flags, records, first, self._safe, 0, self.end, 0)
            checksum.seal_block(self._scratch, self._used, vbucket_id, last)
            key = BLOCK_KEY.pack(vbucket_id, last)
            transaction.put(key, self._scratch[: self._used].data, db=self._disk.log)
            self.put = Tally(self.put.blocks + 1, self.put.records + records, self.put.dead + replaced)
            self.end = last
            if replaced:
                sealed = seal_dead(vbucket_id, last, self._replaced[:replaced])
                transaction.put(key, sealed, db=self._disk.dead)
        self._counts[:] = 0
        self._used = BLOCK.size


class Flusher:
    """Writes batches of changes to disk, in the background or on demand."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        shared.flush = self.flush
        self._writer = BlockWriter(shared.disk, shared.options.block_bytes)
        self._ready = threading.Event()
        self._allowed = threading.Event()
        self._allowed.set()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.paused = False
        self._troubled = False
        self.commits = 0

    def start(self) -> None:
        self._shared.wake_flusher = self._ready.set
        self._thread = threading.Thread(target=self._run, name="upriver-flusher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._ready.set()
        self._allowed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def pause(self) -> None:
        """Stop writing; waits for a commit under way."""
        with self._shared.commit_lock:
            self.paused = True
            self._allowed.clear()

    def resume(self) -> None:
        """Start writing again, with everything that waits."""
        self.paused = False
        self._allowed.set()
        self._ready.set()

    def _run(self) -> None:
        spent = 0.0
        while not self._stopping:
            self._ready.wait()
            self._allowed.wait()
            self._gather(max(self._shared.options.flush_delay_s, REST * spent))
            if self._stopping:
                return
            self._ready.clear()
            begin = time.thread_time()
            try:
                self.flush_once()
            except DiskFull:
                time.sleep(RETRY_S)
                self._ready.set()
            except BaseException as failure:
                self._shared.failure = str(failure) or type(failure).__name__  # nothing more will be persisted
                raise
            spent = time.thread_time() - begin
            if self._shared.dirty:
                self._ready.set()

    def _gather(self, delay_s: float) -> None:
        """Wait until there are enough changes for a commit, or the delay is over."""
        deadline = time.monotonic() + delay_s
        while not self._stopping and self._shared.dirty_bytes < self._shared.options.flush_bytes:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, SLICE_S))

    def flush_unless_paused(self) -> None:
        """``flush``, or do nothing during a pause: the changes are written when it ends."""
        with self._shared.commit_lock:
            if not self.paused:
                self.flush()

    def flush(self) -> None:
        """Everything written before this call is durable when it returns; ``TemporaryFailure`` during a pause."""
        with self._shared.commit_lock:
            self.check_running()
            with self._shared.lock:
                waiting = set(self._shared.dirty)
            while waiting & set(self._shared.dirty):
                waiting -= set(self.flush_once())

    def check_running(self) -> None:
        if self.paused:
            raise TemporaryFailure("persistence is stopped")

    def flush_once(self) -> list[int]:
        """Make one commit; returns the vbuckets that it wrote."""
        with self._shared.commit_lock:
            if self.paused:
                return []
            batch = self._freeze()
            if not batch:
                return []
            try:
                self._commit(batch)
            except BaseException as failure:  # nothing of the batch is on disk
                with self._shared.lock:
                    self._thaw(batch)
                self._tell_trouble(str(failure) or type(failure).__name__)
                raise
            told = self._acknowledge(batch)
            self._tell_trouble("")
        if self._shared.dirty:  # changed during the commit: ``note_dirty`` may not have woken us
            self._shared.wake_flusher()
        listeners = self._shared.listeners
        if listeners.on_persisted is not None:
            listeners.on_persisted(told)
        if self._shared.refused and self._shared.dirty_bytes <= self._shared.options.dirty_bytes // 2:
            self._shared.refused = False
            if listeners.on_room is not None:
                listeners.on_room()
        return [item.vbucket.id for item in batch]

    def _tell_trouble(self, reason: str) -> None:
        """Call ``on_trouble`` once when trouble begins and once when it is over."""
        if self._troubled is not bool(reason):
            self._troubled = bool(reason)
            if self._shared.listeners.on_trouble is not None:
                self._shared.listeners.on_trouble(reason)

    def _freeze(self) -> list[Frozen]:
        """Freeze waiting changes, up to a batch; other threads can take the lock between two vbuckets."""
        shared = self._shared
        batch: list[Frozen] = []
        size = 0
        with shared.lock:
            waiting = list(shared.dirty)
        for number in waiting:
            with shared.lock:
                vbucket = shared.dirty.pop(number, None)
                if vbucket is None:
                    continue
                frozen = self._freeze_one(vbucket)
            batch.append(frozen)
            size += frozen.size + sum(overlay.table.nbytes for overlay in frozen.overlays)  # all held in memory
            if size >= shared.options.batch_bytes:
                break
        return batch

    def _freeze_one(self, vbucket: VBucket) -> Frozen:
        vbucket.close_segment()
        segments = vbucket.memory.collect_unflushed()
        vbucket.keys.freeze_if_due(vbucket.high_seqno, vbucket.high_seqno - vbucket.indexed_seqno)
        size = sum(segment.end - segment.at for segment in segments)
        return Frozen(vbucket, segments, vbucket.high_seqno, describe(vbucket), vbucket.keys.frozen[:], size)

    def _commit(self, batch: list[Frozen]) -> None:
        disk = self._shared.disk
        with disk.write(sum(item.size for item in batch)) as transaction:
            for item in batch:
                self._write(transaction, item)
            present = self._shared.present | {item.vbucket.id for item in batch}
            if present != self._shared.present:
                disk.put_present(transaction, present)
        self._shared.present = present
        self.commits += 1

    def _write(self, transaction: Any, item: Frozen) -> None:
        disk, number, meta = self._shared.disk, item.vbucket.id, item.meta
        put = self._writer.write(transaction, number, item.segments, meta["log_end"])
        meta["content"] = [old + new for old, new in zip(meta["content"], put, strict=True)]
        meta["log_end"] = self._writer.end
        if item.overlays:
            put_table(transaction, disk, number, item.overlays, self._shared.table_scratch)
            meta["indexed_seqno"] = item.overlays[-1].upto
            meta["tables"] = disk.generations(transaction, number)
        transaction.put(meta_key(number), seal_vbucket(number, meta), db=disk.meta)

    def _thaw(self, batch: list[Frozen]) -> None:
        """The commit failed: the whole batch waits again, in the same order."""
        self._shared.disk_full = True
        for item in batch:
            item.vbucket.memory.flush_ended(on_disk=False)
            self._shared.dirty[item.vbucket.id] = item.vbucket

    def _acknowledge(self, batch: list[Frozen]) -> list[tuple[int, int]]:
        shared = self._shared
        shared.disk_full = False
        for item in batch:
            with shared.lock:
                self._acknowledge_one(item)
        with shared.lock:
            shared.evict()
        return [(item.vbucket.id, item.high_seqno) for item in batch]

    def _acknowledge_one(self, item: Frozen) -> None:
        self._shared.dirty_bytes -= item.size
        item.vbucket.memory.flush_ended(on_disk=True)
        note_persisted(item.vbucket, item.high_seqno, item.meta)
        item.vbucket.wake_for_disk()
        if item.overlays:
            item.vbucket.indexed_seqno = item.overlays[-1].upto
            item.vbucket.keys.written(item.overlays)
