"""Encodes packed records as frames, and columns as packed records: the kernels of ``bulk.encode`` and ``bulk.live``.

Every frame of a document message is written by ``put_head`` and ``put_extras``.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from numba import njit, types

from upriver.wire import packed
from upriver.wire.kernels import decode as k
from upriver.wire.kernels.intrinsics import (
    ARRAY,
    I64,
    get8,
    get32,
    get64,
    load8,
    load_le16,
    load_le32,
    load_le64,
    store8,
    store_be16,
    store_be32,
    store_be64,
    store_le16,
    store_le32,
    store_le64,
    word,
)  # fmt: skip
from upriver.wire.kernels.kernel import INLINE, kernel

# What a stream asked for, as bits of ``word(plan, BITS)``.
COLLECTIONS, DELETE_TIMES, EXPIRY_OPCODE, UPR, NO_VALUE = (1 << n for n in range(5))
KEEP_DATATYPE, SKIP_DELETES, FILTER, HIFI_MFU, PLAIN_COMMITS = (1 << n for n in range(5, 10))
# The slots of ``plan``.
BITS, P_OPAQUE, P_VBUCKET, P_SID, STOP_DATATYPES, FILTER_IDS, FILTER_COUNT, AFTER, UPTO, BUDGET = range(10)
# The slots of ``state``.
OFFSET, WRITTEN, RECORDS, LAST, SCANNED, REASON, INVISIBLE = range(7)
# Why an encoder stopped.
END, FULL, WINDOW, PAST, SPECIAL, CORRUPT = range(6)

_HEADER = 24
_MUTATION, _DELETION, _EXPIRATION = 0x57, 0x58, 0x59
_MARKER, _SEQNO_ADVANCED = 0x56, 0x64
_MARKER_FRAME, _REPLICA_MARKER_FRAME, _ADVANCED_FRAME = 44, 61, 32
_AT_SIZE, _AT_KIND, _AT_DATATYPE, _AT_KEY_LEN = packed.AT_SIZE, packed.AT_KIND, packed.AT_DATATYPE, packed.AT_KEY_LEN
_AT_SEQNO, _AT_REV, _AT_CAS = packed.AT_SEQNO, packed.AT_REV, packed.AT_CAS
_AT_FLAGS, _AT_TIME, _AT_PREV = packed.AT_FLAGS, packed.AT_TIME, packed.AT_PREV
_AT_VALUE_LEN, _AT_COLLECTION, _AT_EXTRA = packed.AT_VALUE_LEN, packed.AT_COLLECTION, packed.AT_EXTRA
_RECORD = packed.HEADER_SIZE
_SUPERSEDED = packed.SUPERSEDED
_KIND_MASK = 0x7F
_LAST_DOCUMENT_KIND = int(packed.RecordKind.EXPIRATION)
_SYSTEM_EVENT, _COMMIT = int(packed.RecordKind.SYSTEM_EVENT), int(packed.RecordKind.COMMIT)
UNSEEN = -1  # a prepare or an abort, for a reader that sees only commits


@njit(**INLINE)
def opcode_of(kind, bits):
    """The opcode for a record; an expiration is sent as a deletion unless the peer asked for expirations.

    See docs/protocol/messages.md#expiration.
    """
    if kind == 0:
        return _MUTATION
    return _EXPIRATION if kind == 2 and bits & EXPIRY_OPCODE else _DELETION


@njit(**INLINE)
def extras_size(op, bits):
    """The extras length of a document message in the dialect and version that the stream asked for.

    See docs/protocol/messages.md and docs/protocol/upr.md#differences.
    """
    if op == _MUTATION:
        return 30 if bits & UPR else 31
    if bits & UPR:
        return 18
    if op == _EXPIRATION:
        return 20
    return 21 if bits & DELETE_TIMES else 18


@njit(**INLINE)
def put_head(o, op, klen, extlen, datatype, vbucket, vlen, opaque, cas, sid):
    """Write header and stream-id; returns where the extras go."""
    common = op << 48 | extlen << 24 | datatype << 16 | vbucket
    framing = 3 if sid else 0
    if sid:
        store_be64(o, 0x08 << 56 | common | (3 << 8 | klen) << 32)
        store8(o + _HEADER, 0x22)
        store_be16(o + _HEADER + 1, sid)
    else:
        store_be64(o, common | klen << 32)
        store8(o, 0x80)
    store_be32(o + 8, framing + extlen + klen + vlen)
    store_be32(o + 12, opaque)
    store_be64(o + 16, cas)
    return o + _HEADER + framing


@njit(**INLINE)
def put_extras(o, op, extlen, seqno, rev, flags, time, lock_time, nru):
    """Write the extras; ``time`` is the expiry of a mutation and the deletion time of a tombstone."""
    store_be64(o, seqno)
    store_be64(o + 8, rev)
    if op == _MUTATION:
        store_be32(o + 16, flags)
        store_be32(o + 20, time)
        store_be32(o + 24, lock_time)
        store_be16(o + 28, 0)
        if extlen == 31:
            store8(o + 30, nru)
    elif extlen == 18:
        store_be16(o + 16, 0)
    else:
        store_be32(o + 16, time)
        if extlen == 21:
            store8(o + 20, 0)
    return o + extlen


@njit(**INLINE)
def is_in(sorted_ids, count, wanted):
    """Whether ``wanted`` is in the table at ``sorted_ids``, by binary search."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if word(sorted_ids, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low < count and word(sorted_ids, low) == wanted


