"""Frames to columns in one pass: the numba kernel behind ``columns.BulkDecoder``.

The kernel takes a document message only if nothing about it is unusual. Whatever it does not like (other opcodes,
other framing extras, broken prefixes, seqno 0, extended metadata) is noted as a *control* for the object reader,
which knows every rule and its error. So the two readers cannot disagree about what is legal.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from upriver.wire.intrinsics import (
    copy,
    copy32,
    copy128,
    load8,
    load_be16,
    load_be32,
    load_be64,
    load_le16,
    load_le32,
    load_le64,
    store8,
    store_le16,
    store_le32,
    store_le64,
)  # fmt: skip

I64 = types.int64
TABLE = types.Array(types.int64, 1, "C")
OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}
INLINE: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": True}

# Where each column's address stands in the address table of a ``Columns``; the order is that of its ``LAYOUT``.
EVENT, VBUCKET, COLLECTION, DATATYPE, SEQNO, REV, CAS, FLAGS, EXPIRY = range(9)
DELETE_TIME, LOCK_TIME, STREAM_ID, OPAQUE, NRU, KEY_AT, VALUE_AT, KEY, VALUE = range(9, 18)
SNAP_START, SNAP_END, VBUUID, EPOCH = range(18, 22)
KEY_SAFE, VALUE_SAFE = range(22, 24)  # up to where the key and value areas may be read

# The slots of ``state``: what the kernel goes on from, and what it reports.
AT, ROWS, KEY_USED, VALUE_USED, CONTROLS, BYTES, REASON = range(7)
CONTROL_WIDTH = 3  # row, offset, size

# The slots of ``rules``: what the connection agreed on. A set of datatypes is a bit per datatype.
COLLECTIONS, LIMIT, MUTATION_TYPES, TOMBSTONE_TYPES, V1_DELETION_TYPES, MAX_ROWS, MAX_KEYS, MAX_VALUES = range(8)

# Why the kernel stopped.
INCOMPLETE, FULL, CONTROLS_FULL, BROKEN = range(4)

HEADER = 24
SLACK = 128 # bytes behind every data area, so that short copies may run over

_MUTATION, _DELETION, _EXPIRATION = 0x57, 0x58, 0x59
_REQUEST, _ALT_REQUEST, _ALT_RESPONSE = 0x80, 0x08, 0x18
_SID_HEAD = 0x22
_SID_SIZE = 3
_RAW_ONLY = 1  # UPR knew no datatypes


@njit(**INLINE)
def is_framed(head, size, limit):
    """Whether a header makes sense at all: what ``framing.frame_size`` checks. ``head``: its first 8 bytes."""
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
    """The datatypes that a message with these extras at ``p`` may have; none if the extras are not plain.

    Not plain: an unknown size, seqno 0 or above 2^63, extended metadata, or something in an unused byte.
    """
    if load_be64(p) <= 0:
        return 0
    if op == _MUTATION:
        known = rules[MUTATION_TYPES] if extlen == 31 else _RAW_ONLY if extlen == 30 else 0
        return known if load_be16(p + 28) == 0 else 0
    if extlen == 18 and load_be16(p + 16) == 0:
        return rules[V1_DELETION_TYPES] if op == _DELETION else _RAW_ONLY
    if op == _DELETION:
        return rules[TOMBSTONE_TYPES] if extlen == 21 and load8(p + 20) == 0 else 0
    return rules[TOMBSTONE_TYPES] if extlen == 20 else 0


@njit(**INLINE)
def stream_id_of(p, head):
    """The stream-id of a frame: 0 if it has no framing extras, -1 if they are anything but one stream-id."""
    magic = (head >> 56) & 0xFF
    if magic == _REQUEST:
        return 0
    if magic != _ALT_REQUEST or (head >> 40) & 0xFF != _SID_SIZE or load8(p + HEADER) != _SID_HEAD:
        return -1
    sid = load_be16(p + HEADER + 1)
    return sid if sid else -1


@njit(**INLINE)
def prefix_size(p, size):
    """Bytes of the LEB128 collection id at ``p`` if the key of ``size`` bytes keeps every rule of 1.5, else 0."""
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
    if not rules[COLLECTIONS]:
        return 0 if 1 <= klen <= 250 else -1
    prefix = prefix_size(extras + extlen, klen)
    return prefix if prefix else -1


@njit(**INLINE)
def key_length(head, sid):
    return (head >> 32) & (0xFF if sid else 0xFFFF)


@njit(**INLINE)
def write_extras(op, extlen, p, row, table):
    """The columns that come from the extras at ``p``."""
    store_le64(table[SEQNO] + 8 * row, load_be64(p))
    store_le64(table[REV] + 8 * row, load_be64(p + 8))
    flags, expiry, lock_time, delete_time, nru = 0, 0, 0, 0, 0
    if op == _MUTATION:
        flags, expiry, lock_time = load_be32(p + 16), load_be32(p + 20), load_be32(p + 24)
        if extlen == 31:
            nru = load8(p + 30)
    elif extlen != 18:
        delete_time = load_be32(p + 16)
    store_le32(table[FLAGS] + 4 * row, flags)
    store_le32(table[EXPIRY] + 4 * row, expiry)
    store_le32(table[LOCK_TIME] + 4 * row, lock_time)
    store_le32(table[DELETE_TIME] + 4 * row, delete_time)
    store8(table[NRU] + row, nru)


@njit(**INLINE)
def write_header(p, head, sid, collection, row, table):
    """The columns that come from the header at ``p``."""
    store8(table[EVENT] + row, (head >> 48) & 0xFF)
    store8(table[DATATYPE] + row, (head >> 16) & 0xFF)
    store_le16(table[VBUCKET] + 2 * row, head & 0xFFFF)
    store_le16(table[STREAM_ID] + 2 * row, sid)
    store_le32(table[COLLECTION] + 4 * row, collection)
    store_le32(table[OPAQUE] + 4 * row, load_be32(p + 12))
    store_le64(table[CAS] + 8 * row, load_be64(p + 16))


@njit(**INLINE)
def copy_over(target, source, size, safe):
    """At least ``size`` bytes, in whole blocks where the source may be read that far, else exactly.

    The target has ``SLACK`` bytes to spare. Between 256 B and 2 KiB libc's memcpy reaches 0.6 of its own speed for
    large blocks; this loop reaches 0.95. Above, libc wins.
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
def write_row(p, head, vlen, sid, prefix, row, keys, values, safe, table):
    """A plain document message as row ``row``, its key at ``keys`` and its value at ``values``."""
    extlen = (head >> 24) & 0xFF
    extras = p + HEADER + (_SID_SIZE if sid else 0)
    key, klen = extras + extlen, key_length(head, sid)
    write_header(p, head, sid, prefix_value(key, prefix) if prefix else 0, row, table)
    write_extras((head >> 48) & 0xFF, extlen, extras, row, table)
    copy_over(table[KEY] + keys, key + prefix, klen - prefix, safe)
    copy_over(table[VALUE] + values, key + klen, vlen, safe)
    store_le32(table[KEY_AT] + 4 * row + 4, keys + klen - prefix)
    store_le32(table[VALUE_AT] + 4 * row + 4, values + vlen)


