"""``format("dcp")``: the classes that Spark calls. They delegate to other modules, imported when they are needed.

Spark creates the reader twice. One instance plans, in the driver's process, for as long as the query lives. The other
is pickled once, and every task calls its ``read``. So only partitions can pass between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from upriver.spark.options import ReadOptions, WriteOptions
    from upriver.spark.reader.driver import Driver
    from upriver.spark.reader.executor import Task
    from upriver.spark.sink import DcpBatchWriter, DcpStreamWriter


class DcpSource(DataSource):
    """Reads and writes documents of a database that speaks DCP."""

    @classmethod
    def name(cls) -> str:
        return "dcp"

    def schema(self) -> str:
        from upriver.spark.schema import ddl, table_comment

        return ddl(self._read_options(), table_comment(dict(self.options)))

    def reader(self, schema: StructType) -> DcpBatchReader:
        return DcpBatchReader(self._read_options(schema), schema)

    def streamReader(self, schema: StructType) -> DcpStreamReader:  # noqa: N802 - Spark's names
        options = self._read_options(schema)
        if options.vbuckets:
            from upriver.errors import ConfigError

            raise ConfigError("vbuckets is an option of batch reads: a stream reads all of them")
        return DcpStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DcpBatchWriter:
        from upriver.spark.sink import DcpBatchWriter

        return DcpBatchWriter(self._write_options(overwrite), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DcpStreamWriter:  # noqa: N802
        from upriver.spark.sink import DcpStreamWriter

        return DcpStreamWriter(self._write_options(overwrite), schema)

    def _write_options(self, overwrite: bool) -> WriteOptions:
        from upriver.errors import ConfigError
        from upriver.spark.options import WriteOptions

        if overwrite:
            raise ConfigError('format dcp does not empty a bucket: write with .mode("append") or outputMode("append")')
        return WriteOptions.parse(dict(self.options))

    def _read_options(self, schema: StructType | None = None) -> ReadOptions:
        from upriver.spark.options import ReadOptions
        from upriver.spark.schema import table_options

        return ReadOptions.parse({**(table_options(schema) if schema else {}), **self.options})


class DcpPartition(InputPartition):
    """One of our tasks, as a partition of Spark."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)


class _Rows:
    """The half of both readers that runs on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        from upriver.spark.schema import check

        check(schema, options)
        self._options, self._schema = options, schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's substitute for an empty list of partitions
            return
        from upriver.spark.reader.executor import TaskReader
        from upriver.spark.schema import arrow_schema, value_format
        from upriver.spark.values.forms import Shaper

        shape = Shaper(arrow_schema(self._schema), value_format(self._schema), self._options.since)
        for batch in TaskReader(partition.value, self._options).batches():
            shaped = shape(batch)
            if shaped.num_rows:
                yield shaped


class DcpBatchReader(_Rows, DataSourceReader):
    """Reads every vbucket up to its high seqno when the DataFrame was planned."""

    def partitions(self) -> list[InputPartition]:
        from upriver.spark.reader.driver import Driver

        return [DcpPartition(task) for task in Driver(self._options).batch_tasks()]


class DcpStreamReader(_Rows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches."""

    _driver: Driver | None = None

    def _planner(self) -> Driver:
        """Created in the driver's instance only: the pickled one must hold plain values."""
        from upriver.spark.reader.driver import Driver

        if self._driver is None:
            self._driver = Driver(self._options)
        return self._driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._planner().initial_offset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_rows_per_trigger:
            return ReadMaxRows(self._options.max_rows_per_trigger)
        if self._options.max_bytes_per_trigger:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        return self._planner().latest_offset(start, self._most(limit))

    def _most(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """The most rows and bytes of the next batch. Both options hold at once, though Spark knows only one limit."""
        if isinstance(limit, ReadAllAvailable):
            return None, None
        rows, size = self._options.max_rows_per_trigger, self._options.max_bytes_per_trigger
        if isinstance(limit, ReadMaxRows):
            rows = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        return rows, size

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._planner().lag()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._planner().freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [DcpPartition(task) for task in self._planner().tasks(start, end)]

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: Spark calls it a batch late, or never, and an error here would end the query."""

    def stop(self) -> None:
        """Close the connections. Spark does not call it, but ends the process."""
        if self._driver is not None:
            self._driver.close()
