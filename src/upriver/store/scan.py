"""A disk snapshot, read block by block: latest version per key, in seqno order, without a Python object per record."""

from __future__ import annotations

from typing import Any

import numpy as np

from upriver.store import checksum, runs, sealed
from upriver.store.arrays import octets
from upriver.store.core import Core
from upriver.store.disk import BLOCK_KEY, NO_WORDS, Octets, Words

STEP_BYTES = 256 * 1024
NO_OCTETS: Octets = np.empty(0, np.uint8)


class DiskScan:
    """The state that the disk has now, above ``after``. ``end`` is where it ends."""

    def __init__(self, vbucket: Core, after: int) -> None:
        self._vbucket = vbucket
        self.end = vbucket.persisted_seqno
        self.epoch = vbucket.epoch
        self._log_end = vbucket.log_end
        # Most vbuckets of a first load have nothing to look for, and a transaction costs more than their few records.
        self._dead = dead_seqnos(vbucket, after, self.end) if vbucket.content.dead else NO_WORDS
        self._position = 0
        self._scratch: Octets = NO_OCTETS

    def step(self, after: int) -> tuple[memoryview, int]:
        """The next records above ``after`` (marked where they are dead), and the seqno up to which they are all.

        The memory is reused by the next step.
        """
        with self._vbucket.shared.disk.read(self._vbucket.id) as transaction:
            used, last = self._copy_blocks(transaction, after)
        self._mark(used)
        return self._scratch.data[:used], min(last, self.end)

    def _copy_blocks(self, transaction: Any, after: int) -> tuple[int, int]:
        """Copy blocks until there are enough; returns the bytes used, and the seqno that they reach."""
        used, number, disk = 0, self._vbucket.id, self._vbucket.shared.disk
        target, reached = self._scratch, after
        cursor = transaction.cursor(db=disk.log)
        more = cursor.set_range(BLOCK_KEY.pack(number, after + 1))
        while more:
            vbucket, last = BLOCK_KEY.unpack(cursor.key())
            if vbucket != number:
                break
            block = np.frombuffer(disk.value(cursor, number), np.uint8)
            if used + block.size > target.size:
                target = self._enlarge(used, block, last)
            state, used = checksum.copy_block(
                block, number, last, reached, reached == after, disk.strict, target, used
            )
            if state != checksum.WHOLE:
                raise disk.damaged(number, f"the block that ends at seqno {last} {sealed.WRONG[state]}")
            if used >= STEP_BYTES or last >= self.end:
                return used, last
            reached, more = last, cursor.next()
        if reached < min(self._log_end, self.end):
            raise self._vbucket.gap(reached)
        return used, self.end

    def _enlarge(self, used: int, block: Octets, last: int) -> Octets:
        """Room for a block more; if more blocks will follow, for all of a step."""
        disk, vbucket = self._vbucket.shared.disk, self._vbucket.id
        following = 0 if last >= self.end else STEP_BYTES + self._vbucket.shared.options.block_bytes
        if block.size > max(following, self._scratch.size):  # a giant; so that a damaged length takes no memory
            disk.block(vbucket, last, block)
        grown = octets(max(used + block.size, following))
        grown[:used] = self._scratch[:used]
        self._scratch = grown
        return grown

    def _mark(self, used: int) -> None:
        vbucket = self._vbucket
        if self._position < self._dead.size or vbucket.erasing:
            self._position = runs.mark_dead(
                self._scratch, 0, used, self._dead, self._position, vbucket.erasing, vbucket.collections
            )


def dead_seqnos(vbucket: Core, after: int, upto: int) -> Words:
    """Seqnos above ``after`` that a record at or below ``upto``, the end of what is on disk, has replaced, sorted."""
    disk = vbucket.shared.disk
    with disk.read(vbucket.id) as transaction:
        dead = disk.dead_in(transaction, vbucket.id, upto, guarded=True)
    check_dead(vbucket, dead)
    return in_order(dead[dead > np.uint64(after)])


def check_dead(vbucket: Core, dead: Words) -> None:
    """Raise if these are not all that there should be."""
    if dead.size != vbucket.content.dead:
        what = f"{dead.size} seqnos are listed as replaced, not {vbucket.content.dead}"
        raise vbucket.shared.disk.damaged(vbucket.id, what)


def in_order(seqnos: Words) -> Words:
    if not seqnos.size:
        return NO_WORDS
    found: Words = np.sort(seqnos)
    found.flags.writeable = False  # as an empty one is: kernels are compiled for one kind
    return found
