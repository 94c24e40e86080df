"""Fingerprints of documents, from either side: the bytes of the bucket, and a row of a table as in ``docs/sync.md``.

Numbers are compared by their exact value: ``1`` equals ``1.0``, and 2^64 + 1 equals nothing else. Fields that are null
at the top level count as absent; everything else must be the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from deltalake import DeltaTable

# Every row has these columns beside the fields of its document.
META = frozenset({
    "_key", "_seqno", "_vbucket", "_epoch", "_cas", "_changed_at", "_expires_at", "_deleted", "_rest", "_value",
})  # fmt: skip
_JSON = 0x01
_ESCAPE = re.compile(r"\\x[89a-f][0-9a-f]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def shown(key: bytes) -> str:
    r"""A key as the tables have it: text as it is, and escapes for bytes that are not UTF-8.

    Backslashes are doubled in keys with an escape, or text that looks like one, so that no two keys look the same.

    >>> print(shown(b"a\\b"), shown(b"\xff"), shown(rb"\xff"), shown(b"\\\xff"))
    a\b \xff \\xff \\\xff
    """
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return key.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return text.replace("\\", "\\\\") if _ESCAPE.search(text) else text


def exact(value: Any) -> Any:
    """Equal numbers in the same form: an integer, if the value is whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(text: str) -> int | float:
    found: int | float = exact(float(text))
    return found


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_ENCODER = json.JSONEncoder(sort_keys=True)
_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_refuse)


def _sum(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One document on one side: checksums of its bytes, of its fields, and of its metadata."""

    fields: int | None  # None: not a JSON object
    raw: int | None  # None: the row does not have the bytes
    metadata: int  # seqno, CAS, time of the change, expiry

    def same(self, row: Fingerprint) -> bool:
        """Whether a row has this document of the bucket; if the row has bytes, they must be the same."""
        if self.metadata != row.metadata:
            return False
        return self.raw == row.raw if row.raw is not None else self.fields is not None and self.fields == row.fields


def of_bucket(row: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of a mutation of the change feed."""
    value = row["value"] or b""
    found = _object(value) if (row["datatype"] or 0) & _JSON else None
    metadata = _metadata_sum(row["seqno"], row["cas"], row["timestamp"], row["expiry"] or 0)
    return Fingerprint(None if found is None else _fields(found), _sum(value), metadata)


def _object(value: bytes) -> dict[str, Any] | None:
    try:
        found = _DECODER.decode(value.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _fields(document: Mapping[str, Any]) -> int:
    plain = {name: value for name, value in document.items() if value is not None}
    return _sum(_ENCODER.encode(plain).encode())


def _metadata_sum(seqno: int | None, cas: int | None, changed: datetime | None, expires: int) -> int:
    return hash((seqno, cas, changed, expires))


@dataclass(frozen=True, slots=True)
class RowReader:
    """Makes fingerprints of the rows of one table."""

    columns: tuple[str, ...]
    nested: frozenset[str]  # columns with JSON text

    @classmethod
    def of(cls, table: DeltaTable) -> RowReader:
        fields = [one for one in table.schema().fields if one.name not in META]
        nested = frozenset(one.name for one in fields if one.metadata.get("upriver.kind") == "json")
        return cls(tuple(one.name for one in fields), nested)

    def __call__(self, row: Mapping[str, Any]) -> Fingerprint:
        expires = row["_expires_at"]
        seconds = 0 if expires is None else int((expires - _EPOCH).total_seconds())
        metadata = _metadata_sum(row["_seqno"], row["_cas"], row["_changed_at"], seconds)
        if row["_value"] is not None:
            return Fingerprint(None, _sum(row["_value"]), metadata)
        try:
            document = self._document(row)
        except ValueError:
            return Fingerprint(None, None, metadata)
        return Fingerprint(_fields(document), None, metadata)

    def _document(self, row: Mapping[str, Any]) -> dict[str, Any]:
        document = {
            name: _DECODER.decode(row[name]) if name in self.nested else exact(row[name])
            for name in self.columns
            if row[name] is not None
        }
        rest = _DECODER.decode(row["_rest"]) if row["_rest"] is not None else {}
        for name, value in rest.items():
            if document.setdefault(name, value) != value:
                raise ValueError(f"{name} has two values")
        return document
