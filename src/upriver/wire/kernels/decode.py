"""Decodes frames into columns in one pass, and checks rows against their streams: the kernels of ``bulk``.

The decoder takes a document message only if nothing about it is unusual. Every other frame (other opcodes, other
framing extras, broken prefixes, seqno 0, extended metadata) is reported as a control frame for the object reader,
which knows every rule and its error. So the two readers cannot disagree about what is legal.
"""

from __future__ import annotations

from numba import njit, types

from upriver.wire.kernels.intrinsics import (
    ARRAY,
    I64,
    copy,
    copy32,
    copy128,
    get16,
    get32,
    get64,
    load8,
    load_be16,
    load_be32,
    load_be64,
    put8,
    put16,
    put32,
    put64,
    store_le64,
    word,
)
from upriver.wire.kernels.kernel import INLINE, kernel

# The place of each column in the address table of a ``Columns``, in the order of its ``LAYOUT``.
EVENT, VBUCKET, COLLECTION, DATATYPE, SEQNO, REV, CAS, FLAGS, EXPIRY = range(9)
DELETE_TIME, LOCK_TIME, STREAM_ID, OPAQUE, NRU, KEY_AT, VALUE_AT, KEY, VALUE = range(9, 18)
SNAP_START, SNAP_END, VBUUID, EPOCH = range(18, 22)
KEY_SAFE, VALUE_SAFE = range(22, 24)  # up to where the key and value areas may be read

# The slots of ``state``: where the kernel continues, and what it reports.
AT, ROWS, KEY_USED, VALUE_USED, TOUCHED, CONTROLS, BYTES, REASON = range(8)
# Columns that are nearly always 0 are zeroed beforehand and written only after the first value that is not 0, which
# saves a third of the time for columns. ``TOUCHED`` says which of them are being written.
_COLLECTIONS_TOUCHED, _OTHERS_TOUCHED = 1, 2
CONTROL_WIDTH = 3  # row, offset, size
MAX_CONTROLS = 1024

# The slots of ``rules``: what the connection agreed on. A set of datatypes is a bit per datatype.
COLLECTIONS, LIMIT, MUTATION_TYPES, TOMBSTONE_TYPES, V1_DELETION_TYPES, MAX_ROWS, MAX_KEYS, MAX_VALUES = range(8)

# Why the kernel stopped.
INCOMPLETE, FULL, CONTROLS_FULL, BROKEN = range(4)

HEADER = 24
SLACK = 128  # bytes behind every data area, so that short copies may run over

_MUTATION, _DELETION, _EXPIRATION = 0x57, 0x58, 0x59
_REQUEST, _ALT_REQUEST, _ALT_RESPONSE = 0x80, 0x08, 0x18
_SID_HEAD = 0x22
_SID_SIZE = 3
_RAW_ONLY = 1  # UPR knew no datatypes

# The header of a usual mutation: magic, opcode, extras length, and a datatype below 8; as signed numbers.
_USUAL_MASK = 0xFFFF_0000_FFF8_0000 - 2**64
_USUAL = 0x8057_0000_1F00_0000 - 2**64
_USUAL_EXTRAS = 31
_USUAL_KEY = HEADER + _USUAL_EXTRAS


@njit(**INLINE)
def is_framed(head, size, limit):
    """Whether a header passes the checks of ``framing.frame_size``; ``head`` is its first 8 bytes."""
    magic = (head >> 56) & 0xFF
    flexible = (magic == _ALT_REQUEST) | (magic == _ALT_RESPONSE)
    if not flexible and not 0x80 <= magic <= 0x83:
        return False
    lengths = (head >> 32) & 0xFFFF
    if flexible:
        lengths = (lengths >> 8) + (lengths & 0xFF)
    return size <= limit and HEADER + lengths + ((head >> 24) & 0xFF) <= size


@njit(**INLINE)
def legal_datatypes(op, extlen, p, rules):
    """The datatypes that a message with the extras at ``p`` may have; none if the extras are not plain.

    Not plain: an unknown size, seqno 0 or above 2^63, extended metadata, or an unused byte that is not 0.
    """
    if load_be64(p) <= 0:
        return 0
    if op == _MUTATION:
        known = word(rules, MUTATION_TYPES) if extlen == 31 else _RAW_ONLY if extlen == 30 else 0
        return known if load_be16(p + 28) == 0 else 0
    if extlen == 18 and load_be16(p + 16) == 0:
        return word(rules, V1_DELETION_TYPES) if op == _DELETION else _RAW_ONLY
    if op == _DELETION:
        return word(rules, TOMBSTONE_TYPES) if extlen == 21 and load8(p + 20) == 0 else 0
    return word(rules, TOMBSTONE_TYPES) if extlen == 20 else 0


