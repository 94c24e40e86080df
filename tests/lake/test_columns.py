"""Documents become columns, and come back as they were."""

from __future__ import annotations

import json

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lake.feed_sync import FeedSync
from tests.support.examples import examples
from upriver.lake.apply.rows import text_keys
from upriver.lake.columns import evolve, observe, row_schema, to_columns, to_document
from upriver.lake.options import ColumnType

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8).filter(lambda text: text.isprintable()),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    ),
    max_leaves=4,
)
names = st.sampled_from(["n", "N", "name", "_key", "with space", "a.b", "", "é", "x" * 200])
documents = st.lists(st.dictionaries(names, values, max_size=5), max_size=12)


@settings(max_examples=examples(150), deadline=None)
@given(documents, documents)
def test_every_document_comes_back_whatever_the_columns_were_made_for(first, later) -> None:
    shape = evolve({}, observe(first), len(first))
    arrays, rest = to_columns(later, shape)
    table = pa.table(
        [*arrays, pa.array(rest, pa.string()), pa.nulls(len(later), pa.binary())], names=[*shape, "_rest", "_value"]
    )
    for row, document in zip(table.to_pylist(), later, strict=True):
        said = {name: value for name, value in document.items() if value is not None}
        assert to_document(row, shape) == said
        assert json.dumps(to_document(row, shape), sort_keys=True).replace(".0", "") == json.dumps(
            said, sort_keys=True
        ).replace(".0", "")


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        ([{"a": 1}], [{"a": 2.5}], ColumnType.DOUBLE),
        ([{"a": 1}], [{"a": "x"}], ColumnType.BIGINT),
        ([{"a": None}], [{"a": True}], ColumnType.BOOLEAN),
        ([{"a": {"b": 1}}], [{"a": [1]}], ColumnType.JSON),
        ([{"a": 1}, {"a": 1.5}], [], ColumnType.DOUBLE),
    ],
)
def test_a_column_takes_the_kind_of_its_values_and_widens_only_without_loss(first, then, kind) -> None:
    shape = evolve({}, observe(first), len(first))
    assert evolve(shape, observe(then), len(then))["a"] is kind


def test_names_that_differ_only_in_case_do_not_both_become_columns() -> None:
    shape = evolve({}, observe([{"Name": 1, "name": 2, "_Key": 3, "_key": 4}]), 1)
    lowered = [name.lower() for name in row_schema(shape).names]
    assert len(lowered) == len(set(lowered))


def test_columns_are_bounded_and_rare_fields_stay_in_rest() -> None:
    many = [{f"field{index}": 1} for index in range(1000)] + [{"common": 1}] * 1000
    shape = evolve({}, observe(many), len(many), max_columns=5)
    assert list(shape) == ["common"]


@pytest.mark.parametrize("levels", [100, 253, 254, 255, 260, 1000, 5000])
def test_a_document_of_any_depth_is_stored_and_comes_back(sync: FeedSync, levels) -> None:
    for name in ("n", "a b"):  # one that has a column and one that never does
        sync.feed.put(f"plain-{name}", {name: [1]})
        sync.feed.put(f"deep-{name}", json.dumps({name: [0]}).encode().replace(b"0", b"[" * levels + b"]" * levels))
    sync.commit()
    sync.orders.advance(0, force=True)
    truth = sync.feed.truth()
    for key, said in sync.read().items():
        assert said == truth[key] or said == orjson.loads(truth[key])
    assert (type(sync.read()["deep-n"]) is bytes) == (levels > 250)


@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\xff", rb"\xff", b"\\\xff", rb"\\xff"]), unique=True))
def test_no_two_keys_show_as_the_same_text_and_plain_ones_stay(keys: list[bytes]) -> None:
    shown = text_keys(pa.chunked_array([pa.array(keys, pa.binary())])).to_pylist()
    assert len(set(shown)) == len(keys)
    plain = [(key, text) for key, text in zip(keys, shown, strict=True) if key.isascii() and b"\\" not in key]
    assert all(text == key.decode() for key, text in plain)
