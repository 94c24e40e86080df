# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined, call-overload"
"""Where LMDB keeps the value of a cursor's key, found without touching the value.

A node of a leaf page is: length of the value (two halves), flags, length of the key, the key, and then the value or the
number of the page where it begins. With one wrong bit the value may seem to extend beyond the end of the file, and
reading there kills the process. A page begins with its own number, which tells where the file begins in memory.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from upriver.store.disk.kernels.checksum import copy_block
from upriver.wire.kernels.intrinsics import load_word, pointer
from upriver.wire.kernels.kernel import kernel

PAGE_HEADER = np.uint64(16)
NODE_HEAD = np.uint64(8)
ELSEWHERE = np.uint64(1)  # node flag: the value is on its own pages
NOWHERE = np.uint64(1 << 62)
BEYOND, MISPLACED, OTHER, NO_ROOM = range(5, 9)  # in addition to the states of a block in ``checksum``


@kernel(nogil=False)
def value_end(key, page_size):
    """The offset in the file where the value of a cursor's key ends; 0 if it ends in the same page."""
    at = np.uint64(key.ctypes.data)
    head = load_word(at - NODE_HEAD)
    size = head & np.uint64(0xFFFFFFFF)
    if head >> np.uint64(32) & ELSEWHERE:
        page = load_word(at + np.uint64(key.size))
        return page * np.uint64(page_size) + PAGE_HEADER + size if page < NOWHERE >> np.uint64(16) else NOWHERE
    return np.uint64(0) if size < np.uint64(page_size) else NOWHERE


@kernel(nogil=False)
def file_begin(key, page_size):
    """The address where the file begins in memory, computed from the number in the page of this key."""
    page = np.uint64(key.ctypes.data) & ~(np.uint64(page_size) - np.uint64(1))
    return page - load_word(page) * np.uint64(page_size)


@kernel()
def copy_value(key, begin, page_size, length, vbucket, after, first, strict, target, to):
    """``copy_block`` for the value of a cursor's key, without a detour through Python.

    Returns (state, where the target ends, last seqno of the block, bytes of the block). ``begin`` is the address and
    ``length`` the size of the file.
    """
    if key.size != 10:
        return MISPLACED, to, np.uint64(0), 0
    last = np.uint64(0)
    for at in range(2, 10):
        last = last << np.uint64(8) | np.uint64(key[at])
    if np.int64(key[0]) << 8 | np.int64(key[1]) != vbucket:
        return OTHER, to, last, 0
    if file_begin(key, page_size) != begin:
        return MISPLACED, to, last, 0
    end = value_end(key, page_size)
    if end > np.uint64(length):
        return BEYOND, to, last, 0
    key_end = np.uint64(key.ctypes.data) + np.uint64(key.size)
    size = np.int64(load_word(np.uint64(key.ctypes.data) - NODE_HEAD) & np.uint64(0xFFFFFFFF))
    value = begin + end - np.uint64(size) if end else key_end
    if to + size > target.size:
        return NO_ROOM, to, last, size
    state, used = copy_block(carray(pointer(value), size), vbucket, last, after, first, strict, target, to)
    return state, used, last, size
