"""Checks and searches large JSON texts with kernels; a parser would make millions of objects."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from upriver.wire.bulk.decode import address_of

LARGE = 64 * 1024  # bytes; below this a parser is as fast
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class MemberSpan(NamedTuple):
    """Where a member of a container begins, where its value begins, and where it ends."""

    begin: int
    value: int
    end: int


def depth_of(text: bytes) -> int | None:
    """How deep the arrays and objects of a JSON text are nested; None if it is not JSON."""
    from upriver.wire.kernels import json as k

    stack = np.empty(k.MOST_LEVELS, np.uint8)
    source = _octets(text)
    depth = int(k.check(address_of(source), len(source), address_of(stack)))
    if depth == k.UNSURE:  # a number that may not fit a double, or a thousand levels: let a parser decide
        return _depth_by_parser(text)
    return None if depth == k.INVALID else depth


def is_json(text: bytes) -> bool:
    return depth_of(text) is not None


def _depth_by_parser(text: bytes) -> int | None:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    deepest = depth = 0
    for c in _STRING.sub(b"", text):
        depth += (c in b"[{") - (c in b"]}")
        deepest = max(deepest, depth)
    return deepest


def find_member(container: bytes, part: str | int | None) -> tuple[MemberSpan | None, int]:
    """Find a member of a JSON array or object by name or index (-1: the last), and count the members before it.

    ``container`` must be valid JSON and begin with its bracket. A ``part`` of None matches no member, so all are
    counted.
    """
    from upriver.wire.kernels import json as k

    source, found = _octets(container), np.zeros(4, np.int64)
    name = _octets(part.encode() if isinstance(part, str) else b"")
    name_size = len(name) if isinstance(part, str) else -1
    index = part if isinstance(part, int) else -2
    at, passed = _skip(container, 1, b" \t\r\n"), 0
    while True:
        reason = k.find_member(address_of(source), at, address_of(name), name_size, index, found)
        begin, value, end, more = found.tolist()
        passed += more
        if reason == k.MISSING:
            return None, passed
        if reason == k.FOUND or _name_at(container, begin) == part:
            return MemberSpan(begin, value, end), passed
        at, passed = _skip(container, end, b" \t\r\n,"), passed + 1


def _octets(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8) if data else np.zeros(1, np.uint8)[:0]


def _skip(container: bytes, at: int, characters: bytes) -> int:
    while container[at] in characters:
        at += 1
    return at


def _name_at(container: bytes, begin: int) -> str:
    found = _STRING.match(container, begin)
    assert found, "the container is valid JSON"
    return str(orjson.loads(found[0]))
