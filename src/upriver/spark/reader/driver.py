"""The driver's half of a reader: where a query starts, where each batch ends, and which task reads what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from upriver.client.names import Names
from upriver.errors import ConfigError
from upriver.model import FailoverLog, OnRollback
from upriver.protocol.filters import EVERYTHING, Filter, Wanted
from upriver.protocol.offsets import Offset
from upriver.protocol.position import Position
from upriver.spark.options import ReadOptions
from upriver.spark.reader.cluster import Cluster
from upriver.spark.reader.executor import Task
from upriver.spark.reader.planning import Known, Range, View, behind, claimable, look, pack, plan, ranges
from upriver.spark.reader.reports import ReportServer, own_address

ALL_LOGS_EVERY_S = 3.0
CLOSE_AFTER_S = 1.0  # without anything to do, before an empty batch says what the last one did
LONGEST_HOLD_S = 5.0
HIDDEN_FOR_S = 30.0  # how long changes that the filter hides are not worth a batch
MOST_COLLECTIONS = 16  # that are asked for one by one
LONGEST_STRETCH, STRETCHED_ROWS = 64.0, 1_000_000  # of a batch that the filter leaves almost empty
PROBE_ROWS = 1_000  # of a first batch that has a limit of bytes, if the size of a row is unknown

Recall = Callable[[dict[str, Any]], Known | None]


class Driver:
    """Plans for one query. Its memory only saves work: every promise rests on the offsets that Spark keeps.

    ``recall`` looks up what tasks reported about the batch that ended at an offset, for callers that keep the reports.
    """

    def __init__(self, options: ReadOptions, recall: Recall | None = None) -> None:
        self.options, self._recall = options, recall
        self.cluster = Cluster(options)
        self.known = Known()
        self._first: Offset | None = None
        self._anchored = False
        self._ceiling: dict[int, int] | None = None
        self._view: View | None = None  # since the last batch was planned
        self._viewed_at = 0.0
        self._all_logs_at = 0.0
        self._has_purges = False
        self._end: Offset | None = None
        self._ran: Offset | None = None  # the end of the batch whose tasks were made here last
        self._idle_since = 0.0
        self._misses: dict[int, int] = {}  # how often in a row a vbucket was left unread
        self._held: dict[int, float] = {}  # until when it is not tried again
        self._row_bytes_guess: float | None = None  # the size of a row, as the nodes say
        self._filtered = bool(options.collections or options.scope)
        self._wanted: Wanted | None = None
        self._resolved = False
        self._most: int | None = None
        self._full = False  # whether the last batch took all that its limit allowed
        self._stretch = 1.0
        self._report_server: ReportServer | None = None

    def close(self) -> None:
        self.cluster.close()
        if self._report_server:
            self._report_server.close()

    # ---------------------------------------------------------------------------------------------- where to start

    def initial_offset(self) -> dict[str, Any]:
        """Where a new query begins.

        Spark asks again, also after a crash. So the answer is remembered, and an empty first batch anchors it unless it
        is always the same.
        """
        if self._first is None:
            self._first = self._resolve(self.options.starting)
        return self._first.to_json()

    def _resolve(self, starting: Any) -> Offset:
        topology = self.cluster.topology()
        vbuckets = topology.vbuckets
        if starting == "earliest":
            return Offset.earliest(vbuckets, topology.bucket_uuid, (self._want().filter,))
        if isinstance(starting, Mapping) and "dcp" in starting:
            return self._checked(Offset.from_json(starting)).settled()
        wanted = starting if isinstance(starting, Mapping) else {str(vb): starting for vb in range(vbuckets)}
        highs, logs = self.cluster.highs(), self.cluster.logs(range(vbuckets))
        named = [_position(wanted.get(str(vb), "earliest"), highs.get(vb, 0), logs[vb]) for vb in range(vbuckets)]
        if unknown := set(wanted) - {str(vb) for vb in range(vbuckets)}:
            raise ConfigError(f"offsets name vbucket {min(unknown)!r}; the bucket has 0 to {vbuckets - 1}")
        filters = (self._want().filter,)
        return Offset(tuple(named), anchor=True, baseline=True, bucket=topology.bucket_uuid, filters=filters)

    def _checked(self, offset: Offset) -> Offset:
        """The offset, if it is of this bucket."""
        topology = self.cluster.topology()
        vbuckets, uuid = topology.vbuckets, topology.bucket_uuid
        if offset.vbuckets != vbuckets:
            raise ConfigError(
                f"the offset has {offset.vbuckets} vbuckets and the bucket {vbuckets}: it is of another bucket; "
                "start with a new checkpoint"
            )
        if offset.bucket and uuid and offset.bucket != uuid and not self.options.adopt:
            raise ConfigError(
                f"the offset is of bucket {offset.bucket}, and this one is {uuid}: it was deleted and created again, "
                "or it is of another cluster. Start with a new checkpoint, or set adopt=true: then everything is "
                "rolled back, and this one is read from the beginning"
            )
        return offset

    # ---------------------------------------------------------------------------------------------- where to end

    def freeze(self) -> None:
        """For AvailableNow: read nothing beyond the current high seqnos."""
        self._ceiling = self.cluster.highs()

    def latest_offset(self, start: dict[str, Any], most: tuple[int | None, int | None]) -> dict[str, Any]:
        """The end of the next batch; ``start`` itself, the very same text, if there is nothing to do."""
        at = self._checked(Offset.from_json(start))
        if at.anchor and not self._anchored and at == self._first:
            self._anchored = True
            self._end = at
            return start
        end = self._plan(at, most)
        while end is at and self._ceiling is not None and self._held:  # AvailableNow must wait for them
            time.sleep(max(0.05, min(self._held.values()) - time.monotonic()))
            end = self._plan(at, most)
        self._end = end
        return start if end is at else end.to_json()

    def _plan(self, at: Offset, most: tuple[int | None, int | None]) -> Offset:
        view, wanted = self._look(at), self._want(at)
        if wanted.filter.nothing:
            return at  # until a collection of that name is created
        fail = self.options.on_rollback is OnRollback.FAIL
        self._most = self._rows(*most)
        end = plan(at, view, self.known, most=self._most, ceiling=self._top(at, view, wanted), fail_on_rollback=fail,
                   close=self._may_close(), wanted=wanted)  # fmt: skip
        return at if end is at else replace(end, bucket=self.cluster.topology().bucket_uuid or at.bucket)

    def _top(self, at: Offset, view: View, wanted: Wanted) -> Mapping[int, int] | None:
        """The highest seqno that each vbucket may go to; None for no limit.

        Changes that the filter hides are not worth a batch, except now and then: the position of a reader must not fall
        behind the purge seqno.
        """
        if self._ceiling is not None or view.matching is None or wanted.filter not in at.filters[:1]:
            return self._ceiling
        matters = any(view.matching.get(vb, 0) > each.seqno for vb, each in enumerate(at.positions))
        if matters or time.monotonic() - self._idle_since > HIDDEN_FOR_S:
            return None
        return {vb: each.seqno for vb, each in enumerate(at.positions)}

    def _may_close(self) -> bool:
        """Whether an empty batch may close the last one: when a run ends, or when nothing has happened for a while."""
        if self._recall is not None:
            return False  # the caller keeps the reports
        return self._ceiling is not None or time.monotonic() - self._idle_since > CLOSE_AFTER_S

    def _rows(self, rows: int | None, size: int | None) -> int | None:
        limits = [] if rows is None else [max(rows, min(int(rows * self._stretch), STRETCHED_ROWS))]
        if size is not None:
            limits.append(max(1, int(size / self._row_bytes())) if self._row_bytes() else PROBE_ROWS)
        return min(limits) if limits else None

    def _weigh(self, rows: int) -> None:
        """Adapt how many seqnos a batch may span: with a filter, most may be of other collections."""
        limit = self.options.max_rows_per_trigger
        if limit is None or not self._filtered:
            return
        if rows > limit:
            self._stretch = max(1.0, self._stretch * limit / rows)
        elif rows < limit / 4 and self._full:
            self._stretch = min(LONGEST_STRETCH, self._stretch * 4)

    def _row_bytes(self) -> float:
        """The size of a row, from the reports of tasks or, before the first, from the nodes; 0 if unknown."""
        if seen := self._reports().row_bytes:
            return seen
        if self._row_bytes_guess is None:
            self._row_bytes_guess = self.cluster.row_bytes()
        return self._row_bytes_guess

    def _look(self, at: Offset) -> View:
        """What the cluster says: fresh after a batch, up to ``pollMilliseconds`` old while nothing happens."""
        now = time.monotonic()
        if self._view is not None and now - self._viewed_at < self.options.poll_milliseconds / 1000:
            return self._view
        everything = now - self._all_logs_at > ALL_LOGS_EVERY_S
        if everything:
            self._all_logs_at = now
        if self._view is None:
            self._idle_since = now
            self._learn(at, now)
        # AvailableNow must see every vbucket, or it would end too early; a stream can leave some for later.
        highs = self.cluster.reachable_highs if self._ceiling is None else self.cluster.highs
        self._wanted = None  # what the names mean may have changed
        also = [*self.known.left(at), *behind(at, self._want(at))]
        matching = self._matching(self._want(at))
        view = look(at, highs, self.cluster.logs, everything=everything, also=also, revision=self._revision)
        view = replace(view, matching=matching)
        if not self._has_purges and any(each.seqno for each in at.positions):
            # Only a reader that was away for days can have been passed by a purge; while it runs, executors notice.
            self._has_purges, view = True, replace(view, purges=self.cluster.purges())
        self._held = {vb: until for vb, until in self._held.items() if until > now}
        held = {vb: high for vb, high in view.highs.items() if vb not in self._held}
        self._view, self._viewed_at = replace(view, highs=held), now
        return self._view

    def _revision(self) -> tuple[int, int]:
        return self.cluster.topology().revision

    def _matching(self, wanted: Wanted) -> dict[int, int] | None:
        """The last seqno that the filter lets through, by vbucket; None if that would take too many requests."""
        ids = [number for number in wanted.scope_of if wanted.has(wanted.filter, number)]
        if not self._filtered or not 0 < len(ids) <= MOST_COLLECTIONS:
            return None
        return self.cluster.matching(ids)

    def _learn(self, at: Offset, now: float) -> None:
        """Find out what was read of the batch that ended at ``at``, if this driver ran it or its reports were kept."""
        if self.options.on_rollback is OnRollback.FAIL:
            self.known.reported = True  # tasks fail rather than leave anything unread
        if at == self._ran and self._report_server:
            self.known.reported = True
            self._report_server.learn(self.known)
            self._weigh(self._report_server.rows)
        elif self._recall is not None:
            self.known = self._recall(at.to_json()) or self.known
        self._misses = {vb: self._misses.get(vb, 0) + 1 for vb in self.known.left(at)}
        # While a cluster is partitioned, executors and driver may disagree about the owner of a vbucket.
        pauses = {vb: min(LONGEST_HOLD_S, 0.1 * 2 ** min(misses, 10)) for vb, misses in self._misses.items()}
        self._held = {vb: now + pause for vb, pause in pauses.items() if self._misses[vb] > 1}

    def lag(self) -> dict[str, Any]:
        """How far the planned end is behind the database; shown in the query's progress as ``latestOffset``."""
        highs = self._view.highs if self._view else {}
        positions = self._end.positions if self._end else ()
        behind = {vb: highs[vb] - at.seqno for vb, at in enumerate(positions) if highs.get(vb, 0) > at.seqno}
        return {"highSeqnos": " ".join(str(highs.get(vb, 0)) for vb in range(len(positions))),
                "lagPerVbucket": {str(vb): lag for vb, lag in behind.items()}, "lag": sum(behind.values())}  # fmt: skip

    # ---------------------------------------------------------------------------------------------- the tasks

    def tasks(self, start: dict[str, Any], end: dict[str, Any]) -> list[Task]:
        """The tasks of a batch, a new one or one that is replayed after a crash."""
        goal = Offset.from_json(end)
        if goal.anchor or start == end:
            self._ran = goal
            return []
        at = Offset.from_json(start)
        view = self._view or self._look(at)
        todo = ranges(at, goal, view, self.known, self._want(goal))
        # Executors read from here on, so what the cluster said before no longer counts.
        self._view, self.known, self._ran = None, Known(), goal
        self._full = self._most is not None and sum(one.backlog for one in todo) >= self._most
        return self._pack(todo, follow=False)

    def batch_tasks(self) -> list[Task]:
        """The tasks of a batch query: from its start to where every vbucket is now, or to ``endingOffsets``."""
        start = self._resolve(self.options.starting)
        view = look(start, self.cluster.highs, self.cluster.logs, everything=True)
        ends = self._batch_ends(view)
        if max(self.options.vbuckets, default=0) >= start.vbuckets:
            raise ConfigError(f"vbuckets={max(self.options.vbuckets)}: the bucket has 0 to {start.vbuckets - 1}")
        filter = self._want().filter.wire()
        todo = [
            Range(vb, claimable(vb, at, view, self.known), ends[vb], view.logs[vb].uuid, filter=filter)
            for vb, at in enumerate(start.positions)
            if ends.get(vb, 0) > at.seqno and (not self.options.vbuckets or vb in self.options.vbuckets)
        ]
        try:
            return self._pack(todo, follow=True)
        finally:
            self.close()

    def _batch_ends(self, view: View) -> dict[int, int]:
        if self.options.ending_offsets == "latest":
            return dict(view.highs)
        wanted = self._resolve(self.options.ending_offsets)
        return {vb: min(at.seqno, view.highs.get(vb, 0)) for vb, at in enumerate(wanted.positions)}

    def _pack(self, todo: list[Range], *, follow: bool) -> list[Task]:
        topology = self.cluster.topology()
        owners = {one.vbucket: topology.active(one.vbucket) for one in todo}
        groups = pack(todo, owners, self.options.task_limit)
        channels = [None] * len(groups) if follow else self._reports().open_plan(len(groups))
        return [Task(tuple(group), channel, follow) for group, channel in zip(groups, channels, strict=True)]

    def _want(self, at: Offset | None = None) -> Wanted:
        """What to read. An unknown name is an error at the start; later it means that the collection was dropped."""
        if self._wanted is None:
            needed = self._filtered or (at is not None and at.filters not in ((), (EVERYTHING,)))
            if needed:
                self._wanted = wanted_of(self.options, self.cluster.manifest(), strict=not self._resolved)
            else:
                self._wanted = Wanted()
            self._resolved = True
        return self._wanted

    def _reports(self) -> ReportServer:
        if self._report_server is None:
            seed = self.options.connect_options().seeds[0]
            self._report_server = ReportServer(own_address(seed.host, seed.port))
        return self._report_server


