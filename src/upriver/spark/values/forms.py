"""The ``value`` column in the form that was asked for, and batches with exactly the columns that Spark expects."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.apply.rows import text_keys
from upriver.records.schema import CHANGES, Event
from upriver.spark.options import ValueFormat
from upriver.spark.schema import UNFIT
from upriver.spark.values.fields import fitted

_DOCUMENTS = pa.array([Event.MUTATION.value, Event.DELETION.value, Event.EXPIRATION.value])


class Shaper:
    """Turns batches in the schema ``CHANGES`` into the schema of a query."""

    def __init__(self, schema: pa.Schema, form: ValueFormat, since: datetime | None = None) -> None:
        self.schema = schema
        self._since = None if since is None else pa.scalar(since, CHANGES.field("timestamp").type)
        self._form = form
        self._same = schema.equals(CHANGES)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._since is not None:
            batch = _newer(batch, self._since)
        if self._same:
            return batch
        made = self._values(batch.column("value")) if "value" in self.schema.names else {}
        arrays = [
            made[field.name] if field.name in made else _column(batch.column(field.name), field)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _values(self, column: pa.Array) -> dict[str, pa.Array]:
        """The column ``value`` and, for a struct, the column of what did not fit."""
        kind = self.schema.field("value").type
        if self._form is not ValueFormat.STRUCT:
            return {"value": _FORMS[self._form](column, kind)}
        value, unfit = fitted(column, kind)
        return {"value": value, UNFIT: unfit}


def _column(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type == field.type:
        return column
    if field.name == "key":
        return text_keys(pa.chunked_array([column])).combine_chunks()
    return column.cast(field.type)


def _newer(batch: pa.RecordBatch, since: pa.Scalar) -> pa.RecordBatch:
    """Documents changed at ``since`` or later, and all rows that are not documents."""
    document = pc.is_in(batch.column("event"), _DOCUMENTS)
    late = pc.fill_null(pc.greater_equal(batch.column("timestamp"), since), True)
    return batch.filter(pc.or_(late, pc.invert(document)))


def _binary(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column


def _string(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Text; bytes that are not UTF-8 become U+FFFD, because Spark would pass them on unchecked."""
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


_FORMS: dict[ValueFormat, Callable[[pa.Array, pa.DataType], pa.Array]] = {
    ValueFormat.BINARY: _binary,
    ValueFormat.STRING: _string,
    ValueFormat.VARIANT: _variant,
}
