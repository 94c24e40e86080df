# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that build, copy, search and mark runs of packed records."""

from __future__ import annotations

import numpy as np

from upriver.store.index.kernels import DELETED, ENTRY, NOWHERE, SEQNO_BITS, slot_of
from upriver.store.log.kernels.ingest import collection_row, is_delete, record_hash, tally
from upriver.store.registers import C_START, ENTRIES
from upriver.wire.kernels.intrinsics import copy_bytes, load32, load64, store32
from upriver.wire.kernels.kernel import kernel
from upriver.wire.packed import (
    AT_CAS,
    AT_COLLECTION,
    AT_DATATYPE,
    AT_EXTRA,
    AT_FLAGS,
    AT_KEY_LEN,
    AT_KIND,
    AT_PREV,
    AT_REV,
    AT_SEQNO,
    AT_SIZE,
    AT_TIME,
    AT_VALUE_LEN,
    HEADER_SIZE,
    SUPERSEDED,
    RecordKind,
)

_MUTATION, _DELETION, _EXPIRATION = int(RecordKind.MUTATION), int(RecordKind.DELETION), int(RecordKind.EXPIRATION)
_SYSTEM = int(RecordKind.SYSTEM_EVENT)
_PREPARE, _COMMIT, _ABORT = int(RecordKind.PREPARE), int(RecordKind.COMMIT), int(RecordKind.ABORT)
_KIND_MASK = 0x7F


@kernel()
def build(keys, key_sizes, values, value_sizes, datatypes, prefix, kind, collection, flags, time, target):
    """Write many documents as adjacent packed records without seqnos; returns the bytes used."""
    at = 0
    key_at = 0
    value_at = 0
    for index in range(key_sizes.size):
        key_len = key_sizes[index]
        value_len = value_sizes[index]
        wire_len = prefix.size + key_len
        for byte in range(HEADER_SIZE):
            target[at + byte] = 0
        store32(target, at + AT_SIZE, np.uint64(HEADER_SIZE + wire_len + value_len))
        target[at + AT_KIND] = kind
        target[at + AT_DATATYPE] = datatypes[index]
        target[at + AT_KEY_LEN] = np.uint8(wire_len & 0xFF)
        target[at + AT_KEY_LEN + 1] = np.uint8(wire_len >> 8)
        store32(target, at + AT_FLAGS, np.uint64(flags))
        store32(target, at + AT_TIME, np.uint64(time))
        store32(target, at + AT_VALUE_LEN, np.uint64(value_len))
        store32(target, at + AT_COLLECTION, np.uint64(collection))
        body = at + HEADER_SIZE
        copy_bytes(target, body, prefix, 0, prefix.size)
        copy_bytes(target, body + prefix.size, keys, key_at, key_len)
        copy_bytes(target, body + wire_len, values, value_at, value_len)
        at = body + wire_len + value_len
        key_at += key_len
        value_at += value_len
    return at


@kernel()
def gather(source, at, end, target, used, previous, counts):
    """Copy the records that are not superseded behind ``target[:used]`` while they fit.

    ``previous`` collects the seqnos they replace. ``counts`` is (records, replaced, first seqno, last seqno) and
    accumulates, so that one block can be filled from several segments. Returns (end of the input taken, target used).
    """
    while at < end:
        size = load32(source, at + AT_SIZE)
        if source[at + AT_KIND] & SUPERSEDED:
            at += size
            continue
        if used + size > target.size or counts[1] == previous.size:
            break
        copy_bytes(target, used, source, at, size)
        replaced = load64(source, at + AT_PREV)
        if replaced != np.uint64(0):
            previous[counts[1]] = replaced
            counts[1] += 1
        seqno = np.int64(load64(source, at + AT_SEQNO))
        if counts[0] == 0:
            counts[2] = seqno
        counts[3] = seqno
        counts[0] += 1
        used += size
        at += size
    return at, used


@kernel(nogil=False)
def locate(data, at, end, seqno):
    """Offset of the record with this seqno, or -1."""
    while at < end:
        found = load64(data, at + AT_SEQNO)
        if found == seqno:
            return at
        if found > seqno:
            return -1
        at += load32(data, at + AT_SIZE)
    return -1


@kernel()
def mark_dead(data, at, end, dead, position, erased, collections):
    """Set SUPERSEDED on the records whose seqno is in the sorted ``dead`` (from ``position`` on).

    With ``erased``, also on records of collections that were dropped or flushed since. Returns the new position.
    """
    row = np.int64(-1)
    while at < end:
        seqno = load64(data, at + AT_SEQNO)
        while position < dead.size and dead[position] < seqno:
            position += 1
        if position < dead.size and dead[position] == seqno:
            data[at + AT_KIND] |= np.uint8(SUPERSEDED)
        elif erased and (data[at + AT_KIND] & _KIND_MASK) != _SYSTEM:
            row = collection_row(collections, np.uint64(load32(data, at + AT_COLLECTION)), row)
            if row < 0 or seqno <= collections[row, C_START]:
                data[at + AT_KIND] |= np.uint8(SUPERSEDED)
        at += load32(data, at + AT_SIZE)
    return position


@kernel()
def index_run(data, at, end, after, overlay, seed):
    """Enter the records above ``after`` into an overlay that has room for them; returns how many slots were new."""
    new = 0
    while at < end:
        kind = np.int64(data[at + AT_KIND]) & _KIND_MASK
        seqno = load64(data, at + AT_SEQNO)
        if kind != _SYSTEM and seqno > after:
            key_hash = record_hash(data, at, kind, seed)
            slot = slot_of(overlay, ENTRY, key_hash)
            if overlay[slot] == np.uint64(0):
                new += 1
            gone = is_delete(kind, load64(data, at + AT_EXTRA))
            overlay[slot] = key_hash
            overlay[slot + 1] = seqno | (DELETED if gone else np.uint64(0))
            overlay[slot + 2] = load64(data, at + AT_REV)
            overlay[slot + 3] = NOWHERE
        at += load32(data, at + AT_SIZE)
    return new


