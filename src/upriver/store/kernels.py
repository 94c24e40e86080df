"""Numba kernels over runs of packed records and over key tables: the only code that visits every record.

A key table is open addressing with linear probing in a flat uint64 array: ``ENTRY`` words a slot (hash, seqno with
the deleted bit, rev, where in memory), or ``SLOT`` words on disk, without the last. Hash 0 marks a free slot.
Everything here works on one vbucket and holds no state of its own.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

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
    Kind,
)

ENTRY = 4  # words of a slot in memory
SLOT = 3  # words of a slot on disk
DELETED = np.uint64(1 << 63)
SEQNO_BITS = np.uint64((1 << 56) - 1)
COMMIT_DELETES = np.uint64(1 << 63)  # in ``extra`` of a COMMIT
PREPARE_SALT = np.uint64(0x9E3779B97F4A7C15)  # prepares live beside the committed version of their key
NOWHERE = np.uint64(0)

# Registers of a vbucket: one uint64 array that kernels update in place.
HIGH, CAS, DELETED_REV, USED, ENTRIES, DEDUPED, VISIBLE, PREPARED, STOP, FIRST, TOMBSTONES, COMPLETED, EXPIRY = range(13)
REGISTERS = 16

# Rows of the collection table: id, live items, high seqno, start seqno, visible high seqno.
C_ID, C_ITEMS, C_HIGH, C_START, C_VISIBLE = range(5)
C_WORDS = 5

# Why ``ingest`` stopped before the end of its input.
DONE, FULL, COLLISION, UNKNOWN_COLLECTION, SYSTEM_EVENT, BAD_SEQNO, BAD_RECORD, CROWDED = range(8)

_MUTATION, _DELETION, _EXPIRATION = int(Kind.MUTATION), int(Kind.DELETION), int(Kind.EXPIRATION)
_SYSTEM, _PREPARE, _COMMIT, _ABORT = int(Kind.SYSTEM_EVENT), int(Kind.PREPARE), int(Kind.COMMIT), int(Kind.ABORT)
_KIND_MASK = 0x7F
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_MIX2 = np.uint64(0xC4CEB9FE1A85EC53)


def _loader(bits, result):
    def typer(typingctx, data, at):
        def codegen(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            pointer = builder.gep(array.data, [args[1]])
            wide = ir.IntType(bits)
            word = builder.load(builder.bitcast(pointer, wide.as_pointer()), align=1)
            return word if bits == 64 else builder.zext(word, ir.IntType(64))

        return result(data, types.intp), codegen

    return intrinsic(typer)


def _storer(bits):
    def typer(typingctx, data, at, value):
        def codegen(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            pointer = builder.gep(array.data, [args[1]])
            wide = ir.IntType(bits)
            word = args[2] if bits == 64 else builder.trunc(args[2], wide)
            builder.store(word, builder.bitcast(pointer, wide.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.none(data, types.intp, types.uint64), codegen

    return intrinsic(typer)


load64 = _loader(64, types.uint64)
load32 = _loader(32, types.int64)
load16 = _loader(16, types.int64)
store64 = _storer(64)
store32 = _storer(32)


@intrinsic
def copy_bytes(typingctx, target, target_at, source, source_at, count):
    """memcpy between two byte arrays."""

    def codegen(context, builder, signature, args):
        to = context.make_array(signature.args[0])(context, builder, args[0])
        of = context.make_array(signature.args[2])(context, builder, args[2])
        pointer_type = ir.IntType(8).as_pointer()
        to_at = builder.bitcast(builder.gep(to.data, [args[1]]), pointer_type)
        of_at = builder.bitcast(builder.gep(of.data, [args[3]]), pointer_type)
        kind = ir.FunctionType(
            ir.VoidType(), [pointer_type, pointer_type, ir.IntType(64), ir.IntType(1)]
        )
        copy = builder.module.declare_intrinsic(
            "llvm.memcpy", [pointer_type, pointer_type, ir.IntType(64)], kind
        )
        builder.call(copy, [to_at, of_at, args[4], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.none(target, types.intp, source, types.intp, types.intp), codegen


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
        at += 1
        if at == slots:
            at = 0


@njit(cache=True)
def find(key, salt, seed, overlay, base):
    """(hash, seqno with the deleted bit, rev, place in memory) of a key; seqno 0 when it is not known."""
    key_hash = hash_key(key, 0, key.size, seed) ^ salt
    at = slot_of(overlay, ENTRY, key_hash)
    if at >= 0 and overlay[at] == key_hash:
        return key_hash, overlay[at + 1], overlay[at + 2], overlay[at + 3]
    at = slot_of(base, SLOT, key_hash)
    if at >= 0 and base[at] == key_hash:
        return key_hash, base[at + 1], base[at + 2], NOWHERE
    return key_hash, np.uint64(0), np.uint64(0), NOWHERE


@njit(cache=True)
def rehash(old, words, new):
    """Move every entry of ``old`` into the empty table ``new`` of the same width."""
    for at in range(0, old.size, words):
        if old[at] != np.uint64(0):
            to = slot_of(new, words, old[at])
            for word in range(words):
                new[to + word] = old[at + word]


@njit(cache=True, nogil=True)
def merge_tables(base, overlay, upto, purged_upto, new):
    """``base`` brought forward by the overlay's entries up to seqno ``upto``; seqno 0 in the overlay removes.

    Tombstones at or below ``purged_upto`` are left out. Returns how many entries ``new`` holds.
    """
    count = 0
    for at in range(0, base.size, SLOT):
        if base[at] != np.uint64(0):
            over = slot_of(overlay, ENTRY, base[at])
            newer = over >= 0 and overlay[over] == base[at]
            if newer and (overlay[over + 1] & SEQNO_BITS) <= upto:
                continue
            if base[at + 1] & DELETED and (base[at + 1] & SEQNO_BITS) <= purged_upto:
                continue
            to = slot_of(new, SLOT, base[at])
            for word in range(SLOT):
                new[to + word] = base[at + word]
            count += 1
    for at in range(0, overlay.size, ENTRY):
        seqno = overlay[at + 1] & SEQNO_BITS
        if overlay[at] == np.uint64(0) or seqno > upto or seqno == np.uint64(0):
            continue
        if overlay[at + 1] & DELETED and seqno <= purged_upto:
            continue
        to = slot_of(new, SLOT, overlay[at])
        for word in range(SLOT):
            new[to + word] = overlay[at + word]
        count += 1
    return count


@njit(cache=True)
def keep_newer(old, upto, new):
    """Copy the overlay entries above seqno ``upto`` into ``new``; returns how many."""
    count = 0
    for at in range(0, old.size, ENTRY):
        if old[at] != np.uint64(0) and (old[at + 1] & SEQNO_BITS) > upto:
            to = slot_of(new, ENTRY, old[at])
            for word in range(ENTRY):
                new[to + word] = old[at + word]
            count += 1
    return count


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
def _is_delete(kind, extra):
    if kind == _COMMIT:
        return (extra & COMMIT_DELETES) != np.uint64(0)
    return kind == _DELETION or kind == _EXPIRATION or kind == _ABORT


@njit(cache=True)
def _ingest(
    source, at, end, target, segment_at, serial, overlay, base, collections, registers, seed, assign, ceiling
):
    """Append records to the open segment, index them, and settle seqno, rev, CAS and ``prev_seqno``.

    With ``assign`` the seqno, CAS and (rev 0) rev are made here; otherwise they are taken as they come, and must
    rise up to ``ceiling``. Returns how far the input was taken; ``registers[STOP]`` says why it was not all.
    """
    row = np.int64(-1)
    registers[STOP] = np.uint64(DONE)
    registers[FIRST] = np.uint64(0)
    while at < end:
        if not whole_record(source, at, end):
            registers[STOP] = np.uint64(BAD_RECORD)
            return at
        size = load32(source, at + AT_SIZE)
        key_len = load16(source, at + AT_KEY_LEN)
        kind = np.int64(source[at + AT_KIND]) & _KIND_MASK
        if kind == _SYSTEM:
            registers[STOP] = np.uint64(SYSTEM_EVENT)
            return at
        if registers[ENTRIES] * np.uint64(5) >= np.uint64(overlay.size):  # four words a slot: at 0.8 full
            registers[STOP] = np.uint64(CROWDED)
            return at
        used = np.int64(registers[USED])
        if used + size > target.size:
            registers[STOP] = np.uint64(FULL)
            return at
        seqno = registers[HIGH] + np.uint64(1) if assign else load64(source, at + AT_SEQNO)
        if not assign and (seqno <= registers[HIGH] or seqno > ceiling):
            registers[STOP] = np.uint64(BAD_SEQNO)
            return at
        row = collection_row(collections, np.uint64(load32(source, at + AT_COLLECTION)), row)
        if row < 0:
            registers[STOP] = np.uint64(UNKNOWN_COLLECTION)
            return at
        extra = load64(source, at + AT_EXTRA)
        prepared = kind == _PREPARE or kind == _ABORT
        key_hash = hash_key(source, at + HEADER_SIZE, key_len, seed)
        if prepared:
            key_hash ^= PREPARE_SALT
        slot = slot_of(overlay, ENTRY, key_hash)
        known = np.uint64(0)
        rev = np.uint64(0)
        place = NOWHERE
        if overlay[slot] == key_hash:
            known, rev, place = overlay[slot + 1], overlay[slot + 2], overlay[slot + 3]
        else:
            below = slot_of(base, SLOT, key_hash)
            if below >= 0 and base[below] == key_hash:
                known, rev = base[below + 1], base[below + 2]
            # A new slot, unless the record is refused below.
        old_seqno = known & SEQNO_BITS
        stale = old_seqno <= collections[row, C_START]  # from before the collection was flushed
        if stale:
            rev = np.uint64(0)
        previous = old_seqno
        in_segment = (place >> np.uint64(32)) == np.uint64(serial) and np.int64(place & np.uint64(0xFFFFFFFF)) >= segment_at
        if in_segment and old_seqno != np.uint64(0):
            old_at = np.int64(place & np.uint64(0xFFFFFFFF))
            old_kind = np.int64(target[old_at + AT_KIND]) & _KIND_MASK
            if kind >= _PREPARE or old_kind >= _PREPARE:
                registers[STOP] = np.uint64(COLLISION)
                return at
            target[old_at + AT_KIND] |= np.uint8(SUPERSEDED)
            previous = load64(target, old_at + AT_PREV)
            registers[DEDUPED] += np.uint64(1)
        if overlay[slot] != key_hash:
            registers[ENTRIES] += np.uint64(1)
        copy_bytes(target, used, source, at, size)
        target[used + AT_KIND] = np.uint8(kind)
        given_rev = load64(source, at + AT_REV)
        cas = load64(source, at + AT_CAS)
        if assign:
            if given_rev == np.uint64(0):
                floor = rev if old_seqno != np.uint64(0) and not stale else registers[DELETED_REV]
                given_rev = floor + np.uint64(1)
                store64(target, used + AT_REV, given_rev)
            if cas == np.uint64(0):
                cas = registers[CAS] + np.uint64(1)
                store64(target, used + AT_CAS, cas)
            store64(target, used + AT_SEQNO, seqno)
        store64(target, used + AT_PREV, previous)
        if cas > registers[CAS] and cas != np.uint64(0xFFFFFFFFFFFFFFFF):
            registers[CAS] = cas
        gone = _is_delete(kind, extra)
        if gone and not prepared and given_rev > registers[DELETED_REV]:
            registers[DELETED_REV] = given_rev
        was_live = old_seqno != np.uint64(0) and not stale and (known & DELETED) == np.uint64(0)
        if not prepared:
            was_dead = old_seqno != np.uint64(0) and not stale and (known & DELETED) != np.uint64(0)
            if was_live and gone:
                collections[row, C_ITEMS] -= np.uint64(1)
            if not was_live and not gone:
                collections[row, C_ITEMS] += np.uint64(1)
            if gone and not was_dead:
                registers[TOMBSTONES] += np.uint64(1)
            if was_dead and not gone:
                registers[TOMBSTONES] -= np.uint64(1)
            collections[row, C_VISIBLE] = seqno
            registers[VISIBLE] = seqno
        collections[row, C_HIGH] = seqno
        expiry = np.uint64(load32(source, at + AT_TIME))
        if not gone and expiry != np.uint64(0) and expiry < registers[EXPIRY]:
            registers[EXPIRY] = expiry
        if kind == _PREPARE:
            registers[PREPARED] = seqno
        if kind == _COMMIT or kind == _ABORT:
            completed = extra & SEQNO_BITS
            if completed > registers[COMPLETED]:
                registers[COMPLETED] = completed
        overlay[slot] = key_hash
        overlay[slot + 1] = seqno | (DELETED if gone else np.uint64(0))
        overlay[slot + 2] = given_rev
        overlay[slot + 3] = (np.uint64(serial) << np.uint64(32)) | np.uint64(used)
        registers[HIGH] = seqno
        if registers[FIRST] == np.uint64(0):
            registers[FIRST] = seqno
        registers[USED] = np.uint64(used + size)
        at += size
    return at


@njit(cache=True)
def ingest(source, at, end, target, segment_at, serial, overlay, base, collections, registers, seed, assign, ceiling):
    """``_ingest`` for a record or a few: keeps the interpreter lock, which is dear to get back."""
    return _ingest(
        source, at, end, target, segment_at, serial, overlay, base, collections, registers, seed, assign, ceiling
    )


@njit(cache=True, nogil=True)
def ingest_many(
    source, at, end, target, segment_at, serial, overlay, base, collections, registers, seed, assign, ceiling
):
    """``_ingest`` for long runs: other threads go on meanwhile."""
    return _ingest(
        source, at, end, target, segment_at, serial, overlay, base, collections, registers, seed, assign, ceiling
    )


@njit(cache=True, nogil=True)
def build(keys, key_ends, values, value_ends, datatypes, prefix, kind, collection, flags, time, target):
    """Lay many documents side by side as packed records without seqno; returns the bytes used."""
    at = 0
    key_at = 0
    value_at = 0
    for index in range(key_ends.size):
        key_len = key_ends[index] - key_at
        value_len = value_ends[index] - value_at
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


@njit(cache=True, nogil=True)
def gather(source, at, end, target, used, previous, counts):
    """Copy the records that are not superseded behind ``target[:used]`` while they fit.

    ``previous`` collects the seqnos they replace. ``counts`` gets (records, replaced, first seqno, last seqno) and is
    added to, so that one block can be filled from several segments. Returns (input taken up to, target used).
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


