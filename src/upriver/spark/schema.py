"""The Spark schema of change rows, derived from the one Arrow schema.

Spark compares the first batch of a task with its schema by names, order, types and nullability. Unsigned 64-bit numbers
are the same bits as a signed ``BIGINT`` (``model.signed``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from upriver.errors import ConfigError
from upriver.records.schema import CHANGES
from upriver.spark.options import KeyFormat, ReadOptions, ValueFormat

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_REMEMBERED = "options of this table: "
UNFIT = "value_unfit"  # with valueSchema: the JSON of fields that did not fit, or the text of a value that is no object
KEY_COLUMNS = ("event", "vbucket", "seqno", "epoch", "vbuuid", "collection_id", "key")

_NAMES = {
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP",
}
VALUE_TYPES = (
    "BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL", "STRING", "BINARY", "DATE",
    "TIMESTAMP", "TIMESTAMP_NTZ", "VARIANT", "ARRAY", "MAP", "STRUCT",
)  # fmt: skip
_SYNONYMS = {
    "BYTE", "SHORT", "INTEGER", "LONG", "REAL", "DEC", "NUMERIC", "CHAR", "CHARACTER", "VARCHAR", "TIMESTAMP_LTZ",
}  # fmt: skip
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)*`|'(?:[^'\\]|\\.|'')*'|[A-Za-z0-9_\u0080-\U0010ffff]+|\S)", re.DOTALL)
_EXAMPLE = 'write fields and types, such as "name STRING, age INT, tags ARRAY<STRING>"'


def columns(options: ReadOptions) -> list[str]:
    """The columns that a source with these options has, in order."""
    if options.keys_only:
        return list(KEY_COLUMNS)
    return [*CHANGES.names, UNFIT] if options.format is ValueFormat.STRUCT else list(CHANGES.names)


def ddl(options: ReadOptions, comment: str = "") -> str:
    """The schema as Spark's DDL, so that Spark parses the user's ``valueSchema``."""
    if options.value_schema:
        check_value_schema(options.value_schema)
    parts = [f"{name} {_type(name, options)}{_null(name)}" for name in columns(options)]
    if comment:
        escaped = comment.replace("\\", "\\\\").replace("'", "\\'")
        parts[0] += f" COMMENT '{escaped}'"
    return ", ".join(parts)


# Spark keeps the options of CREATE TABLE ... OPTIONS, but does not pass them to a Python source that reads the table.
# It does pass the schema with its comments, so the options of a table are kept in the comment of its first column.


def table_comment(given: Mapping[str, str]) -> str:
    """The comment that keeps the options of a table; empty if these are not options of a table."""
    kept = {name[7:]: text for name, text in given.items() if name.lower().startswith("option.")}
    if not kept:
        return ""
    if any(name.lower() == "password" for name in kept):
        raise ConfigError("a table keeps its options readable: use passwordFile or the variable UPRIVER_PASSWORD")
    return _REMEMBERED + json.dumps(kept, sort_keys=True)


def table_options(schema: StructType) -> dict[str, str]:
    """The options that ``table_comment`` has kept."""
    comment = schema[0].metadata.get("comment", "") if len(schema) else ""
    return dict(json.loads(comment.removeprefix(_REMEMBERED))) if comment.startswith(_REMEMBERED) else {}


def _type(name: str, options: ReadOptions) -> str:
    if name == "value":
        wanted = options.format
        return f"STRUCT<{options.value_schema}>" if wanted is ValueFormat.STRUCT else wanted.upper()
    if name == UNFIT or (name == "key" and options.key_format is KeyFormat.STRING):
        return "STRING"
    kind = CHANGES.field(name).type
    if pa.types.is_map(kind):
        return f"MAP<{_NAMES[kind.key_type]}, {_NAMES[kind.item_type]}>"
    return _NAMES[kind]


def _null(name: str) -> str:
    return "" if name == UNFIT or CHANGES.field(name).nullable else " NOT NULL"


def check(schema: StructType, options: ReadOptions) -> None:
    """``ConfigError`` unless a schema that the user gave has our columns; types of ``key`` and ``value`` may differ."""
    expected = columns(options)
    if schema.names not in (expected, [*expected, UNFIT]):
        raise ConfigError(f"format dcp has the columns {', '.join(expected)}, in this order, not {schema.names}")


def value_format(schema: StructType) -> ValueFormat:
    """The form of values that a schema asks for."""
    if "value" not in schema.names:
        return ValueFormat.BINARY
    name: str = schema["value"].dataType.typeName()
    try:
        return ValueFormat(name)
    except ValueError as error:
        raise ConfigError(f"value cannot be {name}; valid are {', '.join(ValueFormat)}") from error


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark will check batches against."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def check_value_schema(text: str) -> None:
    """``ConfigError``, naming the field, unless this is a list of fields with types that JSON can be read as.

    Spark parses the text afterwards, as part of a larger schema, so only what is certainly wrong is refused here.
    """
    tokens = _TOKEN.findall(text)
    rest = _skip_fields(tokens, "")
    if rest:
        raise ConfigError(f"valueSchema: {rest[0]!r} is not expected there; {_EXAMPLE}")


def _skip_fields(tokens: list[str], inside: str) -> list[str]:
    """Skip fields up to the end or the closing bracket; the tokens that are left."""
    while True:
        if len(tokens) < 2 or tokens[0] in (",", ">", "<", ":"):
            raise ConfigError(f"valueSchema: a field{_of(inside)} has no name or no type; {_EXAMPLE}")
        name = f"{inside}{tokens[0].strip('`')}"
        tokens = _skip_type(tokens[2:] if tokens[1] == ":" else tokens[1:], name)
        tokens = _skip_remarks(tokens, name)
        if not tokens or tokens[0] == ">":
            return tokens
        if tokens[0] != ",":
            raise ConfigError(f"valueSchema: {tokens[0]!r} after the type of '{name}' is not expected; {_EXAMPLE}")
        tokens = tokens[1:]


def _of(inside: str) -> str:
    return f" of '{inside.rstrip('.')}'" if inside else ""


def _skip_type(tokens: list[str], name: str) -> list[str]:
    word = tokens[0].upper() if tokens else ""
    if word not in VALUE_TYPES and word not in _SYNONYMS:
        said = f"{tokens[0]!r} is no type that a field of a document can have" if tokens else "there is no type"
        raise ConfigError(f"valueSchema: field '{name}': {said}; valid are {', '.join(VALUE_TYPES)}")
    if word not in ("ARRAY", "MAP", "STRUCT"):
        return _without_parameters(tokens[1:])
    tokens = _expect(tokens[1:], "<", name, word)
    if word == "STRUCT":
        tokens = _skip_fields(tokens, f"{name}.")
    elif word == "ARRAY":
        tokens = _skip_type(tokens, name)
    else:
        if not tokens or tokens[0].upper() != "STRING":
            raise ConfigError(f"valueSchema: field '{name}': the keys of a MAP are STRING, as in JSON")
        tokens = _skip_type(_expect(tokens[1:], ",", name, word), name)
    return _expect(tokens, ">", name, word)


def _without_parameters(tokens: list[str]) -> list[str]:
    """Skip the ``(10, 2)`` of a decimal."""
    return tokens[tokens.index(")") + 1 :] if tokens and tokens[0] == "(" and ")" in tokens else tokens


def _skip_remarks(tokens: list[str], name: str) -> list[str]:
    """Skip a comment or a collation."""
    words = [token.upper() for token in tokens[:2]]
    if words == ["NOT", "NULL"]:
        raise ConfigError(f"valueSchema: field '{name}': any document may lack a field, so leave out NOT NULL")
    return _skip_remarks(tokens[2:], name) if words[:1] in (["COMMENT"], ["COLLATE"]) else tokens


def _expect(tokens: list[str], token: str, name: str, word: str) -> list[str]:
    if not tokens or tokens[0] != token:
        raise ConfigError(f"valueSchema: field '{name}': {word} lacks its {token!r}; {_EXAMPLE}")
    return tokens[1:]
