"""Compaction: removes old versions, dropped collections and old tombstones, and joins small blocks.

Purging tombstones raises the purge seqno: a reader that is further behind may have missed deletions. Removing old
versions raises the rollback floor: a rollback below it goes to 0. Other threads read and write meanwhile; only the
commit and the update of the vbucket happen under the lock. What a reader of a disk snapshot still needs stays.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from upriver.model import SEQNO_MAX
from upriver.store import registers as r
from upriver.store.disk.file import (
    BLOCK_KEY,
    EXACT,
    NO_WORDS,
    Block,
    Octets,
    Words,
    erase_range,
    meta_key,
    seal_vbucket,
)
from upriver.store.disk.kernels import checksum
from upriver.store.disk.sealed import BLOCK, seal_dead
from upriver.store.index.keyindex import rewrite_table
from upriver.store.log.blocks import blocks_after, check_dead, in_order
from upriver.store.log.flusher import BlockWriter
from upriver.store.log.kernels import runs
from upriver.store.record import Tally, describe, note_persisted
from upriver.wire.packed import HEADER_SIZE

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

WORTH_RECORDS, WORTH_BLOCKS, FEW_RECORDS = 1000, 64, 8
_BORN = [r.C_ID, r.C_START]
PATIENCE_S = 600
KEEP_SHARE = 0.75  # a block with at least this share still live stays as it is


def compact(vbucket: VBucket, purge_before_s: int, purge_before_seqno: int) -> None:
    """Rewrite blocks where it pays, in one transaction; purge tombstones deleted at or before ``purge_before_s``."""
    shared = vbucket.shared
    with shared.commit_lock, ExitStack() as at_last:
        shared.flush()
        with shared.lock:
            shared.flush()  # changes made meanwhile
            work = Compaction(vbucket, max(0, purge_before_s), min(purge_before_seqno, vbucket.high_seqno - 1))
        with shared.disk.write(shared.options.block_bytes) as transaction:
            work.run(transaction)
            at_last.enter_context(shared.lock)  # no reader sees the new blocks before the vbucket is updated
        work.acknowledge()


def wants_compaction(vbucket: VBucket) -> bool:
    """Whether it pays: many dead records, many small blocks, a collection to erase, or old tombstones."""
    blocks, records, dead = vbucket.content
    shared = vbucket.shared
    if vbucket.id in shared.disk.damage:
        return False  # its undamaged parts stay where they are
    if shared.now_s - vbucket.compacted_s < PATIENCE_S and any(source.scan_end for source in list(vbucket.sources)):
        return False  # more can be removed once these readers are done
    if vbucket.erasing or (records >= WORTH_RECORDS and dead * 2 > records):
        return True
    if blocks >= WORTH_BLOCKS and records < blocks * FEW_RECORDS:
        return True
    waited = shared.now_s - vbucket.compacted_s
    return vbucket.tombstone_count > 0 and waited > max(shared.options.purge_age_s // 3, 1)


class Compaction:
    """One pass over the blocks of a vbucket as it was when this object was made, with everything on disk."""

    def __init__(self, vbucket: VBucket, purge_before_s: int, purge_before_seqno: int) -> None:
        vbucket.load_keys()
        vbucket.keys.freeze(vbucket.high_seqno)
        self._vbucket = vbucket
        self._overlays = vbucket.keys.frozen[:]
        self._meta = describe(vbucket)
        self._end = vbucket.high_seqno
        self._erasing = vbucket.erasing
        self._collections = vbucket.collection_table.copy()
        self._cutoff = np.uint64(purge_before_s)
        self._scans = [(source.position, source.scan_end) for source in vbucket.sources if source.scan_end]
        purgeable = min([purge_before_seqno, *(source.purgeable_seqno for source in vbucket.sources)])
        self._upto = np.uint64(max(0, purgeable))
        oldest = min(vbucket.pending.values(), default=SEQNO_MAX)
        self._over = np.uint64(min(vbucket.high_completed_seqno, oldest - 1))  # durable writes up to here are completed
        self._dead = self._droppable = NO_WORDS
        self._position = 0
        self._writer = BlockWriter(vbucket.shared.disk, vbucket.shared.options.block_bytes)
        self._kept = Tally()
        self._purged: list[Words] = []
        self._dropped: list[Words] = []
        self._tombstones: list[Words] = []  # of those purged
        self._hashes = NO_WORDS  # of their keys

    def run(self, transaction: Any) -> None:
        """Everything but the commit."""
        vbucket, disk = self._vbucket, self._vbucket.shared.disk
        self._dead = in_order(disk.dead_in(transaction, vbucket.id, self._end))
        check_dead(vbucket, self._dead)
        self._droppable = self._not_wanted(transaction)
        for last in [last for last, _ in blocks_after(vbucket, 0)]:
            value = transaction.get(BLOCK_KEY.pack(vbucket.id, last), db=disk.log)
            block = disk.block(vbucket.id, last, value)
            self._block(transaction, last, block._replace(data=block.data.copy()))
        self._writer.finish(transaction, vbucket.id)
        put, kept = self._writer.put, self._kept
        removed = _joined(self._purged + self._dropped)
        self._write_dead(transaction, removed)
        dead = disk.dead_in(transaction, vbucket.id, self._end).size
        tombstones = _joined(self._tombstones)
        self._hashes = rewrite_table(
            transaction, disk, vbucket.id, self._overlays, removed, tombstones, vbucket.shared.table_scratch
        )
        self._update_meta(Tally(put.blocks + kept.blocks, put.records + kept.records, dead), removed)
        self._meta |= {"log_end": self._writer.end, "tables": disk.generations(transaction, vbucket.id)}
        transaction.put(meta_key(vbucket.id), seal_vbucket(vbucket.id, self._meta), db=disk.meta)

    def _not_wanted(self, transaction: Any) -> Words:
        """The dead seqnos that no reader still needs: in the disk snapshot of a reader, later ones may be alive."""
        wanted = []
        for end in {end for _, end in self._scans}:
            position = min(position for position, scan_end in self._scans if scan_end == end)
            inside = self._dead[(self._dead > np.uint64(position)) & (self._dead <= np.uint64(end))]
            then = self._vbucket.shared.disk.dead_in(transaction, self._vbucket.id, end)
            wanted.append(np.setdiff1d(inside, then))
        if not wanted:
            return self._dead
        return in_order(np.setdiff1d(self._dead, np.concatenate(wanted)))

    def _update_meta(self, content: Tally, removed: Words) -> None:
        purged, meta = _joined(self._purged), self._meta
        meta |= {"content": list(content), "compacted_s": self._vbucket.shared.now_s, "indexed_seqno": self._end}
        meta["erasing"] = False
        if removed.size:
            meta["rollback_floor"] = self._end
        if purged.size:
            meta["purge_seqno"] = max(meta["purge_seqno"], int(purged[-1]))
        left = int(meta["registers"][r.TOMBSTONES]) - self._hashes.size
        meta["registers"][r.TOMBSTONES] = max(0, left)

    def _write_dead(self, transaction: Any, removed: Words) -> None:
        """List the dead records that stay in the log, since the records that replaced them may be gone.

        The list goes where no rollback removes it: at the rollback floor, which is the end if anything was removed.
        """
        vbucket, disk = self._vbucket, self._vbucket.shared.disk
        floor = self._end if removed.size else vbucket.rollback_floor
        if removed.size:
            erase_range(transaction, disk.dead, vbucket.id, 0)
        listed = disk.dead_in(transaction, vbucket.id, self._end)
        unlisted = np.setdiff1d(self._dead, np.concatenate([removed, listed]))
        if unlisted.size:
            key = BLOCK_KEY.pack(vbucket.id, floor)
            value = transaction.get(key, db=disk.dead)
            before = disk.dead_list(vbucket.id, floor, value) if value is not None else NO_WORDS
            transaction.put(key, seal_dead(vbucket.id, floor, np.concatenate([before, unlisted])), db=disk.dead)

    def _block(self, transaction: Any, last: int, block: Block) -> None:
        vbucket, disk, data = self._vbucket, self._vbucket.shared.disk, block.data
        changed = self._mark(data, block.at)
        size = data.size - block.at
        live = int(runs.live_bytes(data, block.at, data.size)) if changed else size
        large = live >= vbucket.shared.options.block_bytes // 2
        if not changed and large:
            self._keep(transaction, last, block)
            return
        key = BLOCK_KEY.pack(vbucket.id, last)
        transaction.delete(key, db=disk.log)
        transaction.delete(key, db=disk.dead)
        self._writer.add(transaction, vbucket.id, data, block.at, data.size, block.safe, bool(block.flags & EXACT))

    def _keep(self, transaction: Any, last: int, block: Block) -> None:
        """Leave the block as it is, except for its link if the block before it now ends elsewhere."""
        vbucket, writer = self._vbucket, self._writer
        writer.finish(transaction, vbucket.id)
        self._kept = Tally(self._kept.blocks + 1, self._kept.records + block.records)
        if block.link is not None and block.link != writer.end:
            fields = block.flags, block.records, block.first, block.safe, 0, writer.end, 0
            BLOCK.pack_into(block.data.data, 0, *fields)
            checksum.seal_block(block.data, block.data.size, vbucket.id, last)
            transaction.put(BLOCK_KEY.pack(vbucket.id, last), block.data.data, db=vbucket.shared.disk.log)
        writer.end = last

    def _mark(self, data: Octets, begin: int) -> bool:
        """Mark the records to remove in this copy; False if there are none, or too few to be worth it."""
        found = np.empty(data.size // HEADER_SIZE, np.uint64)
        start = self._position
        self._position = runs.mark_dead(
            data, begin, data.size, self._droppable, self._position, self._erasing, self._collections
        )
        dropped = found[: runs.superseded(data, begin, data.size, found)].copy()
        tombstones = np.empty_like(found)
        count, of_documents = runs.mark_purgeable(
            data, begin, data.size, self._cutoff, self._upto, self._over, found, tombstones
        )
        purged = found[:count].copy()
        live = int(runs.live_bytes(data, begin, data.size))
        worth = purged.size or self._erasing or live < KEEP_SHARE * (data.size - begin)
        if not worth:
            self._position = start
            runs.unmark(data, begin, data.size)
            return False
        self._purged.append(purged)
        self._tombstones.append(tombstones[:of_documents].copy())
        self._dropped.append(dropped)
        return bool(purged.size or dropped.size)

    def acknowledge(self) -> None:
        """After the commit, under the lock: update the vbucket, which may have changed meanwhile."""
        vbucket, meta = self._vbucket, self._meta
        overtaken = vbucket.keys.count_newer(self._hashes, len(self._overlays))  # tombstones replaced meanwhile
        left = vbucket.tombstone_count - self._hashes.size + overtaken
        vbucket.registers[r.TOMBSTONES] = max(0, left)
        vbucket.keys.written(self._overlays)
        if meta["rollback_floor"] == self._end:
            vbucket.epoch += 1
        for name in ("indexed_seqno", "compacted_s", "rollback_floor"):
            setattr(vbucket, name, meta[name])
        vbucket.purge_seqno = max(vbucket.purge_seqno, meta["purge_seqno"])  # a marker may have raised it meanwhile
        if np.array_equal(vbucket.collection_table[:, _BORN], self._collections[:, _BORN]):
            vbucket.erasing = False
        note_persisted(vbucket, self._end, meta)


def _joined(parts: list[Words]) -> Words:
    return in_order(np.concatenate(parts)) if parts else NO_WORDS
