"""``upriver load``: documents from JSON lines, Parquet or CSV into a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.connecting import connection_options, open_database, split_options
from upriver.errors import ConfigError, KeyNotFound

if TYPE_CHECKING:
    from upriver.client.blocking import Database

BATCH = 2_000
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv"}
Row = dict[str, Any]


@click.command()
@connection_options
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("--format", "kind", type=click.Choice(["jsonl", "parquet", "csv"]), help="Instead of by the suffix.")
@click.option("--key", "key_field", default="id", show_default=True, help="Field that holds the document's key.")
@click.option("--collection", default="", help="Into this scope.collection.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON, and no progress bar.")
def load(**options: Any) -> None:
    """Write documents from FILES into a bucket. Files of ``upriver dump`` are recognized, deletions included."""
    connecting, rest = split_options(options)
    totals = {"written": 0, "deleted": 0, "skipped": 0, "without_key": 0}
    with open_database(connecting) as db:
        cid = db.collection_id(rest["collection"]) if rest["collection"] else 0
        for path in rest["files"]:
            _load_file(db, path, rest["kind"], rest["key_field"], cid, totals, quiet=rest["as_json"])
    click.echo(json.dumps(totals) if rest["as_json"] else _summary(totals, rest["key_field"]))


def _summary(totals: dict[str, int], key_field: str) -> str:
    text = f"{totals['written']:,} written, {totals['deleted']:,} deleted, {totals['skipped']:,} skipped"
    if totals["without_key"]:
        text += f", of these {totals['without_key']:,} without a field {key_field!r} for the key (see --key)"
    return text


def _load_file(
    db: Database, path: Path, kind: str | None, key_field: str, cid: int, totals: dict[str, int], *, quiet: bool
) -> None:
    from upriver.cli.progress import progress_bar
    from upriver.cli.rows import document_of, lacks_key

    writer = _Writer(db, cid, totals)
    with progress_bar(path.name, path.stat().st_size, quiet=quiet, unit="documents") as advance_to:
        for done, rows in _READERS[_kind(path, kind)](path):
            for row in rows:
                writer.add(document_of(row, key_field))
                totals["without_key"] += lacks_key(row, key_field)
            advance_to(done, len(rows))
        writer.flush()


def _kind(path: Path, given: str | None) -> str:
    kind = given or _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"{path}: the suffix does not say what it is; use --format jsonl, parquet or csv")
    return kind


class _Writer:
    """Gathers documents; a deletion waits for the writes before it, so that the order of a key is kept."""

    def __init__(self, db: Database, cid: int, totals: dict[str, int]) -> None:
        self._db, self._cid, self._totals = db, cid, totals
        self._pending: dict[bytes, bytes] = {}

    def add(self, document: tuple[bytes, bytes | None] | None) -> None:
        if document is None:
            self._totals["skipped"] += 1
            return
        key, value = document
        if value is None:
            self._delete(key)
            return
        self._pending[key] = value
        if len(self._pending) >= BATCH:
            self.flush()

    def _delete(self, key: bytes) -> None:
        self._pending.pop(key, None)
        try:
            self._db.delete(key, self._cid)
            self._totals["deleted"] += 1
        except KeyNotFound:
            self._totals["skipped"] += 1

    def flush(self) -> None:
        self._db.set_many(self._pending, self._cid)
        self._totals["written"] += len(self._pending)
        self._pending.clear()


def _read_jsonl(path: Path) -> Iterator[tuple[int, list[Row]]]:
    with path.open("rb") as file:
        rows: list[Row] = []
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_parse(path, number, line))
            if len(rows) >= BATCH:
                yield file.tell() if file.seekable() else 0, rows
                rows = []
        yield path.stat().st_size, rows


def _parse(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line.rstrip())
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        told = f"{path}, line {number}: not JSON ({reason}); nothing after line {number} was read"
        raise ConfigError(told) from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path}, line {number}: a JSON object is expected")
    return row


def _read_parquet(path: Path) -> Iterator[tuple[int, list[Row]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: {error}") from error
    size, read = path.stat().st_size, 0
    for batch in file.iter_batches(BATCH):
        read += batch.num_rows
        yield size * read // max(1, file.metadata.num_rows), batch.to_pylist()


def _read_csv(path: Path) -> Iterator[tuple[int, list[Row]]]:
    import pyarrow as pa
    import pyarrow.csv

    try:
        done = 0
        for batch in pyarrow.csv.open_csv(path):
            done += batch.nbytes
            yield min(done, path.stat().st_size), batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: {error}") from error


_READERS = {"jsonl": _read_jsonl, "parquet": _read_parquet, "csv": _read_csv}
