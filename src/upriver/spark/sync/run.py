"""A whole run of a sync: survey the bucket, open the lake, run the query until it ends or is told to stop."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from upriver.errors import UpriverError
from upriver.lake import bucket
from upriver.lake.apply.reconcile import reconcile
from upriver.lake.history import HistoryTable
from upriver.lake.journal import Batch, Journal, Lag
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.lake.tables import Tables
from upriver.protocol.offsets import Offset
from upriver.spark.sync import committed
from upriver.spark.sync.job import BETWEEN_BATCHES, Applier, clean_sometimes, is_connect, start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

IDLE_S = 30.0
FRESHEN_EVERY_S = 2.0
ASK_EVERY_S = 1.0


@dataclass
class SyncProgress:
    """What is known of a run at work; passed to ``on_progress`` about twice a second."""

    expected: int = 0  # changes in the bucket when the run started
    lag: int | None = None  # changes that the bucket has and the tables lack
    away_s: float = 0.0  # for how long the bucket has not answered; it is asked every second
    away_because: str = ""
    loading: bool = True  # until the tables have caught up once
    started: float = field(default_factory=time.time)
    rows: int = 0
    rollbacks: int = 0
    count: int = 0  # of batches
    batches: deque[Batch] = field(default_factory=lambda: deque(maxlen=1000))  # the last ones
    new_batches: list[Batch] = field(default_factory=list)  # those since the last call

    def add(self, batches: Iterable[Batch]) -> None:
        self.new_batches = list(batches)
        for batch in self.new_batches:
            self.batches.append(batch)
            self.rows += batch.rows
            self.rollbacks += batch.rollbacks
            self.count += 1


class LagWatch:
    """Knows, inside its context, how many changes the bucket has that the tables lack.

    A thread asks the bucket every second, beside the query, and asks again when the bucket does not answer. The source
    only knows what it has not planned yet, which is nothing during a long batch.
    """

    def __init__(self, options: SyncOptions) -> None:
        self._options = options
        self._highs: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._answered_at = time.monotonic()
        self._trouble = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="upriver lag", daemon=True)

    def __enter__(self) -> LagWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * ASK_EVERY_S)

    def committed(self, progress: Mapping[str, Any]) -> None:
        """Note the end of the last batch, from Spark's progress."""
        sources = progress.get("sources") or [{}]
        end = sources[0].get("endOffset")
        if isinstance(end, str):
            end = json.loads(end)
        if end:
            self._reached = {vb: at.seqno for vb, at in enumerate(Offset.from_json(end).positions)}

    @property
    def lag(self) -> int | None:
        """Changes behind; None before both sides are known."""
        highs, reached = self._highs, self._reached
        if not highs or not reached:
            return None
        return sum(max(0, high - reached.get(vbucket, 0)) for vbucket, high in highs.items())

    @property
    def away(self) -> tuple[float, str]:
        """For how many seconds the bucket has not answered (at most about one while it does), and the last error."""
        return time.monotonic() - self._answered_at, self._trouble or "no answer yet"

    def _ask(self) -> None:
        while not self._ended.is_set():
            try:
                with bucket.database(self._options) as database:
                    while not self._ended.is_set():
                        self._highs = database.high_seqnos()
                        self._answered_at, self._trouble = time.monotonic(), ""
                        self._ended.wait(ASK_EVERY_S)
            except (UpriverError, OSError) as error:
                self._trouble = str(error)
            self._ended.wait(ASK_EVERY_S)


OnProgress = Callable[[SyncProgress], None]


