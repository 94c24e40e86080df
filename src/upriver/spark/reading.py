"""What an executor does: read the ranges of one task and yield Arrow batches, on connections that it keeps.

A task of a stream reads only from the branch its batch was planned on. Where history has moved on, it leaves the
vbucket to the next plan (``planning``, 1). A task of a batch query has no next plan: it follows the new branch itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from upriver.client.blocking import Database, default_name
from upriver.client.kv import make_session
from upriver.client.names import Names
from upriver.client.pacing import jitter
from upriver.client.reading import Content, settings_of
from upriver.client.reading import ReadOptions as ClientReadOptions
from upriver.protocol.feed import Feed, FeedRequest, OnRollback
from upriver.records.batches import row_batch
from upriver.records.schema import Event
from upriver.spark.options import OnRollback as WhatOnRollback
from upriver.spark.options import ReadOptions
from upriver.spark.planning import Range
from upriver.spark.pool import POOL
from upriver.spark.pump import PlannedFeed, Pump
from upriver.spark.reports import Channel, Reporter, Summary

_frozen = False


@dataclass(frozen=True, slots=True)
class Task:
    """One task's part of a batch: plain values only, since Spark pickles it."""

    ranges: tuple[Range, ...]
    filter: bytes = b""
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
        freeze_once()
        reporter = Reporter(self.task.channel)
        reporter.begin()
        rolled_back = [one for one in self.task.ranges if one.rolled_back]
        if rolled_back:
            yield row_batch(_rollback_row(one) for one in rolled_back)
        todo = [one for one in self.task.ranges if one.backlog > 0]
        if todo:
            yield from self._follow(todo) if self.task.follow else self._as_planned(todo)
        reporter.end(self.summary)

    def _as_planned(self, todo: list[Range]) -> Iterator[pa.RecordBatch]:
        with self._feed(todo, planned=True) as feed:
            assert isinstance(feed.feed, PlannedFeed)
            yield from self._pump(feed)
            self._note_complete(feed.feed, todo)
            refused = [one for one in todo if one.vbucket in feed.feed.refused]
        if refused:
            yield from self._follow(self._still_on_top(refused))

    def _still_on_top(self, refused: list[Range]) -> list[Range]:
        """Those that were not refused because of a failover, but because tombstones were purged behind them.

        The next plan would not notice, so they are read again on the spot; the others are left to it.
        """
        logs = self._database().failover_logs([one.vbucket for one in refused])
        return [one for one in refused if logs[one.vbucket].uuid == one.vbuuid]

    def _follow(self, todo: list[Range]) -> Iterator[pa.RecordBatch]:
        if not todo:
            return
        with self._feed(todo, planned=False) as feed:
            yield from self._pump(feed)
            standing = feed.feed.standing
            for one in todo:
                if standing.epoch[one.vbucket] != one.epoch:
                    self.summary.epochs.append((one.vbucket, standing.epoch[one.vbucket]))

    def _pump(self, feed: Pump) -> Iterator[pa.RecordBatch]:
        options, window = self.options, self.options.flow_control_buffer
        wanted = {"xattrs": options.xattrs, "values": options.values_wanted}
        names = Names.of_manifest(self._database().manifest())
        for made in feed.batches(names, options.batch_rows, window // 3, options.timeout_seconds, **wanted):
            for batch in made.items:
                self.summary.rows += batch.num_rows
                yield batch
            for documents in made.held:
                self.summary.size_bytes += documents.rows.bytes
                feed.feed.taken(documents)

    def _note_complete(self, feed: PlannedFeed, todo: list[Range]) -> None:
        for one in todo:
            vb = one.vbucket
            if vb not in feed.left and vb not in feed.refused and one.end in feed.standing.points(vb):
                self.summary.complete.append((vb, one.vbuuid, one.end))

    def _database(self) -> Database:
        return POOL.database(self.options.connect_options())

    def _feed(self, todo: list[Range], *, planned: bool) -> Pump:
        database, options = self._database(), self.options
        content = Content.VALUES if options.values_wanted else Content.KEYS
        wanted = ClientReadOptions(content=content, xattrs=options.xattrs, expiry_events=True)
        connect = replace(database.options, window_bytes=options.flow_control_buffer)
        settings = settings_of(connect, wanted, default_name())
        basics: tuple[Any, ...] = (
            self._request(todo), database.topology, lambda: make_session(connect, settings), settings.buffer_bytes
        )  # fmt: skip
        more: dict[str, Any] = {
            "parse": connect.parse_map, "noop_interval_s": settings.noop_interval_s, "jitter": jitter,
        }  # fmt: skip
        branches = {one.vbucket: one.vbuuid for one in todo}
        feed = PlannedFeed(branches, *basics, **more) if planned else Feed(*basics, **more)
        return Pump(feed, database, (content, options.xattrs, settings.buffer_bytes))

    def _request(self, todo: list[Range]) -> FeedRequest:
        fail = self.options.on_rollback is WhatOnRollback.FAIL
        return FeedRequest(
            starts={one.vbucket: one.claim for one in todo},
            ends={one.vbucket: one.end for one in todo},
            epochs={one.vbucket: one.epoch for one in todo},
            points={one.vbucket: tuple(reversed(one.points)) for one in todo},
            value=self.task.filter,
            on_rollback=OnRollback.FAIL if fail else OnRollback.EMIT,
        )


def _rollback_row(one: Range) -> dict[str, Any]:
    vbuuid = one.lost_vbuuid - 2**64 if one.lost_vbuuid >= 2**63 else one.lost_vbuuid
    return {"event": Event.ROLLBACK, "vbucket": one.vbucket, "seqno": one.claim.seqno, "epoch": one.epoch,
            "vbuuid": vbuuid}  # fmt: skip


def freeze_once() -> None:
    """Spark collects garbage after every task, and looks at everything we imported; once is enough for that."""
    global _frozen
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen = True
