"""Memory for records and key tables: large pieces come straight from the system and go back to it when let go.

The C heap would keep most of what is freed, in pieces between what is not, and the quota would mean little.
"""

from __future__ import annotations

import mmap

import numpy as np

from upriver.store.disk import Octets, Words

MAPPED = 64 * 1024
MOST_KEPT = 4 << 20


def octets(size: int) -> Octets:
    """Bytes, not cleared."""
    if size < MAPPED:
        return np.empty(size, np.uint8)
    return np.frombuffer(_mapping(size), np.uint8)


def words(count: int) -> Words:
    """Zeros."""
    if count * 8 < MAPPED:
        return np.zeros(count, np.uint64)
    return np.frombuffer(_mapping(count * 8, mmap.MAP_POPULATE), np.uint64)  # every page of a hash table is touched


def _mapping(size: int, flags: int = 0) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)


class Scratch:
    """Words for one user at a time, kept for the next one unless they are many: fresh pages are dearer than zeros."""

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
