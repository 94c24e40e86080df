"""Checks that the values of received rows are what their datatypes say: a numba kernel of ``bulk.row_checks``.

It accepts only the plain case. Any other row is left to ``values.check_value``, which knows every rule and its
error, so the two cannot disagree about what is legal.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from numba import njit, types

from upriver.wire.kernels.decode import DATATYPE, VALUE, VALUE_AT
from upriver.wire.kernels.intrinsics import I64, get8, get32, load8, load_be32, word
from upriver.wire.kernels.json import are_same, check_text
from upriver.wire.kernels.kernel import kernel
from upriver.wire.kernels.shape import pair_size
from upriver.wire.kernels.snappy import CALLED, claimed_size, inflate

_SNAPPY, _XATTR = 2, 4
_MOST_INFLATED = 30 << 20
_MOST_BYTES = 1 << 20  # of extended attributes
_LONGEST_NAME = 15
_PLAIN_PAIRS = 32  # few, because each name is compared with those before it


@njit(**CALLED)
def name_size(p):
    """The length of an attribute's name, or -1 if it is not plain: too long, or not ASCII."""
    n = 0
    while load8(p + n) != 0:
        if load8(p + n) >= 0x80 or n == _LONGEST_NAME:
            return -1
        n += 1
    return n


@njit(**CALLED)
def is_repeated(first, p, size):
    """Whether an attribute before the one at ``p`` has the same name."""
    while first < p:
        if name_size(first + 4) == size and are_same(first + 4, p + 4, size):
            return True
        first += 4 + load_be32(first)
    return False


@njit(**CALLED)
def are_plain(value, size, stack):
    """Whether a value begins with valid, plain extended attributes (docs/protocol/kv.md#xattrs)."""
    if size < 4 or load_be32(value) > size - 4 or load_be32(value) > _MOST_BYTES:
        return False
    first = p = value + 4
    end = first + load_be32(value)
    pairs = 0
    while p < end:
        pair, pairs = pair_size(p, end), pairs + 1
        if pair < 0 or pairs > _PLAIN_PAIRS:
            return False
        name = name_size(p + 4)
        if name < 0 or is_repeated(first, p, name):
            return False
        text = p + 4 + name + 1
        if check_text(text, p + pair - 1 - text, stack) < 0:
            return False
        p += pair
    return True


@kernel(types.int64(I64, I64, I64, I64, I64, I64))
def first_odd(first, last, table, scratch, scratch_size, stack):
    """The first row from ``first`` on whose value may not be what its datatype says, or ``last``."""
    for row in range(first, last):
        datatype = get8(table, DATATYPE, row)
        if datatype & (_SNAPPY | _XATTR):
            at = get32(table, VALUE_AT, row)
            value, size = word(table, VALUE) + at, get32(table, VALUE_AT, row + 1) - at
            if datatype & _SNAPPY:
                claimed = claimed_size(value, size)
                if claimed < 0 or claimed > _MOST_INFLATED:
                    return row
                target = scratch if datatype & _XATTR else 0
                if (target and claimed > scratch_size) or not inflate(value, size, target, claimed):
                    return row
                value, size = target, claimed
            if datatype & _XATTR and not are_plain(value, size, stack):
                return row
    return last
