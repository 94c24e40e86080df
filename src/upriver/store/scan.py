"""A disk snapshot, read block by block: latest version per key, in seqno order, without a Python object per record."""

from __future__ import annotations

from typing import Any

import numpy as np

from upriver.store import runs
from upriver.store.arrays import octets
from upriver.store.core import Core
from upriver.store.disk import BLOCK, BLOCK_KEY, NO_WORDS, Octets, Words

STEP_BYTES = 256 * 1024
NO_OCTETS: Octets = np.empty(0, np.uint8)


class DiskScan:
    """The state that the disk has now, above ``after``. ``end`` is where it ends."""

    def __init__(self, vbucket: Core, after: int) -> None:
        self._vbucket = vbucket
        self.after = after
        self.end = vbucket.persisted_seqno
        self.epoch = vbucket.epoch
        # Most vbuckets of a first load have nothing to look for, and a transaction costs more than their few records.
        self._dead = dead_seqnos(vbucket, after, self.end) if vbucket.content.dead else NO_WORDS
        self._position = 0
        self._scratch: Octets = NO_OCTETS

    def step(self, after: int) -> tuple[memoryview, int]:
        """The next records above ``after`` (marked where they are dead), and the seqno up to which they are all.

        The memory is reused by the next step.
        """
        with self._vbucket.shared.disk.read() as transaction:
            used, last = self._copy_blocks(transaction, after)
        self._mark(used)
        return self._scratch.data[:used], min(last, self.end)

    def _copy_blocks(self, transaction: Any, after: int) -> tuple[int, int]:
        """Copy blocks until there are enough; returns the bytes used, and the seqno that they reach."""
        used, number = 0, self._vbucket.id
        target = self._scratch.data
        cursor = transaction.cursor(db=self._vbucket.shared.disk.log)
        more = cursor.set_range(BLOCK_KEY.pack(number, after + 1))
        while more:
            key, data = cursor.item()
            vbucket, last = BLOCK_KEY.unpack(key)
            if vbucket != number:
                break
            size = len(data) - BLOCK.size
            if used + size > len(target):
                target = self._enlarge(used, size, last)
            target[used : used + size] = data[BLOCK.size :]
            used += size
            if used >= STEP_BYTES or last >= self.end:
                return used, last
            more = cursor.next()
        return used, self.end

    def _enlarge(self, used: int, size: int, last: int) -> memoryview:
        """Room for ``size`` bytes more; if more blocks will follow, for all of a step."""
        following = 0 if last >= self.end else STEP_BYTES + self._vbucket.shared.options.block_bytes
        grown = octets(max(used + size, following))
        grown[:used] = self._scratch[:used]
        self._scratch = grown
        return grown.data

    def _mark(self, used: int) -> None:
        vbucket = self._vbucket
        if self._position < self._dead.size or vbucket.erasing:
            self._position = runs.mark_dead(
                self._scratch, 0, used, self._dead, self._position, vbucket.erasing, vbucket.collections
            )


def dead_seqnos(vbucket: Core, after: int, upto: int) -> Words:
    """Seqnos above ``after`` that a record at or below ``upto`` has replaced, sorted."""
    with vbucket.shared.disk.read() as transaction:
        return dead_in(transaction, vbucket, after, upto)


def dead_in(transaction: Any, vbucket: Core, after: int, upto: int) -> Words:
    """``dead_seqnos`` as a transaction sees them."""
    found: list[Words] = []
    cursor = transaction.cursor(db=vbucket.shared.disk.dead)
    more = cursor.set_range(BLOCK_KEY.pack(vbucket.id, after + 1))
    while more:
        owner, last = BLOCK_KEY.unpack(cursor.key())
        if owner != vbucket.id or last > upto:
            break
        words = np.frombuffer(cursor.value(), np.uint8).copy().view(np.uint64)
        found.append(words[words > np.uint64(after)])
        more = cursor.next()
    if not found:
        return NO_WORDS
    dead: Words = np.sort(np.concatenate(found))
    dead.flags.writeable = False  # as an empty one is: kernels are compiled for one kind
    return dead
