"""``df.write.format("dcp")`` and ``df.writeStream.format("dcp")``: the classes that Spark calls to write.

Spark creates a stream writer twice for every micro-batch, so it keeps no state. All it leaves behind are documents, and
a file of refused ones whose name has the batch and the partition, so a replay writes the same file again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from upriver.errors import UpriverError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from upriver.spark.options import WriteOptions
    from upriver.spark.writing import Refusal

SHOWN = 3


@dataclass(slots=True)
class SinkCommit(WriterCommitMessage):
    """How many rows one task wrote, and how many were refused."""

    rows: int
    refused: int


class DocumentsRefused(UpriverError):
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
        from upriver.spark.writing import DocumentWriter

        options = self._options
        database = patiently(
            lambda: POOL.database(options.connect_options()), f"reach a node of {redacted(options.connection)}",
            options.timeout_seconds,
        )  # fmt: skip
        writer = DocumentWriter(database, options)
        refused: list[Refusal] = []
        for batch in iterator:
            refused += writer.write(batch)
            self._fail_on(refused)
        if refused and self._options.dead_letter:
            self._write_dead_letters(refused)
        freeze_imports()
        return SinkCommit(writer.written, len(refused))

    def _fail_on(self, refused: Sequence[Refusal]) -> None:
        from upriver.spark.options import OnError

        if refused and self._options.on_error is OnError.FAIL:
            examples = "; ".join(f"{one.key!r}: {one.reason}" for one in refused[:SHOWN])
            raise DocumentsRefused(
                f"{len(refused)} documents were refused: {examples} (onError=deadletter keeps them instead)"
            )

    def _write_dead_letters(self, refused: Sequence[Refusal]) -> None:
        """Write refused documents to a Parquet file, whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from upriver.spark.writing import REFUSALS

        folder = Path(self._options.dead_letter)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{_partition_name(self._job)}.parquet"
        unfinished = folder / f".{target.name}.{os.urandom(4).hex()}"
        pq.write_table(pa.Table.from_pylist([asdict(one) for one in refused], schema=REFUSALS), unfinished)
        unfinished.replace(target)


class DcpBatchWriter(_Documents, DataSourceArrowWriter):
    """Writes a DataFrame."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: documents are in the bucket as soon as they are written."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: writing the same documents again is harmless."""


class DcpStreamWriter(_Documents, DataSourceStreamArrowWriter):
    """Writes micro-batches."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Does nothing: documents are in the bucket as soon as they are written."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Does nothing: Spark also calls it after a commit that succeeded."""


def _partition_name(job: str) -> str:
    """A name for the part of the batch that this task writes; a replay of a streaming batch has the same."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    query = context.getLocalProperty("sql.streaming.queryId") or job
    batch = context.getLocalProperty("streaming.sql.batchId") or "0"
    return f"{query}-{batch}-{context.partitionId()}"