@njit(**INLINE)
def is_wanted(kind, collection, plan):
    """Whether a stream with these options is sent documents of this kind and collection."""
    bits = word(plan, BITS)
    if kind and bits & SKIP_DELETES:
        return False
    if not bits & COLLECTIONS:
        return collection == 0
    return not bits & FILTER or is_in(word(plan, FILTER_IDS), word(plan, FILTER_COUNT), collection)


@njit(**INLINE)
def is_whole(r, left):
    """Whether the record at ``r`` ends within the ``left`` bytes of its run and its lengths add up."""
    if left < _RECORD:
        return False
    size = load_le32(r + _AT_SIZE)
    return size <= left and size == _RECORD + load_le16(r + _AT_KEY_LEN) + load_le32(r + _AT_VALUE_LEN)


@njit(**INLINE)
def plain_kind(kind, r, bits):
    """The kind that the record at ``r`` has for a reader without sync writes: a commit is the document that it made.

    See docs/protocol/snapshots.md#seqnos.
    """
    if kind <= _SYSTEM_EVENT or not bits & PLAIN_COMMITS:
        return kind
    if kind == _COMMIT:
        return 1 if load_le64(r + _AT_EXTRA) < 0 else 0
    return UNSEEN


@njit(**INLINE)
def put_record(o, r, op, extlen, strip, vlen, datatype, plan, safe):
    """Write one packed record as a frame."""
    klen = load_le16(r + _AT_KEY_LEN) - strip
    extras = put_head(
        o, op, klen, extlen, datatype, word(plan, P_VBUCKET), vlen, word(plan, P_OPAQUE),
        load_le64(r + _AT_CAS), word(plan, P_SID),
    )  # fmt: skip
    nru = load8(r + _AT_EXTRA) if load8(r + _AT_KIND) == 0 else 0
    if nru > 3 and not word(plan, BITS) & HIFI_MFU:
        nru = 3
    key = put_extras(
        extras, op, extlen, load_le64(r + _AT_SEQNO), load_le64(r + _AT_REV),
        load_le32(r + _AT_FLAGS), load_le32(r + _AT_TIME), 0, nru,
    )  # fmt: skip
    source = r + _RECORD + strip
    k.copy_over(key, source, klen, safe)
    k.copy_over(key + klen, source + klen, vlen, safe)


@njit(**INLINE)
def encode_run(base, size, out, room, plan, state):
    """Write the records from ``base + state[OFFSET]`` on as frames at ``out + state[WRITTEN]``, in ``room`` bytes."""
    bits, safe = word(plan, BITS), base + size
    at, written, records, reason = state[OFFSET], state[WRITTEN], 0, END
    strip = 0 if bits & COLLECTIONS else 1
    framing = 3 if word(plan, P_SID) else 0
    budget = word(plan, BUDGET)
    while at < size:
        r = base + at
        if not is_whole(r, size - at):
            reason = CORRUPT
            break
        seqno, kind = load_le64(r + _AT_SEQNO), load8(r + _AT_KIND)
        if seqno > word(plan, UPTO):
            reason = PAST
            break
        step = load_le32(r + _AT_SIZE)
        if kind < _SUPERSEDED and seqno > word(plan, AFTER):
            datatype = load8(r + _AT_DATATYPE)
            if kind > _LAST_DOCUMENT_KIND:
                kind = plain_kind(kind, r, bits)
                if kind > _LAST_DOCUMENT_KIND:
                    reason = SPECIAL
                    break
            if kind == UNSEEN:
                if is_wanted(0, load_le32(r + _AT_COLLECTION), plan):
                    state[INVISIBLE] = seqno
            elif is_wanted(kind, load_le32(r + _AT_COLLECTION), plan):
                klen, vlen = load_le16(r + _AT_KEY_LEN), load_le32(r + _AT_VALUE_LEN)
                if datatype & word(plan, STOP_DATATYPES) or klen <= strip or (framing and klen - strip > 255):
                    reason = SPECIAL
                    break
                if bits & NO_VALUE:
                    vlen = 0
                    datatype = datatype if bits & KEEP_DATATYPE else 0
                op = opcode_of(kind, bits)
                extlen = extras_size(op, bits)
                frame = _HEADER + framing + extlen + klen - strip + vlen
                if budget <= 0 or written + frame > room:
                    reason = WINDOW if budget <= 0 else FULL
                    break
                put_record(out + written, r, op, extlen, strip, vlen, datatype, plan, safe)
                written += frame
                budget -= frame
                records += 1
                state[LAST] = seqno
        state[SCANNED] = seqno
        at += step
    state[OFFSET], state[WRITTEN], state[RECORDS], state[REASON] = at, written, records, reason


