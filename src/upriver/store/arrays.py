"""Memory for records and key tables: large pieces come straight from the system and go back to it when let go.

The C heap would keep most of what is freed, in pieces between what is not, and the quota would mean little.
"""

from __future__ import annotations

import mmap

import numpy as np

from upriver.store.disk import Octets, Words

MAPPED = 64 * 1024


def octets(size: int) -> Octets:
    """Bytes, not cleared."""
    if size < MAPPED:
        return np.empty(size, np.uint8)
    return np.frombuffer(_mapping(size), np.uint8)


def words(count: int) -> Words:
    """Zeros."""
    if count * 8 < MAPPED:
        return np.zeros(count, np.uint64)
    return np.frombuffer(_mapping(count * 8), np.uint64)


def _mapping(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