@njit(cache=True)
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


@njit(cache=True, nogil=True)
def mark_dead(data, at, end, dead, position, erased, collections):
    """Set SUPERSEDED on the records whose seqno is in the sorted ``dead`` (from ``position`` on).

    With ``erased`` also on those of collections that are gone or were begun anew later. Returns the new position.
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


@njit(cache=True)
def first_after(data, at, end, after):
    """The first seqno above ``after`` that is not superseded, or 0."""
    while at < end:
        seqno = load64(data, at + AT_SEQNO)
        if seqno > after and not (data[at + AT_KIND] & SUPERSEDED):
            return seqno
        at += load32(data, at + AT_SIZE)
    return np.uint64(0)


@njit(cache=True)
def last_matching(data, at, end, after, wanted, visible_only):
    """The last seqno above ``after`` that passes: not superseded, in ``wanted`` (empty: any), visible if asked."""
    last = np.uint64(0)
    while at < end:
        seqno = load64(data, at + AT_SEQNO)
        kind = np.int64(data[at + AT_KIND])
        hidden = visible_only and (kind == _PREPARE or kind == _ABORT)
        if seqno > after and not (kind & SUPERSEDED) and not hidden:
            passes = wanted.size == 0
            collection = load32(data, at + AT_COLLECTION)
            for index in range(wanted.size):
                passes = passes or wanted[index] == collection
            if passes:
                last = seqno
        at += load32(data, at + AT_SIZE)
    return last


@njit(cache=True, nogil=True)
def index_run(data, at, end, after, overlay, seed):
    """Enter the records above ``after`` into an overlay that has room for them; returns how many slots were new."""
    new = 0
    while at < end:
        kind = np.int64(data[at + AT_KIND]) & _KIND_MASK
        seqno = load64(data, at + AT_SEQNO)
        if kind != _SYSTEM and seqno > after:
            key_hash = hash_key(data, at + HEADER_SIZE, load16(data, at + AT_KEY_LEN), seed)
            if kind == _PREPARE or kind == _ABORT:
                key_hash ^= PREPARE_SALT
            slot = slot_of(overlay, ENTRY, key_hash)
            if overlay[slot] == np.uint64(0):
                new += 1
            gone = _is_delete(kind, load64(data, at + AT_EXTRA))
            overlay[slot] = key_hash
            overlay[slot + 1] = seqno | (DELETED if gone else np.uint64(0))
            overlay[slot + 2] = load64(data, at + AT_REV)
            overlay[slot + 3] = NOWHERE
        at += load32(data, at + AT_SIZE)
    return new


@njit(cache=True, nogil=True)
def expired(data, at, end, now, found):
    """Offsets of live documents whose time has come; returns (how many, the earliest expiry still ahead)."""
    count = 0
    ahead = np.uint64(0xFFFFFFFFFFFFFFFF)
    while at < end:
        kind = np.int64(data[at + AT_KIND])
        time = np.uint64(load32(data, at + AT_TIME))
        live = kind == _MUTATION or (kind == _COMMIT and not _is_delete(kind, load64(data, at + AT_EXTRA)))
        if live and time != np.uint64(0):
            if time <= now and count < found.size:
                found[count] = at
                count += 1
            elif time < ahead:
                ahead = time
        at += load32(data, at + AT_SIZE)
    return count, ahead
