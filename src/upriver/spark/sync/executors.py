"""Work for Spark's executors without pandas: small data sources whose tasks do something and say what they did.

(`mapInArrow` would do, but Spark insists on pandas for it.)
"""

from __future__ import annotations

import json
import pickle
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from upriver.lake.apply.epochs import Epochs
from upriver.lake.apply.merge import Outcome, Work, as_plain, forward, from_plain, run_inline
from upriver.lake.change_log import Written, write_log
from upriver.lake.collection import Runner, TableOptions
from upriver.lake.files import filesystem, uncompressed
from upriver.lake.layout import Lake

WORK_FORMAT = "upriver-work"
SINK_FORMAT = "upriver-log"


class WorkSource(DataSource):
    """A task per unit of work of the file ``path``, and a row per outcome."""

    @classmethod
    def name(cls) -> str:
        return WORK_FORMAT

    def schema(self) -> str:
        return "outcome STRING"

    def reader(self, schema: StructType) -> WorkReader:
        return WorkReader(self.options["file"], int(self.options["count"]))


class WorkReader(DataSourceReader):
    """Runs on executors: reads its work from the file, does it."""

    def __init__(self, path: str, count: int) -> None:
        self._path, self._count = path, count

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(index) for index in range(self._count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        fs, path = filesystem(self._path)
        with fs.open_input_stream(path) as source:
            works: Sequence[Work] = pickle.loads(source.read())  # noqa: S301 - we wrote it a moment ago
        try:
            outcome = forward(works[partition.value])
        except FileNotFoundError as error:  # the driver looks again
            outcome = Outcome(gone=[str(error)])
        yield pa.RecordBatch.from_pydict({"outcome": [json.dumps(as_plain(outcome))]})


def spark_runner(spark: Any, options: TableOptions) -> Runner:
    """Runs large steps on the executors, a task per range, and small ones here, which is quicker."""
    spark.dataSource.register(WorkSource)

    def run(works: Sequence[Work], window: pa.Table | None = None) -> list[Outcome]:
        rows = sum(piece.rows for work in works[:1] for piece in work.log if piece.last > work.applied)
        rows += sum(piece.rows for work in works if work.merge for piece in work.current)
        size = _bytes(works)
        if size <= options.policy.inline_bytes and (rows <= options.policy.inline_rows or len(works) < 2):
            return run_inline(works, window)
        with _work_file(works) as path:
            frame = spark.read.format(WORK_FORMAT).option("file", path).option("count", str(len(works))).load()
            outcomes = [from_plain(json.loads(row[0])) for row in frame.collect()]
        gone = [path for outcome in outcomes for path in outcome.gone]
        if gone:
            raise FileNotFoundError(gone[0])
        return outcomes

    return run


def _bytes(works: Sequence[Work]) -> int:
    """What these works read, about, when it is in memory."""
    new = {piece.path: piece for work in works for piece in work.log if piece.last > work.applied}
    old = {piece.path: piece for work in works if work.merge for piece in work.current}
    roots = (works[0].root("changes"), works[0].root("current")) if works else ("", "")
    return uncompressed(roots[0], new.values()) + uncompressed(roots[1], old.values())


class _work_file:  # noqa: N801 - used like a function
    """The works in a file that executors can read, for as long as they do."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = list(works)
        self._path = f"{works[0].lake}/_upriver/work-{secrets.token_hex(6)}.pickle"

    def __enter__(self) -> str:
        fs, path = filesystem(self._path)
        with fs.open_output_stream(path) as out:
            out.write(pickle.dumps(self._works))
        return self._path

    def __exit__(self, *exc: object) -> None:
        fs, path = filesystem(self._path)
        fs.delete_file(path)


class LogSink(DataSource):
    """Writes rows of ``format("dcp")`` into the log files of a lake; what was written is left in a file."""

    @classmethod
    def name(cls) -> str:
        return SINK_FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> LogWriter:
        return LogWriter(self.options["lake"], int(self.options["batch"]), self.options["answer"])


@dataclass
class _Done(WriterCommitMessage):
    written: str


class LogWriter(DataSourceArrowWriter):
    """Executors write; the driver keeps what they say."""

    def __init__(self, lake: str, batch: int, answer: str) -> None:
        self._lake, self._batch, self._answer = lake, batch, answer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = Epochs(Lake(self._lake).epochs()).lift(iterator)
        return _Done(json.dumps(write_log(rows, self._lake, self._batch).plain()))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        fs, path = filesystem(self._answer)
        with fs.open_output_stream(path) as out:
            out.write("\n".join(done.written for done in messages if isinstance(done, _Done)).encode())

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Files of a batch that failed are nobody's; vacuum takes them."""


def write_frame(frame: Any, lake: str, batch: int) -> Written:
    """Write the rows of a micro-batch into the log files of a lake."""
    frame.sparkSession.dataSource.register(LogSink)
    answer = f"{lake}/_upriver/written-{secrets.token_hex(6)}.jsonl"
    options = {"lake": lake, "batch": str(batch), "answer": answer}
    frame.write.format(SINK_FORMAT).options(**options).mode("append").save()
    fs, path = filesystem(answer)
    with fs.open_input_stream(path) as source:
        lines = source.read().decode().splitlines()
    fs.delete_file(path)
    return Written.gather(json.loads(line) for line in lines if line)
