"""Memory for records and key tables: large pieces are mapped from the system, and reused.

The C heap would keep most freed memory, scattered between pieces in use, and make the quota meaningless. But fresh
pages cost twenty times as much as a copy into existing ones, so a pool keeps some of the freed mappings.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque

import numpy as np

from upriver.store.disk.file import Octets, Words

MAPPED = 64 * 1024
MOST_KEPT = 4 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class MemoryPool:
    """Freed mappings by size, no more bytes than the open buckets allow.

    A mapping comes back in the thread that drops the last reference to it.
    """

    def __init__(self) -> None:
        self.allowed_bytes = 0
        self._free: dict[int, list[mmap.mmap]] = {}  # sizes used last are at the end
        self._returned: deque[mmap.mmap] = deque()
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        return sum(size * len(mappings) for size, mappings in self._free.items())

    def allow(self, size: int) -> None:
        """Allow ``size`` more bytes; a negative number takes them back."""
        with self._lock:
            self.allowed_bytes += size
            self._sort_in()

    def lend(self, size: int, flags: int = 0) -> tuple[mmap.mmap, bool]:
        """A mapping, and whether it is fresh, which means zeros."""
        with self._lock:
            self._sort_in()
            kept = self._free[size] = self._free.pop(size, [])
            if kept:
                return kept.pop(), False
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags), True

    def give_back(self, mapping: mmap.mmap) -> None:
        self._returned.append(mapping)
        if self._lock.acquire(blocking=False):  # else the holder, perhaps this very thread, sorts it in
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        """Keep the returned mappings; if they are too many, free the sizes used least recently."""
        while self._returned:
            mapping = self._returned.popleft()
            self._free.setdefault(len(mapping), []).append(mapping)
        excess = self.free_bytes - self.allowed_bytes
        for size, kept in self._free.items():
            while kept and excess > 0:
                kept.pop()
                excess -= size


POOL = MemoryPool()


def keep_heap(size: int) -> None:
    """Let glibc's heap keep ``size`` free bytes at its end; other C libraries have no such switch.

    LMDB allocates what a commit writes and frees it afterwards. By default glibc gives that memory back to the system
    and asks for fresh pages a moment later.
    """
    global _heap_kept
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None and size > _heap_kept:
        _heap_kept = size
        tune(M_TRIM_THRESHOLD, size)
        tune(M_MMAP_THRESHOLD, size)


_heap_kept = 0


def octets(size: int) -> Octets:
    """An array of bytes, not cleared."""
    if size < MAPPED:
        return np.empty(size, np.uint8)
    mapping, _ = POOL.lend(size)
    return _lent(mapping).view(np.uint8)


def words(count: int) -> Words:
    """An array of zero words."""
    if count * 8 < MAPPED:
        return np.zeros(count, np.uint64)
    mapping, fresh = POOL.lend(count * 8, mmap.MAP_POPULATE)  # every page of a hash table is touched
    lent = _lent(mapping).view(np.uint64)
    if not fresh:
        lent[:] = 0
    return lent


def _lent(mapping: mmap.mmap) -> Octets:
    """A whole mapping as an array; it goes back to the pool with the last array, slice or memoryview of it."""
    lent = np.frombuffer(mapping, np.uint8)
    weakref.finalize(lent.base, POOL.give_back, mapping).atexit = False
    return lent


class Scratch:
    """A reusable array of words for one user at a time; a very large one is not kept."""

    def __init__(self) -> None:
        self._kept = words(0)

    def zeros(self, count: int) -> Words:
        """An array of zeros, valid until the next call."""
        if count * 8 > MOST_KEPT:
            return words(count)
        if count > self._kept.size:
            self._kept = words(count + count // 4)
        self._kept[:count] = 0
        return self._kept[:count]
