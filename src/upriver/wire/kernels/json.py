"""Checks and searches JSON texts without making objects: whether a text is JSON, its depth, and where a member is.

A parser that makes objects takes seconds for a document of 20 MB and holds the interpreter lock meanwhile; these
kernels take milliseconds and release the lock. ``check`` is strict (RFC 8259, UTF-8, no lone surrogates); the other
kernels rely on a text that has passed it.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from numba import njit, types

from upriver.wire.kernels.intrinsics import ARRAY, I64, load8, load_be16, load_be32, load_le64, store8
from upriver.wire.kernels.kernel import INLINE, kernel

CALLED = {**INLINE, "forceinline": False}
INVALID, UNSURE = -1, -2  # unsure: a number or a depth at the limits of what parsers accept
MOST_LEVELS = 1000
_MOST_DIGITS = 300
# What may come next.
_VALUE, _VALUE_OR_END, _NAME, _NAME_OR_END, _COMMA_OR_END = range(5)
_QUOTE, _BACKSLASH, _COMMA, _COLON, _MINUS, _POINT = 0x22, 0x5C, 0x2C, 0x3A, 0x2D, 0x2E
_ARRAY, _ARRAY_END, _OBJECT, _OBJECT_END = 0x5B, 0x5D, 0x7B, 0x7D
_ESCAPES = tuple(b'"\\/bfnrt')
_ONES, _TOPS = 0x0101010101010101, -0x7F7F7F7F7F7F7F80


@njit(**INLINE)
def is_space(c):
    return c == 0x20 or c == 0x0A or c == 0x0D or c == 0x09


@njit(**INLINE)
def skip_space(p, end):
    while p < end and is_space(load8(p)):
        p += 1
    return p


@njit(**INLINE)
def is_plain(word):
    """Whether eight bytes are all ASCII without quotes, backslashes and control characters."""
    quotes, slashes = word ^ (_ONES * _QUOTE), word ^ (_ONES * _BACKSLASH)
    odd = (word - _ONES * 0x20) | (quotes - _ONES) & ~quotes | (slashes - _ONES) & ~slashes | word
    return odd & _TOPS == 0


@njit(**INLINE)
def is_digit(c):
    return 0x30 <= c <= 0x39


@njit(**CALLED)
def hex4(p, end):
    """The number in four hexadecimal digits, or -1."""
    if end - p < 4:
        return -1
    number = 0
    for at in range(4):
        c = load8(p + at)
        if is_digit(c):
            number = number << 4 | c - 0x30
        elif 0x61 <= c | 0x20 <= 0x66:
            number = number << 4 | (c | 0x20) - 0x57
        else:
            return -1
    return number


@njit(**CALLED)
def skip_escape(p, end):
    """The end of the escape sequence whose backslash is at ``p``, or -1."""
    if end - p < 2:
        return -1
    c = load8(p + 1)
    if c != 0x75:
        return p + 2 if c in _ESCAPES else -1
    unit = hex4(p + 2, end)
    if unit < 0 or 0xDC00 <= unit <= 0xDFFF:
        return -1
    if 0xD800 <= unit <= 0xDBFF:
        if end - p < 12 or load_be16(p + 6) != 0x5C75:
            return -1
        low = hex4(p + 8, end)
        return p + 12 if 0xDC00 <= low <= 0xDFFF else -1
    return p + 6


@njit(**CALLED)
def skip_rune(p, end):
    """The end of the UTF-8 sequence at ``p``, or -1 if it is invalid."""
    c = load8(p)
    size = 2 if 0xC2 <= c < 0xE0 else 3 if 0xE0 <= c < 0xF0 else 4 if 0xF0 <= c < 0xF5 else 0
    if size == 0 or end - p < size:
        return -1
    for at in range(1, size):
        if load8(p + at) & 0xC0 != 0x80:
            return -1
    second = load8(p + 1)
    if (c == 0xE0 and second < 0xA0) or (c == 0xED and second > 0x9F):
        return -1
    if (c == 0xF0 and second < 0x90) or (c == 0xF4 and second > 0x8F):
        return -1
    return p + size


@njit(**CALLED)
def check_string(p, end):
    """The end of the string whose content begins at ``p``, or -1."""
    while True:
        while end - p >= 8 and is_plain(load_le64(p)):
            p += 8
        if p >= end:
            return -1
        c = load8(p)
        if c == _QUOTE:
            return p + 1
        if c == _BACKSLASH:
            p = skip_escape(p, end)
        elif c >= 0x80:
            p = skip_rune(p, end)
        elif c >= 0x20:
            p += 1
        else:
            return -1
        if p < 0:
            return -1


@njit(**INLINE)
def skip_digits(p, end):
    while p < end and is_digit(load8(p)):
        p += 1
    return p


@njit(**CALLED)
def check_number(p, end):
    """The end of the number at ``p``, or INVALID, or UNSURE if it may not fit a double."""
    begin = p
    if load8(p) == _MINUS:
        p += 1
    if p >= end or not is_digit(load8(p)):
        return INVALID
    p = p + 1 if load8(p) == 0x30 else skip_digits(p, end)
    if p < end and load8(p) == _POINT:
        fraction = p + 1
        p = skip_digits(fraction, end)
        if p == fraction:
            return INVALID
    exponent = p
    if p < end and load8(p) | 0x20 == 0x65:
        p += 1
        if p < end and (load8(p) == _MINUS or load8(p) == 0x2B):
            p += 1
        exponent = p
        p = skip_digits(p, end)
        if p == exponent:
            return INVALID
    return UNSURE if p - begin > _MOST_DIGITS or p - exponent > 2 else p


@njit(**CALLED)
def check_word(p, end):
    """The end of true, false or null at ``p``, or -1."""
    if end - p >= 4 and (load_be32(p) == 0x74727565 or load_be32(p) == 0x6E756C6C):
        return p + 4
    if end - p >= 5 and load_be32(p) == 0x66616C73 and load8(p + 4) == 0x65:
        return p + 5
    return INVALID


@njit(**CALLED)
def check_simple(p, end):
    """The end of the value at ``p``, which is neither array nor object; or INVALID or UNSURE."""
    c = load8(p)
    if c == _QUOTE:
        return check_string(p + 1, end)
    if c == _MINUS or is_digit(c):
        return check_number(p, end)
    return check_word(p, end)


@kernel(types.int64(I64, I64, I64))
def check(base, size, stack):
    """``check_text`` for Python."""
    return check_text(base, size, stack)


@njit(**CALLED)
def check_text(base, size, stack):
    """The depth of the JSON text, or INVALID, or UNSURE. ``stack`` has MOST_LEVELS bytes."""
    p, end = base, base + size
    depth, deepest, expected = 0, 0, _VALUE
    while True:
        p = skip_space(p, end)
        if p >= end:
            return deepest if expected == _COMMA_OR_END and depth == 0 else INVALID
        c = load8(p)
        inside = load8(stack + depth - 1) if depth else 0
        if expected == _COMMA_OR_END and depth and c == _COMMA:
            expected = _NAME if inside == _OBJECT else _VALUE
            p += 1
        elif (c == _ARRAY_END and inside == _ARRAY and (expected in (_COMMA_OR_END, _VALUE_OR_END))) or (
            c == _OBJECT_END and inside == _OBJECT and (expected in (_COMMA_OR_END, _NAME_OR_END))
        ):
            depth -= 1
            expected = _COMMA_OR_END
            p += 1
        elif expected == _COMMA_OR_END:
            return INVALID
        elif expected in (_NAME, _NAME_OR_END):
            if c != _QUOTE:
                return INVALID
            p = check_string(p + 1, end)
            if p < 0:
                return INVALID
            p = skip_space(p, end)
            if p >= end or load8(p) != _COLON:
                return INVALID
            p += 1
            expected = _VALUE
        elif c in (_ARRAY, _OBJECT):
            if depth >= MOST_LEVELS:
                return UNSURE
            store8(stack + depth, c)
            depth += 1
            deepest = max(deepest, depth)
            expected = _VALUE_OR_END if c == _ARRAY else _NAME_OR_END
            p += 1
        else:
            p = check_simple(p, end)
            if p < 0:
                return p
            expected = _COMMA_OR_END


# ---------------------------------------------------------------------------------------------- text that is known JSON


@njit(**CALLED)
def string_end(p):
    """The end of the string whose content begins at ``p``."""
    while True:
        c = load8(p)
        if c == _QUOTE:
            return p + 1
        p += 2 if c == _BACKSLASH else 1


@njit(**CALLED)
def value_end(p):
    """The end of the value at ``p``."""
    c = load8(p)
    if c == _QUOTE:
        return string_end(p + 1)
    if c != _ARRAY and c != _OBJECT:
        while not (c in (_COMMA, _ARRAY_END, _OBJECT_END) or is_space(c)):
            p += 1
            c = load8(p)
        return p
    depth = 0
    while True:
        c = load8(p)
        p += 1
        if c == _QUOTE:
            p = string_end(p)
        elif c in (_ARRAY, _OBJECT):
            depth += 1
        elif c in (_ARRAY_END, _OBJECT_END):
            depth -= 1
            if depth == 0:
                return p


@njit(**CALLED)
def has_escape(p, end):
    while p < end:
        if load8(p) == _BACKSLASH:
            return True
        p += 1
    return False


@njit(**CALLED)
def are_same(p, q, size):
    at = 0
    while at < size and load8(p + at) == load8(q + at):
        at += 1
    return at == size


# The slots of ``found``: the member at which the search stopped, and how many came before it.
BEGIN, VALUE, VALUE_END, PASSED = range(4)
MISSING, FOUND, ESCAPED = range(3)  # escaped: the name must be decoded before it can be compared


@kernel(types.int64(I64, I64, I64, I64, I64, ARRAY))
def find_member(base, at, name, name_size, index, found):
    """Search the members of the container at ``base``, from the one at offset ``at`` on, by name or, in arrays, index.

    ``index`` -1 is the last one; all offsets in ``found`` are relative to ``base``.
    """
    p, is_object = base + at, load8(base) == _OBJECT
    found[PASSED] = 0
    while load8(p) != _ARRAY_END and load8(p) != _OBJECT_END:
        found[BEGIN] = p - base
        same, escaped = False, False
        if is_object:
            name_end = string_end(p + 1) - 1
            escaped = has_escape(p + 1, name_end)
            same = not escaped and name_end - p - 1 == name_size and are_same(p + 1, name, name_size)
            p = name_end + 1
            while load8(p) != _COLON:
                p += 1
            p += 1
            while is_space(load8(p)):
                p += 1
        else:
            same = found[PASSED] == index
        found[VALUE] = p - base
        p = value_end(p)
        found[VALUE_END] = p - base
        if same:
            return FOUND
        if escaped:
            return ESCAPED
        found[PASSED] += 1
        while is_space(load8(p)) or load8(p) == _COMMA:
            p += 1
    return FOUND if index == -1 and not is_object and found[PASSED] else MISSING
