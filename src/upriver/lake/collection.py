"""The tables of one collection: how a batch reaches the change log, the tail and ``current``.

The order of commits makes a crash harmless: first the log, then new rows of the tail, then ``current``, and last the
removal of tail files that ``current`` has superseded, with the number of the batch that is now applied. A crash between
two commits leaves work that the replayed batch finds and finishes. Repeating a step changes nothing, and a reader sees
every change once at any moment.

Other tools (``OPTIMIZE``) may rewrite the files of a table at any moment. Each step begins with the newest version of
the tables, and starts again when a file that it wants to replace is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from upriver.errors import UpriverError
from upriver.lake.apply.merge import MergeResult, MergeTask, run_inline
from upriver.lake.apply.plan import CollectionFiles, MergePlanner, Unapplied
from upriver.lake.apply.policy import TableOptions, hold
from upriver.lake.apply.reread import Ahead, Reread, note_ahead, read_again
from upriver.lake.apply.rollbacks import void
from upriver.lake.change_log import LOG, LogMark, adopt_foreign, read_marks
from upriver.lake.columns import column_field, evolve, imposed, observe, row_schema, shape_of
from upriver.lake.delta import TRIES, CommitConflict, Table
from upriver.lake.files import DataFile, discard, now_ms, remember_sizes
from upriver.lake.layout import APPLIED, REPAIRS, TRIMMED, Lake
from upriver.lake.options import TableShape
from upriver.records.schema import Event

logger = logging.getLogger("upriver.sync")
T = TypeVar("T")
P = ParamSpec("P")
UNKNOWN_FLOOR = 2**63 - 1
AHEAD = "upriver.ahead"
RunMerges = Callable[[Sequence[MergeTask], pa.Table | None], list[MergeResult]]


@dataclass
class AdvanceResult:
    """What one advance did to one collection; the journal keeps it."""

    name: str
    rows: int = 0
    merged_ranges: int = 0
    bytes_written: int = 0
    repaired: int = 0
    held: bool = False
    rows_current: int = 0
    rows_tail: int = 0


def _retried_on_conflict(
    step: Callable[Concatenate[CollectionTables, P], T],
) -> Callable[Concatenate[CollectionTables, P], T]:
    """Start a step again while other writers change its tables."""

    @wraps(step)
    def attempts(self: CollectionTables, /, *args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(TRIES):
            versions = self.versions()
            try:
                return step(self, *args, **kwargs)
            except CommitConflict as conflict:
                logger.info("%s: another writer changed %s, starting again", self.name, conflict)
            except FileNotFoundError:  # a file that was replaced, and vacuumed at once
                self.refresh()
                if self.versions() == versions:
                    raise
        raise UpriverError(f"{self.name}: another writer changes the tables all the time; stop it, then sync again")

    return attempts


class CollectionTables:
    """The tables of one collection, kept open between batches.

    ``run`` does merge tasks, here or on executors. ``reread`` reads vbuckets again that the log cannot repair.
    """

    def __init__(
        self, lake: Lake, name: str, options: TableOptions, *, run: RunMerges = run_inline, reread: Reread | None = None
    ) -> None:
        self.lake, self.name, self.options, self.run, self.reread = lake, name, options, run, reread
        self.changes, self.tail, self.current = (lake.table(kind, name) for kind in ("changes", "tail", "current"))
        self._planner = MergePlanner(lake.root, name, self.tail, self.current, options)

    def refresh(self) -> None:
        """See what other writers have committed."""
        for table in (self.changes, self.tail, self.current):
            table.refresh()

    def versions(self) -> list[int]:
        return [table.delta.version() for table in (self.changes, self.tail, self.current) if table.exists]

    @property
    def applied(self) -> int:
        """The last batch that tail and current have, -1 for none."""
        version = self.tail.version(APPLIED)
        return -1 if version is None else version

    @property
    def shape(self) -> TableShape:
        return shape_of(self.current.schema()) if self.current.exists else {}

    # ---------------------------------------------------------------------------------------------- the change log

    @_retried_on_conflict
    def commit_log(self, app_id: str, batch: int, files: Sequence[DataFile], marks: Sequence[LogMark] = ()) -> bool:
        """Append a batch to the log, and void what its rollbacks took back; False when it was there before."""
        self.changes.create(LOG, f"every change of {self.name}")
        remember_sizes(files)
        before = self.changes.version(app_id)
        rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK] if before is None or before < batch else []
        old = self.log()
        rewritten = void(self.changes.uri, [*old, *files], rollbacks)
        removes = [file for file in old if file.path in rewritten]
        adds = [rewritten.get(file.path, file) for file in [*files, *removes]]
        with delete_on_conflict(self.changes, rewritten.values()):
            done = self.changes.commit(app_id, batch, adds, removes)
        discard(self.changes.uri, [file.path for file in files if file.path in rewritten])
        return done

    def log(self) -> list[DataFile]:
        """The files of the log as they are now, all of them ours."""
        self.changes.refresh()
        adopt_foreign(self.changes, self.applied)
        return self.changes.files()

    def floors(self) -> dict[int, int]:
        """The seqno up to which the log was trimmed, by vbucket."""
        noted = self.lake.floors(self.name)
        if noted is None and self.changes.version(TRIMMED) is not None:  # an earlier version did not note it
            return dict.fromkeys(range(self.options.vbuckets), UNKNOWN_FLOOR)
        return noted or {}

    # ---------------------------------------------------------------------------------------------- tail and current

    @_retried_on_conflict
    def advance(self, batch: int, lag: int = 0, *, force: bool = False, drain: bool = False) -> AdvanceResult:
        """Bring tail and current to ``batch``, while the bucket is about ``lag`` rows ahead.

        ``drain`` leaves nothing in the tail that ``current`` lacks; ``force`` also rewrites every file of ``current``.
        """
        result = AdvanceResult(self.name)
        if not self.changes.exists:
            return result
        found = self._files()  # as our last commit left them: a refresh costs more than most batches
        if not (found.new or force or (drain and found.tail) or self._planner.overdue(found)):
            return result
        self.refresh()
        self.log()
        found = self._files()
        new_rows = sum(file.rows for file in found.new if not file.marks)
        table_rows = sum(file.rows for file in [*found.current, *found.tail])
        late = any(now_ms() - file.made_ms > self.options.policy.staleness_s / 2 * 1000 for file in found.new)
        if not (force or drain or late) and hold(new_rows, table_rows, lag, self.options.policy):
            result.held = True
            return result
        unapplied = Unapplied(self.changes.uri, found.new, self.options.vbuckets)
        found = replace(found, marks=read_marks(self.changes.uri, found.log))
        batch = max(batch, found.applied)
        while lacking := self._merge(found, unapplied, result, batch=batch, lag=lag, force=force, drain=drain):
            self._reread_rolled_back(lacking, found.marks, batch)
            log = self.log()
            found = replace(found, log=log, marks=read_marks(self.changes.uri, log))
        return result

    def _files(self) -> CollectionFiles:
        return CollectionFiles(self.applied, self.changes.files(), self.tail.files(), self.current.files())

    def _merge(
        self,
        found: CollectionFiles,
        unapplied: Unapplied,
        result: AdvanceResult,
        *,
        batch: int,
        lag: int,
        force: bool,
        drain: bool,
    ) -> list[int]:
        """Merge and commit what is unapplied, or return vbuckets that the log cannot repair and commit nothing."""
        shape, widened = self._evolve(unapplied)
        rewrite = force or widened or found.in_doubt
        floors = self.floors() if found.new_marks else {}
        tasks = self._planner.tasks(found, unapplied, shape, floors, batch=batch, lag=lag, rewrite=rewrite, drain=drain)
        results = self.run(tasks, unapplied.table)
        lacking = sorted({vbucket for merged in results for vbucket in merged.unknown})
        if lacking:
            return lacking
        since = min((file.made_ms for file in found.new), default=0)
        tail = [replace(file, made_ms=since) for merged in results for file in merged.tail]
        current = [file for merged in results for file in merged.current]
        replaced = list({file.path: file for merged in results for file in merged.replaced}.values())
        remember_sizes([*tail, *current])
        with delete_on_conflict(self.tail, tail), delete_on_conflict(self.current, current):
            if widened:
                self.current.replace(f"{APPLIED}.current", batch, current, row_schema(shape), found.current)
                self.tail.replace(APPLIED, batch, [], row_schema(shape), found.tail)
            else:
                self._commit(batch, tail, current, replaced, self._planner.superseded(found))
        result.rows = sum(merged.rows for merged in results)
        result.repaired = sum(merged.repaired for merged in results)
        result.merged_ranges = sum(task.merge for task in tasks)
        result.bytes_written = sum(file.size for file in [*tail, *current])
        result.rows_current = sum(file.rows for file in self.current.files())
        result.rows_tail = sum(file.rows for file in self.tail.files())
        return []

    def _evolve(self, unapplied: Unapplied) -> tuple[TableShape, bool]:
        """The shape that the new documents need, after adding its columns; and whether a column must widen."""
        given = self.options.shapes.get(self.name)
        if given is not None:
            shape = imposed(self.shape, given)
        else:
            documents = list(unapplied.sample())
            shape = evolve(self.shape, observe(documents), len(documents), self.options.max_columns)
        widened = False
        for table, purpose in ((self.tail, "what current lacks of"), (self.current, "latest documents of")):
            table.create(row_schema(shape), f"{purpose} {self.name}")
            have = shape_of(table.schema())
            table.add_columns([column_field(name, kind) for name, kind in shape.items() if name not in have])
            widened |= any(name in have and have[name] != kind for name, kind in shape.items())
        if widened:
            logger.info("%s: a column widens to double, so its table is written again", self.name)
        return shape, widened

    def _commit(
        self,
        batch: int,
        tail: list[DataFile],
        current: list[DataFile],
        replaced: list[DataFile],
        superseded: list[DataFile],
    ) -> None:
        # ``superseded`` was decided before this merge: tail files go a batch late, for readers that opened ``current``
        # a moment too early.
        if current or replaced:
            if tail:  # before ``current`` loses a row, the tail must have its deletion
                _commit_anyway(self.tail, f"{APPLIED}.tail", batch, tail, [])
            _commit_anyway(self.current, f"{APPLIED}.current", batch, current, replaced)
            tail = []
        _commit_anyway(self.tail, APPLIED, batch, tail, superseded)

    # ---------------------------------------------------------------------------------------------- reading again

    def _reread_rolled_back(self, vbuckets: Sequence[int], marks: Sequence[LogMark], batch: int) -> None:
        """Read vbuckets again that the log does not reach back far enough for, and commit them to the log."""
        logger.warning("%s: the log does not reach back, reading vbuckets %s again", self.name, list(vbuckets))
        rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK]
        epochs = {vb: max(mark.epoch for mark in rollbacks if mark.vbucket == vb) for vb in vbuckets}
        found = read_again(self.lake, self.name, epochs, self.reread, batch)
        self.lake.write_floors(self.name, {**self.floors(), **found.floors()})
        note_ahead(self.lake, self.name, found.highs)
        self.commit_log(REPAIRS, batch, found.files, found.rollbacks)

    def reread_lost(self, vbuckets: Sequence[int], batch: int) -> None:
        """Read vbuckets once more, under new epochs, after a failover lost what an earlier reread had read."""
        logger.warning("%s: a failover lost what was read again of vbuckets %s", self.name, list(vbuckets))
        known = self.lake.epochs()
        epochs = {vbucket: known.get(vbucket, 0) + 1 for vbucket in vbuckets}
        self.lake.write_epochs({**known, **epochs})
        found = read_again(self.lake, self.name, epochs, self.reread, batch)
        self.lake.write_floors(self.name, {**self.floors(), **found.floors()})
        self.commit_log(AHEAD, self.changes.next_version(AHEAD), found.files, found.rollbacks)
        note_ahead(self.lake, self.name, {vbucket: found.highs.get(vbucket, Ahead(0, 0)) for vbucket in vbuckets})


def _commit_anyway(table: Table, app: str, batch: int, adds: list[DataFile], removes: list[DataFile]) -> None:
    """Commit even if this batch was committed before: the files were chosen by what the table holds now."""
    before = table.version(app)
    if before is not None and before >= batch:
        app = f"{app}.again"
        batch = table.next_version(app)
    table.commit(app, batch, adds, removes)


@contextmanager
def delete_on_conflict(table: Table, made: Iterable[DataFile]) -> Iterator[None]:
    """Delete the files that a step wrote when it has to start again."""
    try:
        yield
    except CommitConflict:
        table.drop_uncommitted(made)
        raise
