"""Rows of change batches as JSON values, and back to documents."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from upriver.cli.rendering import value_json
from upriver.cli.undone import is_dumped
from upriver.model import Datatype

if TYPE_CHECKING:
    import pyarrow as pa

_PLAIN = ("event", "vbucket", "seqno", "epoch", "vbuuid", "rev_seqno", "cas", "scope", "collection", "collection_id",
          "flags", "expiry", "delete_time")  # fmt: skip


def json_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Change rows as JSON lines have them; nulls are left out."""
    for row in batch.to_pylist():
        found = {name: row[name] for name in _PLAIN if row[name] is not None}
        if row["key"] is not None:
            found |= _text("key", row["key"])
        if row["value"] is not None:
            found |= value_json(row["value"], row["datatype"] or 0) | {"datatype": row["datatype"] or 0}
        if row["xattrs"]:
            found["xattrs"] = {name: value.decode("utf-8", "replace") for name, value in row["xattrs"]}
        yield found


def _text(name: str, raw: bytes) -> dict[str, str]:
    try:
        return {name: raw.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(raw).decode()}


def document_of(row: dict[str, Any], key_field: str) -> tuple[bytes, bytes | None] | None:
    """Key and value of a row: of our own dump (value None for a deletion), or of any object with a key field.

    None for rows that are not about a document.
    """
    if is_dumped(row):
        return _of_dump(row)
    key = row.get(key_field)
    if key is None:
        return None
    raw = key if isinstance(key, bytes) else str(key).encode()
    return raw, json.dumps(row, ensure_ascii=False, default=_plain).encode()


def _plain(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def lacks_key(row: dict[str, Any], key_field: str) -> bool:
    """Whether the row is not of a dump and has no key field."""
    return not is_dumped(row) and row.get(key_field) is None


def _of_dump(row: dict[str, Any]) -> tuple[bytes, bytes | None] | None:
    if row["event"] not in ("mutation", "deletion", "expiration"):
        return None
    key = _raw(row, "key")
    if key is None or row["event"] != "mutation":
        return None if key is None else (key, None)
    return (key, _value(row)) if "value" in row or "value_base64" in row else None  # of tail --keys-only


def _value(row: dict[str, Any]) -> bytes:
    """The value of a row. JSON lines show the JSON text ``"a"`` and the text ``a`` alike; the datatype decides."""
    value = row.get("value")
    if isinstance(value, str | None) and "value" in row and row.get("datatype", 0) & Datatype.JSON:
        return json.dumps(value, ensure_ascii=False).encode()
    return _raw(row, "value") or b""


def _raw(row: dict[str, Any], name: str) -> bytes | None:
    if f"{name}_base64" in row:
        return base64.b64decode(row[f"{name}_base64"])
    value = row.get(name)
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value, ensure_ascii=False).encode()
