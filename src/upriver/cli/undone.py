"""Which rows of a dump are void: a later rollback, or the end of their collection, has undone them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Place = tuple[int, int]  # which file, and which row in it
_COLUMNS = ["event", "vbucket", "seqno", "collection_id"]
_ENDS = ("collection_dropped", "collection_flushed")
_UNDOING = ("rollback", *_ENDS)


class Undone:
    """What rollbacks, drops and flushes undo; ``note`` all of them first, in the order of the files."""

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
    """Parses only lines that may be of this kind. Lines that are not JSON are reported by the loader."""
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


def is_dumped(row: Any) -> bool:
    """Whether a row is one of the change feed."""
    return isinstance(row, dict) and "event" in row and "seqno" in row and "vbucket" in row


_READERS = {"jsonl": _in_jsonl, "parquet": _in_parquet}
