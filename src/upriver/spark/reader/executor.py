"""What an executor does: read the ranges of one task and yield Arrow batches, on connections that it keeps.

A task of a stream reads only from the branch its batch was planned on. Where history has moved on, it leaves the
vbucket to the next plan (``planning``, 1). A task of a batch query has no next plan: it follows the new branch itself.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from upriver.client._feed.arrow import BatchMaker
from upriver.client._feed.bundle import Bundle
from upriver.client._feed.pump import Pump
from upriver.client._feed.reconnects import Reconnects, jitter
from upriver.client._requests.connections import make_session
from upriver.client.blocking import Database, default_name
from upriver.client.names import Names
from upriver.client.options import redacted
from upriver.client.reading import Content, settings_of
from upriver.client.reading import ReadOptions as ClientReadOptions
from upriver.errors import ConnectFailed, HistoryLost, UnknownCollection, UnknownScope
from upriver.model import OnRollback
from upriver.protocol.feed.cluster_feed import ClusterFeed, FeedRequest, FeedRows
from upriver.records.batches import rollback_row, row_batch
from upriver.spark.options import ReadOptions
from upriver.spark.reader.cluster import patiently
from upriver.spark.reader.planning import Range
from upriver.spark.reader.pool import POOL, Shelf
from upriver.spark.reader.reports import Channel, Reporter, Summary

T = TypeVar("T")
ROUND_S = 0.02
_frozen = 0  # how many modules there were when we last looked


@dataclass(frozen=True, slots=True)
class Task:
    """One task's part of a batch: plain values only, since Spark pickles it."""

    ranges: tuple[Range, ...]
    channel: Channel | None = None
    follow: bool = False  # a batch query: go on with whatever branch there is


