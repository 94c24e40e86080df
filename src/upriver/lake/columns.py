"""JSON documents to typed columns and back: inferred types, new columns, and a place for what does not fit.

Nothing is rounded or refused. A value that a column cannot hold exactly is kept, under its name, in the JSON object of
``_rest``. A document that is not a JSON object is kept as it is in ``_value``. Nested objects and arrays are JSON text,
because a struct with a new field breaks plain readers of older files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import ConfigError
from upriver.lake.options import ColumnType, TableShape

Document = dict[str, Any]
Observed = dict[str, Counter[str]]  # field -> how often each kind was seen

# Every row of ``tail`` and ``current`` starts with these.
META = [
    pa.field("_key", pa.string()),
    pa.field("_seqno", pa.int64()),
    pa.field("_vbucket", pa.int32()),
    pa.field("_epoch", pa.int32()),
    pa.field("_cas", pa.int64()),
    pa.field("_changed_at", pa.timestamp("us", tz="UTC")),
    pa.field("_expires_at", pa.timestamp("us", tz="UTC")),
    pa.field("_deleted", pa.bool_()),
    pa.field("_rest", pa.string()),
    pa.field("_value", pa.binary()),
]
_RESERVED = frozenset(field.name for field in META) | {"_valid_from", "_valid_to", "_version"}
_FORBIDDEN = frozenset(' ,;{}()\n\t=.`"')
_KIND = b"upriver.kind"
_EXACT = 2**53
_SHALLOW = 200  # levels that orjson always writes
_FLAT_BYTES = 2 * _SHALLOW  # a document of so few bytes has no more levels
_BEFORE_NUMBERS = np.frombuffer(b":,[- \t\r\n", np.uint8)
# orjson silently rounds integers beyond 64 bits, which have at least 19 digits.
_LONG_TEXT, _LONG_BYTES = re.compile("[0-9]{19}"), re.compile(b"[0-9]{19}")


_ARROW = {
    ColumnType.BOOLEAN: pa.bool_(),
    ColumnType.BIGINT: pa.int64(),
    ColumnType.DOUBLE: pa.float64(),
    ColumnType.STRING: pa.string(),
    ColumnType.JSON: pa.string(),
}
_OF_TYPE = {
    bool: ColumnType.BOOLEAN,
    int: ColumnType.BIGINT,
    float: ColumnType.DOUBLE,
    str: ColumnType.STRING,
    dict: ColumnType.JSON,
    list: ColumnType.JSON,
}
_NONE = type(None)
# Python types whose values a column takes without a check of each one.
_PLAIN = {
    ColumnType.BOOLEAN: {bool, _NONE},
    ColumnType.BIGINT: {int, _NONE},
    ColumnType.DOUBLE: {float, _NONE},
    ColumnType.STRING: {str, _NONE},
}


def row_schema(shape: TableShape) -> pa.Schema:
    """The Arrow schema of ``tail`` and ``current`` for documents of this shape."""
    return pa.schema([*META, *(column_field(name, kind) for name, kind in shape.items())])


def column_field(name: str, kind: ColumnType) -> pa.Field:
    return pa.field(name, _ARROW[kind], metadata={_KIND: kind.value})


def shape_of(schema: pa.Schema) -> TableShape:
    """The shape that a table was written with."""
    return {
        field.name: ColumnType((field.metadata or {}).get(_KIND, b"string").decode())
        for field in schema
        if field.name not in _RESERVED
    }


def parse(value: bytes) -> Document | None:
    """A JSON object; None for all other bytes, and for an object so deep that orjson cannot write it.

    >>> parse(b'{"a": 1}'), parse(b'[1]'), parse(b'\\xff')
    ({'a': 1}, None, None)
    """
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    if type(document) is not dict:
        return None
    if len(value) > _FLAT_BYTES and value.count(b"[") + value.count(b"{") > _SHALLOW and _too_deep(document):
        return None
    return document


def _too_deep(document: Document) -> bool:
    """Whether orjson can read this document but not write it."""
    try:
        orjson.dumps(document)
    except orjson.JSONEncodeError:
        return True
    return False


def parse_exactly(value: bytes) -> Document | None:
    """The same, with integers of any size.

    >>> parse_exactly(b'{"a": 18446744073709551617}')
    {'a': 18446744073709551617}
    """
    document = parse(value)
    if document is None or not _LONG_BYTES.search(value):
        return document
    try:
        exact: Document = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return exact


def parser_for(values: pa.ChunkedArray | pa.Array) -> Callable[[bytes], Document | None]:
    """The quickest parser that reads these values exactly."""
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    return parse_exactly if any(_has_long_number(chunk) for chunk in chunks) else parse


def _has_long_number(values: pa.Array) -> bool:
    """Whether there may be a number of 19 digits: so many digits always include four aligned words of four."""
    _, offsets, data = values.buffers()
    if not len(values) or data is None:
        return False
    first, last = np.frombuffer(offsets, np.int32)[[values.offset, values.offset + len(values)]]
    text = np.frombuffer(data, np.uint8)[first:last]
    words = (text[: len(text) // 4 * 4].view(np.uint32) & 0xF0F0F0F0) == 0x30303030  # digits, and :;<=>?
    runs = words[:-3] & words[1:-2] & words[2:-1] & words[3:]
    return bool(runs.any()) and _begins_a_long_number(text)


def _begins_a_long_number(text: npt.NDArray[np.uint8]) -> bool:
    """Whether 19 digits follow a byte that may precede a number; in a string they follow a letter, quote or digit."""
    digits = run = (text - np.uint8(48)) < 10
    for shift in (1, 2, 4, 8, 3):  # each step finds runs that are longer by the shift
        run = run[:-shift] & run[shift:]
    begins = np.flatnonzero(run[1:] & ~digits[: len(run) - 1])
    return bool(np.isin(text[begins], _BEFORE_NUMBERS).any())


def loads(text: str) -> Any:
    """JSON text that ``dumps`` wrote, with integers of any size."""
    return json.loads(text) if _LONG_TEXT.search(text) else orjson.loads(text)


def dumps(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def observe(documents: Iterable[Document]) -> Observed:
    """Which fields the documents have, and how often each type; nulls do not count."""
    fields = (zip(document, map(type, document.values()), strict=True) for document in documents)
    pairs: Counter[tuple[str, type]] = Counter(chain.from_iterable(fields))
    seen: Observed = {}
    for (name, kind), count in pairs.items():
        if kind is not _NONE:
            seen.setdefault(name, Counter())[_OF_TYPE[kind].value] += count
    return seen


def evolve(shape: TableShape, seen: Observed, documents: int, max_columns: int = 200) -> TableShape:
    """The shape after these observations: integers widened to doubles where needed, and columns for new fields.

    A field becomes a column when one document in two hundred has it; rarer ones stay in ``_rest``.
    """
    grown = {name: _widened(kind, seen.get(name)) for name, kind in shape.items()}
    taken = {name.lower() for name in grown} | _RESERVED
    for name, kinds in sorted(seen.items(), key=lambda item: (-item[1].total(), item[0])):
        often = kinds.total() * 200 >= documents
        if often and len(grown) < max_columns and name.lower() not in taken and _allowed(name):
            grown[name] = _majority(kinds)
            taken.add(name.lower())
    return grown


def imposed(shape: TableShape, given: TableShape) -> TableShape:
    """The shape of a table whose columns the user gives: columns can be added, and integers can become doubles."""
    for name, kind in shape.items():
        wanted = given.get(name, kind)
        if wanted is not kind and (kind, wanted) != (ColumnType.BIGINT, ColumnType.DOUBLE):
            raise ConfigError(
                f"column '{name}' is {kind} in the table and cannot become {wanted}: sync to a new directory"
            )
    return shape | given


def _widened(kind: ColumnType, kinds: Counter[str] | None) -> ColumnType:
    return ColumnType.DOUBLE if kind is ColumnType.BIGINT and kinds and kinds[ColumnType.DOUBLE] else kind


def _allowed(name: str) -> bool:
    return 0 < len(name) <= 128 and _FORBIDDEN.isdisjoint(name) and name.isprintable()


def _majority(kinds: Counter[str]) -> ColumnType:
    if kinds[ColumnType.DOUBLE]:
        kinds = kinds + Counter({ColumnType.DOUBLE.value: kinds[ColumnType.BIGINT]})
    return ColumnType(max(sorted(kinds), key=lambda kind: kinds[kind]))


def to_columns(documents: Sequence[Document], shape: TableShape) -> tuple[list[pa.Array], list[str | None]]:
    """The documents as one array per column of the shape, and for each document the JSON of what did not fit."""
    rest: dict[int, Document] = {}
    arrays = [_column(documents, name, kind, rest) for name, kind in shape.items()]
    known = frozenset(shape)
    for index, document in enumerate(documents):
        if not document.keys() <= known:
            extra = {name: value for name, value in document.items() if name not in known and value is not None}
            if extra:
                rest.setdefault(index, {}).update(extra)
    texts: list[str | None] = [None] * len(documents)
    for index, left in rest.items():
        texts[index] = dumps(left)
    return arrays, texts


def _column(documents: Sequence[Document], name: str, kind: ColumnType, rest: dict[int, Document]) -> pa.Array:
    values = [document.get(name) for document in documents]
    if kind is ColumnType.JSON or not set(map(type, values)) <= _PLAIN[kind]:
        values = [_fitted(index, name, value, kind, rest) for index, value in enumerate(values)]
    try:
        return pa.array(values, _ARROW[kind])
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
        values = [_last_resort(index, name, value, kind, rest) for index, value in enumerate(values)]
        return pa.array(values, _ARROW[kind])


def _fitted(index: int, name: str, value: Any, kind: ColumnType, rest: dict[int, Document]) -> Any:
    if value is None:
        return None
    seen = _OF_TYPE[type(value)]
    if seen is kind:
        return dumps(value) if kind is ColumnType.JSON else value
    if kind is ColumnType.DOUBLE and seen is ColumnType.BIGINT and -_EXACT <= value <= _EXACT:
        return float(value)
    rest.setdefault(index, {})[name] = value
    return None


def _last_resort(index: int, name: str, value: Any, kind: ColumnType, rest: dict[int, Document]) -> Any:
    """For a column with a value that Arrow refuses, such as an integer beyond 63 bits: try each value by itself."""
    try:
        pa.scalar(value, _ARROW[kind])
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
        rest.setdefault(index, {})[name] = value
        return None
    return value


def fold_rest(table: pa.Table, shape: TableShape) -> pa.Table:
    """Move values from ``_rest`` into columns that exist by now."""
    rest = table.column("_rest")
    if rest.null_count == table.num_rows:
        return table
    rows = [index for index, text in enumerate(rest.to_pylist()) if text is not None]
    left = [loads(rest[index].as_py()) for index in rows]
    if not any(document.keys() & shape.keys() for document in left):
        return table
    arrays, texts = to_columns(left, shape)
    lifted = dict(zip(shape, arrays, strict=True))
    new_rest = rest.to_pylist()
    for index, text in zip(rows, texts, strict=True):
        new_rest[index] = text
    table = table.set_column(table.schema.get_field_index("_rest"), META[8], pa.array(new_rest, pa.string()))
    for name, values in lifted.items():
        if values.null_count < len(values):
            table = _patched(table, name, rows, values)
    return table


def _patched(table: pa.Table, name: str, rows: Sequence[int], values: pa.Array) -> pa.Table:
    position = table.schema.get_field_index(name)
    merged = table.column(position).to_pylist()
    for index, value in zip(rows, values.to_pylist(), strict=True):
        if value is not None:
            merged[index] = value
    return table.set_column(position, table.schema.field(position), pa.array(merged, table.schema.field(position).type))


def spill(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Before integers are read as doubles: move those that would be rounded to ``_rest``."""
    for field in schema:
        if pa.types.is_floating(field.type) and field.name in table.schema.names:
            column = table.column(field.name)
            if pa.types.is_integer(column.type):
                table = _spilled(table, field.name, column)
    return table


def _spilled(table: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    known = column.fill_null(0)
    inexact = pc.or_(pc.greater(known, _EXACT), pc.less(known, -_EXACT))
    if not pc.any(inexact).as_py():
        return table
    rest = table.column("_rest").to_pylist()
    for index in pc.indices_nonzero(inexact).to_pylist():
        left = loads(rest[index]) if rest[index] else {}
        rest[index] = dumps({**left, name: column[index].as_py()})
    kept = pc.if_else(inexact, pa.scalar(None, pa.int64()), column)
    table = table.set_column(table.schema.get_field_index("_rest"), META[8], pa.array(rest, pa.string()))
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), kept)


def to_document(row: Mapping[str, Any], shape: TableShape) -> Document | bytes:
    """The document of a row of ``tail`` or ``current``; bytes if it is not a JSON object.

    Fields that are null in the document are left out.
    """
    if row["_value"] is not None:
        raw: bytes = row["_value"]
        return raw
    document = {
        name: loads(row[name]) if kind is ColumnType.JSON else row[name]
        for name, kind in shape.items()
        if row.get(name) is not None
    }
    if row["_rest"] is not None:
        document.update(loads(row["_rest"]))
    return document
