"""``df.write.format("dcp")`` and ``df.writeStream.format("dcp")``: the classes that Spark calls to write.

A stream writer is made anew for every micro-batch, twice, and keeps nothing. All it leaves behind are documents, and
a file of refused ones whose name says batch and partition, so that a replay writes the same file again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from upriver.errors import UpriverError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from upriver.spark.options import WriteOptions
    from upriver.spark.writing import Refusal

SHOWN = 3


@dataclass(slots=True)
class Written(WriterCommitMessage):
    """What one task did."""

    rows: int
    refused: int


class Refused(UpriverError):
    """Documents that the database did not take, with ``onError=fail``."""


class _Documents:
    """The half of both writers that runs on executors."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        from upriver.spark.writing import check_columns

        check_columns(schema.names, options)
        self._options = options
        self._job = os.urandom(8).hex()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from upriver.client.options import redacted
        from upriver.spark.reader.cluster import patiently
        from upriver.spark.reader.executor import freeze_imports
        from upriver.spark.reader.pool import POOL
        from upriver.spark.writing import Writer

        options = self._options
        database = patiently(
            lambda: POOL.database(options.connect_options()), f"reach a node of {redacted(options.connection)}",
            options.timeout_seconds,
        )  # fmt: skip
        writer = Writer(database, options)
        refused: list[Refusal] = []
        for batch in iterator:
            refused += writer.write(batch)
            self._fail_on(refused)
        if refused and self._options.dead_letter:
            self._bury(refused)
        freeze_imports()
        return Written(writer.written, len(refused))

    def _fail_on(self, refused: Sequence[Refusal]) -> None:
        from upriver.spark.options import OnError

        if refused and self._options.on_error is OnError.FAIL:
            examples = "; ".join(f"{one.key!r}: {one.reason}" for one in refused[:SHOWN])
            raise Refused(f"{len(refused)} documents were refused: {examples} (onError=deadletter keeps them instead)")

    def _bury(self, refused: Sequence[Refusal]) -> None:
        """Keep refused documents as a Parquet file; written beside its place first, so that it is whole or absent."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from upriver.spark.writing import REFUSALS

        folder = Path(self._options.dead_letter)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{_place(self._job)}.parquet"
        unfinished = folder / f".{target.name}.{os.urandom(4).hex()}"
        pq.write_table(pa.Table.from_pylist([asdict(one) for one in refused], schema=REFUSALS), unfinished)
        unfinished.replace(target)


class DcpBatchWriter(_Documents, DataSourceArrowWriter):
    """Writes a DataFrame."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Documents are there as soon as they are written; there is nothing left to do."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was written stays: writing it again does no harm."""


class DcpStreamWriter(_Documents, DataSourceStreamArrowWriter):
    """Writes micro-batches."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Documents are there as soon as they are written; there is nothing left to do."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Also called after a commit that succeeded, so nothing may be undone here."""


def _place(job: str) -> str:
    """Which part of which batch this task writes; the same for a replay of a streaming query's batch."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") or job
    batch = context.getLocalProperty("streaming.sql.batchId") or "0"
    return f"{query}-{batch}-{context.partitionId()}"
