# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Where LMDB is about to look for a value, told before anybody touches it.

A node of a leaf page is: length of the value (two halves), flags, length of the key, the key, and then the value or the
number of the page where it begins. With one wrong bit the value may seem to go on behind the end of the file, and
reading there ends the process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

PAGE_HEADER = np.uint64(16)
NODE_HEAD = np.uint64(8)
ELSEWHERE = np.uint64(1)  # node flag: the value has pages of its own
NOWHERE = np.uint64(1 << 62)


def _peek(typingctx, address):
    """The word at an address, which need not be aligned."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.uint64), codegen


peek: Any = intrinsic(_peek)


@njit(cache=True)
def value_end(key, page_size):
    """Where in the file the value of this key, as a cursor shows it, ends; 0 if that is in the same page."""
    at = np.uint64(key.ctypes.data)
    head = peek(at - NODE_HEAD)
    size = head & np.uint64(0xFFFFFFFF)
    if head >> np.uint64(32) & ELSEWHERE:
        page = peek(at + np.uint64(key.size))
        return page * np.uint64(page_size) + PAGE_HEADER + size if page < NOWHERE >> np.uint64(16) else NOWHERE
    return np.uint64(0) if size < np.uint64(page_size) else NOWHERE