def run(
    spark: SparkSession,
    options: SyncOptions,
    *,
    stop: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> SyncProgress:
    """Make the tables under ``options.to`` equal to the bucket and, unless ``once``, keep them so until ``stop``."""
    if "://" not in options.to:  # workers may have been started in another directory
        options = options.with_(to=os.path.abspath(options.to))
    if options.checkpoint and "://" not in options.checkpoint:
        options = options.with_(checkpoint=os.path.abspath(options.checkpoint))
    found = bucket.survey(options)
    lake = Lake(options.to, options.checkpoint)
    with lake.only_writer():
        settings = lake.create_or_check(options.bucket, found.vbuckets, found.uuid, adopt=options.adopt)
        applier = Applier(options, settings["id"], found.vbuckets, found.changes)
        tables = applier.tables(spark)
        committed.check(lake, tables.last_batch())
        committed.take_over(lake, options)
        reconcile(tables, found, options)
        progress = SyncProgress(found.changes)
        query = start(spark, options, applier)
        try:
            with LagWatch(options) as lag:
                # In Spark Connect the server applies the batches, and no other process may write meanwhile.
                freshen = None if is_connect(spark) else applier.freshen
                _watch(query, lake, progress, lag, stop, on_progress, freshen)
        finally:
            with BETWEEN_BATCHES:
                query.stop()
        _finish(Tables(lake, settings["id"], tables.options, run=tables.run, reread=applier.reread), options)
    return progress


def _watch(
    query: StreamingQuery,
    lake: Lake,
    progress: SyncProgress,
    lag: LagWatch,
    stop: threading.Event | None,
    on_progress: OnProgress | None,
    freshen: Callable[[], None] | None,
) -> None:
    """Report progress until the query ends or is told to stop; freshen the tables while no batch comes."""
    from pyspark.errors import StreamingQueryException

    journal = Journal(lake.root)
    journal.skip()
    freshen_at = 0.0
    while query.isActive and not (stop is not None and stop.is_set()):
        with suppress(StreamingQueryException):  # ``exception()`` below has it as well
            query.awaitTermination(0.5)  # type: ignore[arg-type]  # PySpark declares int
        _update(progress, query, journal, lag)
        if on_progress:
            on_progress(progress)
        if freshen is not None and time.monotonic() >= freshen_at and _is_idle(progress):
            freshen()
            freshen_at = time.monotonic() + FRESHEN_EVERY_S
    _update(progress, query, journal, lag)
    if on_progress:
        on_progress(progress)
    error = query.exception()
    if error is not None:
        raise UpriverError(f"the sync stopped: {first_cause(str(error))}")


def _is_idle(progress: SyncProgress) -> bool:
    """Whether no batch is expected: the tables have all that the bucket has, or no batch has come for a while."""
    last = progress.batches[-1].at if progress.batches else progress.started
    return progress.lag == 0 or time.time() - last > IDLE_S


def _update(progress: SyncProgress, query: StreamingQuery, journal: Journal, lag: LagWatch) -> None:
    progress.away_s, progress.away_because = lag.away
    reported = query.lastProgress
    if reported:
        lag.committed(reported)
    progress.add(journal.new_batches())
    known, progress.lag = progress.lag, lag.lag
    if progress.lag == 0 or (progress.batches and progress.rows >= progress.expected):
        progress.loading = False
    if progress.lag is not None and (progress.lag != known or time.time() - journal.lag_at > 2.0):
        journal.add_lag(Lag(time.time(), progress.lag))


def first_cause(text: str) -> str:
    """The line of a Spark error that says what happened."""
    lines = [line for line in text.partition("JVM stacktrace:")[0].splitlines() if line.strip()]
    ours = [line.strip() for line in lines if line.strip().startswith("upriver.errors.")]
    if ours:
        return ours[-1].removeprefix("upriver.errors.")
    python = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b:? ", line)]
    return (python or lines or ["no message"])[-1 if python else 0].strip()


def _finish(tables: Tables, options: SyncOptions) -> None:
    """Apply what a load held back. A run with ``once`` leaves nothing waiting."""
    for advanced in tables.drain() if options.once else tables.freshen():
        if options.history:
            HistoryTable(tables.collection(advanced.name)).advance(drain=options.once)
    clean_sometimes(tables, options)
