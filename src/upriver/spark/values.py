"""The ``value`` column in the form that was asked for, and batches with exactly the columns that Spark expects."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from upriver.records.schema import CHANGES, Event
from upriver.spark.options import ValueFormat

_DOCUMENTS = pa.array([Event.MUTATION.value, Event.DELETION.value, Event.EXPIRATION.value])


class Shaper:
    """Turns batches in the schema ``CHANGES`` into the schema of a query."""

    def __init__(self, schema: pa.Schema, form: ValueFormat, since: datetime | None = None) -> None:
        self.schema = schema
        self._since = None if since is None else pa.scalar(since, CHANGES.field("timestamp").type)
        self._at = [CHANGES.get_field_index(name) for name in schema.names]
        self._form = form
        self._same = schema.equals(CHANGES)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._since is not None:
            batch = _newer(batch, self._since)
        if self._same:
            return batch
        arrays = [self._column(batch.column(at), field) for at, field in zip(self._at, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, column: pa.Array, field: pa.Field) -> pa.Array:
        if field.name == "value":
            return _FORMS[self._form](column, field.type)
        return column if column.type == field.type else column.cast(field.type)


def _newer(batch: pa.RecordBatch, since: pa.Scalar) -> pa.RecordBatch:
    """Documents changed at ``since`` or later, and everything that is not a document."""
    document = pc.is_in(batch.column("event"), _DOCUMENTS)
    late = pc.fill_null(pc.greater_equal(batch.column("timestamp"), since), True)
    return batch.filter(pc.or_(late, pc.invert(document)))


def _binary(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column


def _string(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Text; bytes that are none become U+FFFD, because Spark would pass them on unchecked."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if v is None else v.decode("utf-8", "replace") for v in column.to_pylist()], pa.string())


def _variant(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """VARIANT; null where the value is not JSON."""
    from pyspark.sql.types import VariantVal

    def parse(text: bytes | None) -> dict[str, bytes] | None:
        if text is None:
            return None
        try:
            found = VariantVal.parseJson(text.decode())
        except (ValueError, UnicodeDecodeError):
            return None
        return {"value": found.value, "metadata": found.metadata}

    return pa.array([parse(text) for text in column.to_pylist()], kind)


def _struct(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The fields of JSON documents; null where the value is no object, or a field has another type."""
    from pyarrow import json as arrow_json

    live = pc.is_valid(column)
    present = column.filter(live)
    if len(present) == 0:
        return pa.nulls(len(column), kind)
    options = arrow_json.ParseOptions(
        explicit_schema=pa.schema(list(kind)), newlines_in_values=True, unexpected_field_behavior="ignore"
    )
    text = b"\n".join(present.to_pylist())
    try:
        block = arrow_json.ReadOptions(block_size=len(text) + 1024, use_threads=False)
        parsed = arrow_json.read_json(pa.BufferReader(text), block, options).combine_chunks()
    except pa.ArrowInvalid:
        return _struct_one_by_one(column, kind)
    if parsed.num_rows != len(present):
        return _struct_one_by_one(column, kind)
    made = pa.StructArray.from_arrays([parsed.column(f.name).combine_chunks() for f in kind], fields=list(kind))
    if len(present) == len(column):
        return made
    places = pc.if_else(live, pc.subtract(pc.cumulative_sum(live.cast(pa.int32())), 1), None)
    return made.take(places)


def _struct_one_by_one(column: pa.Array, kind: pa.DataType) -> pa.Array:
    import orjson

    def parse(text: bytes | None) -> Any:
        try:
            found = orjson.loads(text or b"null")
            return pa.scalar({f.name: found.get(f.name) for f in kind}, kind) if isinstance(found, dict) else None
        except (ValueError, TypeError, pa.ArrowException):
            return None

    scalars = [parse(text) for text in column.to_pylist()]
    return pa.array([None if scalar is None else scalar.as_py() for scalar in scalars], kind)


_FORMS: dict[ValueFormat, Callable[[pa.Array, pa.DataType], pa.Array]] = {
    ValueFormat.BINARY: _binary,
    ValueFormat.STRING: _string,
    ValueFormat.VARIANT: _variant,
    ValueFormat.STRUCT: _struct,
}