@njit(**INLINE)
def forgets_framing(head, size):
    """Whether a frame may have a stream-id though its framing length says 0, as real servers' tombstones do."""
    op = (head >> 48) & 0xFF
    if (op != _DELETION and op != _EXPIRATION) or (head >> 40) & 0xFF:
        return False
    return HEADER + _SID_SIZE + ((head >> 24) & 0xFF) + ((head >> 32) & 0xFF) <= size


@njit(**INLINE)
def stream_id_of(p, head, size):
    """The stream-id of a frame: 0 if it has no framing extras, -1 if they are anything but one stream-id."""
    magic = (head >> 56) & 0xFF
    if magic == _REQUEST:
        return 0
    if magic != _ALT_REQUEST or ((head >> 40) & 0xFF != _SID_SIZE and not forgets_framing(head, size)):
        return -1
    if load8(p + HEADER) != _SID_HEAD:
        return -1
    sid = load_be16(p + HEADER + 1)
    return sid if sid else -1


@njit(**INLINE)
def prefix_size(p, size):
    """Bytes of the LEB128 collection id at ``p`` if the key of ``size`` bytes keeps every rule of
    docs/protocol/framing.md#key-prefix, else 0.
    """
    last = load8(p)
    if last == 0:
        return 1 if 2 <= size <= 251 else 0
    n = 1
    while last >= 0x80 and n < 5 and n < size:
        last = load8(p + n)
        n += 1
    if last >= 0x80 or last == 0 or (n == 5 and last > 0x0F) or (n == 1 and last < 8):
        return 0
    return n if 0 < size - n <= 246 else 0


@njit(**INLINE)
def prefix_value(p, n):
    """The collection id in the ``n`` prefix bytes at ``p``."""
    number = load8(p) & 0x7F
    for i in range(1, n):
        number |= (load8(p + i) & 0x7F) << (7 * i)
    return number


@njit(**INLINE)
def is_usual(p, head, size, left, rules):
    """Whether the frame is of the usual kind: a complete mutation with no framing extras and a short prefix.

    Many valid frames are not; the slower path handles those.
    """
    klen = (head >> 32) & 0xFFFF
    if (head & _USUAL_MASK) != _USUAL or klen > 247 or size < _USUAL_KEY + klen:
        return False
    if size > left or size > word(rules, LIMIT) or not (word(rules, MUTATION_TYPES) >> datatype_of(head)) & 1:
        return False
    if load_be64(p + HEADER) <= 0 or load_be16(p + HEADER + 28):
        return False
    if not word(rules, COLLECTIONS):
        return klen > 0
    collection = load8(p + _USUAL_KEY)
    return klen > 1 and (collection == 0 or 8 <= collection < 0x80)


@njit(**INLINE)
def datatype_of(head):
    return (head >> 16) & 0xFF


@njit(**INLINE)
def plain_prefix(p, head, sid, rules):
    """How many bytes of the key are collection prefix, or -1 if the frame is not a plain document message."""
    op = (head >> 48) & 0xFF
    if op < _MUTATION or op > _EXPIRATION or sid < 0:
        return -1
    extlen, datatype = (head >> 24) & 0xFF, (head >> 16) & 0xFF
    extras = p + HEADER + (_SID_SIZE if sid else 0)
    if datatype > 7 or not (legal_datatypes(op, extlen, extras, rules) >> datatype) & 1:
        return -1
    klen = key_length(head, sid)
    if not word(rules, COLLECTIONS):
        return 0 if 1 <= klen <= 250 else -1
    prefix = prefix_size(extras + extlen, klen)
    return prefix if prefix else -1


@njit(**INLINE)
def key_length(head, sid):
    return (head >> 32) & (0xFF if sid else 0xFFFF)