@kernel(types.void(I64, I64, I64, I64, I64, ARRAY))
def encode_packed(base, size, out, room, plan, state):
    """``encode_run`` for Python; the caller fills ``plan`` and ``state``."""
    encode_run(base, size, out, room, plan, state)


@njit(**INLINE)
def first_live(base, size, after):
    """The first seqno above ``after`` that is not superseded, or 0."""
    at = 0
    while at < size:
        if load_le64(base + at + _AT_SEQNO) > after and load8(base + at + _AT_KIND) < _SUPERSEDED:
            return load_le64(base + at + _AT_SEQNO)
        at += load_le32(base + at + _AT_SIZE)
    return 0


@njit(**INLINE)
def put_snapshot(base, size, out, written, room, plan, after, upto, budget, start, end, flags, replica, state):
    """Write a whole small snapshot: its marker (version 2.0 for a replica, else 1) and the frames of its records.

    ``start`` 0 stands for the first record's seqno, ``end`` 0 for the last seqno sent. If another ``end`` is not the
    last seqno sent, a SEQNO_ADVANCED follows. Writes all or nothing; returns (written, records, last seqno sent,
    reason).
    """
    marker = _REPLICA_MARKER_FRAME if replica else _MARKER_FRAME
    store_le64(plan + 8 * AFTER, after)
    store_le64(plan + 8 * UPTO, upto)
    store_le64(plan + 8 * BUDGET, budget - marker)
    state[OFFSET], state[WRITTEN], state[LAST], state[INVISIBLE] = 0, written + marker, 0, 0
    encode_run(base, size, out, room - _ADVANCED_FRAME, plan, state)
    last, done = state[LAST], state[WRITTEN]
    if state[REASON] != END or not last:
        return written, 0, 0, SPECIAL if state[INVISIBLE] else min(state[REASON], SPECIAL)
    if end and end != last:
        if budget <= done - written:
            return written, 0, 0, WINDOW  # the documents use up the window, so the SEQNO_ADVANCED would have to wait
        put_head(out + done, _SEQNO_ADVANCED, 0, 8, 0, word(plan, P_VBUCKET), 0, word(plan, P_OPAQUE), 0, 0)
        store_be64(out + done + _HEADER, end)
        done += _ADVANCED_FRAME
    end = end if end else last
    start = start if start else first_live(base, size, after)
    if replica:
        o = 1 + put_head(out + written, _MARKER, 0, 1, 0, word(plan, P_VBUCKET), 36, word(plan, P_OPAQUE), 0, 0)
        store8(o - 1, 0)
        store_be64(o + 20, upto)  # everything is visible: a snapshot with a prepare is not written here
        store_be64(o + 28, 0)
    else:
        o = put_head(out + written, _MARKER, 0, 20, 0, word(plan, P_VBUCKET), 0, word(plan, P_OPAQUE), 0, 0)
    store_be64(o, start if start < end else end)
    store_be64(o + 8, end)
    store_be32(o + 16, flags)
    return done, state[RECORDS], last, END


# The columns of the two tables of ``encode_followed``: new snapshots by row, and live streams by vbucket.
N_VBUCKET, N_FIRST, N_LAST, N_START, N_FLAGS, N_ADDRESS, N_SIZE, N_WIDTH = range(8)
F_PLAN, F_SWITCHES, F_END, F_RECORDS, F_SENT, F_ADVANCED, F_WIDTH = range(7)
F_CAN_ADVANCE, F_FILTERED, F_REPLICA = 1, 2, 4
# Outcomes of a row: no live stream; sent; sent, and the stream has reached its end; the stream must send it itself.
NOBODY, SERVED, FINISHED, LEFT_OUT = range(4)


