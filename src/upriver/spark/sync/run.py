"""The whole of a sync: look at the bucket, settle the lake, run the query until it is done or told to stop."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from upriver.errors import UpriverError
from upriver.lake import bucket
from upriver.lake.apply.reconcile import reconcile
from upriver.lake.history import History
from upriver.lake.journal import Batch, Journal, Lag
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.lake.tables import Tables
from upriver.spark.sync import reached
from upriver.spark.sync.job import BETWEEN_BATCHES, Applier, clean_sometimes, start
from upriver.spark.sync.lag import LagWatch

IDLE_S = 30.0
FRESHEN_EVERY_S = 2.0
# Documents do not pass through the JVM, so it has nothing to gain from compiling its code thoroughly: that took as much
# of the processors during a load as reading the bucket did.
QUICK_JAVA = "-XX:TieredStopAtLevel=1"


@dataclass
class Live:
    """What is known of a run while it goes on; handed to ``on_progress`` about twice a second."""

    expected: int = 0  # changes in the bucket when the run started
    lag: int | None = None  # changes that the bucket has and the tables do not
    away_s: float = 0.0  # for how long the bucket has not answered; it is asked every second
    away_because: str = ""
    loading: bool = True  # until the tables have caught up once
    started: float = field(default_factory=time.time)
    rows: int = 0
    rollbacks: int = 0
    count: int = 0  # of batches
    batches: deque[Batch] = field(default_factory=lambda: deque(maxlen=1000))  # the last ones
    news: list[Batch] = field(default_factory=list)  # those since the last call

    def add(self, batches: Iterable[Batch]) -> None:
        self.news = list(batches)
        for batch in self.news:
            self.batches.append(batch)
            self.rows += batch.rows
            self.rollbacks += batch.rollbacks
            self.count += 1


def sync(
    spark: Any,
    options: SyncOptions | Mapping[str, Any],
    *,
    stop: threading.Event | None = None,
    on_progress: Callable[[Live], None] | None = None,
) -> Live:
    """Bring the tables under ``options.to`` up to the bucket and, unless ``once``, keep them there until ``stop``."""
    options = options if isinstance(options, SyncOptions) else SyncOptions.parse(options)
    if "://" not in options.to:  # workers may have been started in another directory
        options = options.with_(to=os.path.abspath(options.to))
    if options.checkpoint and "://" not in options.checkpoint:
        options = options.with_(checkpoint=os.path.abspath(options.checkpoint))
    found = bucket.survey(options)
    lake = Lake(options.to, options.checkpoint)
    with lake.only_writer():
        settings = lake.settle(options.bucket, found.vbuckets, found.uuid, adopt=options.adopt)
        applier = Applier(options, settings["id"], found.vbuckets, found.changes)
        tables = applier.tables(spark)
        reached.check(lake, tables.last_batch())
        reached.take_over(lake, options)
        reconcile(tables, found, options)
        live = Live(found.changes)
        query = start(spark, options, applier)
        try:
            with LagWatch(options) as lag:
                # In Spark Connect batches are applied in the server, and nobody else may write meanwhile.
                idle = None if type(spark).__module__.startswith("pyspark.sql.connect") else applier.freshen
                _watch(query, lake, live, lag, stop, on_progress, idle)
        finally:
            with BETWEEN_BATCHES:
                query.stop()
        _finish(Tables(lake, settings["id"], tables.options, run=tables.run, reread=applier.reread), options)
    return live


def _watch(
    query: Any,
    lake: Lake,
    live: Live,
    lag: LagWatch,
    stop: threading.Event | None,
    on_progress: Callable[[Live], None] | None,
    idle: Callable[[], None] | None,
) -> None:
    journal = Journal(lake.root)
    journal.skip()
    next_s = 0.0
    while query.isActive and not (stop is not None and stop.is_set()):
        _wait(query)
        _look(query, journal, live, lag)
        if on_progress:
            on_progress(live)
        if idle is not None and time.monotonic() >= next_s and _is_idle(live):
            idle()
            next_s = time.monotonic() + FRESHEN_EVERY_S
    _look(query, journal, live, lag)
    if on_progress:
        on_progress(live)
    error = query.exception()
    if error is not None:
        raise UpriverError(f"the sync stopped: {first_cause(str(error))}")


def _is_idle(live: Live) -> bool:
    """Nothing is to come: the tables have all that the bucket has, or no batch has come for a while."""
    last = live.batches[-1].at if live.batches else live.started
    return live.lag == 0 or time.time() - last > IDLE_S


def _wait(query: Any) -> None:
    from pyspark.errors import StreamingQueryException

    with suppress(StreamingQueryException):  # told by ``exception()`` as well
        query.awaitTermination(0.5)


def _look(query: Any, journal: Journal, live: Live, lag: LagWatch) -> None:
    live.away_s, live.away_because = lag.away
    progress = query.lastProgress
    if progress:
        lag.committed(progress)
    live.add(journal.news())
    known, live.lag = live.lag, lag.lag
    if live.lag == 0 or (live.batches and live.rows >= live.expected):
        live.loading = False
    if live.lag is not None and (live.lag != known or time.time() - journal.lag_at > 2.0):
        journal.add_lag(Lag(time.time(), live.lag))


def first_cause(text: str) -> str:
    """The line of a Spark error that says what happened."""
    lines = [line for line in text.partition("JVM stacktrace:")[0].splitlines() if line.strip()]
    ours = [line.strip() for line in lines if line.strip().startswith("upriver.errors.")]
    if ours:
        return ours[-1].removeprefix("upriver.errors.")
    python = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b:? ", line)]
    return (python or lines or ["no message"])[-1 if python else 0].strip()


def _finish(tables: Tables, options: SyncOptions) -> None:
    """What a load held back for the end; a run that only brings the tables up to date leaves nothing waiting."""
    for step in tables.settle() if options.once else tables.freshen():
        if options.history:
            History(tables.collection(step.name)).advance(settle=options.once)
    clean_sometimes(tables, options)


def session(master: str, *, ui: bool = False) -> Any:
    """The session that ``spark-submit`` has prepared, or one of our own."""
    import upriver.spark

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from pyspark.sql import SparkSession

        return upriver.spark.register(SparkSession.builder.getOrCreate())
    settings = {"spark.driver.extraJavaOptions": QUICK_JAVA, "spark.ui.enabled": str(ui).lower()}
    return upriver.spark.session(master, settings=settings)
