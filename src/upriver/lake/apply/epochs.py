"""Epochs that only grow within the change log.

The source counts the rollbacks of a vbucket, but it may miss one that an executor met and the driver was not told of.
The log misses none: no row has an epoch below the last rollback that the log has of its vbucket, and every further
rollback has a higher one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.records.schema import Event


class Epochs:
    """Lifts the rows of one task, in order, to the epochs of the log. ``floors`` are the log's epochs by vbucket."""

    def __init__(self, floors: Mapping[int, int]) -> None:
        self._floors = dict(floors)

    def lift(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same rows, with a higher epoch where the log needs it."""
        for rows in batches:
            back = pc.equal(rows.column("event"), Event.ROLLBACK.value)
            places = pc.indices_nonzero(back).to_pylist()
            if not places and not self._floors:
                yield rows
                continue
            start = 0
            for at in places:
                yield from self._segment(rows.slice(start, at - start))
                yield self._rollback(rows.slice(at, 1))
                start = at + 1
            yield from self._segment(rows.slice(start))

    def _segment(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if rows.num_rows == 0:
            return
        vbuckets = rows.column("vbucket").to_numpy()
        floors = np.zeros(int(vbuckets.max()) + 1, dtype=np.int32)
        for vbucket, floor in self._floors.items():
            if vbucket < len(floors):
                floors[vbucket] = floor
        yield _with_epochs(rows, np.maximum(rows.column("epoch").to_numpy(), floors[vbuckets]))

    def _rollback(self, row: pa.RecordBatch) -> pa.RecordBatch:
        vbucket = row.column("vbucket")[0].as_py()
        epoch = max(row.column("epoch")[0].as_py(), self._floors.get(vbucket, 0) + 1)
        self._floors[vbucket] = epoch
        return _with_epochs(row, np.array([epoch], dtype=np.int32))


def _with_epochs(rows: pa.RecordBatch, epochs: object) -> pa.RecordBatch:
    position = rows.schema.get_field_index("epoch")
    return rows.set_column(position, rows.schema.field(position), pa.array(epochs, pa.int32()))
