"""The part of the change log that tail and current lack: read once for all merge tasks, unless it is large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upriver.lake.apply.policy import VbucketRange
from upriver.lake.change_log import read_changes, read_log
from upriver.lake.columns import Document, parser_for
from upriver.lake.files import DataFile, bytes_in_memory, gather

SAMPLE_ROWS = 4_000
SAMPLE_BYTES = 8 << 20
SHARED_ROWS = 300_000
SHARED_BYTES = 128 << 20


class Unapplied:
    """Log files with new batches; ``table`` holds their rows if they are few and small enough to keep."""

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
