# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that inspect a stretch of the memory log before it is sent as a snapshot."""

from __future__ import annotations

import numpy as np

from upriver.store.index.kernels import hash_key
from upriver.wire.kernels.intrinsics import load16, load32, load64
from upriver.wire.kernels.kernel import kernel
from upriver.wire.packed import (
    AT_COLLECTION,
    AT_KEY_LEN,
    AT_KIND,
    AT_SEQNO,
    AT_SIZE,
    HEADER_SIZE,
    SUPERSEDED,
    RecordKind,
)

_SYSTEM, _PREPARE, _ABORT = int(RecordKind.SYSTEM_EVENT), int(RecordKind.PREPARE), int(RecordKind.ABORT)
_SEED = 0x5EED


@kernel(nogil=False)
def _slot(data, at, table):
    """The slot of the record's key in a table of offsets plus one, or the free slot where it would go."""
    length = load16(data, at + AT_KEY_LEN)
    slots = np.uint64(table.size)
    slot = np.int64(hash_key(data, at + HEADER_SIZE, length, _SEED) % slots)
    while table[slot]:
        other = table[slot] - 1
        if load16(data, other + AT_KEY_LEN) == length:
            index = 0
            while index < length and data[at + HEADER_SIZE + index] == data[other + HEADER_SIZE + index]:
                index += 1
            if index == length:
                break
        slot = slot + 1 if slot + 1 < table.size else np.int64(0)
    return slot


@kernel(nogil=False)
def replaced(data, at, end, after, table, found):
    """Collect the seqnos above ``after`` that later records of the stretch replace: (how many, where it stopped).

    It compares keys: the ``prev_seqno`` of a record may name a version that was purged since. It stops at the first
    prepare, commit or abort, which are never left out (docs/protocol/snapshots.md#model). ``table`` is empty and has
    more slots than there are records.
    """
    count = 0
    while at < end:
        kind = np.int64(data[at + AT_KIND])
        if not kind & SUPERSEDED and kind != _SYSTEM:
            if kind >= _PREPARE:
                break
            if load64(data, at + AT_SEQNO) > after:
                slot = _slot(data, at, table)
                if table[slot]:
                    found[count] = load64(data, table[slot] - 1 + AT_SEQNO)
                    count += 1
                table[slot] = at + 1
        at += load32(data, at + AT_SIZE)
    return count, at


@kernel(nogil=False)
def survey(data, at, end, after, wanted, visible_only):
    """Of the seqnos above ``after`` that are not superseded: the first, the last that matches, the last visible one.

    A match is in a collection of ``wanted`` (empty: any) and, with ``visible_only``, visible. 0 where there is none.
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
