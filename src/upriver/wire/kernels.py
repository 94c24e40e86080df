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
    store8,
    store_le16,
    store_le32,
    store_le64,
)  # fmt: skip

I64 = types.int64
TABLE = types.Array(types.int64, 1, "C")
OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}

# Where each column's address stands in the address table of a ``Columns``; the order is that of its ``LAYOUT``.
EVENT, VBUCKET, COLLECTION, DATATYPE, SEQNO, REV, CAS, FLAGS, EXPIRY = range(9)
DELETE_TIME, LOCK_TIME, STREAM_ID, OPAQUE, NRU, KEY_AT, VALUE_AT, KEY, VALUE = range(9, 18)
SNAP_START, SNAP_END, VBUUID, EPOCH = range(18, 22)
KEY_SAFE, VALUE_SAFE = range(22, 24)  # up to where the key and value areas may be read

# The slots of ``state``: what the kernel goes on from, and what it reports.
AT, ROWS, KEY_USED, VALUE_USED, CONTROLS, BYTES, REASON = range(7)
CONTROL_WIDTH = 3  # row, offset, size

# Why the kernel stopped.
INCOMPLETE, FULL, CONTROLS_FULL, BROKEN = range(4)

HEADER = 24
SLACK = 128 # bytes behind every data area, so that short copies may run over

_MUTATION, _DELETION, _EXPIRATION = 0x57, 0x58, 0x59
_REQUEST, _ALT_REQUEST, _ALT_RESPONSE = 0x80, 0x08, 0x18
_SID_HEAD = 0x22
_SID_SIZE = 3
# Bit n: a tombstone may have datatype n; not plain JSON nor JSON in snappy (2.9).
_TOMBSTONE_DATATYPES = 0b11110101


@njit(**OPTIONS)
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


@njit(**OPTIONS)
def extras_are_plain(op, extlen, p):
    """Whether the extras at ``p`` are of a known layout without extended metadata."""
    if op == _MUTATION:
        return (extlen == 31 or extlen == 30) and load_be16(p + 28) == 0
    if extlen == 18:
        return load_be16(p + 16) == 0
    if op == _DELETION:
        return extlen == 21 and load8(p + 20) == 0
    return extlen == 20


@njit(**OPTIONS)
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


@njit(**OPTIONS)
def prefix_value(p, n):
    """The collection id in the ``n`` prefix bytes at ``p``."""
    number = load8(p) & 0x7F
    for i in range(1, n):
        number |= (load8(p + i) & 0x7F) << (7 * i)
    return number


@njit(**OPTIONS)
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


@njit(**OPTIONS)
def write_header(p, head, sid, collection, row, table):
    """The columns that come from the header at ``p``."""
    store8(table[EVENT] + row, (head >> 48) & 0xFF)
    store8(table[DATATYPE] + row, (head >> 16) & 0xFF)
    store_le16(table[VBUCKET] + 2 * row, head & 0xFFFF)
    store_le16(table[STREAM_ID] + 2 * row, sid)
    store_le32(table[COLLECTION] + 4 * row, collection)
    store_le32(table[OPAQUE] + 4 * row, load_be32(p + 12))
    store_le64(table[CAS] + 8 * row, load_be64(p + 16))


@njit(**OPTIONS)
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


_DECODE = types.void(I64, I64, I64, I64, I64, TABLE, TABLE, TABLE, TABLE)


@njit(_DECODE, **OPTIONS)
def decode(base, end, safe, collections, limit, table, capacity, controls, state):
    """Decode from ``base + state[AT]`` until the input ends or something is full.

    ``safe``: the address up to which memory may be read. ``capacity``: rows, key bytes, value bytes. ``controls``
    gets (row, offset, size) of every frame that is left to the object reader.
    """
    at, row, keys, values = state[AT], state[ROWS], state[KEY_USED], state[VALUE_USED]
    noted, charged, reason = 0, 0, INCOMPLETE
    while end - at >= HEADER:
        p = base + at
        head = load_be64(p)
        size = HEADER + load_be32(p + 8)
        if not is_framed(head, size, limit):
            reason = BROKEN
            break
        if size > end - at:
            break
        op = (head >> 48) & 0xFF
        magic = (head >> 56) & 0xFF
        klen, framing, sid = (head >> 32) & 0xFFFF, 0, 0
        plain = (op == _MUTATION) | (op == _DELETION) | (op == _EXPIRATION)
        if magic != _REQUEST:
            framing, klen = klen >> 8, klen & 0xFF
            plain = plain and magic == _ALT_REQUEST and framing == _SID_SIZE and load8(p + HEADER) == _SID_HEAD
            sid = load_be16(p + HEADER + 1)
            plain = plain and sid != 0
        extlen = (head >> 24) & 0xFF
        extras = p + HEADER + framing
        key = extras + extlen
        datatype = (head >> 16) & 0xFF
        plain = plain and datatype < 8 and extras_are_plain(op, extlen, extras) and load_be64(extras) > 0
        plain = plain and (op == _MUTATION or (_TOMBSTONE_DATATYPES >> datatype) & 1)
        prefix, collection = 0, 0
        if plain and collections:
            prefix = prefix_size(key, klen)
            plain = prefix > 0
            collection = prefix_value(key, prefix)
        elif plain:
            plain = 1 <= klen <= 250
        if plain:
            value = key + klen
            vlen = p + size - value
            key, klen = key + prefix, klen - prefix
            if row >= capacity[0] or keys + klen > capacity[1] or values + vlen > capacity[2]:
                reason = FULL
                break
            write_header(p, head, sid, collection, row, table)
            write_extras(op, extlen, extras, row, table)
            copy_over(table[KEY] + keys, key, klen, safe)
            copy_over(table[VALUE] + values, value, vlen, safe)
            keys += klen
            values += vlen
            row += 1
            store_le32(table[KEY_AT] + 4 * row, keys)
            store_le32(table[VALUE_AT] + 4 * row, values)
            charged += size
        else:
            if CONTROL_WIDTH * noted >= controls.size:
                reason = CONTROLS_FULL
                break
            controls[CONTROL_WIDTH * noted] = row
            controls[CONTROL_WIDTH * noted + 1] = at
            controls[CONTROL_WIDTH * noted + 2] = size
            noted += 1
        at += size
    state[AT], state[ROWS], state[KEY_USED], state[VALUE_USED] = at, row, keys, values
    state[CONTROLS], state[BYTES], state[REASON] = noted, charged, reason