@njit(**INLINE)
def write_header(p, head, op, row, table):
    """Write the columns that come from the header at ``p``."""
    put8(table, EVENT, row, op)
    put8(table, DATATYPE, row, datatype_of(head))
    put16(table, VBUCKET, row, head & 0xFFFF)
    put32(table, OPAQUE, row, load_be32(p + 12))
    put64(table, CAS, row, load_be64(p + 16))


@njit(**INLINE)
def write_extras(op, extlen, p, row, sid, touched, table):
    """Write the columns that come from the extras at ``p``; returns the new ``touched``."""
    put64(table, SEQNO, row, load_be64(p))
    put64(table, REV, row, load_be64(p + 8))
    flags, expiry, lock_time, delete_time, nru = 0, 0, 0, 0, 0
    if op == _MUTATION:
        flags, expiry, lock_time = load_be32(p + 16), load_be32(p + 20), load_be32(p + 24)
        if extlen == 31:
            nru = load8(p + 30)
    elif extlen != 18:
        delete_time = load_be32(p + 16)
    put32(table, FLAGS, row, flags)
    if touched & _OTHERS_TOUCHED or expiry | lock_time | delete_time | nru | sid:
        put32(table, EXPIRY, row, expiry)
        put32(table, LOCK_TIME, row, lock_time)
        put32(table, DELETE_TIME, row, delete_time)
        put8(table, NRU, row, nru)
        put16(table, STREAM_ID, row, sid)
        touched |= _OTHERS_TOUCHED
    return touched


@njit(**INLINE)
def write_collection(collection, row, touched, table):
    if touched & _COLLECTIONS_TOUCHED or collection:
        put32(table, COLLECTION, row, collection)
        touched |= _COLLECTIONS_TOUCHED
    return touched


@njit(**INLINE)
def copy_over(target, source, size, safe):
    """Copy ``size`` bytes: in whole blocks, which may copy more, where the source may be read that far, else exactly.

    The target has ``SLACK`` bytes to spare. Between 256 B and 2 KiB libc's memcpy reaches 0.6 of its speed for large
    blocks; this loop reaches 0.95. Above that, libc is faster.
    """
    if size > 2048 or source + size + SLACK > safe:
        copy(target, source, size)
    elif size <= 32:
        copy32(target, source)
    else:
        done = 0
        while done < size:
            copy128(target + done, source + done)
            done += 128


@njit(**INLINE)
def write_row(p, head, op, extlen, sid, prefix, collection, klen, vlen, row, keys, values, touched, safe, table):
    """Write a plain document message as row ``row``, its key at ``keys`` and its value at ``values``."""
    extras = p + HEADER + (_SID_SIZE if sid else 0)
    key = extras + extlen
    write_header(p, head, op, row, table)
    touched = write_extras(op, extlen, extras, row, sid, touched, table)
    touched = write_collection(collection, row, touched, table)
    copy_over(word(table, KEY) + keys, key + prefix, klen - prefix, safe)
    copy_over(word(table, VALUE) + values, key + klen, vlen, safe)
    put32(table, KEY_AT, row + 1, keys + klen - prefix)
    put32(table, VALUE_AT, row + 1, values + vlen)
    return touched


@njit(**INLINE)
def has_room(klen, vlen, row, keys, values, rules):
    if row >= word(rules, MAX_ROWS):
        return False
    return keys + klen <= word(rules, MAX_KEYS) and values + vlen <= word(rules, MAX_VALUES)


@njit(**INLINE)
def note_control(controls, noted, row, at, size):
    """Report a frame for the object reader."""
    slot = controls + 8 * CONTROL_WIDTH * noted
    store_le64(slot, row)
    store_le64(slot + 8, at)
    store_le64(slot + 16, size)


