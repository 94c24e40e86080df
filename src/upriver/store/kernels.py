"""Numba kernels over runs of packed records and over key tables: the only code that visits every record.

A key table is open addressing with linear probing in a flat uint64 array: ``ENTRY`` words a slot (hash, seqno with
the deleted bit, rev, where in memory), or ``SLOT`` words on disk, without the last. Hash 0 marks a free slot. Slots
are in the order of hashes, so that merging tables is a pass over both. A table on disk has a filter: a few bits for
every entry that say "not here" without a look at the slots. ``layers`` says where the tables under the overlay are,
newest first: ``LAYER`` words each (address, slots, words of a slot, address of the filter, its words or 0).
Everything here works on one vbucket and holds no state of its own.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from upriver.store.intrinsics import copy_bytes, load16, load32, load64, load_at, prefetch, store64
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

ENTRY = 4  # words of a slot in memory
SLOT = 3  # words of a slot on disk
LAYER = 5
FILTERED = 6  # entries that share a word of a filter
LOOKAHEAD = 32  # records whose keys are on their way from memory while others are taken in
DELETED = np.uint64(1 << 63)
SEQNO_BITS = np.uint64((1 << 56) - 1)
COMMIT_DELETES = np.uint64(1 << 63)  # in ``extra`` of a COMMIT
PREPARE_SALT = np.uint64(0x9E3779B97F4A7C15)  # prepares live beside the committed version of their key
NOWHERE = np.uint64(0)
NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)  # adding it takes one away
NO_CLOCK = np.uint64(1 << 63)  # from here on a CAS is no time that a clock has shown (year 2262): ours ignores it

# Registers of a vbucket: one uint64 array that kernels update in place.
HIGH, CAS, DELETED_REV, USED, ENTRIES, DEDUPED, VISIBLE = range(7)
PREPARED, STOP, FIRST, TOMBSTONES, COMPLETED, EXPIRY, GAPS = range(7, 14)
REGISTERS = 16

# Rows of the collection table: id, live items, high seqno, start seqno, visible high seqno.
C_ID, C_ITEMS, C_HIGH, C_START, C_VISIBLE = range(5)
C_WORDS = 5

# Why ``ingest`` stopped before the end of its input.
DONE, FULL, COLLISION, UNKNOWN_COLLECTION, SYSTEM_EVENT, BAD_SEQNO, BAD_RECORD, CROWDED = range(8)

_MUTATION, _DELETION, _EXPIRATION = int(RecordKind.MUTATION), int(RecordKind.DELETION), int(RecordKind.EXPIRATION)
_SYSTEM, _PREPARE, _COMMIT, _ABORT = (
    int(RecordKind.SYSTEM_EVENT),
    int(RecordKind.PREPARE),
    int(RecordKind.COMMIT),
    int(RecordKind.ABORT),
)
_KIND_MASK = 0x7F
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_MIX2 = np.uint64(0xC4CEB9FE1A85EC53)


@njit(cache=True)
def mix(word):
    word ^= word >> np.uint64(33)
    word *= _MIX
    word ^= word >> np.uint64(33)
    word *= _MIX2
    word ^= word >> np.uint64(33)
    return word


@njit(cache=True)
def hash_key(data, at, length, seed):
    """64 bits of a prefixed key, keyed by the bucket's secret; never 0."""
    state = np.uint64(seed) ^ (np.uint64(length) * PREPARE_SALT)
    end = at + length
    while at + 8 <= end:
        state = mix(state ^ load64(data, at))
        at += 8
    tail = np.uint64(0)
    shift = np.uint64(0)
    while at < end:
        tail |= np.uint64(data[at]) << shift
        shift += np.uint64(8)
        at += 1
    state = mix(state ^ tail)
    return state if state != np.uint64(0) else np.uint64(1)