@kernel()
def expired(data, at, end, now, found):
    """Collect the offsets of expired documents; returns (how many, the earliest expiry still ahead)."""
    count = 0
    ahead = np.uint64(0xFFFFFFFFFFFFFFFF)
    while at < end:
        kind = np.int64(data[at + AT_KIND])
        time = np.uint64(load32(data, at + AT_TIME))
        live = kind == _MUTATION or (kind == _COMMIT and not is_delete(kind, load64(data, at + AT_EXTRA)))
        if live and time != np.uint64(0):
            if time <= now and count < found.size:
                found[count] = at
                count += 1
            elif time < ahead:
                ahead = time
        at += load32(data, at + AT_SIZE)
    return count, ahead


@kernel(nogil=False)
def specials(data, at, end, found):
    """Collect the offsets of prepares, commits and aborts; returns how many."""
    count = 0
    while at < end:
        if np.int64(data[at + AT_KIND]) & _KIND_MASK >= _PREPARE:
            found[count] = at
            count += 1
        at += load32(data, at + AT_SIZE)
    return count


@kernel(nogil=False)
def cut(data, at, end, upto):
    """Mark the records above ``upto`` superseded."""
    while at < end:
        if load64(data, at + AT_SEQNO) > upto:
            data[at + AT_KIND] |= np.uint8(SUPERSEDED)
        at += load32(data, at + AT_SIZE)


@kernel(nogil=False)
def mark_purgeable(data, at, end, cutoff, upto, completed, found, tombstones):
    """Mark old tombstones, and old prepares and aborts that are completed, superseded; their seqnos go to ``found``.

    The seqnos of tombstones also go to ``tombstones``. Returns how many went to each. ``cutoff`` is in unix seconds; it
    is compared with the deletion time or, for prepares and aborts, with the time in their CAS.
    """
    count = of_documents = 0
    while at < end:
        kind = np.int64(data[at + AT_KIND])
        seqno = load64(data, at + AT_SEQNO)
        time = np.uint64(load32(data, at + AT_TIME))
        old = kind in (_DELETION, _EXPIRATION) and time <= cutoff
        if kind == _COMMIT:
            old = is_delete(kind, load64(data, at + AT_EXTRA)) and time <= cutoff
        if kind in (_PREPARE, _ABORT):
            old = seqno <= completed and load64(data, at + AT_CAS) // np.uint64(1_000_000_000) <= cutoff
        if old and seqno <= upto:
            data[at + AT_KIND] |= np.uint8(SUPERSEDED)
            found[count] = seqno
            count += 1
            if kind not in (_PREPARE, _ABORT):
                tombstones[of_documents] = seqno
                of_documents += 1
        at += load32(data, at + AT_SIZE)
    return count, of_documents


@kernel(nogil=False)
def live_bytes(data, at, end):
    """Bytes of the records that are not superseded."""
    total = 0
    while at < end:
        size = load32(data, at + AT_SIZE)
        if not data[at + AT_KIND] & SUPERSEDED:
            total += size
        at += size
    return total


@kernel(nogil=False)
def superseded(data, at, end, found):
    """Collect the seqnos of superseded records; returns how many."""
    count = 0
    while at < end:
        if data[at + AT_KIND] & SUPERSEDED:
            found[count] = load64(data, at + AT_SEQNO)
            count += 1
        at += load32(data, at + AT_SIZE)
    return count


@kernel()
def recount(data, at, end, overlay, collections, registers, seed):
    """Count and index the records of a log from its start, as ``ingest`` did when they were written.

    Stops at a system event and returns its offset. Records of collections that were dropped later are not counted. A
    superseded record changes neither index nor counts: the record that replaced it may have been purged.
    """
    row = np.int64(-1)
    while at < end:
        kind = np.int64(data[at + AT_KIND]) & _KIND_MASK
        dead = data[at + AT_KIND] & SUPERSEDED != 0
        if kind == _SYSTEM:
            return at
        row = collection_row(collections, np.uint64(load32(data, at + AT_COLLECTION)), row)
        key_hash = record_hash(data, at, kind, seed)
        slot = slot_of(overlay, ENTRY, key_hash)
        known = overlay[slot + 1] if overlay[slot] == key_hash else np.uint64(0)
        seqno, rev, extra = load64(data, at + AT_SEQNO), load64(data, at + AT_REV), load64(data, at + AT_EXTRA)
        gone = is_delete(kind, extra)
        if row >= 0:
            if (known & SEQNO_BITS) <= collections[row, C_START]:
                known = np.uint64(0)
            if dead:
                known = seqno | (DELETED if gone else np.uint64(0))  # as if it were known already: nothing to count
            expiry = np.uint64(load32(data, at + AT_TIME))
            value_len = load32(data, at + AT_VALUE_LEN)
            tally(collections[row], kind, gone, known, seqno, rev, expiry, extra & SEQNO_BITS, value_len, registers)
        if not dead:
            registers[ENTRIES] += np.uint64(overlay[slot] != key_hash)
            overlay[slot], overlay[slot + 1], overlay[slot + 2] = key_hash, seqno | (DELETED if gone else NOWHERE), rev
            overlay[slot + 3] = NOWHERE
        at += load32(data, at + AT_SIZE)
    return at


@kernel(nogil=False)
def unmark(data, at, end):
    """Remove every SUPERSEDED mark: records on disk have none."""
    while at < end:
        data[at + AT_KIND] &= np.uint8(_KIND_MASK)
        at += load32(data, at + AT_SIZE)