@dataclass(slots=True)
class Reader:
    """Reads one task."""

    task: Task
    options: ReadOptions
    summary: Summary = field(default_factory=Summary)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows of the task in the schema ``CHANGES``; reports to the driver at the end."""
        reporter = Reporter(self.task.channel)
        reporter.begin()
        rolled_back = [one for one in self.task.ranges if one.rolled_back]
        if rolled_back:
            yield row_batch(
                rollback_row(one.vbucket, one.start.seqno, one.lost_vbuuid, one.start.epoch) for one in rolled_back
            )
        for todo in self._groups():
            yield from self._follow(todo) if self.task.follow else self._as_planned(todo)
        reporter.end(self.summary)
        freeze_imports()

    def _groups(self) -> list[list[Range]]:
        """What is to be read, by filter: a feed has one."""
        groups: dict[tuple[bytes, tuple[int, ...]], list[Range]] = {}
        for one in self.task.ranges:
            if one.backlog > 0:
                groups.setdefault((one.filter, one.without), []).append(one)
        return list(groups.values())

    def _as_planned(self, todo: list[Range]) -> Iterator[pa.RecordBatch]:
        with self._pump(todo, planned=True) as pump:
            try:
                yield from self._pumped(pump, todo[0].without)
            except (UnknownCollection, UnknownScope) as error:
                self._give_up(todo, error)
                return
            self._sum_up(pump.feed, todo)

    def _give_up(self, todo: list[Range], error: Exception) -> None:
        """A collection of the filter was dropped since the plan, or the node has not heard of it yet."""
        if self.options.on_rollback is OnRollback.FAIL:
            raise error
        self.summary.unread += [(one.vbucket, one.end) for one in todo]

    def _sum_up(self, feed: ClusterFeed, todo: list[Range]) -> None:
        """What was read to its end, and what was left to the next plan."""
        unread = [one for one in todo if one.vbucket in feed.left or one.vbucket in feed.refused]
        if unread and self.options.on_rollback is OnRollback.FAIL:
            raise HistoryLost(unread[0].vbucket, unread[0].start.snap_start, unread[0].start.vbuuid)
        purged = self._still_on_top([one for one in unread if one.vbucket in feed.refused])
        self.summary.unread += [(one.vbucket, 0 if one.vbucket in purged else one.end) for one in unread]
        self.summary.complete += [
            (one.vbucket, one.vbuuid, one.end) for one in todo
            if one not in unread and not one.addition and feed.table.covered(one.vbucket) <= one.end
        ]  # fmt: skip

    def _still_on_top(self, refused: list[Range]) -> set[int]:
        """Those that were not refused because of a failover, but because tombstones were purged behind them.

        The driver cannot see that. What follows is a rollback to 0, which the offset must carry.
        """
        if not refused:
            return set()
        vbuckets = [one.vbucket for one in refused]
        logs = self._ask(lambda db: db.failover_logs(vbuckets), "read the failover logs")
        return {one.vbucket for one in refused if logs[one.vbucket].uuid == one.vbuuid}

    def _follow(self, todo: list[Range]) -> Iterator[pa.RecordBatch]:
        with self._pump(todo, planned=False) as pump:
            yield from self._pumped(pump)

    def _pumped(self, pump: Pump, without: tuple[int, ...] = ()) -> Iterator[pa.RecordBatch]:
        unwanted = pa.array(without, pa.int64())
        for made in self._made(pump):
            for batch in made.items:
                if without:
                    batch = batch.filter(pc.invert(pc.is_in(batch.column("collection_id"), value_set=unwanted)))
                self.summary.rows += batch.num_rows
                yield batch
            for documents in made.held:
                self.summary.size_bytes += documents.rows.bytes
                pump.feed.taken(documents)

    def _made(self, pump: Pump) -> Iterator[Bundle]:
        """Full batches where the network allows it; smaller only when nothing more comes, or what is held weighs so
        much that it must not stay: it takes part of the flow-control window, and at its end nobody would move."""
        options, feed = self.options, pump.feed
        names = Names.of_manifest(self._ask(lambda db: db.manifest(), "read the collections"))
        maker = BatchMaker(feed, names, options.batch_rows, xattrs=options.xattrs, values=options.values_wanted)
        heard_at, held = time.monotonic(), 0
        while not feed.done:
            came = False
            for event in pump.events(ROUND_S):
                came = True
                if isinstance(event, FeedRows):
                    held += event.rows.bytes
                for made in maker.add(event):
                    yield made
                    held = 0
            if held >= options.flow_control_buffer // 3 or (held and not came):
                yield from maker.flush()
                held = 0
            heard_at = time.monotonic() if came else self._still_patient(heard_at, pump)
        yield from maker.flush()

    def _still_patient(self, heard_at: float, pump: Pump) -> float:
        patience = self.options.timeout_seconds
        if time.monotonic() - heard_at > patience:
            last = pump.reconnects.last_error
            raise ConnectFailed(f"no data for {patience:.0f} s (timeoutSeconds); the last error was: {last}")
        return heard_at

    def _ask(self, question: Callable[[Database], T], what: str) -> T:
        """As the driver asks: a task that begins while no node answers waits for one."""
        options, connect = self.options, self.options.connect_options()
        return patiently(
            lambda: question(POOL.database(connect)), f"{what} of {redacted(options.connection)}",
            options.timeout_seconds, lambda: POOL.forget_database(connect),
        )  # fmt: skip

    def _pump(self, todo: list[Range], *, planned: bool) -> Pump:
        database, options = self._ask(lambda db: db, "reach a node"), self.options
        content = Content.VALUES if options.values_wanted else Content.KEYS
        wanted = ClientReadOptions(content=content, xattrs=options.xattrs, expiry_events=True)
        connect = replace(database.options, window_bytes=options.flow_control_buffer)
        settings = settings_of(connect, wanted, default_name())
        feed = ClusterFeed(
            self._request(todo, planned), database.topology, lambda: make_session(connect, settings),
            settings.buffer_bytes, parse=connect.parse_map, noop_interval_s=settings.noop_interval_s, jitter=jitter,
            opaques=POOL.opaques,
        )  # fmt: skip

        def look_around() -> None:
            with suppress(ConnectFailed):  # perhaps another node knows who owns the vbuckets of the lost one now
                feed.use(database.refresh())

        return Pump(feed, connect, Reconnects(), look_around, Shelf(POOL, (connect, content, options.xattrs)))

    def _request(self, todo: list[Range], planned: bool) -> FeedRequest:
        fail = self.options.on_rollback is OnRollback.FAIL
        return FeedRequest(
            starts={one.vbucket: one.start for one in todo},
            ends={one.vbucket: one.end for one in todo},
            value=todo[0].filter,
            on_rollback=OnRollback.FAIL if fail else OnRollback.EMIT,
            branches={one.vbucket: one.vbuuid for one in todo} if planned else {},
        )


def freeze_imports() -> None:
    """At the end of a task, after which Spark collects garbage and looks at everything there is: nothing of what was
    imported will ever be garbage, and the compiler behind the kernels alone is a hundred thousand objects.
    """
    global _frozen
    if _frozen != len(sys.modules):
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)
