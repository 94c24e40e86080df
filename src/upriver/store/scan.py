"""A disk snapshot, read block by block: latest version per key, in seqno order, without a Python object per record."""

from __future__ import annotations

from typing import Any

import numpy as np

from upriver.store import runs
from upriver.store.core import Core
from upriver.store.disk import BLOCK, BLOCK_KEY, NO_WORDS, Octets, Words

STEP_BYTES = 256 * 1024


class DiskScan:
    """The state that the disk has now, above ``after``. ``end`` is where it ends."""

    def __init__(self, vbucket: Core, after: int) -> None:
        self._vbucket = vbucket
        self.end = vbucket.persisted_seqno
        self.epoch = vbucket.epoch
        self._dead = dead_seqnos(vbucket, after, self.end)
        self._position = 0
        self._scratch: Octets = np.empty(STEP_BYTES + vbucket.shared.options.block_bytes, np.uint8)

    def step(self, after: int) -> tuple[memoryview, int]:
        """The next records above ``after`` (marked where they are dead), and the seqno up to which they are all.

        The memory is reused by the next step.
        """
        used, last = 0, self.end
        for last, data in self._vbucket.blocks(after, self.end):  # noqa: B007
            size = len(data) - BLOCK.size
            if used + size > self._scratch.size:
                self._scratch = self._larger(used, size)
            self._scratch[used : used + size] = np.frombuffer(data, np.uint8)[BLOCK.size :]
            used += size
            if used >= STEP_BYTES:
                break
        else:
            last = self.end
        self._mark(used)
        return self._scratch.data[:used], min(last, self.end)

    def _larger(self, used: int, size: int) -> Octets:
        grown = np.empty(used + size, np.uint8)
        grown[:used] = self._scratch[:used]
        return grown

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
    dead: Words = np.sort(np.concatenate(found)) if found else NO_WORDS.copy()
    return dead
