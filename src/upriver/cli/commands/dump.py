"""``upriver dump``: all changes of a bucket up to now, into Parquet or JSON-lines files; can be resumed.

The directory holds numbered parts and ``checkpoint.json``, which says how many parts it covers, and of which
collections. A dump that was killed continues after its last covered part; parts that the checkpoint does not cover are
written again. A part is on disk before a checkpoint covers it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from upriver.cli.connecting import ConnectingCommand, connection_options
from upriver.errors import ConfigError
from upriver.files import sync_file, sync_folder

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client._feed.blocking_feed import ChangeFeed
    from upriver.client.checkpoints import FileCheckpoint
    from upriver.client.options import ConnectOptions

_NAME = re.compile(r"part-\d{6,}\.(parquet|jsonl|unfinished)")


@click.command(cls=ConnectingCommand)
@connection_options
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory of the parts.")
@click.option("--format", "kind", type=click.Choice(["parquet", "jsonl"]), default="parquet", show_default=True)
@click.option("--scope", default="", help="Only this scope.")
@click.option("--collection", "collections", multiple=True, help="Only scope.collection; may be repeated.")
@click.option(
    "--part-rows",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    help="Approximate rows per file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON, and no progress bar.")
def dump(
    connect_to: ConnectOptions, out: Path, kind: str, scope: str, collections: tuple[str, ...], part_rows: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Write every change of a bucket up to now; run it again to add what has changed since, or after a crash."""
    from upriver.client.blocking import connect
    from upriver.client.checkpoints import FileCheckpoint

    out.mkdir(parents=True, exist_ok=True)
    checkpoint = FileCheckpoint(out / "checkpoint.json")
    _remove_unfinished(out, checkpoint)
    with (
        connect(connect_to) as db,
        db.change_batches(
            checkpoint=checkpoint, scope=scope, collections=collections, end="now", rows=min(part_rows, 16_384)
        ) as feed,
    ):
        summary = _Dump(feed, checkpoint, out, kind, part_rows, quiet=as_json).run()
    text = f"{summary['rows']:,} rows in {summary['parts']} new part" + ("" if summary["parts"] == 1 else "s")
    click.echo(json.dumps(summary) if as_json else text)


def _number(part: Path) -> int:
    return int(part.stem.split("-")[1])


def _parts(out: Path) -> list[Path]:
    """The files that a dump wrote. Other programs also name their files part-something."""
    return [path for path in out.glob("part-*.*") if _NAME.fullmatch(path.name)]


def _remove_unfinished(out: Path, checkpoint: FileCheckpoint) -> None:
    """Remove parts that the checkpoint does not cover; without a checkpoint, refuse, as they may be somebody else's."""
    if checkpoint.load() is None:
        if _parts(out):
            what = "remove them to begin again, or dump into another directory"
            raise ConfigError(f"--out: {out} holds parts, but no checkpoint.json that knows of them; {what}")
        return
    known = json.loads(checkpoint.path.read_bytes()).get("parts", 0)
    for part in _parts(out):
        if part.suffix == ".unfinished" or _number(part) > known:
            part.unlink()


class _Sink(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...
    def close(self) -> None: ...


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, batch: pa.RecordBatch) -> None:
        from upriver.cli.rows import json_rows

        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in json_rows(batch))

    def close(self) -> None:
        self._file.close()


def _sink(kind: str, path: Path) -> _Sink:
    if kind == "jsonl":
        return _JsonLines(path)
    import pyarrow.parquet as pq

    from upriver.records.schema import CHANGES

    sink: _Sink = pq.ParquetWriter(path, CHANGES, compression="zstd")
    return sink


class _Dump:
    """One run: batches into parts, with a progress bar."""

    def __init__(
        self,
        feed: ChangeFeed[pa.RecordBatch],
        checkpoint: FileCheckpoint,
        out: Path,
        kind: str,
        part_rows: int,
        quiet: bool,
    ) -> None:
        self._feed, self._checkpoint, self._out, self._kind = feed, checkpoint, out, kind
        self._part_rows, self._quiet = part_rows, quiet
        self._next = 1 + max(map(_number, _parts(out)), default=0)
        others = {p.suffix for p in _parts(out)} - {f".{kind}"}
        if others:
            raise ConfigError(f"{out} holds {others.pop()} files; dump {kind} into another directory")
        self._sink: _Sink | None = None
        self._in_part = self._rows = self._parts = 0

    def run(self) -> dict[str, Any]:
        if self._next == 1 and not self._feed.catching_up:
            self._checkpoint.save(self._feed.positions(), {"parts": 0})  # from now on the parts here are ours
        for batch in self._with_progress(self._feed):
            if self._sink is None:
                self._sink = _sink(self._kind, self._path(".unfinished"))
            self._sink.write(batch)
            self._rows += batch.num_rows
            self._in_part += batch.num_rows
            if self._in_part >= self._part_rows:
                self._finish_part()
        self._finish_part()
        return {"rows": self._rows, "parts": self._parts, "out": str(self._out)}

    def _path(self, suffix: str) -> Path:
        return self._out / f"part-{self._next:06d}{suffix}"

    def _finish_part(self) -> None:
        if self._sink is not None:
            self._sink.close()
            sync_file(self._path(".unfinished"))
            self._path(".unfinished").rename(self._path(f".{self._kind}"))
            sync_folder(self._out)
            self._sink, self._in_part = None, 0
            self._next, self._parts = self._next + 1, self._parts + 1
        if not self._feed.catching_up:  # otherwise a dump that dies now would write these parts twice
            self._checkpoint.save(self._feed.positions(), {"parts": self._next - 1})

    def _with_progress(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from upriver.cli.progress import progress_bar

        ends, starts = self._feed.feed.request.ends, self._feed.feed.request.starts
        total = sum(max(0, end - starts[vb].seqno) for vb, end in ends.items())
        done = sum(position.seqno for position in starts.values())
        with progress_bar("dump", total, quiet=self._quiet) as advance_to:
            for batch in batches:
                yield batch
                advance_to(int(self._feed.feed.table.streams.seqnos().sum()) - done, batch.num_rows)
