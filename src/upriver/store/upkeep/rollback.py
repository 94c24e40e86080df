"""Rollback: restores a vbucket to an earlier consistent point, in one transaction.

The versions that later changes replaced stay in the log until compaction removes them. So a rollback cuts the log and
reads the rest again. If that cannot give a state that existed, the vbucket goes back to 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from upriver.model import SEQNO_MAX, FailoverLog
from upriver.store import registers as r
from upriver.store.collections.events import default_table
from upriver.store.collections.manifest import Manifest
from upriver.store.disk.file import BLOCK_KEY, EXACT, Block, Disk, Words, meta_key, seal_vbucket
from upriver.store.disk.sealed import seal_dead
from upriver.store.index.keyindex import put_table
from upriver.store.log.blocks import blocks_after, check_log_end, in_order, missing_block
from upriver.store.log.flusher import BlockWriter
from upriver.store.log.kernels import runs
from upriver.store.record import Tally, describe, note_persisted, restore
from upriver.wire.packed import HEADER_SIZE, SUPERSEDED, RecordKind, unpack

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket


def consistent_point(vbucket: VBucket, wanted: int) -> int:
    """The highest seqno up to ``wanted`` at which the log shows a state that existed; 0 if none.

    A received or deduplicated snapshot has such seqnos only at its ends.
    """
    if wanted >= vbucket.high_seqno:
        return vbucket.high_seqno
    if wanted == 0:
        return 0  # without reading the log: this is how a damaged replica is emptied
    point = min(wanted, vbucket.complete_seqno)  # if no record is above ``wanted``
    ends_here = False
    for last, block in blocks_after(vbucket, wanted - 1):
        if wanted >= block.first:
            point = wanted if block.flags & EXACT else block.safe
        else:
            point = max(point if ends_here else 0, min(block.safe, wanted))
        ends_here = last == wanted  # the next block may begin at this point, which makes it consistent
        if not ends_here:
            break
    return point if point >= vbucket.rollback_floor else 0


def roll_back(vbucket: VBucket, to: int) -> int:
    """Undo every change above ``to``, or above the consistent point below it; returns the new high seqno.

    The caller holds both locks, has flushed and has ended the streams.
    """
    point = consistent_point(vbucket, to)
    if point >= vbucket.high_seqno:
        return point
    disk = vbucket.shared.disk
    before = seal_vbucket(vbucket.id, describe(vbucket))
    try:
        with disk.write() as transaction:
            log_end = _cut_log(transaction, disk, vbucket, point)
            _forget(vbucket, point)
            vbucket.log_end = log_end
            if point:
                _read_again(transaction, disk, vbucket)
            _begin_branch(vbucket, point)
            vbucket.tables = disk.generations(transaction, vbucket.id)
            meta = describe(vbucket)
            transaction.put(meta_key(vbucket.id), seal_vbucket(vbucket.id, meta), db=disk.meta)
        note_persisted(vbucket, point, meta)
    except BaseException:
        restore(vbucket, before)  # the disk has not changed
        raise
    return point


def _cut_log(transaction: Any, disk: Disk, vbucket: VBucket, point: int) -> int:
    """Remove the records above ``point``; the block that contains it is written again, shorter.

    Returns where the log ends now.
    """
    remainder = _remainder(transaction, disk, vbucket.id, point) if point else None
    disk.erase(transaction, vbucket.id, point)
    disk.erase_tables(transaction, vbucket.id)
    writer = BlockWriter(disk, vbucket.shared.options.block_bytes)
    writer.end = disk.last_block(transaction, vbucket.id) if point else 0
    if remainder is not None:
        data, exact = remainder.data, bool(remainder.flags & EXACT)
        known = disk.dead_in(transaction, vbucket.id, point)
        writer.add(transaction, vbucket.id, data, remainder.at, data.size, remainder.safe, exact)
        writer.finish(transaction, vbucket.id)
        listed = disk.dead_in(transaction, vbucket.id, point)
        _keep_dead(transaction, disk, vbucket.id, writer.end, np.setdiff1d(known, listed))
    return writer.end


def _keep_dead(transaction: Any, disk: Disk, vbucket_id: int, last: int, unlisted: Words) -> None:
    """Add to the shorter block's list of dead seqnos what the list of a compaction at the same place had."""
    if unlisted.size:
        key = BLOCK_KEY.pack(vbucket_id, last)
        listed = disk.dead_list(vbucket_id, last, transaction.get(key, db=disk.dead))
        transaction.put(key, seal_dead(vbucket_id, last, np.concatenate([listed, unlisted])), db=disk.dead)


