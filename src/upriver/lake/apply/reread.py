"""Vbuckets whose log does not reach back far enough are read again from the bucket, into the change log.

A rollback row to seqno 0 precedes what was read, so it voids everything older. Older versions of the documents are not
in the log, so the log of such a vbucket begins where this read ended (its floor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from upriver.errors import ConfigError
from upriver.lake.apply.ahead import Ahead, Highs
from upriver.lake.change_log import LogMark, write_log, write_marks
from upriver.lake.files import DataFile
from upriver.lake.layout import Lake
from upriver.records.schema import Event

Reread = Callable[[Sequence[int]], Iterable[pa.RecordBatch]]  # all changes that the bucket has of some vbuckets


@dataclass(frozen=True)
class RereadFiles:
    """Log files that are not committed yet: what the bucket has of some vbuckets, and rollbacks of all else."""

    files: list[DataFile]
    rollbacks: list[LogMark]
    highs: dict[int, Ahead]  # how far each vbucket was read

    def floors(self) -> dict[int, int]:
        """Up to which seqno the log lacks older versions, by vbucket."""
        return {
            mark.vbucket: self.highs[mark.vbucket].seqno if mark.vbucket in self.highs else 0 for mark in self.rollbacks
        }


def read_again(lake: Lake, name: str, epochs: Mapping[int, int], reread: Reread | None, batch: int) -> RereadFiles:
    """Read these vbuckets again, each under its epoch, and write the rows of one collection as log files."""
    if reread is None:
        raise ConfigError(
            f"{name}: vbuckets {sorted(epochs)} rolled back beyond the retention of the log; "
            "run the sync again with access to the bucket"
        )
    highs = Highs()

    def rows() -> Iterator[pa.RecordBatch]:
        for part in reread(sorted(epochs)):
            highs.see(part)
            yield _with_epochs(part, epochs)

    written = write_log(rows(), lake.root, batch)
    rollbacks = [LogMark(Event.ROLLBACK.value, vbucket, 0, epoch, batch) for vbucket, epoch in epochs.items()]
    for other, files in written.files.items():
        if other != name:
            lake.table("changes", other).drop_uncommitted(files)
    files = [*written.files.get(name, []), write_marks(lake.root, name, rollbacks, batch)]
    return RereadFiles(files, rollbacks, highs.found)


def _with_epochs(rows: pa.RecordBatch, epochs: Mapping[int, int]) -> pa.RecordBatch:
    """The same rows in the epochs of their vbuckets."""
    lifted = pa.array([epochs[vbucket] for vbucket in rows.column("vbucket").to_pylist()], pa.int32())
    return rows.set_column(rows.schema.get_field_index("epoch"), rows.schema.field("epoch"), lifted)
