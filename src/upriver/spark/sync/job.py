"""The streaming query of a sync: micro-batches in, commits out, one line of progress for each.

`Applier` is what Spark calls for every batch. It holds plain values and opens everything else where it runs, so that
it works in the driver, under ``spark-submit`` and in the server of Spark Connect alike.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import pyarrow as pa

from upriver.client.blocking import Database
from upriver.errors import ConfigError
from upriver.lake import bucket, upkeep
from upriver.lake.apply.merge import run_inline
from upriver.lake.apply.policy import Policy
from upriver.lake.change_log import Written
from upriver.lake.history import History
from upriver.lake.journal import Batch, Journal
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions, seconds
from upriver.lake.tables import Step, TableOptions, Tables
from upriver.records.schema import Event
from upriver.spark.reader.cluster import patiently
from upriver.spark.source import DcpSource
from upriver.spark.sync import reached
from upriver.spark.sync.executors import spark_runner, write_frame
from upriver.spark.sync.source import COLUMN, FORMAT, DcpLogSource

logger = logging.getLogger("upriver.sync")
UPKEEP_EVERY_S = 1800.0
HISTORY_EVERY_S = 30.0  # a look at what waits in the log, while no batch comes
REPAIR_PATIENCE_S = 600.0
T = TypeVar("T")
# Held while a batch is being committed, so that whoever stops the query can wait for the gap between two.
BETWEEN_BATCHES = threading.Lock()


def table_options(options: SyncOptions, vbuckets: int) -> TableOptions:
    staleness_s = seconds(options.max_staleness) if options.max_staleness else math.inf
    policy = Policy(share=options.share, staleness_s=staleness_s)
    return TableOptions(policy, options.deletes == "mark", options.max_columns, options.shapes, vbuckets)


class Applier:
    """Commits micro-batches of ``format("dcp-log")``, or of ``format("dcp")``, to the tables of a lake."""

    def __init__(self, options: SyncOptions, lake_id: str, vbuckets: int, expected: int = 0) -> None:
        self.options, self.lake_id, self.vbuckets, self.expected = options, lake_id, vbuckets, expected
        self.started_at = time.time()
        self._tables: Tables | None = None
        self._history_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": None}

    def __call__(self, frame: Any, batch_id: int) -> None:
        with BETWEEN_BATCHES:
            self._apply(frame, batch_id)

    def _apply(self, frame: Any, batch_id: int) -> None:
        started = time.monotonic()
        tables = self.tables(frame.sparkSession)
        if batch_id < tables.last_batch():
            raise ConfigError(
                f"Spark starts at batch {batch_id}, but {self.options.to} has batch {tables.last_batch()}: its "
                f"checkpoint ({tables.lake.checkpoint}) is missing or old. Restore it, or sync to a new directory"
            )
        written = collect(frame, self.options.to, batch_id)
        read_s = time.monotonic() - started
        told = reached.keep(tables.lake, batch_id, written)
        steps = tables.apply(batch_id, written, self._lag(tables, written))
        reached.note(tables.lake, batch_id, self.options, told)
        self._history(tables, steps)
        self._keep_up(tables, steps)
        self._note(tables.lake, batch_id, written, steps, started, read_s)

    def tables(self, spark: Any = None) -> Tables:
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

    def _lag(self, tables: Tables, written: Written) -> int:
        """About how many rows are still to come: none unless this batch was full."""
        if written.rows < 0.8 * self.options.max_rows and written.value_bytes < 0.4 * self.options.max_bytes:
            return 0
        logs = [tables.collection(name).changes for name in tables.names()]
        done = written.rows + sum(piece.rows for log in logs for piece in log.pieces())
        return max(self.expected - done, 0)

    def reread(self, vbuckets: Sequence[int]) -> Iterator[pa.RecordBatch]:
        with self._asked(lambda db: db) as db:
            yield from bucket.scan(db, vbuckets)

    def branches(self, vbuckets: Sequence[int]) -> dict[int, Sequence[tuple[int, int]]]:
        def logs(db: Database) -> dict[int, Sequence[tuple[int, int]]]:
            with db:
                return {vbucket: log.entries for vbucket, log in db.failover_logs(vbuckets).items()}

        return self._asked(logs)

    def _asked(self, question: Callable[[Database], T]) -> T:
        """A repair that needs the bucket waits for it, but not for ever: nobody could stop the sync meanwhile."""
        patience_s = min(self.options.patience_s, REPAIR_PATIENCE_S)
        return patiently(lambda: question(bucket.database(self.options)), "read the bucket for a repair", patience_s)

    def freshen(self) -> None:
        """While no batch comes: what has waited for too long goes into ``current``. Nothing while one is at work."""
        if self._tables is None or not BETWEEN_BATCHES.acquire(blocking=False):
            return
        try:
            steps, now = self._tables.freshen(), time.monotonic()
            everywhere = now >= self._history_at
            self._history_at = now + HISTORY_EVERY_S if everywhere else self._history_at
            self._history(self._tables, [step for step in steps if step.rows or everywhere])
        finally:
            BETWEEN_BATCHES.release()

    def _history(self, tables: Tables, steps: Sequence[Step]) -> None:
        for step in steps if self.options.history else ():
            History(tables.collection(step.name)).advance()

    def _keep_up(self, tables: Tables, steps: Sequence[Step]) -> None:
        for step in steps:
            if step.rows:
                upkeep.fold_tail(tables.collection(step.name))
                upkeep.fold_log(tables.collection(step.name))
        clean_sometimes(tables, self.options)

    def _note(
        self, lake: Lake, batch_id: int, written: Written, steps: Sequence[Step], started: float, read_s: float
    ) -> None:
        log_bytes = sum(piece.size for pieces in written.pieces.values() for piece in pieces)
        Journal(lake.root).add(
            Batch(
                batch=batch_id,
                at=time.time(),
                rows=written.rows,
                value_bytes=written.value_bytes,
                log_bytes=log_bytes,
                table_bytes=sum(step.bytes_written for step in steps),
                read_s=read_s,
                total_s=time.monotonic() - started,
                behind_s=self._behind_s(written),
                rollbacks=sum(mark.event == Event.ROLLBACK for mark in written.marks),
                tables={step.name: asdict(step) for step in steps if step.rows or step.held},
            )
        )

    def _behind_s(self, written: Written) -> float:
        """The age of the newest change; what was there before this run waited for nobody until it began."""
        if not written.rows:
            return 0.0
        return max(0.0, time.time() - max(written.newest_us / 1e6, self.started_at))


def clean_sometimes(tables: Tables, options: SyncOptions) -> None:
    """Clean up if that was not done for a while, by this run or one before."""
    last = tables.lake.cleaned()
    if time.time() - last > UPKEEP_EVERY_S:
        if last:
            clean(tables, options)
        tables.lake.note_cleaned(time.time())


def clean(tables: Tables, options: SyncOptions) -> int:
    """Vacuum, and trim the log, as the retentions say. The number of files deleted."""
    gone = 0
    for name in tables.names():
        collection = tables.collection(name)
        if options.log_retention:
            upkeep.trim_log(collection, int((time.time() - seconds(options.log_retention)) * 1e6))
        gone += upkeep.vacuum(collection, math.ceil(seconds(options.retention) / 3600))
    return gone


def collect(frame: Any, lake: str, batch_id: int) -> Written:
    """What the tasks of this batch wrote; rows of ``format("dcp")`` are written on the way."""
    if frame.columns != [COLUMN]:
        return write_frame(frame, lake, batch_id)
    return Written.gather(json.loads(row[0]) for row in frame.collect())


def _reader(spark: Any, options: SyncOptions) -> Any:
    """The stream whose tasks write the log themselves. In Spark Connect they are not told the number of their batch, so
    there it is the plain one, and its rows are written on the way (`collect`)."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        spark.dataSource.register(DcpSource)
        return spark.readStream.format(DcpSource.name())
    spark.dataSource.register(DcpLogSource)
    return spark.readStream.format(FORMAT).option("lake", options.to)


def start(spark: Any, options: SyncOptions, applier: Applier) -> Any:
    """Start the streaming query."""
    reader = _reader(spark, options).option("maxrowspertrigger", str(options.max_rows))
    reader = reader.option("maxbytespertrigger", str(options.max_bytes))
    for name, text in options.source_options().items():
        reader = reader.option(name, text)
    writer = reader.load().writeStream.foreachBatch(applier).queryName(f"upriver sync {options.bucket}")
    writer = writer.option("checkpointLocation", Lake(options.to, options.checkpoint).checkpoint)
    trigger = {"availableNow": True} if options.once else {"processingTime": f"{seconds(options.every)} seconds"}
    return writer.trigger(**trigger).start()
