"""Data files: Parquet files whose names say which vbuckets and batches they hold.

A version of a Delta table is a list of file names. With vbuckets and batches in the name, that list is all the
bookkeeping that a sync needs, and it changes in the same atomic commit as the data:
``vb0000-0511/b00000003-00000007-<random>.parquet``.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
import numpy.typing as npt
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
_SAMPLE_ROWS = 512
_SIZES: dict[str, int] = {}  # bytes in memory by path: names are random, so a path identifies a file
# Columns whose range goes into the Delta log, so that readers can skip files.
_RANGED = ("vbucket", "seqno", "epoch", "batch", "timestamp", "_vbucket", "_seqno", "_epoch", "_changed_at")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file of a table: vbuckets ``lo`` to ``hi``, batches ``first_batch`` to ``last_batch``."""

    path: str
    lo: int
    hi: int
    first_batch: int
    last_batch: int
    rows: int = 0
    size: int = 0
    marks: bool = False  # of the change log: rollbacks and collection events, no documents
    stats: str = "{}"
    foreign: bool = False  # another tool wrote it, and its name says nothing about its rows
    made_ms: int = 0  # when the oldest of its rows came into the table, 0 before the commit
    in_memory: int = 0  # bytes when uncompressed, 0 for unknown

    def overlaps(self, lo: int, hi: int) -> bool:
        return self.lo <= hi and lo <= self.hi


def parse_file_name(path: str, rows: int = 0, size: int = 0, made_ms: int = 0) -> DataFile:
    """What a file name says. A file that another tool wrote may hold anything.

    >>> parse_file_name("vb0000-0511/b00000003-00000007-ab.parquet", rows=5).last_batch
    7
    """
    found = _NAME.match(path)
    if found is None:
        return DataFile(path, 0, ANY_VBUCKET, 0, 0, rows, size, foreign=True, made_ms=made_ms)
    lo, hi, first, last = (int(found[group]) for group in (1, 2, 4, 5))
    # Earlier versions wrote a first batch after the last one when a collection was dropped between two.
    return DataFile(path, lo, hi, min(first, last), last, rows, size, marks=found[3] == "m", made_ms=made_ms)


def new_file_name(lo: int, hi: int, first: int, last: int, *, marks: bool = False) -> str:
    """A file name that no other file has."""
    return f"vb{lo:04d}-{hi:04d}/{'m' if marks else 'b'}{first:08d}-{last:08d}-{secrets.token_hex(8)}.parquet"


def filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system and path of a table: a local path, or an address that Arrow knows (``s3://``, ``gs://``, ...)."""
    if "://" in uri:
        found: tuple[pafs.FileSystem, str] = pafs.FileSystem.from_uri(uri)
        return found
    return pafs.LocalFileSystem(), uri


def write_file(root: str, path: str, table: pa.Table, edges: Sequence[int] = ()) -> DataFile:
    """Write one data file under the table at ``root``; readers see it once it is committed.

    Row groups begin at ``edges``, the rows where ranges begin that are read one at a time.
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
    named = parse_file_name(path)
    size = fs.get_file_info(target).size
    return replace(named, rows=table.num_rows, size=size, stats=_stats(table), in_memory=max(table.nbytes, 1))


def _groups_of_rows(root: str, rows: int, edges: Sequence[int]) -> list[tuple[int, int]]:
    """Where the row groups of a file begin and end: at the edges, unless these are too close or too far apart."""
    least, most = _ROW_GROUPS.get(root.split("/")[-2], (ROW_GROUP, ROW_GROUP))
    most = max(least, min(rows // 32, most))
    starts = [0]
    for edge in (*edges, rows):
        while edge - starts[-1] > 2 * most or (not edges and edge - starts[-1] > most):
            starts.append(starts[-1] + most)
        if edge - starts[-1] >= least and edge < rows:
            starts.append(edge)
    return list(zip(starts, [*starts[1:], rows], strict=True))


def bytes_in_memory(root: str, files: Iterable[DataFile]) -> int:
    """About how many bytes these files take in memory, from their footers."""
    return sum(_uncompressed(root, file) for file in files)


def _uncompressed(root: str, file: DataFile) -> int:
    if not file.in_memory and file.path not in _SIZES:
        fs, base = filesystem(root)
        found = pq.read_metadata(f"{base}/{file.path}", filesystem=fs)
        size = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
        remember_sizes([replace(file, in_memory=size)])
    return file.in_memory or _SIZES[file.path]


def remember_sizes(files: Iterable[DataFile]) -> None:
    """Remember how large new files are in memory, so that `bytes_in_memory` need not open them."""
    if len(_SIZES) > 50_000:
        _SIZES.clear()
    _SIZES.update({file.path: file.in_memory for file in files})


def discard(root: str, paths: Sequence[str]) -> None:
    """Delete files that no commit names; a file that does not exist is no error."""
    fs, base = filesystem(root)
    for path in paths:
        info = fs.get_file_info(f"{base}/{path}")
        if info.type == pafs.FileType.File:
            fs.delete_file(info.path)


def read_files(
    root: str,
    files: Sequence[DataFile],
    schema: pa.Schema,
    columns: Sequence[str] | None = None,
    span: Span | None = None,
    adapt: Callable[[pa.Table, pa.Schema], pa.Table] | None = None,
) -> pa.Table:
    """Rows of some files (of the vbuckets in ``span``), with null where an older file lacks a column.

    ``adapt`` changes the table of each file before it is brought into the schema.
    """
    names = list(columns) if columns is not None else schema.names
    wanted = pa.schema([schema.field(name) for name in names])
    if not files:
        return wanted.empty_table()
    fs, base = filesystem(root)
    tables = [
        _read_foreign(fs, f"{base}/{file.path}", schema, names, span)
        if file.foreign
        else _read_one(fs, f"{base}/{file.path}", names, span)
        for file in files
    ]
    if adapt is not None:
        tables = [adapt(table, wanted) for table in tables]
    return pa.concat_tables([_conform(table, wanted) for table in tables])


def _read_foreign(fs: pafs.FileSystem, path: str, schema: pa.Schema, names: list[str], span: Span | None) -> pa.Table:
    """Other tools write types that Arrow cannot filter (string views), so cast first, then filter."""
    parts = [part if span is None else within(part, span) for part in _foreign_parts(fs, path, schema)]
    return pa.concat_tables([schema.empty_table(), *parts]).select(names)


def _foreign_parts(fs: pafs.FileSystem, path: str, schema: pa.Schema) -> Iterator[pa.Table]:
    with fs.open_input_file(path) as source:
        file = pq.ParquetFile(source)
        for group in range(file.num_row_groups):
            yield _conform(file.read_row_group(group, use_threads=False), schema)


def foreign_slices(root: str, file: DataFile, schema: pa.Schema, size: int) -> Iterator[pa.Table]:
    """The rows of a file that another tool wrote, about ``size`` bytes at a time."""
    fs, base = filesystem(root)
    waiting: list[pa.Table] = []
    for part in _foreign_parts(fs, f"{base}/{file.path}", schema):
        waiting.append(part)
        if sum(table.nbytes for table in waiting) >= size:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _read_one(fs: pafs.FileSystem, path: str, names: list[str], span: Span | None) -> pa.Table:
    with fs.open_input_file(path) as source:
        file = pq.ParquetFile(source)
        have = file.schema_arrow.names  # computed at every access
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
    """The rows of these vbuckets; a slice, without a copy, when they are side by side."""
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
    """Columns with repeated values in the first rows. A useless dictionary costs a fifth of the writing time."""
    some = table.slice(0, _SAMPLE_ROWS)
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


def gather(table: pa.Table, rows: pa.Array | npt.NDArray[np.int64] | Sequence[int]) -> pa.Table:
    """The rows at these indices. Taking rows from many small chunks is a hundred times slower than from one.

    One chunk of text or bytes cannot exceed 2 GiB, so a large table is cast to large types in between.
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
    """The time in the unit of Delta actions."""
    return int(time.time() * 1000)
