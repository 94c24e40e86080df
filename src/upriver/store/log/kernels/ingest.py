# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel that appends records to the memory log: it assigns seqnos, indexes and counts.

It works on one vbucket and keeps no state.
"""

from __future__ import annotations

import numpy as np

from upriver.store.index.kernels import (
    DELETED,
    ENTRY,
    LAYER,
    PREPARE_SALT,
    SEQNO_BITS,
    below,
    filter_word,
    first_slot,
    hash_key,
    may_have,
    slot_of,
)
from upriver.store.registers import (
    C_HIGH,
    C_ID,
    C_ITEMS,
    C_START,
    C_VISIBLE,
    CAS,
    COMPLETED,
    DEDUPED,
    DELETED_REV,
    ENTRIES,
    EXPIRY,
    FIRST,
    GAPS,
    HIGH,
    PREPARED,
    STOP,
    TOMBSTONES,
    USED,
    VISIBLE,
)
from upriver.wire.kernels.intrinsics import copy_bytes, load16, load32, load64, prefetch, store64
from upriver.wire.kernels.kernel import kernel
from upriver.wire.packed import (
    AT_CAS,
    AT_COLLECTION,
    AT_EXTRA,
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

LOOKAHEAD = 32  # records whose keys are prefetched while earlier ones are appended
COMMIT_DELETES = np.uint64(1 << 63)  # in ``extra`` of a COMMIT
NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)  # adding it subtracts one
NO_CLOCK = np.uint64(1 << 63)  # from here on (year 2262) a CAS is not a real time, and our clock ignores it

# Why ``ingest`` stopped before the end of its input.
DONE, FULL, COLLISION, UNKNOWN_COLLECTION, SYSTEM_EVENT, BAD_SEQNO, BAD_RECORD, CROWDED = range(8)

_DELETION, _EXPIRATION, _SYSTEM = int(RecordKind.DELETION), int(RecordKind.EXPIRATION), int(RecordKind.SYSTEM_EVENT)
_PREPARE, _COMMIT, _ABORT = int(RecordKind.PREPARE), int(RecordKind.COMMIT), int(RecordKind.ABORT)
_KIND_MASK = 0x7F


@kernel(nogil=False)
def collection_row(collections, wanted, hint):
    if hint >= 0 and collections[hint, C_ID] == wanted:
        return hint
    for row in range(collections.shape[0]):
        if collections[row, C_ID] == wanted:
            return row
    return -1


@kernel(nogil=False)
def whole_record(data, at, end):
    """Whether the header at ``at`` describes a record that lies inside ``data[at:end]``."""
    if end - at < HEADER_SIZE:
        return False
    size = load32(data, at + AT_SIZE)
    return size <= end - at and size == HEADER_SIZE + load16(data, at + AT_KEY_LEN) + load32(data, at + AT_VALUE_LEN)


@kernel(nogil=False)
def is_delete(kind, extra):
    if kind == _COMMIT:
        return (extra & COMMIT_DELETES) != np.uint64(0)
    return kind in (_DELETION, _EXPIRATION, _ABORT)


@kernel(nogil=False)
def record_hash(data, at, kind, seed):
    """The key hash of a record; prepares and aborts have a separate one."""
    key_hash = hash_key(data, at + HEADER_SIZE, load16(data, at + AT_KEY_LEN), seed)
    return key_hash ^ PREPARE_SALT if kind in (_PREPARE, _ABORT) else key_hash


@kernel(nogil=False)
def _refusal(source, at, end, target, overlay, registers, assign, ceiling):
    """Why the record at ``at`` cannot be appended now, or DONE."""
    if not whole_record(source, at, end):
        return BAD_RECORD
    if np.int64(source[at + AT_KIND]) & _KIND_MASK == _SYSTEM:
        return SYSTEM_EVENT
    if registers[ENTRIES] * np.uint64(5) >= np.uint64(overlay.size):  # four words per slot: 80 % full
        return CROWDED
    if np.int64(registers[USED]) + load32(source, at + AT_SIZE) > target.size:
        return FULL
    seqno = load64(source, at + AT_SEQNO)
    if not assign and (seqno <= registers[HIGH] or seqno > ceiling):
        return BAD_SEQNO
    return DONE


@kernel(nogil=False)
def _known(overlay, slot, layers, key_hash):
    if overlay[slot] == key_hash:
        return overlay[slot + 1], overlay[slot + 2], overlay[slot + 3]
    return below(layers, key_hash)


@kernel(nogil=False)
def _look_ahead(source, at, end, overlay, layers, seed, hashes):
    """Hash the keys of the next records and prefetch their slots, so that memory serves many at a time.

    The records may be damaged; their hashes are not used then.
    """
    count = 0
    first = np.uint64(overlay.ctypes.data)
    slots = np.uint64(overlay.size // ENTRY)
    while count < hashes.size and whole_record(source, at, end):
        key_hash = record_hash(source, at, np.int64(source[at + AT_KIND]) & _KIND_MASK, seed)
        hashes[count] = key_hash
        prefetch(first + (((key_hash >> np.uint64(32)) * slots) >> np.uint64(32)) * np.uint64(8 * ENTRY))
        for layer in range(0, layers.size, LAYER):
            filtered = layers[layer + 4] != np.uint64(0)
            prefetch(filter_word(layers, layer, key_hash) if filtered else first_slot(layers, layer, key_hash))
        at += load32(source, at + AT_SIZE)
        count += 1
    for index in range(count):
        for layer in range(0, layers.size, LAYER):
            if layers[layer + 4] != np.uint64(0) and may_have(layers, layer, hashes[index]):
                prefetch(first_slot(layers, layer, hashes[index]))


@kernel(nogil=False)
def _supersede(target, segment_at, serial, place, kind, seqno, registers):
    """The seqno that the new record replaces; an older record in the open segment is marked superseded.

    NEVER means that the two must not share a segment (docs/protocol/snapshots.md#model: prepares, commits
    and aborts).
    """
    old_at = np.int64(place & np.uint64(0xFFFFFFFF))
    if (place >> np.uint64(32)) != np.uint64(serial) or old_at < segment_at or seqno == np.uint64(0):
        return seqno
    if kind >= _PREPARE or (np.int64(target[old_at + AT_KIND]) & _KIND_MASK) >= _PREPARE:
        return NEVER
    target[old_at + AT_KIND] |= np.uint8(SUPERSEDED)
    registers[DEDUPED] += np.uint64(1)
    return load64(target, old_at + AT_PREV)


@kernel(nogil=False)
def _complete(target, at, kind, known, rev, previous, assign, registers):
    """Fill in seqno, rev, CAS and ``prev_seqno``; returns (seqno, rev)."""
    if assign:
        store64(target, at + AT_SEQNO, registers[HIGH] + np.uint64(1))
        if load64(target, at + AT_REV) == np.uint64(0):
            store64(target, at + AT_REV, (rev if known != np.uint64(0) else registers[DELETED_REV]) + np.uint64(1))
    if load64(target, at + AT_CAS) in (np.uint64(0), NEVER):  # not a CAS: ours to assign, or a producer's mistake
        store64(target, at + AT_CAS, registers[CAS] + np.uint64(1))
    target[at + AT_KIND] = np.uint8(kind)
    store64(target, at + AT_PREV, previous)
    cas = load64(target, at + AT_CAS)
    if registers[CAS] < cas < NO_CLOCK:
        registers[CAS] = cas
    return load64(target, at + AT_SEQNO), load64(target, at + AT_REV)


@kernel(nogil=False)
def tally(collection, kind, gone, known, seqno, rev, expiry, completed, value_len, registers):
    """Update the counters of the vbucket and of the record's collection.

    A new document's revision is above that of every deleted one. Like real servers, this ignores tombstones with a
    value, which kept system xattrs.
    """
    collection[C_HIGH] = seqno
    if kind == _PREPARE:
        registers[PREPARED] = seqno
    if kind >= _COMMIT and completed > registers[COMPLETED]:
        registers[COMPLETED] = completed
    if kind in (_PREPARE, _ABORT):
        return
    collection[C_VISIBLE] = registers[VISIBLE] = seqno
    was_dead = known & DELETED != np.uint64(0)
    was_live = known != np.uint64(0) and not was_dead
    if was_live != (not gone):
        collection[C_ITEMS] += np.uint64(1) if not gone else NEVER
    if was_dead != gone:
        registers[TOMBSTONES] += np.uint64(1) if gone else NEVER
    if gone and value_len == 0 and rev > registers[DELETED_REV]:
        registers[DELETED_REV] = rev
    if not gone and expiry != np.uint64(0) and expiry < registers[EXPIRY]:
        registers[EXPIRY] = expiry


@kernel(nogil=False)
def _ingest(
    source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling
):
    """Append records to the open segment, index them, and settle seqno, rev, CAS and ``prev_seqno``.

    With ``assign`` the seqno is assigned here, and so are rev and CAS where they are 0; otherwise all are kept, and
    seqnos must rise up to ``ceiling``. Returns where it stopped; ``registers[STOP]`` says why.
    """
    row = np.int64(-1)
    registers[FIRST] = np.uint64(0)
    hashes = np.empty(LOOKAHEAD, np.uint64)
    taken = 0
    while at < end:
        if taken % LOOKAHEAD == 0:
            _look_ahead(source, at, end, overlay, layers, seed, hashes)
        reason = _refusal(source, at, end, target, overlay, registers, assign, ceiling)
        if reason == DONE:
            row = collection_row(collections, np.uint64(load32(source, at + AT_COLLECTION)), row)
            reason = DONE if row >= 0 else UNKNOWN_COLLECTION
        if reason != DONE:
            registers[STOP] = np.uint64(reason)
            return at
        kind = np.int64(source[at + AT_KIND]) & _KIND_MASK
        key_hash = hashes[taken % LOOKAHEAD]
        taken += 1
        slot = slot_of(overlay, ENTRY, key_hash)
        known, rev, place = _known(overlay, slot, layers, key_hash)
        previous = _supersede(target, segment_at, serial, place, kind, known & SEQNO_BITS, registers)
        if previous == NEVER:
            registers[STOP] = np.uint64(COLLISION)
            return at
        if (known & SEQNO_BITS) <= collections[row, C_START]:  # older than the collection's last BEGIN_COLLECTION
            known = np.uint64(0)
        used, size = np.int64(registers[USED]), load32(source, at + AT_SIZE)
        copy_bytes(target, used, source, at, size)
        seqno, rev = _complete(target, used, kind, known, rev, previous, assign, registers)
        extra = load64(source, at + AT_EXTRA)
        gone = is_delete(kind, extra)
        expiry = np.uint64(load32(source, at + AT_TIME))
        value_len = load32(source, at + AT_VALUE_LEN)
        tally(collections[row], kind, gone, known, seqno, rev, expiry, extra & SEQNO_BITS, value_len, registers)
        registers[ENTRIES] += np.uint64(overlay[slot] != key_hash)
        overlay[slot] = key_hash
        overlay[slot + 1] = seqno | (DELETED if gone else np.uint64(0))
        overlay[slot + 2] = rev
        overlay[slot + 3] = (np.uint64(serial) << np.uint64(32)) | np.uint64(used)
        registers[GAPS] += np.uint64(seqno != registers[HIGH] + np.uint64(1))
        registers[HIGH] = seqno
        if registers[FIRST] == np.uint64(0):
            registers[FIRST] = seqno
        registers[USED] = np.uint64(used + size)
        at += size
    registers[STOP] = np.uint64(DONE)
    return at


@kernel(nogil=False)
def ingest(source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling):
    """``_ingest`` for a few records: keeps the interpreter lock, which is expensive to get back."""
    return _ingest(
        source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling
    )


@kernel()
def ingest_many(
    source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling
):
    """``_ingest`` for long runs: releases the interpreter lock."""
    return _ingest(
        source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling
    )
