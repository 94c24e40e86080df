"""The streaming query of a sync: micro-batches in, commits out, one line of the journal for each.

Spark calls an `Applier` for every batch. It holds plain values and opens everything else where it runs, so it works in
the driver, under ``spark-submit`` and in the server of Spark Connect alike.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from upriver.client.blocking import Database
from upriver.errors import ConfigError
from upriver.lake import bucket
from upriver.lake.apply import upkeep
from upriver.lake.apply.merge import run_inline
from upriver.lake.apply.policy import MergePolicy, TableOptions
from upriver.lake.change_log import WrittenFiles
from upriver.lake.collection import AdvanceResult
from upriver.lake.history import HistoryTable
from upriver.lake.journal import Batch, Journal
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions, seconds
from upriver.lake.tables import Tables
from upriver.records.schema import Event
from upriver.spark.reader.cluster import patiently
from upriver.spark.source import DcpSource
from upriver.spark.sync import committed
from upriver.spark.sync.executors import spark_runner, write_frame
from upriver.spark.sync.source import COLUMN, FORMAT, DcpLogSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader

UPKEEP_EVERY_S = 1800.0
HISTORY_EVERY_S = 30.0  # how often every history advances while no batch comes
REPAIR_PATIENCE_S = 600.0
T = TypeVar("T")
# Held while a batch is committed, so that a query is stopped between two batches.
BETWEEN_BATCHES = threading.Lock()


def table_options(options: SyncOptions, vbuckets: int) -> TableOptions:
    staleness_s = seconds(options.max_staleness) if options.max_staleness else math.inf
    policy = MergePolicy(share=options.share, staleness_s=staleness_s)
    return TableOptions(policy, options.deletes == "mark", options.max_columns, options.shapes, vbuckets)


class Applier:
    """Commits micro-batches of ``format("dcp-log")``, or of ``format("dcp")``, to the tables of a lake."""

    def __init__(self, options: SyncOptions, lake_id: str, vbuckets: int, expected: int = 0) -> None:
        self.options, self.lake_id, self.vbuckets, self.expected = options, lake_id, vbuckets, expected
        self.started_at = time.time()
        self._tables: Tables | None = None
        self._history_at = 0.0

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tables": None}

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        with BETWEEN_BATCHES:
            started = time.monotonic()
            tables = self.tables(frame.sparkSession)
            if batch_id < tables.last_batch():
                raise ConfigError(
                    f"Spark starts at batch {batch_id}, but {self.options.to} has batch {tables.last_batch()}: its "
                    f"checkpoint ({tables.lake.checkpoint}) is missing or old. Restore it, or sync to a new directory"
                )
            written = collect(frame, self.options.to, batch_id)
            read_s = time.monotonic() - started
            reports = committed.keep(tables.lake, batch_id, written)
            advanced = tables.apply(batch_id, written, self._lag(tables, written))
            committed.note(tables.lake, batch_id, self.options, reports)
            self._advance_history(tables, advanced)
            for one in advanced:
                if one.rows:
                    upkeep.fold_tail(tables.collection(one.name))
                    upkeep.fold_log(tables.collection(one.name))
            clean_sometimes(tables, self.options)
            self._write_journal(tables.lake, batch_id, written, advanced, started, read_s)

    def tables(self, spark: SparkSession | None = None) -> Tables:
        """The tables, opened where this runs."""
        if self._tables is None:
            run = run_inline if spark is None else spark_runner(spark, table_options(self.options, self.vbuckets))
            self._tables = Tables(
                Lake(self.options.to, self.options.checkpoint),
                self.lake_id,
                table_options(self.options, self.vbuckets),
                run=run,
                reread=self.reread,
                branches=self.branches,
            )
            self._tables.prepare()
        return self._tables

    def _lag(self, tables: Tables, written: WrittenFiles) -> int:
        """About how many rows are still to come: none unless this batch was full."""
        if written.rows < 0.8 * self.options.max_rows and written.value_bytes < 0.4 * self.options.max_bytes:
            return 0
        logs = [tables.collection(name).changes for name in tables.names()]
        done = written.rows + sum(file.rows for log in logs for file in log.files())
        return max(self.expected - done, 0)

    def reread(self, vbuckets: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """All changes that the bucket has of some vbuckets."""
        with self._ask(lambda db: db) as db:
            yield from bucket.scan(db, vbuckets)

    def branches(self, vbuckets: Sequence[int]) -> dict[int, Sequence[tuple[int, int]]]:
        """The failover logs of some vbuckets."""

        def logs(db: Database) -> dict[int, Sequence[tuple[int, int]]]:
            with db:
                return {vbucket: log.entries for vbucket, log in db.failover_logs(vbuckets).items()}

        return self._ask(logs)

    def _ask(self, question: Callable[[Database], T]) -> T:
        """Ask the bucket for a repair; wait for it, but not for ever, because the sync cannot be stopped meanwhile."""
        patience_s = min(self.options.patience_s, REPAIR_PATIENCE_S)
        return patiently(lambda: question(bucket.database(self.options)), "read the bucket for a repair", patience_s)

    def freshen(self) -> None:
        """While no batch comes: merge what has waited too long. Does nothing while a batch is applied."""
        if self._tables is None or not BETWEEN_BATCHES.acquire(blocking=False):
            return
        try:
            advanced, now = self._tables.freshen(), time.monotonic()
            everywhere = now >= self._history_at
            self._history_at = now + HISTORY_EVERY_S if everywhere else self._history_at
            self._advance_history(self._tables, [one for one in advanced if one.rows or everywhere])
        finally:
            BETWEEN_BATCHES.release()

    def _advance_history(self, tables: Tables, advanced: Sequence[AdvanceResult]) -> None:
        for one in advanced if self.options.history else ():
            HistoryTable(tables.collection(one.name)).advance()

    def _write_journal(
        self,
        lake: Lake,
        batch_id: int,
        written: WrittenFiles,
        advanced: Sequence[AdvanceResult],
        started: float,
        read_s: float,
    ) -> None:
        log_bytes = sum(file.size for files in written.files.values() for file in files)
        Journal(lake.root).add(
            Batch(
                batch=batch_id,
                at=time.time(),
                rows=written.rows,
                value_bytes=written.value_bytes,
                log_bytes=log_bytes,
                table_bytes=sum(one.bytes_written for one in advanced),
                read_s=read_s,
                total_s=time.monotonic() - started,
                behind_s=self._behind_s(written),
                rollbacks=sum(mark.event == Event.ROLLBACK for mark in written.marks),
                tables={one.name: asdict(one) for one in advanced if one.rows or one.held},
            )
        )

    def _behind_s(self, written: WrittenFiles) -> float:
        """The age of the newest change; a change from before this run counts from the start of the run."""
        if not written.rows:
            return 0.0
        return max(0.0, time.time() - max(written.newest_us / 1e6, self.started_at))


def clean_sometimes(tables: Tables, options: SyncOptions) -> None:
    """Clean up if no run has done so for a while."""
    last = tables.lake.cleaned()
    if time.time() - last > UPKEEP_EVERY_S:
        if last:
            clean(tables, options)
        tables.lake.note_cleaned(time.time())


def clean(tables: Tables, options: SyncOptions) -> int:
    """Delete old files and trim the logs, as the retentions say; the number of files deleted."""
    gone = 0
    for name in tables.names():
        collection = tables.collection(name)
        if options.log_retention:
            upkeep.trim_log(collection, int((time.time() - seconds(options.log_retention)) * 1e6))
        gone += upkeep.vacuum(collection, math.ceil(seconds(options.retention) / 3600))
    return gone


def collect(frame: DataFrame, lake: str, batch_id: int) -> WrittenFiles:
    """What the tasks of this batch wrote; rows of ``format("dcp")`` are written first."""
    if frame.columns != [COLUMN]:
        return write_frame(frame, lake, batch_id)
    return WrittenFiles.from_tasks(json.loads(row[0]) for row in frame.collect())


def is_connect(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _reader(spark: SparkSession, options: SyncOptions) -> DataStreamReader:
    """The stream whose tasks write the log themselves.

    In Spark Connect, tasks do not know the number of their batch, so the plain stream is used, and `collect` writes its
    rows.
    """
    if is_connect(spark):
        spark.dataSource.register(DcpSource)
        return spark.readStream.format(DcpSource.name())
    spark.dataSource.register(DcpLogSource)
    return spark.readStream.format(FORMAT).option("lake", options.to)


def start(spark: SparkSession, options: SyncOptions, applier: Applier) -> StreamingQuery:
    """Start the streaming query."""
    reader = _reader(spark, options).option("maxrowspertrigger", str(options.max_rows))
    reader = reader.option("maxbytespertrigger", str(options.max_bytes))
    for name, text in options.source_options().items():
        reader = reader.option(name, text)
    writer = reader.load().writeStream.foreachBatch(applier).queryName(f"upriver sync {options.bucket}")
    writer = writer.option("checkpointLocation", Lake(options.to, options.checkpoint).checkpoint)
    if options.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{seconds(options.every)} seconds").start()
