"""Paths inside a JSON text: find, replace, insert and remove without touching the rest (docs/protocol/subdoc.md).

The text is spliced, never parsed and written again: spaces, key order and the spelling of numbers outside the path
stay as they are. Pure: text in, text out; a failure is a ``StatusError`` with its exact sub-document status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import NoReturn

import orjson

from upriver.errors import Status, StatusError
from upriver.wire import json_text

MAX_PATH_BYTES = 1024
MAX_DEPTH = 32
INT64 = range(-(1 << 63), 1 << 63)

Part = str | int
Path = tuple[Part, ...]
Span = tuple[int, int]

_TOKEN = re.compile(r"([^.`\[\]]+)|`((?:[^`]|``)+)`|\[(0|[1-9][0-9]{0,9}|-1)\]")
_SPACE = re.compile(r"[ \t\n\r]*")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
# Only matched against text that is known to be JSON, so they only have to tell its tokens apart. Possessive: no text
# makes them backtrack.
_GAP = r"[ \t\n\r]*+"
_SIMPLE = r'(?:"(?:[^"\\]++|\\.)*+"|[^\[\]{}",:\s]++)'
_SIMPLE_VALUE = re.compile(_SIMPLE)
_NAME = re.compile(rf'"((?:[^"\\]++|\\.)*+)"{_GAP}:{_GAP}')
_NEXT = re.compile(rf"{_GAP}(?:,{_GAP})?+")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_LARGE = 2048  # from here on it pays to compile a pattern for a name
_DECODER = json.JSONDecoder()


def fail(status: Status, why: str) -> NoReturn:
    raise StatusError.of(status, why)


# ---------------------------------------------------------------------------------------------- path grammar


def parse_path(path: bytes) -> Path:
    """The parts of a path: names, and indexes of arrays (-1 is the last).

    >>> parse_path(b"a.`b.c`[0][-1]")
    ('a', 'b.c', 0, -1)
    """
    if len(path) > MAX_PATH_BYTES:
        fail(Status.SUBDOC_PATH_E2BIG, f"a path has at most {MAX_PATH_BYTES} bytes")
    try:
        text = path.decode()
    except UnicodeDecodeError:
        fail(Status.SUBDOC_PATH_EINVAL, "the path is not UTF-8")
    parts = tuple(_parts(text))
    if len(parts) > MAX_DEPTH:
        fail(Status.SUBDOC_PATH_E2BIG, f"a path has at most {MAX_DEPTH} parts")
    return parts


def _parts(text: str) -> Iterator[Part]:
    at = 0
    while at < len(text):
        if at and text[at] != "[":
            if text[at] != ".":
                fail(Status.SUBDOC_PATH_EINVAL, f"expected '.' or '[' at character {at} of {text!r}")
            at += 1
        found = _TOKEN.match(text, at)
        if not found:
            fail(Status.SUBDOC_PATH_EINVAL, f"no name or [index] at character {at} of {text!r}")
        plain, quoted, index = found.groups()
        at = found.end()
        yield int(index) if index else _name(plain or quoted.replace("``", "`"))


def _name(raw: str) -> str:
    """A name, given as between the quotes of a JSON string: with a backslash before a quote."""
    try:
        name, end = scanstring(raw + '"', 0, True)
        if end == len(raw) + 1 and name.encode():
            return str(name)
    except ValueError:
        pass  # refused below
    fail(Status.SUBDOC_PATH_EINVAL, f"{raw!r} is not the inside of a JSON string")


# ---------------------------------------------------------------------------------------------- walking the text


def check_document(text: str, *, known_json: bool = False) -> None:
    """Refuse a document that is not JSON, or nested too deeply."""
    if len(text) > json_text.LARGE:
        _check_large(text)
        return
    if _is_deeper(text, MAX_DEPTH):
        fail(Status.SUBDOC_DOC_E2DEEP, f"the document has more than {MAX_DEPTH} levels")
    if not known_json and not is_json(text):
        fail(Status.SUBDOC_DOC_NOT_JSON, "the document is not JSON")


def _check_large(text: str) -> None:
    depth = json_text.depth_of(text.encode())
    if depth > MAX_DEPTH if depth is not None else _is_deeper(text, MAX_DEPTH):
        fail(Status.SUBDOC_DOC_E2DEEP, f"the document has more than {MAX_DEPTH} levels")
    if depth is None:
        fail(Status.SUBDOC_DOC_NOT_JSON, "the document is not JSON")


def _is_deeper(text: str, limit: int) -> bool:
    """Whether arrays and objects are nested deeper than ``limit``: removes the innermost pairs, level by level."""
    if text.count("[") + text.count("{") <= limit:
        return False
    brackets = _STRING.sub("", text).encode().translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(limit):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def is_json(text: str | bytes) -> bool:
    """Whether this is one JSON value, strictly by the standard."""
    if len(text) > json_text.LARGE:
        return json_text.is_json(text.encode() if isinstance(text, str) else text)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found
    return found.end()


def _value_end(text: str, at: int) -> int:
    if text[at] in "[{":
        return int(_DECODER.scan_once(text, at)[1])  # type: ignore[attr-defined]
    found = _SIMPLE_VALUE.match(text, at)
    assert found, "the text was checked"
    return found.end()


def _root(text: str) -> Span:
    return _skip(text, 0), len(text.rstrip(" \t\n\r"))


def _members(text: str, start: int, at: int = 0, place: int = 0) -> Iterator[tuple[Part, int, Span]]:
    """Each member of the container at ``start``: its name or place, where it begins, and its value.

    With ``at`` and ``place`` only from the member that begins there.
    """
    is_object = text[start] == "{"
    at = at or _skip(text, start + 1)
    while text[at] not in "]}":
        begin = at
        part: Part = place
        if is_object:
            part, at = _name_at(text, at)
        end = _value_end(text, at)
        yield part, begin, (at, end)
        place += 1
        at = _NEXT.match(text, end).end()  # type: ignore[union-attr]  # matches anywhere


def _name_at(text: str, at: int) -> tuple[str, int]:
    """The name of a member, and where its value begins."""
    found = _NAME.match(text, at)
    assert found, "the text was checked"
    name = found[1]
    return (scanstring(text, at + 1, True)[0] if "\\" in name else name), found.end()


def _child(text: str, span: Span, part: Part) -> tuple[int, Span] | None:
    """The member of a container that a part names, or None; a part of the wrong kind is a mismatch."""
    if text[span[0]] != ("{" if isinstance(part, str) else "["):
        fail(Status.SUBDOC_PATH_MISMATCH, f"{part!r} leads into something that is not an {_kind(part)}")
    if span[1] - span[0] > json_text.LARGE:
        return _child_of_large(text, span, part)
    if isinstance(part, str) and span[1] - span[0] > _LARGE:
        return _named_child_of_many(text, span[0], part)
    last = None
    for name, begin, value in _members(text, span[0]):
        last = begin, value
        if name == part:
            return last
    return last if part == -1 else None


def _child_of_large(text: str, span: Span, part: Part) -> tuple[int, Span] | None:
    """As ``_child``, by a kernel on the bytes of the text; byte offsets are converted to character offsets."""
    piece = text[span[0] : span[1]]
    data = piece.encode()
    found, _ = json_text.find_member(data, part)
    if found is None:
        return None
    begin, start, end = found if len(data) == len(piece) else (len(data[:at].decode()) for at in found)
    return span[0] + begin, (span[0] + start, span[0] + end)


def _named_child_of_many(text: str, start: int, name: str) -> tuple[int, Span] | None:
    """Find a member with a pattern that skips simple members in one match, up to the name or to one with an escape."""
    others = _others_than(name)
    at = _skip(text, start + 1)
    while True:
        found = others.match(text, at)
        assert found
        for part, begin, value in _members(text, start, found.end()):
            if part == name:
                return begin, value
            at = _skip(text, value[1])
            break
        else:
            return None
        if text[at] != ",":
            return None
        at = _skip(text, at + 1)


@lru_cache(maxsize=1024)
def _others_than(name: str) -> re.Pattern[str]:
    plain = re.escape(json.dumps(name, ensure_ascii=False)[1:])
    escaped = r'[^"\\]*+\\'
    return re.compile(rf'(?:(?!"(?:{plain}|{escaped}))"[^"]*+"{_GAP}:{_GAP}{_SIMPLE}{_GAP},{_GAP})*+')


def _kind(part: Part) -> str:
    return "object" if isinstance(part, str) else "array"


def _walk(text: str, path: Path) -> tuple[int, int, Span]:
    """Follow a path as far as it exists: how many parts, where the last member begins, and the span reached."""
    begin, span = 0, _root(text)
    for done, part in enumerate(path):
        found = _child(text, span, part)
        if found is None:
            return done, begin, span
        begin, span = found
    return len(path), begin, span


def find(text: str, path: Path) -> Span:
    """The span of the value at a path; ``SUBDOC_PATH_ENOENT`` if there is none."""
    done, _, span = _walk(text, path)
    if done < len(path):
        fail(Status.SUBDOC_PATH_ENOENT, f"there is no {path[done]!r} in the document")
    return span


# ---------------------------------------------------------------------------------------------- lookups


def get(text: str, path: Path) -> str:
    start, end = find(text, path)
    return text[start:end]


def count(text: str, path: Path) -> str:
    """How many members the array or object at a path has."""
    start, end = find(text, path)
    if text[start] not in "[{":
        fail(Status.SUBDOC_PATH_MISMATCH, "only arrays and objects have a count")
    return str(_count(text, (start, end)))


def _count(text: str, span: Span) -> int:
    if span[1] - span[0] > json_text.LARGE:
        return json_text.find_member(text[span[0] : span[1]].encode(), None)[1]
    return sum(1 for _ in _members(text, span[0]))


# ---------------------------------------------------------------------------------------------- changes

Change = Callable[[str, Path, str, bool], tuple[str, str]]


def dict_add(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    _check_value(value, path)
    if _walk(text, _named(path))[0] == len(path):
        fail(Status.SUBDOC_PATH_EEXISTS, "the path exists already")
    return _insert_missing(text, path, value, create), ""


def dict_upsert(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    _check_value(value, path)
    done, _, span = _walk(text, _named(path))
    if done == len(path):
        return _splice(text, span, value), ""
    return _insert_missing(text, path, value, create), ""


def replace(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    _check_value(value, path)
    return _splice(text, find(text, path), value), ""


def remove(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    """Remove a member, and the comma before or after it."""
    done, begin, (_, end) = _walk(text, path)
    if done < len(path):
        fail(Status.SUBDOC_PATH_ENOENT, f"there is no {path[done]!r} in the document")
    after = _skip(text, end)
    if text[after] == ",":
        return text[:begin] + text[_skip(text, after + 1) :], ""
    before = text[:begin].rstrip(" \t\n\r")
    return before.removesuffix(",") + text[end:], ""


def push_last(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    return _push(text, path, value, create, at_end=True), ""


def push_first(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    return _push(text, path, value, create, at_end=False), ""


def insert(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    """Insert values before the element at an index; an index one past the last appends."""
    if not path or not isinstance(path[-1], int) or path[-1] < 0:
        fail(Status.SUBDOC_PATH_EINVAL, "the path of an insertion ends with [index]")
    _check_values(value, path[:-1])
    array = find(text, path[:-1])
    found = _child(text, array, path[-1])
    if found:
        return text[: found[0]] + value + "," + text[found[0] :], ""
    if _count(text, array) != path[-1]:
        fail(Status.SUBDOC_PATH_ENOENT, f"the array ends before {path[-1]}")
    return _add_to_array(text, array, value, at_end=True), ""


def add_unique(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    """Append a simple value to an array of simple values, unless it is there; ``true`` is not 1."""
    _check_value(value, path)
    value = value.strip()
    if value[0] in "[{":
        fail(Status.SUBDOC_VALUE_CANTINSERT, "arrays and objects cannot be compared")
    done, _, span = _walk(text, path)
    if done == len(path) and text[span[0]] == "[":
        for _, _, (start, end) in _members(text, span[0]):
            _check_different(text[start:end], value)
    return _push(text, path, value, create, at_end=True), ""


def _check_different(element: str, value: str) -> None:
    if element[0] in "[{":
        fail(Status.SUBDOC_PATH_MISMATCH, "the array holds arrays or objects, which cannot be compared")
    both_text = element[0] == value[0] == '"'
    if element == value or (both_text and json.loads(element) == json.loads(value)):
        fail(Status.SUBDOC_PATH_EEXISTS, "the value is in the array already")


def counter(text: str, path: Path, value: str, create: bool) -> tuple[str, str]:
    """Add a 64-bit integer to the one at a path; a missing one starts as the delta."""
    delta = _delta(value)
    done, _, span = _walk(text, path)
    if done < len(path):
        return _insert_missing(text, path, str(delta), create), str(delta)
    total = _counted(text[span[0] : span[1]]) + delta
    if total not in INT64:
        fail(Status.SUBDOC_VALUE_CANTINSERT, "the sum does not fit 64 bits")
    return _splice(text, span, str(total)), str(total)


def _delta(value: str) -> int:
    if not _INTEGER.fullmatch(value) or len(value) > 20 or int(value) not in INT64 or int(value) == 0:
        fail(Status.SUBDOC_DELTA_EINVAL, "a delta is an integer of 64 bits, and not 0")
    return int(value)


def _counted(number: str) -> int:
    if not _INTEGER.fullmatch(number):
        fail(Status.SUBDOC_PATH_MISMATCH, "only an integer can be counted up or down")
    if len(number) > 20 or int(number) not in INT64:
        fail(Status.SUBDOC_NUM_ERANGE, "the number there does not fit 64 bits")
    return int(number)


def _named(path: Path) -> Path:
    if not path or not isinstance(path[-1], str):
        fail(Status.SUBDOC_PATH_EINVAL, "the path must end with a name")
    return path


def _insert_missing(text: str, path: Path, value: str, create: bool) -> str:
    """Add what a path lacks; the parts before the last one only with ``create``, and only names."""
    done, _, (start, end) = _walk(text, path)
    missing = path[done:]
    if (len(missing) > 1 and not create) or not all(isinstance(part, str) for part in missing):
        fail(Status.SUBDOC_PATH_ENOENT, f"there is no {missing[0]!r} in the document")
    for name in reversed(missing[1:]):
        value = "{" + json.dumps(name, ensure_ascii=False) + ":" + value + "}"
    member = json.dumps(missing[0], ensure_ascii=False) + ":" + value
    comma = "," if _has_members(text, start) else ""
    return text[: end - 1] + comma + member + text[end - 1 :]


def _push(text: str, path: Path, value: str, create: bool, *, at_end: bool) -> str:
    _check_values(value, path)
    done, _, span = _walk(text, path)
    if done < len(path):
        if not create:
            fail(Status.SUBDOC_PATH_ENOENT, f"there is no {path[done]!r} in the document")
        return _insert_missing(text, path, f"[{value}]", create)
    if text[span[0]] != "[":
        fail(Status.SUBDOC_PATH_MISMATCH, "the path does not lead to an array")
    return _add_to_array(text, span, value, at_end=at_end)


def _add_to_array(text: str, array: Span, value: str, *, at_end: bool) -> str:
    start, end = array
    comma = "," if _has_members(text, start) else ""
    if at_end:
        return text[: end - 1] + comma + value + text[end - 1 :]
    return text[: start + 1] + value + comma + text[start + 1 :]


def _has_members(text: str, start: int) -> bool:
    return text[_skip(text, start + 1)] not in "]}"


def _splice(text: str, span: Span, value: str) -> str:
    return text[: span[0]] + value + text[span[1] :]


def _check_value(value: str, path: Path) -> None:
    if _is_deeper(value, MAX_DEPTH - len(path)):
        fail(Status.SUBDOC_VALUE_ETOODEEP, f"the document would have more than {MAX_DEPTH} levels")
    if not is_json(value):
        fail(Status.SUBDOC_VALUE_CANTINSERT, "the value is not JSON")


def _check_values(value: str, path: Path) -> None:
    """Check one value, or several separated by commas, to put into an array."""
    if _is_deeper(f"[{value}]", MAX_DEPTH - len(path)):
        fail(Status.SUBDOC_VALUE_ETOODEEP, f"the document would have more than {MAX_DEPTH} levels")
    if not value.strip() or not is_json(f"[{value}]"):
        fail(Status.SUBDOC_VALUE_CANTINSERT, "the value is neither JSON nor JSON values separated by commas")
