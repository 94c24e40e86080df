"""The planning half of a reader, in the driver's process: where to start, where a batch ends, who reads what."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from upriver.errors import ConfigError
from upriver.model import FailoverLog
from upriver.spark.cluster import Cluster, stream_filter
from upriver.spark.offsets import Offset, Place
from upriver.spark.options import OnRollback, ReadOptions
from upriver.spark.packing import pack
from upriver.spark.planning import Known, Range, View, claim, look, plan, ranges
from upriver.spark.reading import Task
from upriver.spark.reports import ReportDesk, own_address

ALL_LOGS_EVERY_S = 3.0


class Driver:
    """Plans for one query. Its memory only saves work: every promise rests on the offsets that Spark keeps."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.cluster = Cluster(options)
        self.known = Known()
        self._first: Offset | None = None
        self._anchored = False
        self._ceiling: dict[int, int] | None = None
        self._view: View | None = None  # since the last batch was planned
        self._viewed_at = 0.0
        self._all_logs_at = 0.0
        self._looked = False
        self._end: Offset | None = None
        self._filter: bytes | None = None
        self._desk: ReportDesk | None = None

    def close(self) -> None:
        self.cluster.close()
        if self._desk:
            self._desk.close()

    # ---------------------------------------------------------------------------------------------- where to start

    def initial_offset(self) -> dict[str, Any]:
        """Where a new query begins. Spark asks again, also after a crash, so it is remembered, and anchored in the
        first batch unless it is the same every time."""
        if self._first is None:
            self._first = self._resolve(self.options.starting)
        return self._first.to_json()

    def _resolve(self, starting: Any) -> Offset:
        vbuckets = self.cluster.topology().vbuckets
        if starting == "earliest":
            return Offset.earliest(vbuckets)
        if isinstance(starting, Mapping) and "dcp" in starting:
            return self._checked(Offset.from_json(starting), vbuckets).settled()
        wanted = starting if isinstance(starting, Mapping) else {str(vb): starting for vb in range(vbuckets)}
        highs, logs = self.cluster.highs(), self.cluster.logs(range(vbuckets))
        places = [_place(wanted.get(str(vb), "earliest"), highs.get(vb, 0), logs[vb]) for vb in range(vbuckets)]
        if unknown := set(wanted) - {str(vb) for vb in range(vbuckets)}:
            raise ConfigError(f"offsets name vbucket {min(unknown)!r}; the bucket has 0 to {vbuckets - 1}")
        return Offset(tuple(places), anchor=True, baseline=True)

    def _checked(self, offset: Offset, vbuckets: int) -> Offset:
        if offset.vbuckets != vbuckets:
            raise ConfigError(
                f"the offset has {offset.vbuckets} vbuckets and the bucket {vbuckets}: it is of another bucket; "
                "start with a new checkpoint"
            )
        return offset

    # ---------------------------------------------------------------------------------------------- where to end

    def freeze(self) -> None:
        """AvailableNow: nothing beyond what there is now."""
        self._ceiling = self.cluster.highs()

    def latest_offset(self, start: dict[str, Any], most: tuple[int | None, int | None]) -> dict[str, Any]:
        """The end of the next batch; ``start`` itself, the very same text, if there is nothing to do."""
        at = self._checked(Offset.from_json(start), self.cluster.topology().vbuckets)
        if at.anchor and not self._anchored and at == self._first:
            self._anchored = True
            self._end = at
            return start
        view = self._look(at)
        fail = self.options.on_rollback is OnRollback.FAIL
        rows = self._rows(*most)
        end = plan(at, view, self.known, most=rows, ceiling=self._ceiling, fail_on_rollback=fail)
        self._end = end
        return start if end is at else end.to_json()

    def _rows(self, rows: int | None, size: int | None) -> int | None:
        limits = [] if rows is None else [rows]
        if size is not None:
            limits.append(max(1, int(size / self._reports().row_bytes)))
        return min(limits) if limits else None

    def _look(self, at: Offset) -> View:
        """What the cluster says. While nothing happens, what it said a moment ago; after a batch, always fresh."""
        now = time.monotonic()
        if self._view is not None and now - self._viewed_at < self.options.poll_milliseconds / 1000:
            return self._view
        everything = now - self._all_logs_at > ALL_LOGS_EVERY_S
        if everything:
            self._all_logs_at = now
        if self._view is None and self._desk:
            self._desk.learn(self.known)
        # AvailableNow must see every vbucket, or it would end too early; a stream can leave some for later.
        highs = self.cluster.reachable_highs if self._ceiling is None else self.cluster.highs
        view = look(at, highs, self.cluster.logs, everything=everything)
        if not self._looked and any(place.seqno for place in at.places):
            # Only a reader that was away for days can have been passed by a purge; while it runs, executors notice.
            self._looked, view = True, replace(view, purges=self.cluster.purges())
        self._view, self._viewed_at = view, now
        self.known.observe(at, self._view)
        return self._view

    def lag(self) -> dict[str, Any]:
        """How far the planned end is behind the database; shown in the query's progress as ``latestOffset``."""
        highs = self._view.highs if self._view else {}
        places = self._end.places if self._end else ()
        behind = {vb: highs[vb] - place.seqno for vb, place in enumerate(places) if highs.get(vb, 0) > place.seqno}
        return {"highSeqnos": " ".join(str(highs.get(vb, 0)) for vb in range(len(places))),
                "lagPerVbucket": {str(vb): lag for vb, lag in behind.items()}, "lag": sum(behind.values())}  # fmt: skip

    # ---------------------------------------------------------------------------------------------- who reads what

    def tasks(self, start: dict[str, Any], end: dict[str, Any]) -> list[Task]:
        """The tasks of a batch, a new one or one that is replayed after a crash."""
        goal = Offset.from_json(end)
        if goal.anchor or start == end:
            return []
        at = Offset.from_json(start)
        view = self._view or self._look(at)
        todo = ranges(at, goal, view, self.known)
        # From here on executors read: what the cluster said before says nothing about what they will get.
        self._view, self.known = None, Known()
        return self._pack(todo, follow=False)

    def batch_tasks(self) -> list[Task]:
        """The tasks of a batch query: from its start to where every vbucket is now, or to ``endingOffsets``."""
        start = self._resolve(self.options.starting)
        view = look(start, self.cluster.highs, self.cluster.logs, everything=True)
        ends = self._batch_ends(view)
        if max(self.options.vbuckets, default=0) >= start.vbuckets:
            raise ConfigError(f"vbuckets={max(self.options.vbuckets)}: the bucket has 0 to {start.vbuckets - 1}")
        todo = [
            Range(vb, claim(vb, place, view, self.known), ends[vb], view.logs[vb].uuid, place.epoch, place.points)
            for vb, place in enumerate(start.places)
            if ends.get(vb, 0) > place.seqno and (not self.options.vbuckets or vb in self.options.vbuckets)
        ]
        try:
            return self._pack(todo, follow=True)
        finally:
            self.close()

    def _batch_ends(self, view: View) -> dict[int, int]:
        if self.options.ending_offsets == "latest":
            return dict(view.highs)
        wanted = self._resolve(self.options.ending_offsets)
        return {vb: min(place.seqno, view.highs.get(vb, 0)) for vb, place in enumerate(wanted.places)}

    def _pack(self, todo: list[Range], *, follow: bool) -> list[Task]:
        topology = self.cluster.topology()
        owners = {one.vbucket: topology.active(one.vbucket) for one in todo}
        groups = pack(todo, owners, self.options.task_limit)
        channels = [None] * len(groups) if follow else self._reports().open_plan(len(groups))
        wire_filter = self._wire_filter()
        return [Task(tuple(g), wire_filter, c, follow) for g, c in zip(groups, channels, strict=True)]

    def _wire_filter(self) -> bytes:
        if self._filter is None:
            needed = self.options.collections or self.options.scope
            self._filter = stream_filter(self.options, self.cluster.names()) if needed else b""
        return self._filter

    def _reports(self) -> ReportDesk:
        if self._desk is None:
            seed = self.options.connect_options().seeds[0]
            self._desk = ReportDesk(own_address(seed.host, seed.port))
        return self._desk


def _place(wanted: Any, high: int, log: FailoverLog) -> Place:
    """A place that a user named: ``earliest``, ``latest``, a seqno, or a seqno with its branch."""
    if wanted == "earliest":
        return Place()
    if wanted == "latest":
        return Place(log.uuid, high, (high,) if high else ())
    found = wanted if isinstance(wanted, Mapping) else {"seqno": wanted}
    try:
        seqno, vbuuid = int(found["seqno"]), found.get("vbuuid", log.uuid)
        return Place(int(vbuuid, 16) if isinstance(vbuuid, str) else int(vbuuid), seqno, (seqno,) if seqno else ())
    except (KeyError, TypeError, ValueError) as error:
        example = '17, "earliest", "latest" or {"seqno": 17, "vbuuid": "a1b2"}'
        raise ConfigError(f"{wanted!r} is no place in a vbucket; write {example}") from error
