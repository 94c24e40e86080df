# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Numba kernels that look at a stretch of the memory log before it is handed out as a snapshot."""

from __future__ import annotations

import numpy as np
from numba import njit

from upriver.store.intrinsics import load32, load64
from upriver.wire.packed import AT_COLLECTION, AT_KIND, AT_PREV, AT_SEQNO, AT_SIZE, SUPERSEDED, Kind

_PREPARE, _ABORT = int(Kind.PREPARE), int(Kind.ABORT)


@njit(cache=True)
def replaced(data, at, end, after, found):
    """Which seqnos above ``after`` later records of the stretch replace: (how many, where it stopped).

    It stops at the first prepare, commit or abort: a version of those is never left out (6.1).
    """
    count = 0
    while at < end:
        kind = np.int64(data[at + AT_KIND])
        if not kind & SUPERSEDED:
            if kind >= _PREPARE:
                break
            previous = load64(data, at + AT_PREV)
            if previous > after and load64(data, at + AT_SEQNO) > after:
                found[count] = previous
                count += 1
        at += load32(data, at + AT_SIZE)
    return count, at


@njit(cache=True)
def survey(data, at, end, after, wanted, visible_only):
    """Of the seqnos above ``after`` that are not superseded: the first, the last that passes, the last visible one.

    What passes is in ``wanted`` (empty: any) and, with ``visible_only``, visible. 0 where there is none.
    """
    first = last = visible = np.uint64(0)
    while at < end:
        seqno = load64(data, at + AT_SEQNO)
        kind = np.int64(data[at + AT_KIND])
        if seqno > after and not kind & SUPERSEDED:
            if first == np.uint64(0):
                first = seqno
            hidden = kind in (_PREPARE, _ABORT)
            if not hidden:
                visible = seqno
            passes = wanted.size == 0
            collection = load32(data, at + AT_COLLECTION)
            for index in range(wanted.size):
                passes = passes or wanted[index] == collection
            if passes and not (hidden and visible_only):
                last = seqno
        at += load32(data, at + AT_SIZE)
    return first, last, visible
