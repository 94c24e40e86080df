"""The numba kernel of ``bulk.scan``: reads headers, and only the seqnos of bodies."""

from __future__ import annotations

from numba import njit, types

from upriver.wire.kernels.intrinsics import ARRAY, I64, load8, load_be16, load_be32, load_be64
from upriver.wire.kernels.kernel import INLINE, kernel

_HEADER = 24
_NOTHING, _FRAME, _BROKEN = 0, 1, 2


@njit(**INLINE)
def _seqno_at(opcode, extras):
    """The address of a message's seqno, or 0 if it has none."""
    if opcode in (0x57, 0x58, 0x59, 0x5F, 0x60, 0x64):
        return extras
    if opcode in (0x62, 0x63):
        return extras + 8
    return 0


@kernel(types.void(I64, I64, I64, I64, ARRAY, ARRAY))
def scan(address, end, limit, own, seqnos, state):
    at = state[0]
    state[1] = _NOTHING
    while end - at >= _HEADER:
        p = address + at
        magic, opcode = load8(p), load8(p + 1)
        flexible = magic == 0x08 or magic == 0x18
        framing = load8(p + 2) if flexible else 0
        key = load8(p + 3) if flexible else load_be16(p + 2)
        body = load_be32(p + 8)
        known = flexible or 0x80 <= magic <= 0x83
        if not known or _HEADER + body > limit or framing + load8(p + 4) + key > body:
            state[1] = _BROKEN
            break
        if end - at < _HEADER + body:
            break
        response = magic == 0x81 or magic == 0x18 or magic == 0x83
        if (response and load_be32(p + 12) >= own) or (not response and (opcode == 0x55 or opcode == 0x5B)):
            state[1] = _FRAME
            break
        where = _seqno_at(opcode, p + _HEADER + framing) if not response and load8(p + 4) >= 8 else 0
        if where:
            seqnos[load_be16(p + 6)] = load_be64(where)
        at += _HEADER + body
    state[0] = at
