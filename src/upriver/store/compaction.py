"""Taking space back: old versions, dropped collections, old tombstones; and small blocks become large ones.

Purging tombstones raises the purge seqno: a reader that was away longer may have missed deletions. Taking old versions
away raises the rollback floor: below it there is no way back but to 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from upriver.model import SEQNO_MAX
from upriver.store import kernels as k
from upriver.store import runs
from upriver.store.core import Core, Tally
from upriver.store.disk import BLOCK, BLOCK_KEY, EXACT, Octets, Words, erase_range
from upriver.store.flusher import BlockWriter, meta_key
from upriver.store.keyindex import rewrite_table
from upriver.store.scan import dead_in, dead_seqnos
from upriver.wire.packed import HEADER_SIZE

WORTH_RECORDS, WORTH_BLOCKS, FEW_RECORDS = 1000, 64, 8
KEEP_SHARE = 0.75  # a block with at least this much left of it stays as it is


def compact(vbucket: Core, purge_before_s: int, purge_before_seqno: int) -> None:
    """Rewrite what is worth it, in one transaction; tombstones deleted at or before ``purge_before_s`` go."""
    shared = vbucket.shared
    with shared.commit_lock, shared.lock:
        shared.flush()
        vbucket.load_keys()
        work = Compaction(vbucket, max(0, purge_before_s), min(purge_before_seqno, vbucket.high_seqno - 1))
        before = orjson.dumps(vbucket.describe())
        try:
            with shared.disk.write(shared.options.block_bytes) as transaction:
                work.run(transaction)
        except BaseException:
            vbucket.restore(before)
            raise


def wants_compaction(vbucket: Core) -> bool:
    """Whether it pays: much is dead, blocks are many and small, a collection is to be erased, tombstones are old."""
    blocks, records, dead = vbucket.content
    shared = vbucket.shared
    if vbucket.erasing or (records >= WORTH_RECORDS and dead * 2 > records):
        return True
    if blocks >= WORTH_BLOCKS and records < blocks * FEW_RECORDS:
        return True
    waited = shared.now_s - vbucket.compacted_s
    return vbucket.tombstone_count > 0 and waited > max(shared.options.purge_age_s // 3, 1)


class Compaction:
    """One pass over the blocks of a vbucket."""

    def __init__(self, vbucket: Core, purge_before_s: int, purge_before_seqno: int) -> None:
        self._vbucket = vbucket
        self._cutoff = np.uint64(purge_before_s)
        self._upto = np.uint64(max(0, purge_before_seqno))
        oldest = min(vbucket.pending.values(), default=SEQNO_MAX)
        self._over = np.uint64(min(vbucket.high_completed_seqno, oldest - 1))  # durable writes that are settled
        self._dead = dead_seqnos(vbucket, 0, vbucket.high_seqno)
        self._position = 0
        self._writer = BlockWriter(vbucket.shared.disk, vbucket.shared.options.block_bytes)
        self._kept = Tally()
        self._purged: list[Words] = []
        self._dropped: list[Words] = []

    def run(self, transaction: Any) -> None:
        vbucket, disk = self._vbucket, self._vbucket.shared.disk
        for last in [last for last, _ in vbucket.blocks(0)]:
            key = BLOCK_KEY.pack(vbucket.id, last)
            self._block(transaction, key, np.frombuffer(transaction.get(key, db=disk.log), np.uint8).copy())
        self._writer.finish(transaction, vbucket.id)
        put, kept = self._writer.put, self._kept
        removed = _joined(self._purged + self._dropped)
        dead = int(np.setdiff1d(self._dead, removed).size)
        vbucket.content = Tally(put.blocks + kept.blocks, put.records + kept.records, dead)
        vbucket.compacted_s = vbucket.shared.now_s
        self._write_dead(transaction, removed)
        rewrite_table(transaction, disk, vbucket.id, vbucket.keys.sources(), removed, vbucket.shared.table_scratch)
        self._settle(removed)
        meta = vbucket.describe()
        transaction.put(meta_key(vbucket.id), orjson.dumps(meta), db=disk.meta)
        vbucket.persisted(vbucket.high_seqno, meta)

    def _write_dead(self, transaction: Any, removed: Words) -> None:
        """Keep what is dead and still there dead, though the records that said so may be gone.

        It goes where no rollback can take it away: at the rollback floor, which is the end if anything was removed.
        """
        vbucket, disk = self._vbucket, self._vbucket.shared.disk
        floor = vbucket.high_seqno if removed.size else vbucket.rollback_floor
        if removed.size:
            erase_range(transaction, disk.dead, vbucket.id, 0)
        said = dead_in(transaction, vbucket, 0, vbucket.high_seqno)
        unsaid = np.setdiff1d(self._dead, np.concatenate([removed, said]))
        if unsaid.size:
            key = BLOCK_KEY.pack(vbucket.id, floor)
            there = bytes(transaction.get(key, b"", db=disk.dead))
            transaction.put(key, there + unsaid.tobytes(), db=disk.dead)

    def _block(self, transaction: Any, key: bytes, data: Octets) -> None:
        vbucket, disk = self._vbucket, self._vbucket.shared.disk
        flags, records, _, safe, _ = BLOCK.unpack_from(data.data)
        changed = self._mark(data)
        size = data.size - BLOCK.size
        live = int(runs.live_bytes(data, BLOCK.size, data.size)) if changed else size
        large = live >= vbucket.shared.options.block_bytes // 2
        if not changed and large:
            self._writer.finish(transaction, vbucket.id)
            self._kept = Tally(self._kept.blocks + 1, self._kept.records + records)
            return
        transaction.delete(key, db=disk.log)
        transaction.delete(key, db=disk.dead)
        self._writer.add(transaction, vbucket.id, data, BLOCK.size, data.size, safe, bool(flags & EXACT))

    def _mark(self, data: Octets) -> bool:
        """Mark in this copy what is to go; False if nothing is, or too little to be worth it."""
        vbucket = self._vbucket
        found = np.empty(data.size // HEADER_SIZE, np.uint64)
        start = self._position
        self._position = runs.mark_dead(
            data, BLOCK.size, data.size, self._dead, self._position, vbucket.erasing, vbucket.collections
        )
        dropped = found[: runs.superseded(data, BLOCK.size, data.size, found)].copy()
        count = runs.mark_purgeable(data, BLOCK.size, data.size, self._cutoff, self._upto, self._over, found)
        purged = found[:count].copy()
        live = int(runs.live_bytes(data, BLOCK.size, data.size))
        worth = purged.size or vbucket.erasing or live < KEEP_SHARE * (data.size - BLOCK.size)
        if not worth:
            self._position = start
            runs.unmark(data, BLOCK.size, data.size)
            return False
        self._purged.append(purged)
        self._dropped.append(dropped)
        return bool(purged.size or dropped.size)

    def _settle(self, removed: Words) -> None:
        vbucket = self._vbucket
        purged = _joined(self._purged)
        vbucket.keys.clear()
        vbucket.indexed_seqno = vbucket.high_seqno
        vbucket.erasing = False
        if removed.size:
            vbucket.epoch += 1
            vbucket.rollback_floor = vbucket.high_seqno
        if purged.size:
            vbucket.purge_seqno = max(vbucket.purge_seqno, int(purged[-1]))
            left = int(vbucket.registers[k.TOMBSTONES]) - purged.size
            vbucket.registers[k.TOMBSTONES] = max(0, left)


def _joined(parts: list[Words]) -> Words:
    joined: Words = np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
    joined.flags.writeable = False
    return joined
