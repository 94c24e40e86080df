"""Rows of a dump: as JSON values, back to documents, and which of them a later row has undone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upriver.model import Datatype

if TYPE_CHECKING:
    import pyarrow as pa

_PLAIN = ("event", "vbucket", "seqno", "epoch", "vbuuid", "rev_seqno", "cas", "scope", "collection", "collection_id",
          "flags", "expiry", "delete_time")  # fmt: skip

Row = dict[str, Any]
Place = tuple[int, int]  # which file, and which row in it
_COLUMNS = ["event", "vbucket", "seqno", "collection_id"]
_ENDS = ("collection_dropped", "collection_flushed")
_UNDOING = ("rollback", *_ENDS)


def json_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Change rows as JSON lines have them; nulls are left out."""
    for row in batch.to_pylist():
        found = {name: row[name] for name in _PLAIN if row[name] is not None}
        if row["key"] is not None:
            found |= bytes_json("key", row["key"])
        if row["value"] is not None:
            found |= value_json(row["value"], row["datatype"] or 0) | {"datatype": row["datatype"] or 0}
        if row["xattrs"]:
            found["xattrs"] = {name: value.decode("utf-8", "replace") for name, value in row["xattrs"]}
        yield found


def value_json(value: bytes | None, datatype: int) -> dict[str, Any]:
    if value is None:
        return {}
    if datatype & Datatype.JSON:
        try:
            return {"value": json.loads(value)}
        except ValueError:
            pass  # not JSON in spite of its datatype: shown as text
    return bytes_json("value", value)


def bytes_json(name: str, value: bytes) -> dict[str, str]:
    """Bytes as text; in base64, and under a name that says so, if they are not UTF-8."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def is_dumped(row: Any) -> bool:
    """Whether a row is a change of a dump."""
    return isinstance(row, dict) and "event" in row and "seqno" in row and "vbucket" in row


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


# ---------------------------------------------------------------------------------------------- undone


class Undone:
    """The rows that rollbacks, drops and flushes have undone; ``note`` these first, in the order of the files."""

    def __init__(self) -> None:
        self._rollbacks: dict[int, list[tuple[Place, int]]] = {}
        self._ends: dict[tuple[int, int], list[tuple[Place, int]]] = {}

    def note_file(self, number: int, path: Path, kind: str) -> None:
        for at, row in _READERS[kind](path) if kind in _READERS else ():
            self.note((number, at), row)

    def note(self, place: Place, row: Row) -> None:
        if row["event"] == "rollback":
            self._rollbacks.setdefault(row["vbucket"], []).append((place, row["seqno"]))
        elif row.get("collection_id") is not None:
            self._ends.setdefault((row["vbucket"], row["collection_id"]), []).append((place, row["seqno"]))

    def has(self, place: Place, row: Row) -> bool:
        """Whether this row of a dump is void."""
        vb, seqno = row["vbucket"], row["seqno"]
        ends = self._ends.get((vb, row.get("collection_id", 0)), ())
        return self._rolled_back(place, vb, seqno) or any(
            seqno < end and not self._rolled_back(at, vb, end) for at, end in ends
        )

    def _rolled_back(self, place: Place, vb: int, seqno: int) -> bool:
        return any(at > place and seqno > to_seqno for at, to_seqno in self._rollbacks.get(vb, ()))


def _in_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows that undo others; parses only lines that may be one. The loader reports lines that are not JSON."""
    with path.open("rb") as file:
        for at, line in enumerate(line for line in file if line.strip()):
            if b'"rollback"' in line or b'"collection_' in line:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if is_dumped(row) and row["event"] in _UNDOING:
                    yield at, row


def _in_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    file, before = pq.ParquetFile(path), 0
    if not set(_COLUMNS) <= set(file.schema_arrow.names):
        return
    for batch in file.iter_batches(columns=_COLUMNS):
        found = pc.indices_nonzero(pc.is_in(batch["event"].cast(pa.string()), value_set=pa.array(_UNDOING)))
        yield from zip((before + at for at in found.to_pylist()), batch.take(found).to_pylist(), strict=True)
        before += batch.num_rows


_READERS = {"jsonl": _in_jsonl, "parquet": _in_parquet}
