"""Paths in JSON: the grammar, what each change does to the text, and the exact status of each refusal."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upriver.errors import Status, StatusError
from upriver.node.subdoc import paths
from upriver.node.subdoc.paths import parse_path
from upriver.wire import json_text

S = Status


def change(do: paths.Change, text: str, path: str, value: str = "", create: bool = False) -> str:
    return do(text, parse_path(path.encode()), value, create)[0]


def refusal(do: Any, *arguments: Any) -> Status:
    with pytest.raises(StatusError) as caught:
        do(*arguments)
    return caught.value.status


@pytest.mark.parametrize(("path", "parts"), [
    ("", ()),
    ("a", ("a",)),
    ("a.b.c", ("a", "b", "c")),
    ("a[0].b[-1]", ("a", 0, "b", -1)),
    ("[0][12]", (0, 12)),
    ("`a.b`.c", ("a.b", "c")),
    ("`[x]`", ("[x]",)),
    ("`tick``s`", ("tick`s",)),
    ('say \\"hi\\"', ('say "hi"',)),
    ("\\u00e9", ("é",)),
    ("ключ", ("ключ",)),
    ("$document.CAS", ("$document", "CAS")),
])  # fmt: skip
def test_a_path_has_these_parts(path: str, parts: tuple[str | int, ...]) -> None:
    assert parse_path(path.encode()) == parts


@pytest.mark.parametrize(
    "path", ["a.", ".a", "a..b", "a[", "a[]", "a[-2]", "a[01]", "a[x]", "a]", "`a", "``", 'a"b', "a[0]b", "a\\", "[ 1]"]
)
def test_a_malformed_path_is_refused(path: str) -> None:
    assert refusal(parse_path, path.encode()) == S.SUBDOC_PATH_EINVAL


def test_a_path_of_more_than_32_parts_or_1024_bytes_is_too_big() -> None:
    assert len(parse_path(b".".join([b"p"] * 32))) == 32
    assert refusal(parse_path, b".".join([b"p"] * 33)) == S.SUBDOC_PATH_E2BIG
    assert refusal(parse_path, b"x" * 1025) == S.SUBDOC_PATH_E2BIG


DOC = ' { "n" : 1.50e1, "list":[1,"x",[true, null]] , "o":{"k":"v","empty":{}} }'


@pytest.mark.parametrize(("path", "found"), [
    ("n", "1.50e1"), ("list", '[1,"x",[true, null]]'), ("list[0]", "1"), ("list[-1][0]", "true"),
    ("o.k", '"v"'), ("o.empty", "{}"),
])  # fmt: skip
def test_get_returns_the_text_as_it_stands(path: str, found: str) -> None:
    assert paths.get(DOC, parse_path(path.encode())) == found


@pytest.mark.parametrize(("path", "status"), [
    ("missing", S.SUBDOC_PATH_ENOENT), ("list[3]", S.SUBDOC_PATH_ENOENT), ("o.k2", S.SUBDOC_PATH_ENOENT),
    ("o.empty.x", S.SUBDOC_PATH_ENOENT), ("n.x", S.SUBDOC_PATH_MISMATCH), ("list.x", S.SUBDOC_PATH_MISMATCH),
    ("o[0]", S.SUBDOC_PATH_MISMATCH), ("[0]", S.SUBDOC_PATH_MISMATCH), ("n[0]", S.SUBDOC_PATH_MISMATCH),
])  # fmt: skip
def test_get_says_why_nothing_is_found(path: str, status: Status) -> None:
    assert refusal(paths.get, DOC, parse_path(path.encode())) == status


def test_count_counts_members() -> None:
    assert paths.count(DOC, ()) == "3"
    assert paths.count(DOC, ("list",)) == "3"
    assert paths.count(DOC, ("o", "empty")) == "0"
    assert refusal(paths.count, DOC, ("n",)) == S.SUBDOC_PATH_MISMATCH


def test_last_element_of_an_empty_array_does_not_exist() -> None:
    assert refusal(paths.get, '{"a":[]}', ("a", -1)) == S.SUBDOC_PATH_ENOENT


@pytest.mark.parametrize(("do", "text", "path", "value", "after"), [
    (paths.dict_upsert, '{"a": 1 }', "a", "2", '{"a": 2 }'),
    (paths.dict_upsert, '{"a":1}', "b", '"x"', '{"a":1,"b":"x"}'),
    (paths.dict_upsert, "{ }", "é", "1", '{ "é":1}'),
    (paths.dict_add, '{"a":{}}', "a.b", "[]", '{"a":{"b":[]}}'),
    (paths.replace, "[1,2,3]", "[1]", "[]", "[1,[],3]"),
    (paths.replace, "[1,2,3]", "[-1]", "9", "[1,2,9]"),
    (paths.remove, '{"a":1, "b":2, "c":3}', "a", "", '{"b":2, "c":3}'),
    (paths.remove, '{"a":1, "b":2, "c":3}', "b", "", '{"a":1, "c":3}'),
    (paths.remove, '{"a":1, "b":2 , "c":3 }', "c", "", '{"a":1, "b":2  }'),
    (paths.remove, '{"a":1}', "a", "", "{}"),
    (paths.remove, "[1,2]", "[-1]", "", "[1]"),
    (paths.push_last, "[]", "", "1,2", "[1,2]"),
    (paths.push_last, '{"a":[1]}', "a", "[2]", '{"a":[1,[2]]}'),
    (paths.push_first, "[3]", "", "1,2", "[1,2,3]"),
    (paths.insert, "[1,3]", "[1]", "2", "[1,2,3]"),
    (paths.insert, "[1]", "[1]", "2,3", "[1,2,3]"),
    (paths.insert, "[]", "[0]", "1", "[1]"),
    (paths.add_unique, "[1,true]", "", '"1"', '[1,true,"1"]'),
    (paths.add_unique, "[true]", "", "1", "[true,1]"),
    (paths.counter, '{"n": 41}', "n", "1", '{"n": 42}'),
    (paths.counter, '{"n":-5}', "n", "-3", '{"n":-8}'),
    (paths.counter, "{}", "n", "7", '{"n":7}'),
])  # fmt: skip
def test_a_change_touches_only_its_path(do: paths.Change, text: str, path: str, value: str, after: str) -> None:
    assert change(do, text, path, value) == after
    json.loads(after)


@pytest.mark.parametrize(("do", "path", "value", "after"), [
    (paths.dict_upsert, "a.b.c", "1", '{"a":{"b":{"c":1}}}'),
    (paths.dict_add, "a.b", "1", '{"a":{"b":1}}'),
    (paths.counter, "a.n", "5", '{"a":{"n":5}}'),
    (paths.push_last, "a.list", "1,2", '{"a":{"list":[1,2]}}'),
    (paths.push_first, "list", "1", '{"list":[1]}'),
    (paths.add_unique, "a.set", "1", '{"a":{"set":[1]}}'),
])  # fmt: skip
def test_parents_are_created_only_on_request(do: paths.Change, path: str, value: str, after: str) -> None:
    assert change(do, "{}", path, value, create=True) == after
    if "." in path or do in (paths.push_first,):
        assert refusal(change, do, "{}", path, value) == S.SUBDOC_PATH_ENOENT


E = S.SUBDOC_PATH_EINVAL


@pytest.mark.parametrize(("do", "text", "path", "value", "status"), [
    (paths.dict_add, '{"a":1}', "a", "2", S.SUBDOC_PATH_EEXISTS),
    (paths.dict_add, "[1]", "[0]", "2", E),
    (paths.dict_upsert, "[1]", "[0]", "2", E),
    (paths.dict_upsert, "[]", "a", "2", S.SUBDOC_PATH_MISMATCH),
    (paths.dict_upsert, "{}", "a", "nope", S.SUBDOC_VALUE_CANTINSERT),
    (paths.dict_upsert, "{}", "a", "1,2", S.SUBDOC_VALUE_CANTINSERT),
    (paths.dict_upsert, "{}", "a", "NaN", S.SUBDOC_VALUE_CANTINSERT),
    (paths.dict_upsert, "{}", "a[0].b", "1", S.SUBDOC_PATH_ENOENT),
    (paths.replace, "{}", "a", "1", S.SUBDOC_PATH_ENOENT),
    (paths.remove, "{}", "a", "", S.SUBDOC_PATH_ENOENT),
    (paths.push_last, "{}", "", "1", S.SUBDOC_PATH_MISMATCH),
    (paths.push_last, "[]", "", "1,", S.SUBDOC_VALUE_CANTINSERT),
    (paths.push_last, "[]", "", " ", S.SUBDOC_VALUE_CANTINSERT),
    (paths.push_first, '{"a":1}', "a", "1", S.SUBDOC_PATH_MISMATCH),
    (paths.insert, "[1]", "[-1]", "1", E),
    (paths.insert, '{"a":[]}', "a", "1", E),
    (paths.insert, "[1]", "[2]", "1", S.SUBDOC_PATH_ENOENT),
    (paths.insert, "{}", "[0]", "1", S.SUBDOC_PATH_MISMATCH),
    (paths.add_unique, "[1,2]", "", "2", S.SUBDOC_PATH_EEXISTS),
    (paths.add_unique, '["\\u00e9"]', "", '"é"', S.SUBDOC_PATH_EEXISTS),
    (paths.add_unique, "[1]", "", "[2]", S.SUBDOC_VALUE_CANTINSERT),
    (paths.add_unique, "[1,{}]", "", "2", S.SUBDOC_PATH_MISMATCH),
    (paths.add_unique, "[]", "", "1,2", S.SUBDOC_VALUE_CANTINSERT),
    (paths.counter, '{"n":1}', "n", "0", S.SUBDOC_DELTA_EINVAL),
    (paths.counter, '{"n":1}', "n", "1.5", S.SUBDOC_DELTA_EINVAL),
    (paths.counter, '{"n":1}', "n", "9223372036854775808", S.SUBDOC_DELTA_EINVAL),
    (paths.counter, '{"n":1.0}', "n", "1", S.SUBDOC_PATH_MISMATCH),
    (paths.counter, '{"n":"1"}', "n", "1", S.SUBDOC_PATH_MISMATCH),
    (paths.counter, '{"n":9223372036854775808}', "n", "1", S.SUBDOC_NUM_ERANGE),
    (paths.counter, '{"n":9223372036854775807}', "n", "1", S.SUBDOC_VALUE_CANTINSERT),
    (paths.counter, "{}", "a.n", "1", S.SUBDOC_PATH_ENOENT),
])  # fmt: skip
def test_a_change_that_cannot_be_made_has_its_status(
    do: paths.Change, text: str, path: str, value: str, status: Status
) -> None:
    assert refusal(change, do, text, path, value, path == "a[0].b") == status


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_documents_and_values_are_at_most_32_levels_deep() -> None:
    paths.check_document(nested(32))
    assert refusal(paths.check_document, nested(33)) == S.SUBDOC_DOC_E2DEEP
    assert refusal(paths.check_document, nested(100_000)) == S.SUBDOC_DOC_E2DEEP
    paths.check_document(json.dumps(["[" * 50, {"a": "]{"}]))
    paths.dict_upsert("{}", ("a",), nested(31), False)
    assert refusal(paths.dict_upsert, "{}", ("a",), nested(32), False) == S.SUBDOC_VALUE_ETOODEEP
    assert refusal(paths.push_last, "[]", (), nested(32), False) == S.SUBDOC_VALUE_ETOODEEP
    assert refusal(paths.push_last, "[]", (), nested(100_000), False) == S.SUBDOC_VALUE_ETOODEEP


@pytest.mark.parametrize("text", ["", "nope", "{", '{"a":NaN}', "[1,]", '{"a":1} x', "'a'"])
def test_a_text_that_is_not_json_is_recognised(text: str) -> None:
    assert refusal(paths.check_document, text) == S.SUBDOC_DOC_NOT_JSON


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | names
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4))
documents = st.dictionaries(names, values, min_size=1, max_size=8)
layouts = st.sampled_from([
    {"separators": (",", ":")}, {}, {"indent": 2}, {"separators": (" ,\n", "\t: ")}, {"ensure_ascii": False},
])  # fmt: skip


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every path of a document except the root."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for part, child in members for found in [(*path, part), *places(child, (*path, part))]]


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def written(path: tuple[str | int, ...]) -> bytes:
    """A path as a client writes it, every name quoted."""
    out = ""
    for part in path:
        name = json.dumps(part, ensure_ascii=False)[1:-1].replace("`", "``") if isinstance(part, str) else ""
        out += f"[{part}]" if isinstance(part, int) else ("." if out else "") + f"`{name}`"
    return out.encode()


@settings(max_examples=examples(150), deadline=None)
@given(documents, layouts, values, st.data())
def test_replace_and_remove_do_what_python_does_and_leave_the_rest_alone(
    document: dict[str, Any], layout: dict[str, Any], new: Any, data: st.DataObject
) -> None:
    text = json.dumps(document, **layout)
    path = data.draw(st.sampled_from(places(document)))
    parts = parse_path(written(path))
    assert parts == path
    assert json.loads(paths.get(text, parts)) == at(document, path)
    replaced = paths.replace(text, parts, json.dumps(new), False)[0]
    removed = paths.remove(text, parts, "", False)[0]
    at(document, path[:-1])[path[-1]] = new
    assert json.loads(replaced) == document
    del at(document, path[:-1])[path[-1]]
    assert json.loads(removed) == document


@settings(max_examples=examples(150), deadline=None)
@given(documents, layouts, st.data())
def test_large_objects_are_searched_by_patterns_with_the_same_result(
    document: dict[str, Any], layout: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(document, **layout)
    path = (data.draw(st.sampled_from(list(document)) | names), data.draw(names))
    with mock.patch.object(paths, "_LARGE", 1 << 30):
        simple = outcome(paths.get, text, path[:1]), outcome(paths.get, text, path)
    with mock.patch.object(paths, "_LARGE", 0):
        assert (outcome(paths.get, text, path[:1]), outcome(paths.get, text, path)) == simple
    with mock.patch.object(json_text, "LARGE", 0):
        assert (outcome(paths.get, text, path[:1]), outcome(paths.get, text, path)) == simple


@settings(max_examples=examples(150), deadline=None)
@given(documents, layouts, values, st.data())
def test_very_large_documents_are_changed_by_kernels_with_the_same_result(
    document: dict[str, Any], layout: dict[str, Any], new: Any, data: st.DataObject
) -> None:
    text, value = json.dumps(document, **layout), json.dumps(new)
    path = data.draw(st.sampled_from(places(document)))
    beside = (*path[:-1], "new name") if isinstance(path[-1], str) else (*path[:-1], 0)
    work = [(paths.count, text, path), (paths.count, text, path[:-1]), (paths.replace, text, path, value, False),
            (paths.remove, text, path, "", False), (paths.dict_upsert, text, beside, value, False),
            (paths.insert, text, beside, value, False), (paths.check_document, text)]  # fmt: skip
    usual = [outcome(*each) for each in work]
    with mock.patch.object(json_text, "LARGE", 0):
        assert [outcome(*each) for each in work] == usual


def outcome(do: Any, *arguments: Any) -> Any:
    try:
        return do(*arguments)
    except StatusError as error:
        return error.status


@pytest.mark.parametrize("spelled", ["\\u006bey", "k\\u0065y", "key"])
def test_a_name_is_found_in_a_large_object_however_it_is_spelled(spelled: str) -> None:
    others = ",".join(f'"other{number}":"{{key: \\"{number}\\"}}"' for number in range(500))
    text = f'{{{others},"key2":0,"a\\"key":0,"{spelled}":1,"last":2}}'
    assert len(text) > 4096
    assert paths.get(text, ("key",)) == "1"
    assert paths.get(text, ("last",)) == "2"
    assert paths.get(text, ('a"key',)) == "0"


def test_a_large_document_is_searched_and_changed() -> None:
    document = {f"k{number}": {"n": number} if number % 7 == 0 else f'v"{number}' for number in range(2000)}
    text = json.dumps(document)
    assert paths.get(text, ("k1995", "n")) == "1995"
    assert json.loads(paths.get(text, ("k1999",))) == 'v"1999'
    assert json.loads(change(paths.dict_upsert, text, "k1998", "[]"))["k1998"] == []
    assert refusal(paths.get, text, ("k2000",)) == S.SUBDOC_PATH_ENOENT


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(values, max_size=4), layouts, values, st.data())
def test_insertions_into_arrays_do_what_python_does(
    array: list[Any], layout: dict[str, Any], new: Any, data: st.DataObject
) -> None:
    text = json.dumps({"a": array}, **layout)
    index = data.draw(st.integers(0, len(array)))
    inserted = paths.insert(text, ("a", index), json.dumps(new), False)[0]
    assert json.loads(inserted)["a"] == [*array[:index], new, *array[index:]]
    assert json.loads(paths.push_last(text, ("a",), json.dumps(new), False)[0])["a"] == [*array, new]
    assert json.loads(paths.push_first(text, ("a",), json.dumps(new), False)[0])["a"] == [new, *array]


@given(st.binary(max_size=60))
def test_any_bytes_as_a_path_are_parsed_or_refused_with_a_status(path: bytes) -> None:
    try:
        parse_path(path)
        refused = None
    except StatusError as error:
        refused = error.status
    assert refused in (None, S.SUBDOC_PATH_EINVAL, S.SUBDOC_PATH_E2BIG)
