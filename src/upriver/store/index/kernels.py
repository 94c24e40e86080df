# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels over key tables: find a key, grow, merge and filter tables.

A key table is a hash table with linear probing in a flat uint64 array. A slot has ``ENTRY`` words (hash, seqno with the
deleted bit, rev, place in memory), or on disk ``SLOT`` words, without the last. Hash 0 marks a free slot. Slots are in
the order of hashes, so that merging tables is one pass over both. A table on disk has a filter: a few bits per entry
that rule out most unknown keys without reading the slots. ``layers`` lists the tables below the overlay, newest first,
``LAYER`` words each (address, slots, words of a slot, address of the filter, its words or 0).
"""

from __future__ import annotations

import numpy as np

from upriver.store.disk.kernels.checksum import mix
from upriver.wire.kernels.intrinsics import load64, load_word
from upriver.wire.kernels.kernel import kernel

ENTRY = 4  # words of a slot in memory
SLOT = 3  # words of a slot on disk
LAYER = 5
FILTERED = 6  # entries that share a word of a filter
DELETED = np.uint64(1 << 63)
SEQNO_BITS = np.uint64((1 << 56) - 1)
PREPARE_SALT = np.uint64(0x9E3779B97F4A7C15)  # keeps prepares apart from the committed version of their key
NOWHERE = np.uint64(0)


@kernel(nogil=False)
def hash_key(data, at, length, seed):
    """A 64-bit hash of a prefixed key, keyed by the bucket's secret seed; never 0."""
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


@kernel(nogil=False)
def slot_of(table, words, key_hash):
    """The slot of ``key_hash``, or the free slot where it would go; -1 if the table has no slots."""
    slots = table.size // words
    if slots == 0:
        return -1
    at = np.int64(((key_hash >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32))
    while True:
        found = table[at * words]
        if found == key_hash or found == np.uint64(0):
            return at * words
        at = at + 1 if at + 1 < slots else np.int64(0)


@kernel(nogil=False)
def first_slot(layers, layer, key_hash):
    """The address where the search for a key begins in this layer."""
    at = ((key_hash >> np.uint64(32)) * layers[layer + 1]) >> np.uint64(32)
    return layers[layer] + at * layers[layer + 2] * np.uint64(8)


@kernel(nogil=False)
def filter_bits(key_hash):
    """A word with up to three bits set, from the part of the hash that does not select the word."""
    one = np.uint64(1)
    low = one << (key_hash & np.uint64(63)) | one << (key_hash >> np.uint64(6) & np.uint64(63))
    return low | one << (key_hash >> np.uint64(12) & np.uint64(63))


@kernel(nogil=False)
def filter_word(layers, layer, key_hash):
    """The address of a key's word in the filter of this layer."""
    at = ((key_hash >> np.uint64(32)) * layers[layer + 4]) >> np.uint64(32)
    return layers[layer + 3] + at * np.uint64(8)


@kernel(nogil=False)
def may_have(layers, layer, key_hash):
    """False if the layer certainly lacks the key."""
    if layers[layer + 4] == np.uint64(0):
        return True
    bits = filter_bits(key_hash)
    return load_word(filter_word(layers, layer, key_hash)) & bits == bits


@kernel()
def fill_filter(slots, words):
    """Fill the filter ``words`` of a table for the disk."""
    for at in range(0, slots.size, SLOT):
        if slots[at] != np.uint64(0):
            to = ((slots[at] >> np.uint64(32)) * np.uint64(words.size)) >> np.uint64(32)
            words[np.int64(to)] |= filter_bits(slots[at])


@kernel(nogil=False)
def below(layers, key_hash):
    """(seqno with the deleted bit, rev, place in memory) of a key in the newest layer that has it; zeros if none."""
    for layer in range(0, layers.size, LAYER):
        if not may_have(layers, layer, key_hash):
            continue
        width = layers[layer + 2] * np.uint64(8)
        end = layers[layer] + layers[layer + 1] * width
        at = first_slot(layers, layer, key_hash)
        found = load_word(at)
        while found != key_hash and found != np.uint64(0):
            at += width
            if at == end:
                at = layers[layer]
            found = load_word(at)
        if found == key_hash:
            place = load_word(at + np.uint64(24)) if layers[layer + 2] == np.uint64(ENTRY) else NOWHERE
            return load_word(at + np.uint64(8)), load_word(at + np.uint64(16)), place
    return np.uint64(0), np.uint64(0), NOWHERE


@kernel(nogil=False)
def find(key, salt, seed, overlay, layers):
    """(hash, seqno with the deleted bit, rev, place in memory) of a key; seqno 0 if it is unknown."""
    key_hash = hash_key(key, 0, key.size, seed) ^ salt
    at = slot_of(overlay, ENTRY, key_hash)
    if at >= 0 and overlay[at] == key_hash:
        return key_hash, overlay[at + 1], overlay[at + 2], overlay[at + 3]
    known, rev, place = below(layers, key_hash)
    return key_hash, known, rev, place


@kernel(nogil=False)
def rehash(old, words, new):
    """Move every entry of ``old`` into the empty table ``new`` of the same width."""
    for at in range(0, old.size, words):
        if old[at] != np.uint64(0):
            to = slot_of(new, words, old[at])
            for word in range(words):
                new[to + word] = old[at + word]


@kernel()
def merge_into(table, words, new):
    """Copy the entries that ``new``, a table for the disk, lacks from a table or overlay; returns how many."""
    entries = 0
    for at in range(0, table.size, words):
        if table[at] != np.uint64(0):
            to = slot_of(new, SLOT, table[at])
            if new[to] == np.uint64(0):
                for word in range(SLOT):
                    new[to + word] = table[at + word]
                entries += 1
    return entries


@kernel()
def drop_entries(slots, removed, kept):
    """Copy the entries to ``kept``, except those whose seqno is in the sorted ``removed``; returns how many."""
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


@kernel(nogil=False)
def hashes_of(slots, seqnos, hashes):
    """Collect the hashes of entries whose seqno is in the sorted ``seqnos``; returns how many."""
    count = 0
    for at in range(0, slots.size, SLOT):
        seqno = slots[at + 1] & SEQNO_BITS
        index = np.searchsorted(seqnos, seqno)
        if index < seqnos.size and seqnos[index] == seqno and slots[at] != np.uint64(0):
            hashes[count] = slots[at]
            count += 1
    return count


@kernel(nogil=False)
def mark_known(overlay, hashes, known):
    """Set ``known`` for every hash that the overlay has."""
    for index in range(hashes.size):
        slot = slot_of(overlay, ENTRY, hashes[index])
        if slot >= 0 and overlay[slot] == hashes[index]:
            known[index] = True
