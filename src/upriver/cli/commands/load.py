"""``upriver load``: documents from JSON lines, Parquet or CSV into a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.connecting import ConnectingCommand, connection_options
from upriver.cli.rows import Undone, document_of, is_dumped, lacks_key
from upriver.errors import ConfigError, KeyNotFound, UnknownCollection, UnknownScope

if TYPE_CHECKING:
    from upriver.client.blocking import Collection, Database
    from upriver.client.options import ConnectOptions

BATCH = 2_000
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv"}
Row = dict[str, Any]


@click.command(cls=ConnectingCommand)
@connection_options
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "parquet", "csv"]),
    help="[default: by the suffix]",
)
@click.option("--key", "key_field", default="id", show_default=True, help="Field that holds the document's key.")
@click.option("--collection", default="", help="The scope.collection to write to.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON, and no progress bar.")
def load(
    connect_to: ConnectOptions,
    files: tuple[Path, ...],
    kind: str | None,
    key_field: str,
    collection: str,
    as_json: bool,
) -> None:
    """Write documents from FILES into a bucket.

    Files of `upriver dump` are recognized: their documents, deletions included, go into the collections that they came
    from, and rows that a later file undoes are left out. Give all files of a dump, in order.
    """
    from upriver.client.blocking import connect

    totals = {"written": 0, "deleted": 0, "skipped": 0, "without_key": 0}
    kinds = [_kind(path, kind) for path in files]
    with connect(connect_to) as db:
        writers = _Writers(db, collection, totals)
        undone = _undone(files, kinds)
        for number, (path, kind_of_file) in enumerate(zip(files, kinds, strict=True)):
            _load_file(writers, undone, number, path, kind_of_file, key_field, quiet=as_json)
    click.echo(json.dumps(totals) if as_json else _summary(totals, key_field))


def _summary(totals: dict[str, int], key_field: str) -> str:
    text = f"{totals['written']:,} written, {totals['deleted']:,} deleted, {totals['skipped']:,} skipped"
    if totals["without_key"]:
        text += f", of these {totals['without_key']:,} without a field {key_field!r} for the key (see --key)"
    return text


def _undone(files: Sequence[Path], kinds: list[str]) -> Undone:
    import pyarrow as pa

    undone = Undone()
    for number, (path, kind) in enumerate(zip(files, kinds, strict=True)):
        try:
            undone.note_file(number, path, kind)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{path}: {error}") from error
    return undone


def _load_file(
    writers: _Writers, undone: Undone, number: int, path: Path, kind: str, key_field: str, *, quiet: bool
) -> None:
    from upriver.cli.progress import progress_bar

    before = 0
    with progress_bar(path.name, path.stat().st_size, quiet=quiet, unit="documents") as advance_to:
        for done, rows in _READERS[kind](path, key_field):
            for at, row in enumerate(rows, before):
                if is_dumped(row) and undone.has((number, at), row):
                    writers.skip()
                else:
                    writers.add(row, document_of(row, key_field), lacks_key(row, key_field))
            before += len(rows)
            advance_to(done, len(rows))
        writers.flush()


def _kind(path: Path, given: str | None) -> str:
    kind = given or _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"{path}: the suffix does not say what it is; use --format jsonl, parquet or csv")
    return kind


class _Writers:
    """Writes each document into the given collection, or into the one that its row names."""

    def __init__(self, db: Database, collection: str, totals: dict[str, int]) -> None:
        self._db, self._totals, self._given = db, totals, bool(collection)
        self._by_name = {"": _Writer(self._known(collection) if collection else db, totals)}

    def add(self, row: Row, document: tuple[bytes, bytes | None] | None, lacks_key: bool) -> None:
        self._totals["without_key"] += lacks_key
        if document is None or _is_nowhere(row):
            self.skip()
        else:
            self._writer("" if self._given or not is_dumped(row) else _path_of(row)).add(*document)

    def skip(self) -> None:
        self._totals["skipped"] += 1

    def _writer(self, name: str) -> _Writer:
        if name not in self._by_name:
            self._by_name[name] = _Writer(self._of_the_files(name), self._totals)
        return self._by_name[name]

    def _known(self, name: str) -> Collection:
        """A collection that exists: a wrong name is reported before anything is written."""
        found = self._db.collection(name)
        found.high_seqnos()
        return found

    def _of_the_files(self, name: str) -> Collection:
        try:
            return self._known(name)
        except (UnknownCollection, UnknownScope) as error:
            what = f"documents of {name}, which this bucket does not have: create it, or choose one with --collection"
            raise ConfigError(f"the files hold {what}") from error

    def flush(self) -> None:
        for writer in self._by_name.values():
            writer.flush()


def _is_nowhere(row: Row) -> bool:
    """Whether the row's collection was dropped before the dump: it has an id and no name."""
    return is_dumped(row) and bool(row.get("collection_id")) and row.get("collection") is None


def _path_of(row: Row) -> str:
    """The collection of a row; empty for the default one, or if the row names none."""
    path = f"{row.get('scope') or ''}.{row.get('collection') or ''}"
    return "" if path in (".", "_default._default") else path


class _Writer:
    """Writes documents in batches. A later version of a key, or its deletion, replaces the pending one."""

    def __init__(self, documents: Database | Collection, totals: dict[str, int]) -> None:
        self._documents, self._totals = documents, totals
        self._pending: dict[bytes, bytes] = {}

    def add(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._delete(key)
            return
        self._pending[key] = value
        if len(self._pending) >= BATCH:
            self.flush()

    def _delete(self, key: bytes) -> None:
        self._pending.pop(key, None)
        try:
            self._documents.delete(key)
            self._totals["deleted"] += 1
        except KeyNotFound:
            self._totals["skipped"] += 1

    def flush(self) -> None:
        self._documents.set_many(self._pending)
        self._totals["written"] += len(self._pending)
        self._pending.clear()


def _read_jsonl(path: Path, key_field: str) -> Iterator[tuple[int, list[Row]]]:
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


def _read_parquet(path: Path, key_field: str) -> Iterator[tuple[int, list[Row]]]:
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


def _read_csv(path: Path, key_field: str) -> Iterator[tuple[int, list[Row]]]:
    import pyarrow as pa
    import pyarrow.csv

    try:
        done = 0
        texts = pyarrow.csv.ConvertOptions(column_types={key_field: pa.string()})  # the key 007 is not 7
        for batch in pyarrow.csv.open_csv(path, convert_options=texts):
            done += batch.nbytes
            yield min(done, path.stat().st_size), batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: {error}") from error


_READERS = {"jsonl": _read_jsonl, "parquet": _read_parquet, "csv": _read_csv}
