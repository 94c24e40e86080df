"""Raw snappy for kernels: compresses and inflates from one address to another, without Python objects.

``cramjam`` handles one value per call, with two objects each; for small documents the calls cost more than the
compression. Both functions trust their addresses and lengths, but not the compressed bytes.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from numba import njit

from upriver.wire.kernels.intrinsics import (
    copy,
    load8,
    load_le16,
    load_le32,
    load_le64,
    store8,
    store_le16,
    store_le64,
)
from upriver.wire.kernels.kernel import INLINE

CALLED = {**INLINE, "forceinline": False}  # large, and used in several places
TABLE_BYTES = 1 << 15  # of 16-bit positions; the most that a block of 64 KiB needs
_BLOCK = 1 << 16
_MARGIN = 15  # bytes at a block's end without a search for matches, so that loads need no check
_MULTIPLIER = 0x1E35A7BD
_LITERAL, _COPY1, _COPY2 = 0, 1, 2
_SLOWEST_SKIP = 32


@njit(**INLINE)
def most_deflated(size):
    """The largest compressed size of ``size`` bytes."""
    return 32 + size + size // 6


@njit(**INLINE)
def put_literal(o, source, size):
    n = size - 1
    if n < 60:
        store8(o, n << 2 | _LITERAL)
        o += 1
    elif n < 256:
        store8(o, 60 << 2 | _LITERAL)
        store8(o + 1, n)
        o += 2
    else:
        store8(o, 61 << 2 | _LITERAL)
        store_le16(o + 1, n)
        o += 3
    copy(o, source, size)
    return o + size


@njit(**INLINE)
def put_copy2(o, offset, size):
    store8(o, (size - 1) << 2 | _COPY2)
    store_le16(o + 1, offset)
    return o + 3


@njit(**INLINE)
def put_copy(o, offset, size):
    while size >= 68:
        o = put_copy2(o, offset, 64)
        size -= 64
    if size > 64:
        o = put_copy2(o, offset, 60)
        size -= 60
    if size >= 12 or offset >= 2048:
        return put_copy2(o, offset, size)
    store8(o, (offset >> 8) << 5 | (size - 4) << 2 | _COPY1)
    store8(o + 1, offset & 0xFF)
    return o + 2


@njit(**INLINE)
def hash_at(p, shift):
    return (load_le32(p) * _MULTIPLIER & 0xFFFFFFFF) >> shift


@njit(**INLINE)
def match_length(p, q, most):
    """How many bytes at ``p`` and ``q`` are equal, up to ``most``."""
    n = 0
    while n + 8 <= most and load_le64(p + n) == load_le64(q + n):
        n += 8
    while n < most and load8(p + n) == load8(q + n):
        n += 1
    return n


@njit(**INLINE)
def clear_table(table, size):
    """Clear a table for ``size`` bytes of input; returns by how much to shift a hash."""
    bits = 8
    while bits < 14 and 1 << bits < size:
        bits += 1
    for at in range(0, 2 << bits, 8):
        store_le64(table + at, 0)
    return 32 - bits


@njit(**CALLED)
def deflate_block(source, size, o, table):
    at, told = 1, 0
    if size > _MARGIN:
        shift, limit, skip = clear_table(table, size), size - _MARGIN, _SLOWEST_SKIP
        while at < limit:
            slot = table + 2 * hash_at(source + at, shift)
            candidate = load_le16(slot)
            store_le16(slot, at)
            if candidate < at and load_le32(source + candidate) == load_le32(source + at):
                if at > told:
                    o = put_literal(o, source + told, at - told)
                size_here = 4 + match_length(source + candidate + 4, source + at + 4, size - at - 4)
                o = put_copy(o, at - candidate, size_here)
                at += size_here
                told, skip = at, _SLOWEST_SKIP
                if at < limit:
                    store_le16(table + 2 * hash_at(source + at - 1, shift), at - 1)
            else:
                at += skip >> 5  # the longer no match is found, the fewer positions are tried
                skip += 1
    if told < size:
        o = put_literal(o, source + told, size - told)
    return o


@njit(**CALLED)
def deflate(source, size, target, table):
    """Compress; returns the size. ``target`` has room for ``most_deflated``, ``table`` has ``TABLE_BYTES``."""
    o, left = target, size
    while left >= 0x80:
        store8(o, left & 0x7F | 0x80)
        left >>= 7
        o += 1
    store8(o, left)
    o += 1
    at = 0
    while at < size:
        part = min(_BLOCK, size - at)
        o = deflate_block(source + at, part, o, table)
        at += part
    return o - target


@njit(**CALLED)
def claimed_size(source, size):
    """The inflated size that a compressed value claims, or -1 if its preamble is broken."""
    claimed = 0
    for n in range(min(5, size)):
        byte = load8(source + n)
        claimed |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            return claimed
    return -1


@njit(**INLINE)
def repeat(target, offset, size):
    """Copy from ``offset`` bytes back; source and target may overlap."""
    n = 0
    if offset >= 8:
        while n + 8 <= size:
            store_le64(target + n, load_le64(target + n - offset))
            n += 8
    while n < size:
        store8(target + n, load8(target + n - offset))
        n += 1


@njit(**CALLED)
def inflate(source, size, target, claimed):
    """Inflate into ``claimed`` bytes at ``target``; returns whether the value is valid. Target 0: only check."""
    p, end = source, source + size
    while load8(p) >= 0x80:
        p += 1
    p += 1
    o, done = target, target + claimed
    while p < end:
        tag = load8(p)
        p += 1
        kind, n, offset = tag & 3, (tag >> 2) + 1, 0
        more = n - 60 if kind == 0 and n > 60 else (0, 1, 2, 4)[kind]
        if end - p < more:
            return False
        if kind == 0:
            if more:
                n = 1
                for byte in range(more):
                    n += load8(p + byte) << 8 * byte
        elif kind == 1:
            n, offset = ((tag >> 2) & 7) + 4, (tag >> 5) << 8 | load8(p)
        elif kind == 2:
            offset = load_le16(p)
        else:
            offset = load_le32(p)
        p += more
        if done - o < n:
            return False
        if kind == 0:
            if end - p < n:
                return False
            if target:
                copy(o, p, n)
            p += n
        else:
            if offset == 0 or offset > o - target:
                return False
            if target:
                repeat(o, offset, n)
        o += n
    return o == done
