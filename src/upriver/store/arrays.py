"""Memory for records and key tables: large pieces come straight from the system.

The C heap would keep most of what is freed, in pieces between what is not, and the quota would mean little. Fresh pages
are dear, though (twenty times a copy into pages that are there), so some of what is let go waits for its next use.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from upriver.store.disk import Octets, Words

MAPPED = 64 * 1024
MOST_KEPT = 4 << 20


class Pool:
    """Mappings that nobody refers to any more, by size; no more than the open buckets allow."""

    def __init__(self) -> None:
        self.allowed_bytes = 0
        self._free: dict[int, list[mmap.mmap]] = {}

    @property
    def free_bytes(self) -> int:
        return sum(size * len(mappings) for size, mappings in self._free.items())

    def allow(self, size: int) -> None:
        """Keep so many bytes more; a negative number takes it back."""
        self.allowed_bytes += size
        while self.free_bytes > self.allowed_bytes and self._free:
            self._free.popitem()

    def take(self, size: int, flags: int = 0) -> tuple[mmap.mmap, bool]:
        """A mapping, and whether it is fresh, which means zeros."""
        kept = self._free.get(size)
        if kept:
            return kept.pop(), False
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags), True

    def give_back(self, mapping: mmap.mmap) -> None:
        if self.free_bytes + len(mapping) <= self.allowed_bytes:
            self._free.setdefault(len(mapping), []).append(mapping)


POOL = Pool()


def octets(size: int) -> Octets:
    """Bytes, not cleared."""
    if size < MAPPED:
        return np.empty(size, np.uint8)
    mapping, _ = POOL.take(size)
    return _lent(mapping).view(np.uint8)


def words(count: int) -> Words:
    """Zeros."""
    if count * 8 < MAPPED:
        return np.zeros(count, np.uint64)
    mapping, fresh = POOL.take(count * 8, mmap.MAP_POPULATE)  # every page of a hash table is touched
    lent = _lent(mapping).view(np.uint64)
    if not fresh:
        lent[:] = 0
    return lent


def _lent(mapping: mmap.mmap) -> Octets:
    """All of a mapping, which goes back when no array, slice or memoryview of it is left."""
    lent = np.frombuffer(mapping, np.uint8)
    weakref.finalize(lent.base, POOL.give_back, mapping).atexit = False
    return lent


class Scratch:
    """Words for one user at a time, kept for the next one unless they are many."""

    def __init__(self) -> None:
        self._kept = words(0)

    def zeros(self, count: int) -> Words:
        """Valid until the next call."""
        if count * 8 > MOST_KEPT:
            return words(count)
        if count > self._kept.size:
            self._kept = words(count + count // 4)
        self._kept[:count] = 0
        return self._kept[:count]
