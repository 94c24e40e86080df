"""Reads a vbucket's log on disk: blocks in order, single records, and disk snapshots.

Every block is whole and none is missing, or ``DamagedVbucket`` is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from upriver.errors import DamagedVbucket
from upriver.model import SEQNO_MAX
from upriver.store.arrays import octets
from upriver.store.disk import sealed
from upriver.store.disk.file import BLOCK_KEY, FAILURES, NO_WORDS, Block, Octets, Words
from upriver.store.disk.kernels import checksum, nodes
from upriver.store.log.kernels import runs
from upriver.wire.packed import RecordHead, unpack

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

STEP_BYTES = 256 * 1024
FIRST_BYTES = 32 * 1024  # enough for most of a thousand vbuckets


def blocks_after(vbucket: VBucket, after: int, upto: int = SEQNO_MAX) -> Iterator[tuple[int, Block]]:
    """(last seqno, block) of the blocks above ``after``. A block is valid until the next iteration."""
    disk, reached = vbucket.shared.disk, after
    with disk.read(vbucket.id) as transaction:
        cursor = transaction.cursor(db=disk.log)
        more = cursor.set_range(BLOCK_KEY.pack(vbucket.id, after + 1))
        while more:
            owner, last = BLOCK_KEY.unpack(cursor.key())
            if owner != vbucket.id:
                break
            block = disk.block(owner, last, disk.value(cursor, owner))
            if block.link is not None and (block.link > reached or (reached > after and block.link != reached)):
                raise missing_block(vbucket, reached)
            yield last, block
            if last >= upto:
                return
            reached, more = last, cursor.next()
        check_log_end(vbucket, reached)


def missing_block(vbucket: VBucket, reached: int) -> DamagedVbucket:
    """The error to raise when no block follows the one that ends at ``reached``."""
    return vbucket.shared.disk.damaged(vbucket.id, f"the block after seqno {reached} is missing")


def check_log_end(vbucket: VBucket, reached: int) -> None:
    """There are no blocks behind ``reached``: raise if there should be."""
    if reached < vbucket.log_end:
        raise missing_block(vbucket, reached)


def record_on_disk(vbucket: VBucket, seqno: int) -> tuple[RecordHead, bytes, bytes]:
    """Header, prefixed key and value of the record with this seqno."""
    for _, block in blocks_after(vbucket, seqno - 1, seqno):
        at = runs.locate(block.data, block.at, block.data.size, np.uint64(seqno))
        if at >= 0:
            return unpack(block.data.data, at)
    raise vbucket.shared.disk.damaged(vbucket.id, f"seqno {seqno} is in the key index but not in the log")


class DiskScan:
    """Reads a disk snapshot block by block: the latest version of each key above ``after``, up to ``end``.

    Records come in seqno order, without a Python object for each.
    """

    def __init__(self, vbucket: VBucket, after: int) -> None:
        self._vbucket = vbucket
        self.after = after
        self.end = vbucket.persisted_seqno
        self.epoch = vbucket.epoch
        self._log_end = vbucket.log_end
        # After a first load most vbuckets have no dead records, and a transaction costs more than reading their few.
        self._dead = dead_seqnos(vbucket, after, self.end) if vbucket.content.dead else NO_WORDS
        self._position = 0
        self._scratch: Octets = octets(FIRST_BYTES)

    def step(self, after: int) -> tuple[memoryview, int]:
        """The next records above ``after``, dead ones marked, and the seqno up to which they are complete.

        The next step reuses the memory.
        """
        disk = self._vbucket.shared.disk
        try:
            with disk.begin() as transaction:
                used, last = self._copy_blocks(transaction, after)
        except FAILURES as failure:
            raise disk.damaged(self._vbucket.id, failure) from failure
        self._mark(used)
        return self._scratch.data[:used], min(last, self.end)

    def _copy_blocks(self, transaction: Any, after: int) -> tuple[int, int]:
        """Copy blocks until they fill a step; returns the bytes used and the seqno reached."""
        used, number, disk = 0, self._vbucket.id, self._vbucket.shared.disk
        target, reached, place = self._scratch, after, disk.place
        cursor = transaction.cursor(db=disk.log)
        more = cursor.set_range(BLOCK_KEY.pack(number, after + 1))
        while more:
            state, used, last, size = nodes.copy_value(
                np.frombuffer(cursor.key(), np.uint8), *place, number, reached, reached == after, disk.strict, target,
                used,
            )  # fmt: skip
            if state != checksum.WHOLE:
                if state == nodes.OTHER:
                    break
                target, place = self._resolve(cursor, state, used, last, size)
                continue
            if used >= STEP_BYTES or last >= self.end:
                return used, int(last)
            reached, more = int(last), cursor.next()
        if reached < min(self._log_end, self.end):
            raise missing_block(self._vbucket, reached)
        return used, self.end

    def _resolve(self, cursor: Any, state: int, used: int, last: int, size: int) -> tuple[Octets, Any]:
        """Do what the kernel could not, or raise what is wrong with the block."""
        disk, number = self._vbucket.shared.disk, self._vbucket.id
        if state == nodes.NO_ROOM:
            return self._enlarge(cursor, used, size, last), disk.place
        if state == nodes.BEYOND:
            disk.value(cursor, number)  # raises, or notes that the file has grown
            return self._scratch, disk.place
        raise disk.damaged(number, f"the block that ends at seqno {last} {sealed.WRONG[state]}")

    def _enlarge(self, cursor: Any, used: int, size: int, last: int) -> Octets:
        """Make room for ``size`` more bytes, or for a whole step if more blocks follow."""
        disk, number = self._vbucket.shared.disk, self._vbucket.id
        following = 0 if last >= self.end else STEP_BYTES + self._vbucket.shared.options.block_bytes
        if size > max(following, self._vbucket.shared.options.block_bytes):  # a very large record, or a damaged length
            disk.block(number, last, disk.value(cursor, number))
        grown = octets(max(used + size, following))
        grown[:used] = self._scratch[:used]
        self._scratch = grown
        return grown

    def _mark(self, used: int) -> None:
        vbucket = self._vbucket
        if self._position < self._dead.size or vbucket.erasing:
            self._position = runs.mark_dead(
                self._scratch, 0, used, self._dead, self._position, vbucket.erasing, vbucket.collection_table
            )


def dead_seqnos(vbucket: VBucket, after: int, upto: int) -> Words:
    """The sorted seqnos above ``after`` that records up to ``upto``, the persisted seqno, have replaced."""
    disk = vbucket.shared.disk
    with disk.read(vbucket.id) as transaction:
        dead = disk.dead_in(transaction, vbucket.id, upto, guarded=True)
    check_dead(vbucket, dead)
    return in_order(dead[dead > np.uint64(after)] if after else dead)


def check_dead(vbucket: VBucket, dead: Words) -> None:
    """Raise if these are not as many as the vbucket's record says."""
    if dead.size != vbucket.content.dead:
        what = f"{dead.size} seqnos are listed as replaced, not {vbucket.content.dead}"
        raise vbucket.shared.disk.damaged(vbucket.id, what)


def in_order(seqnos: Words) -> Words:
    """Sorted and read-only, as kernels expect them."""
    if not seqnos.size:
        return NO_WORDS
    found: Words = np.sort(seqnos)
    found.flags.writeable = False  # like NO_WORDS: kernels are compiled for read-only arrays
    return found
