"""The JSON kernels agree with a parser on any bytes."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upriver.wire.json_text import depth_of, find_member, is_json

SIMPLE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
VALUES = st.recursive(
    SIMPLE, lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(), inner, max_size=5))
)
SPELLINGS = st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}])


def parses(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def depth(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 0


@settings(deadline=None)
@given(value=VALUES, how=SPELLINGS)
def test_json_is_accepted_in_every_spelling(value: Any, how: dict[str, Any]):
    try:
        text = json.dumps(value, **how).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate
    assert is_json(text) == parses(text)
    if parses(text):
        assert depth_of(text) == depth(value)


@settings(deadline=None, max_examples=examples(250))
@given(
    value=VALUES, how=SPELLINGS, at=st.integers(0, 400), cut=st.integers(0, 2),
    put=st.one_of(st.binary(max_size=3), st.sampled_from([each.encode() for each in ',]}"\\0.e-u'])),
)  # fmt: skip
def test_damaged_json_is_judged_as_a_parser_judges_it(value: Any, how: dict[str, Any], at: int, cut: int, put: bytes):
    text = json.dumps(value, **how).encode(errors="surrogatepass")
    at %= len(text) + 1
    damaged = text[:at] + put + text[at + cut :]
    assert is_json(damaged) == parses(damaged)


@settings(deadline=None, max_examples=examples(200))
@given(text=st.one_of(st.binary(max_size=40), st.text('[]{}",:\\u0019dDe.-+ntfrule \n', max_size=30).map(str.encode)))
@example(b"")
@example(b"[1,]")
@example(b'{"a":1,}')
@example(b"01")
@example(b"1e400")
@example(b"-")
@example(b"1.")
@example(b'"\\ud800"')
@example(b'"\\ud83d\\ude00"')
@example(b'"\xed\xa0\x80"')
@example(b'"\xf4\x90\x80\x80"')
@example(b'"\xc0\x80"')
@example(b"\xef\xbb\xbf{}")
@example(b"nul")
@example(b"true false")
@example(b"[" * 500 + b"]" * 500)
@example(b"[" * 1024 + b"]" * 1024)
@example(b"[" * 1025 + b"]" * 1025)
@example(b"9" * 400)
@example(b"0." + b"1" * 400)
@example(b"1e-999")
@example(b'"' + b"x" * 7 + b"\x1f" + b'"')
def test_any_bytes_are_judged_as_a_parser_judges_them(text: bytes):
    assert is_json(text) == parses(text)


@settings(deadline=None)
@given(members=st.dictionaries(st.text(), VALUES, max_size=8), how=SPELLINGS, wanted=st.text(max_size=3))
def test_a_name_is_found_in_every_spelling(members: dict[str, Any], how: dict[str, Any], wanted: str):
    try:
        text = json.dumps(members, **how).encode()
    except UnicodeEncodeError:
        return
    for place, (name, value) in enumerate(members.items()):
        found, before = find_member(text, name)
        assert found is not None
        assert before == place
        assert json.loads(text[found.value : found.end]) == value
        assert json.loads(b"{" + text[found.begin : found.end] + b"}") == {name: value}
    if wanted not in members:
        assert find_member(text, wanted) == (None, len(members))


@settings(deadline=None)
@given(elements=st.lists(VALUES, max_size=8), how=SPELLINGS)
def test_elements_are_found_by_index_and_counted(elements: list[Any], how: dict[str, Any]):
    try:
        text = json.dumps(elements, **how).encode()
    except UnicodeEncodeError:
        return
    for place, value in enumerate(elements):
        found, before = find_member(text, place)
        assert found is not None
        assert (json.loads(text[found.value : found.end]), before) == (value, place)
    assert find_member(text, len(elements)) == (None, len(elements))
    last, _ = find_member(text, -1)
    assert (json.loads(text[last.value : last.end]) if last else None) == (elements[-1] if elements else None)


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_large_text_is_searched_to_its_end(size: int):
    text = json.dumps({f"key{n}": [n, "x"] for n in range(size)}).encode()
    assert depth_of(text) == 2
    found, before = find_member(text, f"key{size - 1}")
    assert found is not None
    assert (json.loads(text[found.value : found.end]), before) == ([size - 1, "x"], size - 1)
