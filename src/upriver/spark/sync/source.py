"""The stream of a sync: the DCP source, but its tasks write what they read straight into the change log.

Documents do not pass through the JVM: a task decodes frames to Arrow, writes Parquet, and gives Spark one small row
that says what it wrote and what it could not read. The lake stores that for the next plan (``committed``). Planning,
offsets and rollbacks are those of ``format("dcp")``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from upriver.spark.source import DcpSource, DcpStreamReader

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.spark.options import ReadOptions
    from upriver.spark.reader.driver import Driver

FORMAT = "dcp-log"
COLUMN = "written"


class DcpLogSource(DcpSource):
    """``format("dcp-log")``: the options of ``dcp``, and ``lake``, the directory of the tables."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return f"{COLUMN} STRING"

    def streamReader(self, schema: StructType) -> DcpLogReader:  # noqa: N802 - Spark's names
        from upriver.spark.options import ReadOptions

        options = {name: text for name, text in dict(self.options).items() if name != "lake"}
        return DcpLogReader(ReadOptions.parse(options), self.options["lake"])


class DcpLogReader(DcpStreamReader):
    """Micro-batches of log files."""

    def __init__(self, options: ReadOptions, lake: str) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        from upriver.records.schema import CHANGES

        super().__init__(options, from_arrow_schema(CHANGES))
        self._lake = lake

    def _planner(self) -> Driver:
        from upriver.spark.reader.driver import Driver
        from upriver.spark.sync.committed import recall

        if self._driver is None:
            self._driver = Driver(self._options, recall(self._lake))
        return self._driver

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        if partition.value is None:  # Spark's substitute for an empty list of partitions
            return
        from upriver.lake.apply.rollbacks import Epochs
        from upriver.lake.change_log import write_log
        from upriver.lake.layout import Lake
        from upriver.spark.reader.executor import TaskReader

        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty("streaming.sql.batchId") or "")
        reader = TaskReader(partition.value, self._options)
        rows = Epochs(Lake(self._lake).epochs()).lift(reader.batches())
        written = write_log(rows, self._lake, batch)
        written.complete = [vbucket for vbucket, _, _ in reader.summary.complete]
        written.unread = dict(reader.summary.unread)
        yield pa.RecordBatch.from_pydict({COLUMN: [json.dumps(written.to_json())]})
