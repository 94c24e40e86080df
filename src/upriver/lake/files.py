"""Data files of our tables, whose names say which vbuckets and batches they hold.

A Delta snapshot is a list of file names; with the range in the name, that list is all the bookkeeping the job needs,
and it changes in the same atomic commit as the data: ``vb0000-0511/b00000003-00000007-<random>.parquet``.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

Span = tuple[int, int]  # vbuckets, both included

# Log and tail are sorted by vbucket and read a few vbuckets at a time, so the smallest part that can be read alone
# must be small; if it were not, merging one range would cost more the more ranges there are.
_ROW_GROUPS = {"changes": (4_096, 16_384), "tail": (1_024, 4_096)}  # the least and the most rows
ROW_GROUP = 65_536
ANY_VBUCKET = 65_535
CHUNK_BYTES = 1 << 30
_NAME = re.compile(r"^vb(\d+)-(\d+)/([bm])(\d+)-(\d+)-[0-9a-f]+\.parquet$")
_NO_DICTIONARY = {"key", "value", "_key", "_value", "_rest", "seqno", "_seqno", "cas", "_cas", "rev_seqno"}
_LOOK_ROWS = 512
_SIZES: dict[str, int] = {}  # of files in memory, by path: names are random, so they are enough
# Columns whose range goes into the Delta log, so that readers can skip files.
_RANGED = ("vbucket", "seqno", "epoch", "batch", "timestamp", "_vbucket", "_seqno", "_epoch", "_changed_at")


@dataclass(frozen=True, slots=True)
class Piece:
    """One data file: vbuckets ``lo`` to ``hi``, batches ``first`` to ``last``; marks are no documents."""

    path: str
    lo: int
    hi: int
    first: int
    last: int
    rows: int = 0
    size: int = 0
    marks: bool = False
    stats: str = "{}"
    foreign: bool = False  # written by someone else, who knows what it holds
    made_ms: int = 0  # when the oldest of its rows came into the table, 0 before they did
    in_memory: int = 0  # bytes, 0 when nobody has looked

    def overlaps(self, lo: int, hi: int) -> bool:
        return self.lo <= hi and lo <= self.hi


def piece_of(path: str, rows: int = 0, size: int = 0, made_ms: int = 0) -> Piece:
    """What a file name says; a file of someone else may hold anything.

    >>> piece_of("vb0000-0511/b00000003-00000007-ab.parquet", rows=5).last
    7
    """
    found = _NAME.match(path)
    if found is None:
        return Piece(path, 0, ANY_VBUCKET, 0, 0, rows, size, foreign=True, made_ms=made_ms)
    lo, hi, first, last = (int(found[group]) for group in (1, 2, 4, 5))
    # Earlier versions wrote a first batch after the last one when a collection was dropped between two.
    return Piece(path, lo, hi, min(first, last), last, rows, size, marks=found[3] == "m", made_ms=made_ms)


def place(lo: int, hi: int, first: int, last: int, *, marks: bool = False) -> str:
    """A fresh file name."""
    return f"vb{lo:04d}-{hi:04d}/{'m' if marks else 'b'}{first:08d}-{last:08d}-{secrets.token_hex(8)}.parquet"


def filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """Where a table lives: a local path, or an address that Arrow knows (``s3://``, ``gs://``, ``hdfs://``)."""
    if "://" in uri:
        found: tuple[pafs.FileSystem, str] = pafs.FileSystem.from_uri(uri)
        return found
    return pafs.LocalFileSystem(), uri


def write_piece(root: str, path: str, table: pa.Table, edges: Sequence[int] = ()) -> Piece:
    """Write one data file under the table at ``root``; nobody sees it until it is committed.

    ``edges`` are rows at which something begins that is read alone.
    """
    fs, base = filesystem(root)
    fs.create_dir(f"{base}/{path.rpartition('/')[0]}", recursive=True)
    target = f"{base}/{path}"
    try:
        with pq.ParquetWriter(
            target,
            table.schema,
            filesystem=fs,
            compression="zstd",
            compression_level=1,
            use_dictionary=_dictionaries(table),
            write_statistics=True,
        ) as writer:
            for start, end in _groups_of_rows(root, table.num_rows, edges):
                writer.write_table(table.slice(start, end - start), row_group_size=max(end - start, 1))
    except BaseException:
        discard(root, [path])
        raise
    named = piece_of(path)
    size = fs.get_file_info(target).size
    return replace(named, rows=table.num_rows, size=size, stats=_stats(table), in_memory=max(table.nbytes, 1))


def _groups_of_rows(root: str, rows: int, edges: Sequence[int]) -> list[tuple[int, int]]:
    """Where the row groups of a file begin and end: at the edges, unless they are too close, or far apart."""
    least, most = _ROW_GROUPS.get(root.split("/")[-2], (ROW_GROUP, ROW_GROUP))
    most = max(least, min(rows // 32, most))
    starts = [0]
    for edge in (*edges, rows):
        while edge - starts[-1] > 2 * most or (not edges and edge - starts[-1] > most):
            starts.append(starts[-1] + most)
        if edge - starts[-1] >= least and edge < rows:
            starts.append(edge)
    return list(zip(starts, [*starts[1:], rows], strict=True))


def uncompressed(root: str, pieces: Iterable[Piece]) -> int:
    """How many bytes these files are in memory, about; their footers know."""
    return sum(_uncompressed(root, piece) for piece in pieces)


def _uncompressed(root: str, piece: Piece) -> int:
    if not piece.in_memory and piece.path not in _SIZES:
        fs, base = filesystem(root)
        found = pq.read_metadata(f"{base}/{piece.path}", filesystem=fs)
        size = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
        remember([replace(piece, in_memory=size)])
    return piece.in_memory or _SIZES[piece.path]


def remember(pieces: Iterable[Piece]) -> None:
    """Keep the sizes of files that were just written, so that nobody has to open them for it."""
    if len(_SIZES) > 50_000:
        _SIZES.clear()
    _SIZES.update({piece.path: piece.in_memory for piece in pieces})


def discard(root: str, paths: Sequence[str]) -> None:
    """Delete files that no commit names; those that never came to be are fine."""
    fs, base = filesystem(root)
    for path in paths:
        info = fs.get_file_info(f"{base}/{path}")
        if info.type == pafs.FileType.File:
            fs.delete_file(info.path)


def read_pieces(
    root: str,
    pieces: Sequence[Piece],
    schema: pa.Schema,
    columns: Sequence[str] | None = None,
    span: Span | None = None,
    adapt: Callable[[pa.Table, pa.Schema], pa.Table] | None = None,
) -> pa.Table:
    """Rows of some files (of some vbuckets), with null where an older file has no such column.

    ``adapt`` sees each file's table first.
    """
    names = list(columns) if columns is not None else schema.names
    wanted = pa.schema([schema.field(name) for name in names])
    if not pieces:
        return wanted.empty_table()
    fs, base = filesystem(root)
    tables = [
        _read_foreign(fs, f"{base}/{piece.path}", schema, names, span)
        if piece.foreign
        else _read_one(fs, f"{base}/{piece.path}", names, span)
        for piece in pieces
    ]
    if adapt is not None:
        tables = [adapt(table, wanted) for table in tables]
    return pa.concat_tables([_conform(table, wanted) for table in tables])


def _read_foreign(fs: pafs.FileSystem, path: str, schema: pa.Schema, names: list[str], span: Span | None) -> pa.Table:
    """Others write types that Arrow cannot filter (views of strings): first ours, then the filter."""
    parts = [part if span is None else within(part, span) for part in _foreign_parts(fs, path, schema)]
    return pa.concat_tables([schema.empty_table(), *parts]).select(names)


def _foreign_parts(fs: pafs.FileSystem, path: str, schema: pa.Schema) -> Iterator[pa.Table]:
    with fs.open_input_file(path) as source:
        file = pq.ParquetFile(source)
        for group in range(file.num_row_groups):
            yield _conform(file.read_row_group(group, use_threads=False), schema)


def foreign_slices(root: str, piece: Piece, schema: pa.Schema, size: int) -> Iterator[pa.Table]:
    """The rows of a file that somebody else wrote, about so many bytes at a time."""
    fs, base = filesystem(root)
    waiting: list[pa.Table] = []
    for part in _foreign_parts(fs, f"{base}/{piece.path}", schema):
        waiting.append(part)
        if sum(table.nbytes for table in waiting) >= size:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _read_one(fs: pafs.FileSystem, path: str, names: list[str], span: Span | None) -> pa.Table:
    with fs.open_input_file(path) as source:
        file = pq.ParquetFile(source)
        have = file.schema_arrow.names  # made anew at every look
        present = [name for name in names if name in have]
        if span is None:
            return file.read(columns=present, use_threads=False)
        vbucket = _vbucket_column(have)
        needed = list(dict.fromkeys([*present, vbucket]))
        found = file.read_row_groups(_groups(file, have.index(vbucket), span), columns=needed, use_threads=False)
    return within(found, span).select(present)


def _vbucket_column(names: Sequence[str]) -> str:
    return "vbucket" if "vbucket" in names else "_vbucket"


def _groups(file: pq.ParquetFile, column: int, span: Span) -> list[int]:
    """Row groups that may hold rows of these vbuckets."""
    found = []
    for index in range(file.num_row_groups):
        known = file.metadata.row_group(index).column(column).statistics
        if known is None or not known.has_min_max or (known.min <= span[1] and span[0] <= known.max):
            found.append(index)
    return found


def within(table: pa.Table, span: Span) -> pa.Table:
    """The rows of these vbuckets; a slice when they stand together."""
    vbuckets = table.column(_vbucket_column(table.schema.names)).to_numpy()
    inside = (vbuckets >= span[0]) & (vbuckets <= span[1])
    count = int(np.count_nonzero(inside))
    first = int(inside.argmax()) if count else 0
    if inside[first : first + count].all():
        return table.slice(first, count)
    return table.filter(pa.array(inside))


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        if field.name in table.schema.names:
            column = table.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
        else:
            columns.append(pa.nulls(table.num_rows, field.type))
    return pa.table(columns, schema=schema)


def _dictionaries(table: pa.Table) -> list[str]:
    """Columns worth a dictionary: those that repeat within some rows. Trying in vain costs a fifth of the writing."""
    some = table.slice(0, _LOOK_ROWS)
    names = [f.name for f in table.schema if f.name not in _NO_DICTIONARY and not pa.types.is_nested(f.type)]
    return [name for name in names if 2 * len(pc.unique(some.column(name))) <= max(some.num_rows, 2)]


def _stats(table: pa.Table) -> str:
    low: dict[str, object] = {}
    high: dict[str, object] = {}
    for name in _RANGED:
        if table.num_rows and name in table.schema.names and table.column(name).null_count == 0:
            both = pc.min_max(table.column(name)).as_py()
            low[name], high[name] = _plain(both["min"]), _plain(both["max"])
    return json.dumps({"numRecords": table.num_rows, "minValues": low, "maxValues": high, "nullCount": {}})


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


def gather(table: pa.Table, rows: Any) -> pa.Table:
    """The rows at these places. Taking from many small chunks is a hundred times slower than from one.

    One chunk of text or bytes cannot be larger than 2 GiB, so a large table goes the long way round.
    """
    if table.nbytes < CHUNK_BYTES:
        return table.combine_chunks().take(rows)
    places = pa.array(rows)
    step = max(1, table.num_rows * (CHUNK_BYTES // 4) // table.nbytes)
    large = table.cast(pa.schema([_large(field) for field in table.schema])).combine_chunks()
    return pa.concat_tables(
        [large.take(places.slice(at, step)).cast(table.schema) for at in range(0, max(len(places), 1), step)]
    )


def _large(field: pa.Field) -> pa.Field:
    kinds = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    return field.with_type(kinds.get(field.type, field.type))


def now_ms() -> int:
    """The clock of Delta actions."""
    return int(time.time() * 1000)
