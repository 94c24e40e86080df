"""Changes the values of packed records for a stream: the numba kernel of ``bulk.shape``.

It does what OPEN and CONTROL ask for (docs/protocol/open.md#values): leaves out bodies and extended attributes,
inflates values for a reader that cannot, and compresses values for a reader that wants that. The result is packed
records again, so that one encoder makes all frames.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from numba import njit, types

from upriver.wire import packed
from upriver.wire.kernels.encode import BITS as FRAME_BITS
from upriver.wire.kernels.encode import UNSEEN, is_wanted, is_whole, plain_kind
from upriver.wire.kernels.intrinsics import (
    ARRAY,
    I64,
    copy,
    load8,
    load_be32,
    load_le16,
    load_le32,
    load_le64,
    store8,
    store_be32,
    store_le32,
    store_le64,
    word,
)
from upriver.wire.kernels.kernel import kernel
from upriver.wire.kernels.snappy import CALLED, claimed_size, deflate, inflate, most_deflated

# What the stream asked for, as bits of ``word(plan, BITS)``.
XATTRS, DELETED_USER_XATTRS, NO_BODY, FORCE, KEEP_DATATYPE, SNAPPY_READER = (1 << n for n in range(6))
# The slots of ``plan``; FRAMES is the address of the encoder's plan, which has the filter.
BITS, STOP_DATATYPES, AFTER, UPTO, LIMIT, TABLE, SCRATCH, SCRATCH_SIZE, FRAMES = range(9)
# The slots of ``state``; NEEDED is the size that output and scratch must have for the record at OFFSET.
OFFSET, WRITTEN, SCANNED, REASON, NEEDED, INVISIBLE = range(6)
# Why the kernel stopped.
END, ENOUGH, PAST, SPECIAL, TOO_SMALL, CORRUPT = range(6)

_JSON, _SNAPPY, _XATTR = 1, 2, 4
_RECORD = packed.HEADER_SIZE
_MOST_INFLATED = 30 << 20
_LEAST_WORTH_COMPRESSING = 32
_UNDERSCORE = 0x5F
_SOUND, _SMALL, _BROKEN = 0, -1, -2
# The slots of ``work``, which describe a value while it is changed.
_AT, _SIZE, _DATATYPE, _USED = range(4)


@njit(**CALLED)
def pair_size(p, end):
    """The size of the attribute at ``p`` with its length field, or -1 unless it is two strings that end in zero bytes.

    See docs/protocol/kv.md#xattrs.
    """
    if end - p < 4:
        return -1
    size = load_be32(p)
    if size < 3 or size > end - p - 4 or load8(p + 3 + size) != 0 or load8(p + 4) == 0:
        return -1
    at = p + 5
    last = p + 3 + size
    while at < last and load8(at) != 0:
        at += 1
    return size + 4 if at < last else -1


@njit(**CALLED)
def are_sound(p, end):
    """Whether the section consists of whole attributes."""
    while p < end:
        size = pair_size(p, end)
        if size < 0:
            return False
        p += size
    return True


@njit(**CALLED)
def keep_system(p, end, target):
    """Write the attributes whose names begin with an underscore to ``target``; returns their size, 0 if none."""
    o = target + 4
    while p < end:
        size = load_be32(p) + 4
        if load8(p + 4) == _UNDERSCORE:
            copy(o, p, size)
            o += size
        p += size
    store_be32(target, o - target - 4)
    return o - target if o > target + 4 else 0


@njit(**CALLED)
def strip(gone, plan, work):
    """Inflate the value and leave out what the stream does not want, as ``producer.frames`` does in Python."""
    bits, datatype = word(plan, BITS), work[_DATATYPE]
    if datatype & _SNAPPY:
        claimed = claimed_size(work[_AT], work[_SIZE])
        if claimed < 0 or claimed > _MOST_INFLATED:
            return _BROKEN
        work[_USED] = 2 * claimed + 64
        if work[_USED] > word(plan, SCRATCH_SIZE):
            return _SMALL
        if not inflate(work[_AT], work[_SIZE], word(plan, SCRATCH), claimed):
            return _BROKEN
        work[_AT], work[_SIZE] = word(plan, SCRATCH), claimed
    section = 0
    if datatype & _XATTR:
        if work[_SIZE] < 4 or load_be32(work[_AT]) > work[_SIZE] - 4:
            return _BROKEN
        section = 4 + load_be32(work[_AT])
        if not are_sound(work[_AT] + 4, work[_AT] + section):
            return _BROKEN
    body = 0 if gone or bits & NO_BODY else work[_SIZE] - section
    kept = datatype & _JSON if body else 0
    if section <= 4 or not bits & XATTRS:
        work[_AT], work[_SIZE], work[_DATATYPE] = work[_AT] + section, body, kept
        return _SOUND
    if gone and not bits & DELETED_USER_XATTRS:
        if work[_USED] == 0:
            work[_USED] = section + 64
            if work[_USED] > word(plan, SCRATCH_SIZE):
                return _SMALL
        target = word(plan, SCRATCH) + work[_USED] - section - 64
        section = keep_system(work[_AT] + 4, work[_AT] + section, target)
        work[_AT] = target
    work[_SIZE], work[_DATATYPE] = section + body, kept | (_XATTR if section else 0)
    return _SOUND


@njit(**CALLED)
def shape_record(r, gone, at, o, room, plan, work, state):
    """Write the record at ``r`` with its new value to ``o``, and ``at`` into it; returns its size, or why it cannot."""
    bits, klen, original = word(plan, BITS), load_le16(r + packed.AT_KEY_LEN), load8(r + packed.AT_DATATYPE)
    value = o + _RECORD + klen
    work[_AT], work[_SIZE] = r + _RECORD + klen, load_le32(r + packed.AT_VALUE_LEN)
    work[_DATATYPE], work[_USED] = original, 0
    if original & word(plan, STOP_DATATYPES) or bits & NO_BODY:
        outcome = strip(gone, plan, work)
        if outcome != _SOUND:
            state[NEEDED] = work[_USED]
            return outcome
    size, datatype = work[_SIZE], work[_DATATYPE] if work[_SIZE] else 0
    worth = bits & FORCE and size >= _LEAST_WORTH_COMPRESSING and not datatype & _SNAPPY
    state[NEEDED] = _RECORD + klen + (most_deflated(size) if worth else size)
    if state[NEEDED] > room:
        return _SMALL
    copy(o, r, _RECORD + klen)
    smaller = deflate(work[_AT], size, value, word(plan, TABLE)) if worth else size
    if smaller < size:
        size, datatype = smaller, datatype | _SNAPPY
    else:
        copy(value, work[_AT], size)
    if bits & KEEP_DATATYPE:
        datatype = original if bits & SNAPPY_READER else original & ~_SNAPPY
    store_le32(o + packed.AT_SIZE, _RECORD + klen + size)
    store8(o + packed.AT_DATATYPE, datatype)
    store_le32(o + packed.AT_VALUE_LEN, size)
    store_le64(o + packed.AT_PREV, at)  # where the record came from; encoders do not use this field
    return _RECORD + klen + size


@kernel(types.void(I64, I64, I64, I64, I64, ARRAY, ARRAY))
def shape_run(base, size, out, room, plan, work, state):
    """Write the stream's documents from ``base + state[OFFSET]`` on to ``out``, up to about LIMIT bytes."""
    at, written, reason = state[OFFSET], 0, END
    frames = word(plan, FRAMES)
    while at < size:
        r = base + at
        if not is_whole(r, size - at):
            reason = CORRUPT
            break
        if load_le64(r + packed.AT_SEQNO) > word(plan, UPTO):
            reason = PAST
            break
        kind = load8(r + packed.AT_KIND)
        if kind < packed.SUPERSEDED and load_le64(r + packed.AT_SEQNO) > word(plan, AFTER):
            kind = plain_kind(kind, r, word(frames, FRAME_BITS))
            if kind > packed.RecordKind.EXPIRATION:
                reason = SPECIAL
                break
            if is_wanted(max(kind, 0), load_le32(r + packed.AT_COLLECTION), frames):
                if kind == UNSEEN:
                    state[INVISIBLE] = load_le64(r + packed.AT_SEQNO)
                elif written >= word(plan, LIMIT):
                    reason = ENOUGH
                    break
                else:
                    made = shape_record(r, kind != 0, at, out + written, room - written, plan, work, state)
                    if made < 0:
                        reason = SPECIAL if made == _BROKEN else (ENOUGH if written else TOO_SMALL)
                        break
                    written += made
        state[SCANNED] = load_le64(r + packed.AT_SEQNO)
        at += load_le32(r + packed.AT_SIZE)
    state[OFFSET], state[WRITTEN], state[REASON] = at, written, reason
