"""The part of the log that tail and current lack: read once for all who ask, unless it is large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upriver.lake.apply.policy import Range
from upriver.lake.change_log import read_changes, read_log
from upriver.lake.columns import Document, parser_for
from upriver.lake.files import Piece, gather, uncompressed

SAMPLE_ROWS = 4_000
SAMPLE_BYTES = 8 << 20
SHARED_ROWS = 300_000
SHARED_BYTES = 128 << 20


class News:
    """Log files of new batches; ``window`` is their rows, if they are few and small enough to be kept."""

    def __init__(self, root: str, pieces: Sequence[Piece], vbuckets: int) -> None:
        self.root, self.vbuckets = root, vbuckets
        self.pieces = list(pieces)
        self.documents = [piece for piece in pieces if not piece.marks]
        self.rows = sum(piece.rows for piece in self.documents)
        self.bytes = uncompressed(root, self.documents)
        self.window: pa.Table | None = None
        if self.rows <= SHARED_ROWS and self.bytes <= SHARED_BYTES:
            self.window = read_log(root, self.pieces, 0, vbuckets - 1)

    def sample(self) -> Iterator[Document]:
        """Some of the new documents: all of a small batch, rows spread over some files of a large one."""
        for rows in self._some():
            parse = parser_for(rows.column("value"))
            values, datatypes = (rows.column(name).to_pylist() for name in ("value", "datatype"))
            for value, datatype in zip(values, datatypes, strict=True):
                document = parse(value) if value is not None and (datatype or 0) & 1 else None
                if document is not None:
                    yield document

    def _some(self) -> Iterator[pa.Table]:
        if self.window is not None:
            yield _every(self.window.select(["value", "datatype"]), _stride(self.rows, self.bytes))
            return
        pieces = self.documents[:: max(1, len(self.documents) // 8)]
        stride = _stride(sum(piece.rows for piece in pieces), uncompressed(self.root, pieces))
        for piece in pieces:
            yield _every(read_changes(self.root, [piece], ["value", "datatype"]), stride)

    def per_range(self, ranges: Sequence[Range]) -> list[int]:
        """How many new rows each range has."""
        rows = self.window
        if rows is None:
            rows = read_log(self.root, self.pieces, 0, self.vbuckets - 1, ["vbucket"])
        counts: npt.NDArray[np.int64] = np.bincount(rows.column("vbucket").to_numpy(), minlength=self.vbuckets)
        return [int(counts[part.lo : part.hi + 1].sum()) for part in ranges]


def _stride(rows: int, size: int) -> int:
    """Every how many rows, so that neither rows nor bytes are too many."""
    return max(-(-rows // SAMPLE_ROWS), -(-size // SAMPLE_BYTES))


def _every(rows: pa.Table, stride: int) -> pa.Table:
    return rows if stride <= 1 else gather(rows, np.arange(0, rows.num_rows, stride))
