"""``valueSchema`` reads documents as ``from_json`` does: what does not fit is null, alone, and kept beside it."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import ConfigError
from upriver.spark.schema import check_value_schema
from upriver.spark.values.fields import fitted

MOMENT = pa.timestamp("us", tz="UTC")


def read(documents: list[Any], **fields: pa.DataType) -> tuple[list[Any], list[Any]]:
    """Structs, and what did not fit."""
    texts = [one if isinstance(one, bytes) or one is None else json.dumps(one).encode() for one in documents]
    value, unfit = fitted(pa.array(texts, pa.binary()), pa.struct(list(fields.items())))
    return value.to_pylist(), unfit.to_pylist()


@given(st.lists(st.sampled_from([
    b'{"n": 1}', b'{"n": 2}\n{"n": 3}', b"", b" ", b"\n", b'{"n": 4}', b"{", b"[5]", b'{"n":\n6}', None, b"null",
])))  # fmt: skip
def test_a_value_comes_from_its_own_document_whatever_stands_beside_it(documents: list[bytes | None]) -> None:
    said = {b'{"n": 1}': 1, b'{"n": 4}': 4, b'{"n":\n6}': 6}
    value, unfit = read(documents, n=pa.int64())
    assert [one and one["n"] for one in value] == [said.get(document) if document else None for document in documents]
    assert [text is None for text in unfit] == [document is None or document in said for document in documents]


def test_one_field_that_does_not_fit_is_null_alone() -> None:
    value, unfit = read([{"n": "three", "name": "x"}, {"n": 3, "name": "y"}], n=pa.int32(), name=pa.string())
    assert value == [{"n": None, "name": "x"}, {"n": 3, "name": "y"}]
    assert unfit == ['{"n":"three"}', None]


def test_one_odd_document_takes_nothing_from_the_others_of_its_batch() -> None:
    documents = [{"at": "2026-01-31T12:00:00Z"}, {"at": "never"}, {"at": 0}, {}, [1], None]
    value, unfit = read(documents, at=MOMENT)
    moments = [datetime(2026, 1, 31, 12, tzinfo=UTC), None, datetime(1970, 1, 1, tzinfo=UTC), None]
    assert value == [*({"at": moment} for moment in moments), None, None]
    assert unfit == [None, '{"at":"never"}', None, None, "[1]", None]


FITS = [
    (pa.string(), 1, "1"), (pa.string(), 2.5, "2.5"), (pa.string(), True, "true"),
    (pa.string(), {"a": [1]}, '{"a":[1]}'),
    (pa.string(), 2**64 + 1, "18446744073709551617"), (pa.float64(), 2**64 + 1, float(2**64)),
    (pa.float64(), 3, 3.0), (pa.float64(), "NaN", None), (pa.int8(), 127, 127), (pa.bool_(), False, False),
    (pa.date32(), "2026-01-31", date(2026, 1, 31)), (pa.date32(), "2026-1-3T10:00", date(2026, 1, 3)),
    (pa.date32(), "2026", date(2026, 1, 1)),
    (MOMENT, "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
    (MOMENT, "2026-01-31 12:00:00.123456789", datetime(2026, 1, 31, 12, 0, 0, 123456, UTC)),
    (MOMENT, "2026-01-31T12:00:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
    (MOMENT, "2026-07-01 12:00:00 Europe/Zurich", datetime(2026, 7, 1, 10, tzinfo=UTC)),
    (MOMENT, 1769860800, datetime(2026, 1, 31, 12, tzinfo=UTC)),
    (pa.timestamp("us"), "2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12)),  # noqa: DTZ001
    (pa.decimal128(5, 2), 1.005, Decimal("1.01")), (pa.decimal128(5, 2), "7.1", Decimal("7.10")),
    (pa.decimal128(38, 0), 10**37, Decimal(10**37)), (pa.binary(), "aGk=", b"hi"),
    (pa.map_(pa.string(), pa.int64()), {"a": 1, "b": 2}, [("a", 1), ("b", 2)]),
    (pa.list_(pa.string()), ["a", 1], ["a", "1"]), (pa.struct([("x", pa.int32())]), {"x": 1, "y": 2}, {"x": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "expected"), FITS, ids=str)
def test_types_take_what_from_json_gives_them(kind: pa.DataType, given: Any, expected: Any) -> None:
    value, unfit = read([{"f": given}], f=kind)
    if expected is None:
        assert value[0]["f"] != value[0]["f"]  # NaN
    else:
        assert value == [{"f": expected}]
    assert unfit == [None]


MISFITS = [
    (pa.int32(), 2**31, None), (pa.int64(), 2.0, None), (pa.int64(), True, None), (pa.float64(), "1.5", None),
    (pa.bool_(), "true", None), (pa.date32(), "2026-02-30", None), (pa.date32(), 20000, None),
    (MOMENT, "2026-13-01", None), (MOMENT, "2026-01-31T12:00:00 Nowhere/Land", None), (MOMENT, 2.5, None),
    (MOMENT, 10**18, None), (pa.decimal128(3, 2), 100, None), (pa.decimal128(3, 2), "x", None),
    (pa.binary(), "?", None),
    (pa.map_(pa.string(), pa.int64()), {"a": 1, "b": "x"}, [("a", 1), ("b", None)]),
    (pa.map_(pa.string(), pa.int64()), [1], None), (pa.list_(pa.int64()), [1, "x"], [1, None]),
    (pa.list_(pa.int64()), 1, None), (pa.struct([("x", pa.int32()), ("y", pa.string())]), {"x": "a", "y": "b"},
                                      {"x": None, "y": "b"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "left"), MISFITS, ids=str)
def test_what_does_not_fit_is_null_and_kept_beside_it(kind: pa.DataType, given: Any, left: Any) -> None:
    value, unfit = read([{"f": given, "g": 1}, {"f": None, "g": 2}], f=kind, g=pa.int64())
    assert value == [{"f": left, "g": 1}, {"f": None, "g": 2}]
    assert (json.loads(unfit[0]), unfit[1]) == ({"f": given}, None)


@pytest.mark.parametrize("schema", [
    "n INT", "name STRING, n: BIGINT COMMENT 'how many, or ''so''', `odd name` DECIMAL(10, 2)",
    "a ARRAY<STRUCT<x: INT, y: MAP<STRING, ARRAY<DOUBLE>>>>, b VARCHAR(10), c STRING COLLATE UNICODE, d variant",
])  # fmt: skip
def test_a_schema_that_spark_accepts_is_accepted(schema: str) -> None:
    check_value_schema(schema)


@pytest.mark.parametrize(("schema", "says"), [
    ("name STRNG", "field 'name': 'STRNG' is no type"), ("a STRUCT<x: INTT>", r"field 'a.x': 'INTT' is no type"),
    ("a INT b INT", "'b' after the type of 'a'"), ("a", "no name or no type"), ("a INT,", "no name or no type"),
    ("a ARRAY<INT", "ARRAY lacks its '>'"), ("a INT>", "'>' is not expected"), ("a INT NOT NULL", "leave out NOT NULL"),
    ("m MAP<INT, INT>", "keys of a MAP are STRING"), ("a ARRAY", "ARRAY lacks its '<'"),
])  # fmt: skip
def test_an_error_in_the_schema_names_the_field(schema: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^valueSchema: .*{says}"):
        check_value_schema(schema)
