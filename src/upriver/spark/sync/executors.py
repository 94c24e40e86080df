"""Work on Spark's executors without pandas: small data sources whose tasks merge or write, and report what they did.

(`mapInArrow` would do the same, but PySpark requires pandas for it.)
"""

from __future__ import annotations

import json
import pickle
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from upriver.lake.apply.merge import MergeResult, MergeTask, run_inline, run_merge
from upriver.lake.apply.policy import TableOptions
from upriver.lake.apply.rollbacks import Epochs
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.collection import RunMerges
from upriver.lake.files import bytes_in_memory, filesystem
from upriver.lake.layout import Lake

MERGE_FORMAT = "upriver-merge"
LOG_FORMAT = "upriver-log"


class MergeSource(DataSource):
    """One Spark task per merge task in a file, and one row per result."""

    @classmethod
    def name(cls) -> str:
        return MERGE_FORMAT

    def schema(self) -> str:
        return "result STRING"

    def reader(self, schema: StructType) -> MergeReader:
        return MergeReader(self.options["file"], int(self.options["count"]))


class MergeReader(DataSourceReader):
    """Runs on executors: reads its merge task from the file and does it."""

    def __init__(self, path: str, count: int) -> None:
        self._path, self._count = path, count

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(index) for index in range(self._count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        fs, path = filesystem(self._path)
        with fs.open_input_stream(path) as source:
            tasks: Sequence[MergeTask] = pickle.loads(source.read())  # noqa: S301 - we wrote it a moment ago
        try:
            result = run_merge(tasks[partition.value])
        except FileNotFoundError as error:  # another writer replaced the file; the driver starts again
            result = MergeResult(gone=[str(error)])
        yield pa.RecordBatch.from_pydict({"result": [json.dumps(result.to_json())]})


def spark_runner(spark: SparkSession, options: TableOptions) -> RunMerges:
    """Runs large merges on the executors, a Spark task per range, and small ones here, which is quicker."""
    spark.dataSource.register(MergeSource)

    def run(tasks: Sequence[MergeTask], unapplied: pa.Table | None = None) -> list[MergeResult]:
        rows = sum(file.rows for task in tasks[:1] for file in task.new_files())
        rows += sum(file.rows for task in tasks if task.merge for file in task.current)
        size = _bytes_to_read(tasks)
        if size <= options.policy.inline_bytes and (rows <= options.policy.inline_rows or len(tasks) < 2):
            return run_inline(tasks, unapplied)
        with _task_file(tasks) as path:
            frame = spark.read.format(MERGE_FORMAT).option("file", path).option("count", str(len(tasks))).load()
            results = [MergeResult.from_json(json.loads(row[0])) for row in frame.collect()]
        gone = [path for result in results for path in result.gone]
        if gone:
            raise FileNotFoundError(gone[0])
        return results

    return run


def _bytes_to_read(tasks: Sequence[MergeTask]) -> int:
    """About how many bytes these tasks read, in memory."""
    new = {file.path: file for task in tasks for file in task.new_files()}
    old = {file.path: file for task in tasks if task.merge for file in task.current}
    roots = (tasks[0].root("changes"), tasks[0].root("current")) if tasks else ("", "")
    return bytes_in_memory(roots[0], new.values()) + bytes_in_memory(roots[1], old.values())


@contextmanager
def _task_file(tasks: Sequence[MergeTask]) -> Iterator[str]:
    """A file with the tasks that executors can read; deleted at the end."""
    name = f"{tasks[0].lake}/_upriver/work-{secrets.token_hex(6)}.pickle"
    fs, path = filesystem(name)
    with fs.open_output_stream(path) as out:
        out.write(pickle.dumps(list(tasks)))
    try:
        yield name
    finally:
        fs.delete_file(path)


class LogSink(DataSource):
    """Writes rows of ``format("dcp")`` into the log files of a lake, and leaves in a file what was written."""

    @classmethod
    def name(cls) -> str:
        return LOG_FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> LogWriter:
        return LogWriter(self.options["lake"], int(self.options["batch"]), self.options["answer"])


@dataclass
class _LogCommit(WriterCommitMessage):
    written: str


class LogWriter(DataSourceArrowWriter):
    """Executors write log files; the driver collects what they wrote."""

    def __init__(self, lake: str, batch: int, answer: str) -> None:
        self._lake, self._batch, self._answer = lake, batch, answer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = Epochs(Lake(self._lake).epochs()).lift(iterator)
        return _LogCommit(json.dumps(write_log(rows, self._lake, self._batch).to_json()))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        fs, path = filesystem(self._answer)
        with fs.open_output_stream(path) as out:
            out.write("\n".join(done.written for done in messages if isinstance(done, _LogCommit)).encode())

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """No commit names the files of a failed batch; vacuum deletes them."""


def write_frame(frame: DataFrame, lake: str, batch: int) -> WrittenFiles:
    """Write the rows of a micro-batch into the log files of a lake."""
    frame.sparkSession.dataSource.register(LogSink)
    answer = f"{lake}/_upriver/written-{secrets.token_hex(6)}.jsonl"
    options = {"lake": lake, "batch": str(batch), "answer": answer}
    frame.write.format(LOG_FORMAT).options(**options).mode("append").save()
    fs, path = filesystem(answer)
    with fs.open_input_stream(path) as source:
        lines = source.read().decode().splitlines()
    fs.delete_file(path)
    return WrittenFiles.from_tasks(json.loads(line) for line in lines if line)