def _position(wanted: Any, high: int, log: FailoverLog) -> Position:
    """A position that a user named: ``earliest``, ``latest``, a seqno, or a seqno with its branch."""
    if wanted == "earliest":
        return Position()
    if wanted == "latest":
        return Position.consistent_at(log.uuid, high)
    found = wanted if isinstance(wanted, Mapping) else {"seqno": wanted}
    try:
        seqno, vbuuid = int(found["seqno"]), found.get("vbuuid", log.uuid)
        return Position.consistent_at(int(vbuuid, 16) if isinstance(vbuuid, str) else int(vbuuid), seqno).checked()
    except (KeyError, TypeError, ValueError) as error:
        example = '17, "earliest", "latest" or {"seqno": 17, "vbuuid": "a1b2"}'
        raise ConfigError(f"{wanted!r} is not a position in a vbucket; write {example}") from error


def wanted_of(options: ReadOptions, manifest: Mapping[str, Any], *, strict: bool) -> Wanted:
    """What the options name, by the ids in the manifest; with ``strict``, an unknown name is an error."""
    names = Names.of_manifest(manifest)
    scopes = {name: number for number, name in names.scopes.items()}
    scope_of = {number: scopes[scope] for number, (scope, _) in names.collections.items()}
    if options.collections:
        return Wanted(Filter(collections=_collections(options, names, strict)), scope_of)
    if not options.scope:
        return Wanted(EVERYTHING, scope_of)
    if options.scope not in scopes:
        if strict:
            raise ConfigError(f"no scope {options.scope}; there are {', '.join(sorted(scopes))}")
        return Wanted(Filter(collections=frozenset()), scope_of)
    return Wanted(Filter(scope=scopes[options.scope]), scope_of)


def _collections(options: ReadOptions, names: Names, strict: bool) -> frozenset[int]:
    wanted = {qualified(name, options.scope or "_default") for name in options.collections}
    if strict and (unknown := wanted - set(names.collections.values())):
        raise ConfigError(f"no collection {_listed(unknown)}; there are {_listed(names.collections.values())}")
    return frozenset(names.ids_of(wanted))


def _listed(paths: Iterable[tuple[str, str]]) -> str:
    return ", ".join(sorted(".".join(path) for path in paths))


def qualified(name: str, scope: str) -> tuple[str, str]:
    """Scope and collection of a name that may lack its scope.

    >>> qualified("shop.orders", "_default"), qualified("orders", "shop")
    (('shop', 'orders'), ('shop', 'orders'))
    """
    first, dot, second = name.partition(".")
    return (first, second) if dot else (scope, first)