def _remainder(transaction: Any, disk: Disk, vbucket_id: int, point: int) -> Block | None:
    """A copy of the block that contains ``point``, with the records above it marked superseded."""
    cursor = transaction.cursor(db=disk.log)
    if not cursor.set_range(BLOCK_KEY.pack(vbucket_id, point + 1)):
        return None
    owner, last = BLOCK_KEY.unpack(cursor.key())
    if owner != vbucket_id:
        return None
    block = disk.block(vbucket_id, last, cursor.value())
    if block.first > point:
        return None
    copy = block._replace(data=block.data.copy())
    runs.cut(copy.data, copy.at, copy.data.size, np.uint64(point))
    return copy


def _forget(vbucket: VBucket, point: int) -> None:
    """Clear everything derived from the log; the CAS clock and the highest deleted rev never go back."""
    kept = vbucket.registers[[r.CAS, r.DELETED_REV]].copy()
    vbucket.registers[:] = 0
    vbucket.registers[[r.CAS, r.DELETED_REV]] = kept
    vbucket.registers[r.EXPIRY] = SEQNO_MAX
    vbucket.registers[r.HIGH] = point
    vbucket.replace_collection_table(default_table())
    vbucket.collections.manifest = Manifest()
    vbucket.erasing = False
    vbucket.pending.clear()
    vbucket.locks.clear()
    vbucket.content = Tally()
    vbucket.keys.clear()


def _begin_branch(vbucket: VBucket, point: int) -> None:
    fresh = vbucket.shared.random_uuid()
    vbucket.failover_log = vbucket.failover_log.roll_back(point, fresh) if point else FailoverLog.new(fresh)
    vbucket.snap_start = vbucket.snap_end = vbucket.complete_seqno = point
    vbucket.indexed_seqno = point
    vbucket.memory.clear(point)
    vbucket.epoch += 1
    vbucket.purge_seqno = min(vbucket.purge_seqno, point)
    if not point:
        vbucket.rollback_floor = 0


def _read_again(transaction: Any, disk: Disk, vbucket: VBucket) -> None:
    """Rebuild counters, collections and key table from the remaining records and the list of dead ones.

    A record can be dead although nothing in the log replaces it: compaction may have purged the tombstone but kept the
    block with the version before it.
    """
    dead = in_order(disk.dead_in(transaction, vbucket.id, vbucket.high_seqno))
    cursor = transaction.cursor(db=disk.log)
    more = cursor.set_range(BLOCK_KEY.pack(vbucket.id, 0))
    reached = position = 0
    while more and (found := BLOCK_KEY.unpack(cursor.key()))[0] == vbucket.id:
        block = disk.block(vbucket.id, found[1], cursor.value())
        if block.link not in (None, reached):
            raise missing_block(vbucket, reached)
        block = block._replace(data=block.data.copy())
        position = runs.mark_dead(
            block.data, block.at, block.data.size, dead, position, False, vbucket.collection_table
        )
        _replay(vbucket, block)
        blocks, records, _ = vbucket.content
        vbucket.content = Tally(blocks + 1, records + block.records)
        reached, more = found[1], cursor.next()
    check_log_end(vbucket, reached)
    vbucket.content = vbucket.content._replace(dead=dead.size)
    vbucket.keys.freeze(vbucket.high_seqno)
    put_table(transaction, disk, vbucket.id, vbucket.keys.frozen, vbucket.shared.table_scratch)
    vbucket.keys.clear()


def _replay(vbucket: VBucket, block: Block) -> None:
    data, at = block.data, block.at
    while at < data.size:
        if vbucket.keys.overlay.size * 4 < (vbucket.keys.entries + data.size // HEADER_SIZE) * 32:
            vbucket.keys.grow()
            continue
        at = runs.recount(
            data, at, data.size, vbucket.keys.overlay, vbucket.collection_table, vbucket.registers, vbucket.shared.seed
        )
        if at < data.size:
            head, key, value = unpack(data.data, at)
            vbucket.collections.learn(head, key, value)
            at += head.size
    _find_pending(vbucket, block)


def _find_pending(vbucket: VBucket, block: Block) -> None:
    data = block.data
    offsets = np.empty(data.size // HEADER_SIZE + 1, np.int64)
    for at in offsets[: runs.specials(data, block.at, data.size, offsets)]:
        head, wire_key, _ = unpack(data.data, int(at))
        if head.kind & SUPERSEDED:
            continue
        if head.kind == RecordKind.PREPARE:
            vbucket.pending[wire_key] = head.seqno
        else:
            vbucket.pending.pop(wire_key, None)
