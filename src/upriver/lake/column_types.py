"""The types that a column of a document's field can have."""

from __future__ import annotations

from enum import StrEnum


class ColumnType(StrEnum):
    """The type of a column."""

    BOOLEAN = "boolean"
    BIGINT = "bigint"
    DOUBLE = "double"
    STRING = "string"
    JSON = "json"
    """The text of a nested object or array."""


TableShape = dict[str, ColumnType]  # the columns of a table, beside those that every row has