@kernel(types.UniTuple(I64, 3)(ARRAY, I64, I64, ARRAY, I64, I64, I64, I64, ARRAY, ARRAY), nogil=False)
def encode_followed(news, row, rows, followers, out, written, room, budget, outcomes, state):
    """Write snapshots ``row`` to ``rows`` of ``news`` for the live streams, until the buffer or the window is full.

    Returns (the row to continue at, written, documents).
    """
    records = 0
    while row < rows:
        new = row * N_WIDTH
        at = news[new + N_VBUCKET] * F_WIDTH
        outcomes[row] = NOBODY
        if followers[at + F_PLAN]:
            if budget <= 0:
                break
            switches, last = followers[at + F_SWITCHES], news[new + N_LAST]
            end = last if switches & F_CAN_ADVANCE else 0
            done, count, sent, reason = put_snapshot(
                news[new + N_ADDRESS], news[new + N_SIZE], out, written, room, followers[at + F_PLAN],
                news[new + N_FIRST] - 1, last, budget, news[new + N_START], end, news[new + N_FLAGS],
                switches & F_REPLICA, state,
            )  # fmt: skip
            if reason == FULL and written:
                break
            if reason != END or (end and not count and not switches & F_FILTERED):
                outcomes[row] = LEFT_OUT
            else:
                outcomes[row] = SERVED if last < followers[at + F_END] else FINISHED
                budget -= done - written
                written = done
                records += count
                if count:
                    followers[at + F_RECORDS] += count
                    followers[at + F_SENT] = sent
                    if end and sent != last:
                        followers[at + F_ADVANCED] = last
        row += 1
    return row, written, records


@njit(**INLINE)
def put_prefix(o, collection):
    """Write a collection id in LEB128; returns its size."""
    n = 0
    while collection >= 0x80:
        store8(o + n, collection & 0x7F | 0x80)
        collection >>= 7
        n += 1
    store8(o + n, collection)
    return n + 1


@njit(**INLINE)
def prefix_length(collection):
    n = 1
    while collection >= 0x80:
        collection >>= 7
        n += 1
    return n


@kernel(types.void(I64, I64, I64, I64, I64, I64, ARRAY))
def pack_columns(rows, count, out, room, table, starts, state):
    """Write the rows in ``rows`` as packed records from ``out + state[WRITTEN]`` on; ``starts`` gets their offsets."""
    written, n, reason = state[WRITTEN], 0, END
    while n < count:
        row = word(rows, n)
        kind = get8(table, k.EVENT, row) - _MUTATION
        key, value = get32(table, k.KEY_AT, row), get32(table, k.VALUE_AT, row)
        klen, vlen = get32(table, k.KEY_AT, row + 1) - key, get32(table, k.VALUE_AT, row + 1) - value
        collection = get32(table, k.COLLECTION, row)
        prefix = prefix_length(collection)
        size = _RECORD + prefix + klen + vlen
        if written + size > room:
            reason = FULL
            break
        r = out + written
        store_le32(r + _AT_SIZE, size)
        store8(r + _AT_KIND, kind)
        store8(r + _AT_DATATYPE, get8(table, k.DATATYPE, row))
        store_le16(r + _AT_KEY_LEN, prefix + klen)
        store_le64(r + _AT_SEQNO, get64(table, k.SEQNO, row))
        store_le64(r + _AT_REV, get64(table, k.REV, row))
        store_le64(r + _AT_CAS, get64(table, k.CAS, row))
        store_le32(r + _AT_FLAGS, get32(table, k.FLAGS, row))
        store_le32(r + _AT_TIME, get32(table, k.DELETE_TIME if kind else k.EXPIRY, row))
        store_le64(r + _AT_PREV, 0)
        store_le32(r + _AT_VALUE_LEN, vlen)
        store_le32(r + _AT_COLLECTION, collection)
        store_le64(r + _AT_EXTRA, get8(table, k.NRU, row))
        put_prefix(r + _RECORD, collection)
        k.copy_over(r + _RECORD + prefix, word(table, k.KEY) + key, klen, word(table, k.KEY_SAFE))
        k.copy_over(r + _RECORD + prefix + klen, word(table, k.VALUE) + value, vlen, word(table, k.VALUE_SAFE))
        store_le64(starts + 8 * n, written)
        written += size
        n += 1
    state[OFFSET], state[WRITTEN], state[RECORDS], state[REASON] = n, written, n, reason