@njit(cache=True)
def slot_of(table, words, key_hash):
    """Where ``key_hash`` is in the table, or the free slot where it would go; -1 in a table of no slots."""
    slots = table.size // words
    if slots == 0:
        return -1
    at = np.int64(((key_hash >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32))
    while True:
        found = table[at * words]
        if found == key_hash or found == np.uint64(0):
            return at * words
        at = at + 1 if at + 1 < slots else np.int64(0)


@njit(cache=True)
def first_slot(layers, layer, key_hash):
    """The address where the search for a key begins in this layer."""
    at = ((key_hash >> np.uint64(32)) * layers[layer + 1]) >> np.uint64(32)
    return layers[layer] + at * layers[layer + 2] * np.uint64(8)


@njit(cache=True)
def filter_bits(key_hash):
    """Three of the bits of a word; they come from the part of the hash that does not say which word."""
    one = np.uint64(1)
    low = one << (key_hash & np.uint64(63)) | one << (key_hash >> np.uint64(6) & np.uint64(63))
    return low | one << (key_hash >> np.uint64(12) & np.uint64(63))


@njit(cache=True)
def filter_word(layers, layer, key_hash):
    """The address of a key's word in the filter of this layer."""
    at = ((key_hash >> np.uint64(32)) * layers[layer + 4]) >> np.uint64(32)
    return layers[layer + 3] + at * np.uint64(8)


@njit(cache=True)
def may_have(layers, layer, key_hash):
    """False if the layer surely does not know the key."""
    if layers[layer + 4] == np.uint64(0):
        return True
    bits = filter_bits(key_hash)
    return load_at(filter_word(layers, layer, key_hash)) & bits == bits


@njit(cache=True, nogil=True)
def fill_filter(slots, words):
    """The filter of a table for the disk."""
    for at in range(0, slots.size, SLOT):
        if slots[at] != np.uint64(0):
            to = ((slots[at] >> np.uint64(32)) * np.uint64(words.size)) >> np.uint64(32)
            words[np.int64(to)] |= filter_bits(slots[at])


@njit(cache=True)
def below(layers, key_hash):
    """(seqno with the deleted bit, rev, place in memory) of a key in the newest layer that has it; zeros if none."""
    for layer in range(0, layers.size, LAYER):
        if not may_have(layers, layer, key_hash):
            continue
        width = layers[layer + 2] * np.uint64(8)
        end = layers[layer] + layers[layer + 1] * width
        at = first_slot(layers, layer, key_hash)
        found = load_at(at)
        while found != key_hash and found != np.uint64(0):
            at += width
            if at == end:
                at = layers[layer]
            found = load_at(at)
        if found == key_hash:
            place = load_at(at + np.uint64(24)) if layers[layer + 2] == np.uint64(ENTRY) else NOWHERE
            return load_at(at + np.uint64(8)), load_at(at + np.uint64(16)), place
    return np.uint64(0), np.uint64(0), NOWHERE


@njit(cache=True)
def find(key, salt, seed, overlay, layers):
    """(hash, seqno with the deleted bit, rev, place in memory) of a key; seqno 0 when it is not known."""
    key_hash = hash_key(key, 0, key.size, seed) ^ salt
    at = slot_of(overlay, ENTRY, key_hash)
    if at >= 0 and overlay[at] == key_hash:
        return key_hash, overlay[at + 1], overlay[at + 2], overlay[at + 3]
    known, rev, place = below(layers, key_hash)
    return key_hash, known, rev, place


@njit(cache=True)
def rehash(old, words, new):
    """Move every entry of ``old`` into the empty table ``new`` of the same width."""
    for at in range(0, old.size, words):
        if old[at] != np.uint64(0):
            to = slot_of(new, words, old[at])
            for word in range(words):
                new[to + word] = old[at + word]


@njit(cache=True, nogil=True)
def merge_into(table, words, new):
    """Enter what a table (or overlay) knows of keys that ``new``, a table for the disk, does not; returns how many."""
    entries = 0
    for at in range(0, table.size, words):
        if table[at] != np.uint64(0):
            to = slot_of(new, SLOT, table[at])
            if new[to] == np.uint64(0):
                for word in range(SLOT):
                    new[to + word] = table[at + word]
                entries += 1
    return entries


@njit(cache=True, nogil=True)
def drop_entries(slots, removed, kept):
    """Copy the entries but those whose seqno is in the sorted ``removed``; returns how many."""
    entries = 0
    for at in range(0, slots.size, SLOT):
        if slots[at] != np.uint64(0):
            seqno = slots[at + 1] & SEQNO_BITS
            index = np.searchsorted(removed, seqno)
            if index == removed.size or removed[index] != seqno:
                to = slot_of(kept, SLOT, slots[at])
                for word in range(SLOT):
                    kept[to + word] = slots[at + word]
                entries += 1
    return entries


@njit(cache=True)
def hashes_of(slots, seqnos, hashes):
    """Hashes of the entries whose seqno is in the sorted ``seqnos``; returns how many."""
    count = 0
    for at in range(0, slots.size, SLOT):
        seqno = slots[at + 1] & SEQNO_BITS
        index = np.searchsorted(seqnos, seqno)
        if index < seqnos.size and seqnos[index] == seqno and slots[at] != np.uint64(0):
            hashes[count] = slots[at]
            count += 1
    return count


@njit(cache=True)
def mark_known(overlay, hashes, known):
    """Set ``known`` where the overlay has a hash."""
    for index in range(hashes.size):
        slot = slot_of(overlay, ENTRY, hashes[index])
        if slot >= 0 and overlay[slot] == hashes[index]:
            known[index] = True


@njit(cache=True)
def collection_row(collections, wanted, hint):
    if hint >= 0 and collections[hint, C_ID] == wanted:
        return hint
    for row in range(collections.shape[0]):
        if collections[row, C_ID] == wanted:
            return row
    return -1


@njit(cache=True)
def whole_record(data, at, end):
    """Whether the header at ``at`` describes a record that lies inside ``data[at:end]``."""
    if end - at < HEADER_SIZE:
        return False
    size = load32(data, at + AT_SIZE)
    return size <= end - at and size == HEADER_SIZE + load16(data, at + AT_KEY_LEN) + load32(data, at + AT_VALUE_LEN)


@njit(cache=True)
def is_delete(kind, extra):
    if kind == _COMMIT:
        return (extra & COMMIT_DELETES) != np.uint64(0)
    return kind in (_DELETION, _EXPIRATION, _ABORT)


@njit(cache=True)
def record_hash(data, at, kind, seed):
    """The key hash of a record; prepares have a space of their own."""
    key_hash = hash_key(data, at + HEADER_SIZE, load16(data, at + AT_KEY_LEN), seed)
    return key_hash ^ PREPARE_SALT if kind in (_PREPARE, _ABORT) else key_hash


@njit(cache=True)
def _refusal(source, at, end, target, overlay, registers, assign, ceiling):
    """Why the record at ``at`` cannot be taken now, or DONE."""
    if not whole_record(source, at, end):
        return BAD_RECORD
    if np.int64(source[at + AT_KIND]) & _KIND_MASK == _SYSTEM:
        return SYSTEM_EVENT
    if registers[ENTRIES] * np.uint64(5) >= np.uint64(overlay.size):  # four words a slot: at 0.8 full
        return CROWDED
    if np.int64(registers[USED]) + load32(source, at + AT_SIZE) > target.size:
        return FULL
    seqno = load64(source, at + AT_SEQNO)
    if not assign and (seqno <= registers[HIGH] or seqno > ceiling):
        return BAD_SEQNO
    return DONE


@njit(cache=True)
def _known(overlay, slot, layers, key_hash):
    if overlay[slot] == key_hash:
        return overlay[slot + 1], overlay[slot + 2], overlay[slot + 3]
    return below(layers, key_hash)


@njit(cache=True)
def _look_ahead(source, at, end, overlay, layers, seed, hashes):
    """Hash the keys of the next records and ask for their slots: memory then serves many at a time, not one.

    The records may be damaged: what comes of that is not used.
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


@njit(cache=True)
def _supersede(target, segment_at, serial, place, kind, seqno, registers):
    """The seqno that the new record replaces; an older record of the open segment is marked and drops out.

    The largest number says that the two must not share a segment (6.1: prepares, commits and aborts).
    """
    old_at = np.int64(place & np.uint64(0xFFFFFFFF))
    if (place >> np.uint64(32)) != np.uint64(serial) or old_at < segment_at or seqno == np.uint64(0):
        return seqno
    if kind >= _PREPARE or (np.int64(target[old_at + AT_KIND]) & _KIND_MASK) >= _PREPARE:
        return NEVER
    target[old_at + AT_KIND] |= np.uint8(SUPERSEDED)
    registers[DEDUPED] += np.uint64(1)
    return load64(target, old_at + AT_PREV)


@njit(cache=True)
def _settle(target, at, kind, known, rev, previous, assign, registers):
    """Fill in what only the vbucket knows; returns (seqno, rev)."""
    if assign:
        store64(target, at + AT_SEQNO, registers[HIGH] + np.uint64(1))
        if load64(target, at + AT_REV) == np.uint64(0):
            store64(target, at + AT_REV, (rev if known != np.uint64(0) else registers[DELETED_REV]) + np.uint64(1))
    if load64(target, at + AT_CAS) in (np.uint64(0), NEVER):  # not a CAS: from us, or from a careless producer
        store64(target, at + AT_CAS, registers[CAS] + np.uint64(1))
    target[at + AT_KIND] = np.uint8(kind)
    store64(target, at + AT_PREV, previous)
    cas = load64(target, at + AT_CAS)
    if registers[CAS] < cas < NO_CLOCK:
        registers[CAS] = cas
    return load64(target, at + AT_SEQNO), load64(target, at + AT_REV)


@njit(cache=True)
def tally(collection, kind, gone, known, seqno, rev, expiry, completed, value_len, registers):
    """Keep the counters of the vbucket and of the record's collection.

    A new document's revision is above that of every deleted one. Real servers do not count tombstones with a value,
    those that kept system xattrs; nor do we.
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


@njit(cache=True)
def _ingest(
    source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling
):
    """Append records to the open segment, index them, and settle seqno, rev, CAS and ``prev_seqno``.

    With ``assign`` the seqno is made here, and so are rev and CAS where they are 0; otherwise all are taken as they
    come, and seqnos must rise up to ``ceiling``. Returns how far the input was taken; ``registers[STOP]`` says why.
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
        if (known & SEQNO_BITS) <= collections[row, C_START]:  # from before the collection was begun anew
            known = np.uint64(0)
        used, size = np.int64(registers[USED]), load32(source, at + AT_SIZE)
        copy_bytes(target, used, source, at, size)
        seqno, rev = _settle(target, used, kind, known, rev, previous, assign, registers)
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


@njit(cache=True)
def ingest(source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling):
    """``_ingest`` for a record or a few: keeps the interpreter lock, which is dear to get back."""
    return _ingest(
        source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling
    )


@njit(cache=True, nogil=True)
def ingest_many(
    source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling
):
    """``_ingest`` for long runs: other threads go on meanwhile."""
    return _ingest(
        source, at, end, target, segment_at, serial, overlay, layers, collections, registers, seed, assign, ceiling
    )
