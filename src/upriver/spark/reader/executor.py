"""The executor: read the ranges of one task as Arrow batches, on pooled connections.

A task of a stream reads only from the branch that its batch was planned on. Where history has forked since, it leaves
the vbucket to the next plan (``planning``, 1). A batch query has no next plan, so its tasks follow the new branch.
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
from upriver.client._feed.link_policy import Reconnects, jitter
from upriver.client._feed.outbox import Bundle
from upriver.client._feed.pump import Pump
from upriver.client._requests.connections import make_session
from upriver.client.blocking import Database
from upriver.client.names import Names
from upriver.client.options import redacted
from upriver.client.reading import Content, FeedOptions, settings_of
from upriver.errors import ConnectFailed, HistoryLost, UnknownCollection, UnknownScope
from upriver.model import OnRollback
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import FeedRequest, FeedRows
from upriver.records.batches import rollback_row, row_batch
from upriver.spark.options import ReadOptions
from upriver.spark.reader.cluster import patiently
from upriver.spark.reader.planning import Range
from upriver.spark.reader.pool import POOL, PooledConnections
from upriver.spark.reader.reports import Channel, Reporter, TaskSummary

T = TypeVar("T")
ROUND_S = 0.02
_frozen = 0  # how many modules there were at the last freeze


@dataclass(frozen=True, slots=True)
class Task:
    """One task's part of a batch. Plain values only, because Spark pickles it."""

    ranges: tuple[Range, ...]
    channel: Channel | None = None
    follow: bool = False  # a batch query: continue on a new branch after a rollback


@dataclass(slots=True)
class TaskReader:
    """Reads the ranges of one task; ``summary`` is complete at the end."""

    task: Task
    options: ReadOptions
    summary: TaskSummary = field(default_factory=TaskSummary)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows of the task in the schema ``CHANGES``; then a report to the driver."""
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
        """The ranges by filter, because a feed has only one."""
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
        """A collection of the filter was dropped since the plan, or the node does not know it yet."""
        if self.options.on_rollback is OnRollback.FAIL:
            raise error
        self.summary.unread += [(one.vbucket, one.end) for one in todo]

    def _sum_up(self, feed: ClusterFeed, todo: list[Range]) -> None:
        """Note which vbuckets were read to their end, and which are left to the next plan."""
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
        """The vbuckets that were refused not because of a failover, but because tombstones beyond them were purged.

        The driver cannot see that. They roll back to 0, and the offset must say so.
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
        """Full batches if possible; smaller ones when nothing more comes, or when held rows take so much of the flow
        control window that the producer would have to stop."""
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
        """The answer to a question; a task that begins while no node answers waits for one."""
        options, connect = self.options, self.options.connect_options()
        return patiently(
            lambda: question(POOL.database(connect)), f"{what} of {redacted(options.connection)}",
            options.timeout_seconds, lambda: POOL.forget_database(connect),
        )  # fmt: skip

    def _pump(self, todo: list[Range], *, planned: bool) -> Pump:
        database, options = self._ask(lambda db: db, "reach a node"), self.options
        content = Content.VALUES if options.values_wanted else Content.KEYS
        wanted = FeedOptions(content=content, xattrs=options.xattrs, expiry_events=True)
        connect = replace(database.options, window_bytes=options.flow_control_buffer)
        settings = settings_of(connect, wanted)
        feed = ClusterFeed(
            self._request(todo, planned), database.topology, lambda: make_session(connect, settings),
            settings.buffer_bytes, parse=connect.parse_map, noop_interval_s=settings.noop_interval_s, jitter=jitter,
            opaques=POOL.opaques,
        )  # fmt: skip

        def look_around() -> None:
            with suppress(ConnectFailed):  # another node may know the new owner of the lost node's vbuckets
                feed.use(database.refresh())

        kept = PooledConnections(POOL, (connect, content, options.xattrs))
        return Pump(feed, connect, Reconnects(), look_around, kept)

    def _request(self, todo: list[Range], planned: bool) -> FeedRequest:
        return FeedRequest(
            starts={one.vbucket: one.start for one in todo},
            ends={one.vbucket: one.end for one in todo},
            value=todo[0].filter,
            on_rollback=self.options.on_rollback,
            branches={one.vbucket: one.vbuuid for one in todo} if planned else {},
        )


def freeze_imports() -> None:
    """Exempt what is imported from garbage collection. Spark collects after every task, and the compiler behind the
    kernels alone is a hundred thousand objects.
    """
    global _frozen
    if _frozen != len(sys.modules):
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)
