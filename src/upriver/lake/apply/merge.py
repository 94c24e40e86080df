"""One merge task, wherever it runs: bring a range of vbuckets from the change log into the tail or ``current``.

A task reads and writes files and commits nothing; the driver commits what it returns. Repeating a task is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.apply.policy import cut, frontier, missing
from upriver.lake.apply.rows import keep_newer, latest, repair, tail_rows, tombstones
from upriver.lake.change_log import WIPES, LogMark, read_log
from upriver.lake.columns import fold_rest, row_schema, spill
from upriver.lake.files import DataFile, bytes_in_memory, gather, new_file_name, read_files, within, write_file
from upriver.lake.layout import Lake
from upriver.lake.options import TableShape
from upriver.records.schema import Event


@dataclass(frozen=True)
class MergeTask:
    """What to do with vbuckets ``lo`` to ``hi`` of one collection. Plain values only, because Spark pickles it."""

    lake: str
    name: str
    lo: int
    hi: int
    batch: int
    applied: int  # the last batch that tail and current have
    shape: TableShape
    log: tuple[DataFile, ...]
    tail: tuple[DataFile, ...]
    current: tuple[DataFile, ...]
    marks: tuple[LogMark, ...] = ()
    skip: tuple[tuple[int, int], ...] = ()  # ranges that other tasks merge
    merge: bool = False  # into ``current``; False: into the tail
    rewrite: bool = False  # every file, because a type changed
    in_doubt: bool = False  # another tool wrote some files, so none is known to hold all batches up to its last one
    keep_deleted: bool = False
    floors: dict[int, int] = field(default_factory=dict)  # up to which seqno the log was trimmed, by vbucket
    target_rows: int = 131_072
    target_bytes: int = 160 << 20
    max_files: int = 4

    @property
    def schema(self) -> pa.Schema:
        return row_schema(self.shape)

    def root(self, table: str) -> str:
        return Lake(self.lake).path(table, self.name)

    def new_files(self) -> list[DataFile]:
        """Log files with batches that tail and current lack."""
        return [file for file in self.log if file.last_batch > self.applied]

    def marked_vbuckets(self) -> list[int]:
        """Vbuckets of this task with a new rollback, drop or flush."""
        marked = {
            mark.vbucket
            for mark in self.marks
            if mark.batch > self.applied and (mark.event == Event.ROLLBACK or mark.event in WIPES)
        }
        return sorted(
            vbucket
            for vbucket in marked
            if self.lo <= vbucket <= self.hi and not any(lo <= vbucket <= hi for lo, hi in self.skip)
        )


@dataclass
class MergeResult:
    """Files to commit, and vbuckets that the log could not repair."""

    tail: list[DataFile] = field(default_factory=list)
    current: list[DataFile] = field(default_factory=list)
    replaced: list[DataFile] = field(default_factory=list)  # files of ``current``
    unknown: list[int] = field(default_factory=list)  # vbuckets to read again; nothing was written then
    gone: list[str] = field(default_factory=list)  # files that others deleted before the task could read them
    rows: int = 0
    repaired: int = 0

    def to_json(self) -> dict[str, Any]:
        """The form in which an executor sends it to the driver."""
        return asdict(self)

    @classmethod
    def from_json(cls, sent: dict[str, Any]) -> MergeResult:
        files = {name: [DataFile(**file) for file in sent[name]] for name in ("tail", "current", "replaced")}
        return cls(**{**sent, **files})


def run_inline(tasks: Sequence[MergeTask], unapplied: pa.Table | None = None) -> list[MergeResult]:
    """Run tasks in this process; ``unapplied`` holds the new rows of the log if the caller has read them."""
    return [run_merge(task, unapplied) for task in tasks]


def run_merge(task: MergeTask, unapplied: pa.Table | None = None) -> MergeResult:
    """Turn the new part of the log into rows, and write them to the tail or merge them into ``current``."""
    result = MergeResult()
    if unapplied is None:
        unapplied = read_log(task.root("changes"), task.new_files(), task.lo, task.hi)
    changes = within(unapplied, (task.lo, task.hi))
    for lo, hi in task.skip:
        vbuckets = changes.column("vbucket")
        changes = changes.filter(pc.or_(pc.less(vbuckets, lo), pc.greater(vbuckets, hi)))
    marked = task.marked_vbuckets()
    if marked:
        apart = pc.is_in(changes.column("vbucket"), value_set=pa.array(marked, pa.int32()))
        plain = tail_rows(changes.filter(pc.invert(apart)), task.shape)
        rows = pa.concat_tables([plain, *(_marked_rows(task, vbucket, result) for vbucket in marked)])
    else:
        rows = tail_rows(changes, task.shape)
    result.rows = rows.num_rows
    if result.unknown:
        return result
    if task.merge:
        _merge_into_current(task, rows, result)
    elif rows.num_rows:
        first_batch = min(task.applied + 1, task.batch)
        if (np.diff(rows.column("_vbucket").to_numpy()) < 0).any():  # the rows come from more than one file
            rows = gather(rows, pc.sort_indices(rows, [("_vbucket", "ascending")]))
        path = new_file_name(task.lo, task.hi, first_batch, task.batch)
        result.tail.append(write_file(task.root("tail"), path, rows))
    return result


def _marked_rows(task: MergeTask, vbucket: int, result: MergeResult) -> pa.Table:
    """The rows of a vbucket that rolled back, or whose collection was dropped or flushed."""
    marks = [mark for mark in task.marks if mark.vbucket == vbucket]
    known = _known_keys(task, vbucket)
    if any(mark.event == Event.ROLLBACK and mark.batch > task.applied for mark in marks):
        log = read_log(task.root("changes"), task.log, vbucket, vbucket)
        repaired = repair(log, marks, task.applied, known, task.shape, task.floors.get(vbucket, 0))
        result.repaired += repaired.rows.num_rows
        if not repaired.complete:
            result.unknown.append(vbucket)
        return repaired.rows
    rows = tail_rows(read_log(task.root("changes"), task.new_files(), vbucket, vbucket), task.shape)
    wipe = max((mark for mark in marks if mark.event in WIPES), key=lambda mark: mark.order)
    keys = pc.unique(pa.concat_arrays([known, *rows.column("_key").chunks]))
    return latest(pa.concat_tables([rows, tombstones(keys, wipe, task.shape)]))


def _known_keys(task: MergeTask, vbucket: int) -> pa.Array:
    """The keys that tail and current have of a vbucket."""
    found = []
    for table, files in (("current", task.current), ("tail", task.tail)):
        here = [file for file in files if file.overlaps(vbucket, vbucket)]
        found.append(read_files(task.root(table), here, task.schema, ["_key"], (vbucket, vbucket)).column("_key"))
    chunks = [chunk for column in found for chunk in column.chunks]
    return pc.unique(pa.chunked_array(chunks, pa.string()))


def _merge_into_current(task: MergeTask, rows: pa.Table, result: MergeResult) -> None:
    """Rewrite the files of ``current`` that hold a changed key, and add the new rows."""
    new = latest(pa.concat_tables([_waiting_rows(task), rows]))
    total = sum(file.rows for file in task.current) + new.num_rows
    size = bytes_in_memory(task.root("current"), task.current) + new.nbytes
    parts = max(total // task.target_rows, size // task.target_bytes)  # a range of twice its target is cut
    everything = task.rewrite or len(task.current) > task.max_files or parts >= 2
    kept: list[pa.Table] = []
    for file in task.current:
        if not everything and not _has_key_of(task, file, new):
            continue
        old = read_files(task.root("current"), [file], task.schema, span=(task.lo, task.hi), adapt=spill)
        old, new = keep_newer(old, new)
        kept.append(old)
        result.replaced.append(file)
    if not task.keep_deleted:
        _leave_tombstones(task, new, result)
        new = new.filter(pc.invert(new.column("_deleted")))
    table = pa.concat_tables([*kept, new])
    # Only other tools and earlier versions leave two rows of a key.
    if task.rewrite and pc.count_distinct(table.column("_key")).as_py() < table.num_rows:
        table = latest(table)
    table = fold_rest(table, task.shape)
    if parts >= 2:
        parts = max(-(-table.num_rows // task.target_rows), -(-table.nbytes // task.target_bytes))
    for part in cut(task.lo, task.hi, parts):
        path = new_file_name(part.lo, part.hi, 0, task.batch)
        result.current.append(write_file(task.root("current"), path, within(table, (part.lo, part.hi))))


def _waiting_rows(task: MergeTask) -> pa.Table:
    """The tail's rows of this range that ``current`` may lack."""
    merged = frontier(task.current, task.hi + 1)
    merged[: task.lo] = np.iinfo(np.int64).max
    files = [
        file for file in task.tail if file.overlaps(task.lo, task.hi) and (task.in_doubt or len(missing(file, merged)))
    ]
    return read_files(task.root("tail"), files, task.schema, span=(task.lo, task.hi), adapt=spill)


def _leave_tombstones(task: MergeTask, new: pa.Table, result: MergeResult) -> None:
    """Write deletions of keys that the tail still has to the tail: its rows stay until every range has merged them."""
    ended = new.filter(new.column("_deleted"))
    files = [file for file in task.tail if file.overlaps(task.lo, task.hi)]
    if not ended.num_rows or not files:
        return
    waiting = read_files(task.root("tail"), files, task.schema, ["_key"], (task.lo, task.hi)).column("_key")
    ended = ended.filter(pc.is_in(ended.column("_key"), value_set=pc.unique(waiting)))
    if ended.num_rows:
        path = new_file_name(task.lo, task.hi, task.batch, task.batch)
        result.tail.append(write_file(task.root("tail"), path, ended))


def _has_key_of(task: MergeTask, file: DataFile, new: pa.Table) -> bool:
    """Whether a file of ``current`` holds a key of these rows."""
    keys = read_files(task.root("current"), [file], task.schema, ["_key"]).column("_key")
    return bool(pc.any(pc.is_in(keys, value_set=new.column("_key").combine_chunks())).as_py())
