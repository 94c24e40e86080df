"""The plan of a merge: what the tables of one collection lack, and the merge tasks that bring it in.

``policy`` does the arithmetic. `MergePlanner` tells it what the tables hold, and reads tail files where their names do
not say enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upriver.lake.apply.merge import MergeTask
from upriver.lake.apply.policy import (
    TableOptions,
    VbucketRange,
    frontier,
    in_doubt,
    missing,
    overdue,
    ranges_of,
    spanned,
    superseded,
    worth_merging,
)
from upriver.lake.change_log import WIPES, LogMark, read_changes, read_log
from upriver.lake.columns import META, Document, parser_for
from upriver.lake.delta import Table
from upriver.lake.files import DataFile, Span, bytes_in_memory, gather, now_ms, read_files
from upriver.lake.options import TableShape
from upriver.records.schema import Event

SAMPLE_ROWS = 4_000
SAMPLE_BYTES = 8 << 20
SHARED_ROWS = 300_000
SHARED_BYTES = 128 << 20


@dataclass(frozen=True)
class CollectionFiles:
    """The data files of a collection at one moment, and the marks of its log."""

    applied: int  # the last batch that tail and current have
    log: list[DataFile]
    tail: list[DataFile]
    current: list[DataFile]
    marks: list[LogMark] = field(default_factory=list)

    @property
    def new(self) -> list[DataFile]:
        """Log files with batches that tail and current lack."""
        return [file for file in self.log if file.last_batch > self.applied]

    @property
    def new_marks(self) -> list[LogMark]:
        return [mark for mark in self.marks if mark.batch > self.applied]

    @property
    def in_doubt(self) -> bool:
        """Whether another tool wrote some files, whose names do not say what they hold."""
        return in_doubt(self.current) or any(file.foreign for file in self.tail)


class Unapplied:
    """The part of the change log that tail and current lack.

    ``table`` holds its rows, read once for all merge tasks, if they are few and small enough to keep.
    """

    def __init__(self, root: str, files: Sequence[DataFile], vbuckets: int) -> None:
        self.root, self.vbuckets = root, vbuckets
        self.files = list(files)
        self.documents = [file for file in files if not file.marks]
        self.row_count = sum(file.rows for file in self.documents)
        self.byte_count = bytes_in_memory(root, self.documents)
        self.table: pa.Table | None = None
        if self.row_count <= SHARED_ROWS and self.byte_count <= SHARED_BYTES:
            self.table = read_log(root, self.files, 0, vbuckets - 1)

    def sample(self) -> Iterator[Document]:
        """Some of the new documents: all of a small batch, evenly spread rows of a large one."""
        for rows in self._some_rows():
            parse = parser_for(rows.column("value"))
            values, datatypes = (rows.column(name).to_pylist() for name in ("value", "datatype"))
            for value, datatype in zip(values, datatypes, strict=True):
                document = parse(value) if value is not None and (datatype or 0) & 1 else None
                if document is not None:
                    yield document

    def _some_rows(self) -> Iterator[pa.Table]:
        if self.table is not None:
            yield _every(self.table.select(["value", "datatype"]), _stride(self.row_count, self.byte_count))
            return
        files = self.documents[:: max(1, len(self.documents) // 8)]
        stride = _stride(sum(file.rows for file in files), bytes_in_memory(self.root, files))
        for file in files:
            yield _every(read_changes(self.root, [file], ["value", "datatype"]), stride)

    def per_range(self, ranges: Sequence[VbucketRange]) -> list[int]:
        """How many new rows each range has."""
        rows = self.table
        if rows is None:
            rows = read_log(self.root, self.files, 0, self.vbuckets - 1, ["vbucket"])
        counts: npt.NDArray[np.int64] = np.bincount(rows.column("vbucket").to_numpy(), minlength=self.vbuckets)
        return [int(counts[part.lo : part.hi + 1].sum()) for part in ranges]


def _stride(rows: int, size: int) -> int:
    """Every how many rows to sample, so that neither rows nor bytes are too many."""
    return max(-(-rows // SAMPLE_ROWS), -(-size // SAMPLE_BYTES))


def _every(rows: pa.Table, stride: int) -> pa.Table:
    return rows if stride <= 1 else gather(rows, np.arange(0, rows.num_rows, stride))


class MergePlanner:
    """Plans the merges of one collection."""

    def __init__(self, lake: str, name: str, tail: Table, current: Table, options: TableOptions) -> None:
        self._lake, self._name, self._options = lake, name, options
        self._tail, self._current = tail, current
        self._vbuckets: dict[str, npt.NDArray[np.int64]] = {}  # of tail files that were read to find out, by path

    def tasks(
        self,
        found: CollectionFiles,
        unapplied: Unapplied,
        shape: TableShape,
        floors: dict[int, int],
        *,
        batch: int,
        lag: int,
        rewrite: bool,
        drain: bool,
    ) -> list[MergeTask]:
        """A task per range to merge, and one or more that bring all other new rows into the tail."""
        policy, last = self._options.policy, self._options.vbuckets - 1
        ranges = self._ranges(found, unapplied, lag)
        fresh = unapplied.per_range(ranges)
        every = {(part.lo, part.hi) for part in ranges}
        chosen = every if rewrite else self._chosen(found, ranges, fresh, drain)
        marks = found.marks if found.new_marks else []  # a repair needs all of the log and its marks, other tasks none
        base = MergeTask(
            lake=self._lake,
            name=self._name,
            lo=0,
            hi=last,
            batch=batch,
            applied=found.applied,
            shape=shape,
            log=tuple(found.log if marks else unapplied.files),
            tail=tuple(found.tail),
            current=tuple(found.current),
            marks=tuple(marks),
            rewrite=rewrite,
            in_doubt=found.in_doubt,
            keep_deleted=self._options.keep_deleted,
            floors=floors,
            target_rows=policy.target_rows,
            target_bytes=policy.target_bytes,
            max_files=policy.max_files,
        )
        merges = [
            replace(base, lo=lo, hi=hi, merge=True, current=tuple(f for f in found.current if f.overlaps(lo, hi)))
            for lo, hi in sorted(chosen)
        ]
        if len(chosen) == len(ranges):
            return merges
        if sum(fresh) <= policy.inline_rows and unapplied.byte_count <= policy.inline_bytes:
            return [*merges, replace(base, skip=tuple(sorted(chosen)))]
        return merges + [replace(base, lo=lo, hi=hi) for lo, hi in sorted(every - chosen)]

    def _ranges(self, found: CollectionFiles, unapplied: Unapplied, lag: int) -> list[VbucketRange]:
        options = self._options
        if found.in_doubt:  # no file name says where a range begins: cut the table anew
            rows, size = sum(file.rows for file in found.current), bytes_in_memory(self._current.uri, found.current)
            return ranges_of([], options.vbuckets, rows, options.policy, size)
        expected = unapplied.row_count + lag
        size = unapplied.byte_count * expected // max(unapplied.row_count, 1)
        return ranges_of(found.current, options.vbuckets, expected, options.policy, size)

    def _chosen(
        self, found: CollectionFiles, ranges: Sequence[VbucketRange], fresh: Sequence[int], drain: bool
    ) -> set[Span]:
        """The ranges to merge now: those that are worth it, and those that must not wait."""
        policy, vbuckets = self._options.policy, self._options.vbuckets
        chosen = worth_merging(ranges, found.tail, fresh, policy) | self.overdue(found, ranges)
        urgent = {mark.vbucket for mark in found.new_marks if mark.event in WIPES}
        if drain or policy.staleness_s == 0:
            merged = frontier(found.current, vbuckets)
            urgent |= {mark.vbucket for mark in found.new_marks if mark.event == Event.ROLLBACK}
            urgent |= {vb for file in found.tail for vb in missing(file, merged, self._present).tolist()}
            chosen |= {(part.lo, part.hi) for part, rows in zip(ranges, fresh, strict=True) if rows}
        return chosen | {(part.lo, part.hi) for part in ranges if any(part.lo <= vb <= part.hi for vb in urgent)}

    def overdue(self, found: CollectionFiles, ranges: Sequence[VbucketRange] | None = None) -> set[Span]:
        """Ranges whose changes have waited too long. Only tail files that are old enough are read."""
        policy, now = self._options.policy, now_ms()
        old = [file for file in found.tail if now - file.made_ms >= policy.staleness_s / 2 * 1000]
        if not old:
            return set()
        if ranges is None:
            ranges = ranges_of(found.current, self._options.vbuckets, 0, policy)
        return overdue(ranges, old, frontier(found.current, self._options.vbuckets), now, policy, self._present)

    def superseded(self, found: CollectionFiles) -> list[DataFile]:
        """Tail files that can be removed. Decided without reading any file."""

        def known(file: DataFile) -> npt.NDArray[np.int64]:
            return self._vbuckets[file.path] if file.path in self._vbuckets else spanned(file)

        if found.in_doubt:
            return found.tail
        return superseded(found.tail, frontier(found.current, self._options.vbuckets), known)

    def _present(self, file: DataFile) -> npt.NDArray[np.int64]:
        """The vbuckets that a tail file really has rows of."""
        if file.path not in self._vbuckets:
            rows = read_files(self._tail.uri, [file], pa.schema(META), ["_vbucket"])
            live = {known.path for known in self._tail.files()}
            self._vbuckets = {path: found for path, found in self._vbuckets.items() if path in live}
            self._vbuckets[file.path] = np.unique(rows.column("_vbucket").to_numpy()).astype(np.int64)
        return self._vbuckets[file.path]