@kernel(types.void(I64, I64, I64, I64, I64, I64, ARRAY))
def decode(base, end, safe, rules, table, controls, state):
    """Decode from ``base + state[AT]`` to ``base + end``, until the input ends or something is full.

    Memory may be read up to the address ``safe``. ``controls`` gets (row, offset, size) of every frame for the
    object reader. Counters stay in registers: keeping them in ``state`` costs a third of the speed.
    """
    at, row, keys, values, touched = state[AT], state[ROWS], state[KEY_USED], state[VALUE_USED], state[TOUCHED]
    noted, charged, reason = 0, 0, INCOMPLETE
    while end - at >= HEADER:
        p = base + at
        head, size = load_be64(p), HEADER + load_be32(p + 8)
        if is_usual(p, head, size, end - at, rules):
            klen, prefix = (head >> 32) & 0xFF, word(rules, COLLECTIONS)
            vlen = size - _USUAL_KEY - klen
            if not has_room(klen, vlen, row, keys, values, rules):
                reason = FULL
                break
            collection = load8(p + _USUAL_KEY) if prefix else 0
            touched = write_row(
                p, head, _MUTATION, _USUAL_EXTRAS, 0, prefix, collection, klen, vlen, row, keys, values, touched,
                safe, table,
            )  # fmt: skip
            row, keys, values, charged = row + 1, keys + klen - prefix, values + vlen, charged + size
            at += size
            continue
        if not is_framed(head, size, word(rules, LIMIT)):
            reason = BROKEN
            break
        if size > end - at:
            break
        sid = stream_id_of(p, head, size)
        prefix = plain_prefix(p, head, sid, rules)
        if prefix < 0:
            if noted == MAX_CONTROLS:
                reason = CONTROLS_FULL
                break
            note_control(controls, noted, row, at, size)
            noted += 1
        else:
            extlen, klen = (head >> 24) & 0xFF, key_length(head, sid)
            framing = _SID_SIZE if sid else 0
            vlen = size - HEADER - framing - extlen - klen
            if not has_room(klen, vlen, row, keys, values, rules):
                reason = FULL
                break
            collection = prefix_value(p + HEADER + framing + extlen, prefix) if prefix else 0
            touched = write_row(
                p, head, (head >> 48) & 0xFF, extlen, sid, prefix, collection, klen, vlen, row, keys, values, touched,
                safe, table,
            )  # fmt: skip
            row, keys, values, charged = row + 1, keys + klen - prefix, values + vlen, charged + size
        at += size
    state[AT], state[ROWS], state[KEY_USED], state[VALUE_USED], state[TOUCHED] = at, row, keys, values, touched
    state[CONTROLS], state[BYTES], state[REASON] = noted, charged, reason


# The slots of a stream in a ``StreamTable``.
S_LAST, S_START, S_END, S_VBUUID, S_EPOCH, S_OPAQUE, S_UPTO, S_STATE = range(8)
STREAM_WIDTH = 8
CLOSED, OPEN, OUT_OF_ORDER, IGNORED = range(4)


@njit(**INLINE)
def breaks_order(seqno, streams, s):
    """Whether a change with this seqno must not come next on the stream at ``s``.

    See docs/protocol/snapshots.md#promises, guarantees 1 and 2.
    """
    if word(streams, s + S_STATE) == OUT_OF_ORDER:
        return False
    return seqno <= word(streams, s + S_LAST) or seqno < word(streams, s + S_START) or seqno > word(streams, s + S_END)


@kernel(I64(I64, I64, I64, I64, I64, I64, ARRAY))
def advance(first, last, by_opaque, table, streams, slots, dropped):
    """Check rows against their streams, and stamp them with the snapshot, branch and epoch.

    Returns the first row that breaks a rule, or -1. Rows beyond the wanted end, or of an ignored stream, get event 0
    and are counted in ``dropped``.
    """
    for row in range(first, last):
        opaque, seqno = get32(table, OPAQUE, row), get64(table, SEQNO, row)
        slot = opaque if by_opaque else get16(table, VBUCKET, row)
        s = STREAM_WIDTH * slot
        if slot >= slots or word(streams, s + S_STATE) == CLOSED or word(streams, s + S_OPAQUE) != opaque:
            return row
        if word(streams, s + S_STATE) != IGNORED:
            if breaks_order(seqno, streams, s):
                return row
            store_le64(streams + 8 * (s + S_LAST), max(seqno, word(streams, s + S_LAST)))
        if word(streams, s + S_STATE) == IGNORED or seqno > word(streams, s + S_UPTO):
            put8(table, EVENT, row, 0)
            dropped[0] += 1
        put64(table, SNAP_START, row, word(streams, s + S_START))
        put64(table, SNAP_END, row, word(streams, s + S_END))
        put64(table, VBUUID, row, word(streams, s + S_VBUUID))
        put32(table, EPOCH, row, word(streams, s + S_EPOCH))
    return -1