@njit(**INLINE)
def note_control(noted, row, at, size, controls):
    """A frame for the object reader; False if no more can be noted."""
    slot = CONTROL_WIDTH * noted
    if slot >= controls.size:
        return False
    controls[slot], controls[slot + 1], controls[slot + 2] = row, at, size
    return True


@njit(types.void(I64, I64, I64, TABLE, TABLE, TABLE, TABLE), **OPTIONS)
def decode(base, end, safe, rules, table, controls, state):
    """Decode from ``base + state[AT]`` to ``base + end``, until the input ends or something is full.

    ``safe``: the address up to which memory may be read. ``controls`` gets (row, offset, size) of every frame that
    is left to the object reader. Counters stay in registers: keeping them in ``state`` costs a third of the speed.
    """
    at, row, keys, values = state[AT], state[ROWS], state[KEY_USED], state[VALUE_USED]
    noted, charged, reason = 0, 0, INCOMPLETE
    while end - at >= HEADER:
        p = base + at
        head, size = load_be64(p), HEADER + load_be32(p + 8)
        if not is_framed(head, size, rules[LIMIT]):
            reason = BROKEN
            break
        if size > end - at:
            break
        sid = stream_id_of(p, head)
        prefix = plain_prefix(p, head, sid, rules)
        if prefix < 0:
            if not note_control(noted, row, at, size, controls):
                reason = CONTROLS_FULL
                break
            noted += 1
        else:
            klen = key_length(head, sid)
            vlen = size - HEADER - (_SID_SIZE if sid else 0) - ((head >> 24) & 0xFF) - klen
            if row >= rules[MAX_ROWS] or keys + klen > rules[MAX_KEYS] or values + vlen > rules[MAX_VALUES]:
                reason = FULL
                break
            write_row(p, head, vlen, sid, prefix, row, keys, values, safe, table)
            row, keys, values, charged = row + 1, keys + klen - prefix, values + vlen, charged + size
        at += size
    state[AT], state[ROWS], state[KEY_USED], state[VALUE_USED] = at, row, keys, values
    state[CONTROLS], state[BYTES], state[REASON] = noted, charged, reason


# The slots of a stream in a ``StreamTable``.
S_LAST, S_START, S_END, S_VBUUID, S_EPOCH, S_OPAQUE, S_UPTO, S_STATE = range(8)
STREAM_WIDTH = 8
CLOSED, OPEN, OUT_OF_ORDER, IGNORED = range(4)


@njit(**INLINE)
def breaks_order(seqno, streams, s):
    """Whether a change may not come next on the stream at ``s`` (6.1, guarantees 1 and 2)."""
    if streams[s + S_STATE] == OUT_OF_ORDER:
        return False
    return seqno <= streams[s + S_LAST] or seqno < streams[s + S_START] or seqno > streams[s + S_END]


@njit(I64(I64, I64, I64, TABLE, TABLE, TABLE), **OPTIONS)
def advance(first, last, by_opaque, table, streams, dropped):
    """Check rows against their streams and stamp them with what the stream knows.

    Returns the first row that breaks a rule, or -1. Rows beyond the wanted end, or of an ignored stream, get event 0
    and are counted in ``dropped``.
    """
    for row in range(first, last):
        opaque, seqno = load_le32(table[OPAQUE] + 4 * row), load_le64(table[SEQNO] + 8 * row)
        slot = opaque if by_opaque else load_le16(table[VBUCKET] + 2 * row)
        s = STREAM_WIDTH * slot
        if s >= streams.size or streams[s + S_STATE] == CLOSED or streams[s + S_OPAQUE] != opaque:
            return row
        if streams[s + S_STATE] != IGNORED:
            if breaks_order(seqno, streams, s):
                return row
            streams[s + S_LAST] = max(seqno, streams[s + S_LAST])
        if streams[s + S_STATE] == IGNORED or seqno > streams[s + S_UPTO]:
            store8(table[EVENT] + row, 0)
            dropped[0] += 1
        store_le64(table[SNAP_START] + 8 * row, streams[s + S_START])
        store_le64(table[SNAP_END] + 8 * row, streams[s + S_END])
        store_le64(table[VBUUID] + 8 * row, streams[s + S_VBUUID])
        store_le32(table[EPOCH] + 4 * row, streams[s + S_EPOCH])
    return -1
