"""The driver's side of a batch: commit the log, then bring tail and current forward, collection by collection.

Order is everything: the log commits first, then new rows of the tail, then ``current``, then the tail gives up what
``current`` has, with the mark of what is applied. A crash between any two leaves work that the replay of the batch
finds and finishes; no step does harm when repeated, and a reader in between sees every change once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upriver.errors import ConfigError
from upriver.records.schema import Event
from upriver.spark.tables.columns import Shape, column_field, evolve, imposed, observe, row_schema, shape_of
from upriver.spark.tables.foreign import adopt
from upriver.spark.tables.forward import Outcome, Work, run_inline
from upriver.spark.tables.lake import APPLIED, REPAIRS, TRIMMED, Lake
from upriver.spark.tables.log import LOG, Mark, Written, read_changes, read_marks, write_log, write_marks
from upriver.spark.tables.news import News
from upriver.spark.tables.pieces import Piece, discard
from upriver.spark.tables.policy import Policy, covered, frontier, hold, ranges_of, worth_merging
from upriver.spark.tables.voiding import catch_up, void

logger = logging.getLogger("upriver.sync")

Runner = Callable[[Sequence[Work], pa.Table | None], list[Outcome]]
Reread = Callable[[Sequence[int]], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class TableOptions:
    """How tables are kept."""

    policy: Policy = field(default_factory=Policy)
    keep_deleted: bool = False
    max_columns: int = 200
    shapes: dict[str, Shape] = field(default_factory=dict)  # given by the user, by table name
    vbuckets: int = 1024


@dataclass
class Step:
    """What one batch did to one collection."""

    name: str
    rows: int = 0
    merged_ranges: int = 0
    bytes_written: int = 0
    repaired: int = 0
    held: bool = False
    rows_current: int = 0
    rows_tail: int = 0


class CollectionTables:
    """The tables of one collection, kept open between batches."""

    def __init__(self, lake: Lake, name: str, options: TableOptions) -> None:
        self.lake, self.name, self.options = lake, name, options
        self.changes, self.tail, self.current = (lake.table(kind, name) for kind in ("changes", "tail", "current"))

    def commit_log(self, app_id: str, batch: int, pieces: Sequence[Piece], marks: Sequence[Mark] = ()) -> bool:
        """Append a batch to the log, and mark what its rollbacks took back; False when it was there before."""
        self.changes.create(LOG, f"every change of {self.name}")
        adopt(self.changes, self.applied)
        seen = self.changes.version(app_id)
        rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK] if seen is None or seen < batch else []
        old = self.changes.pieces()
        again = void(self.changes.uri, [*old, *pieces], rollbacks)
        removes = [piece for piece in old if piece.path in again]
        adds = [again.get(piece.path, piece) for piece in [*pieces, *removes]]
        done = self.changes.commit(app_id, batch, adds, removes)
        discard(self.changes.uri, [piece.path for piece in pieces if piece.path in again])
        return done

    @property
    def applied(self) -> int:
        """The last batch that tail and current have, -1 for none."""
        version = self.tail.version(APPLIED)
        return -1 if version is None else version

    @property
    def shape(self) -> Shape:
        return shape_of(self.current.schema()) if self.current.exists else {}

    def advance(self, batch: int, lag: int, run: Runner, reread: Reread | None, *, force: bool = False) -> Step:
        """Bring tail and current to ``batch``; ``force`` merges everything."""
        step = Step(self.name)
        applied, log = self.applied, self.changes.pieces()
        new = [piece for piece in log if piece.last > applied]
        unapplied = sum(piece.rows for piece in new if not piece.marks)
        in_tables = sum(piece.rows for piece in [*self.current.pieces(), *self.tail.pieces()])
        if not new and not force:
            return step
        if not force and hold(unapplied, in_tables, lag, self.options.policy):
            step.held = True
            return step
        news = News(self.changes.uri, new, self.options.vbuckets)
        self._advance(max(batch, applied), applied, log, news, unapplied + lag, run, reread, step, force)
        return step

    def _advance(
        self, batch: int, applied: int, log: list[Piece], new: News, expected: int, run: Runner,
        reread: Reread | None, step: Step, force: bool,
    ) -> None:
        shape, widened = self._evolve(new)
        marks = read_marks(self.changes.uri, log)
        works = self._plan(batch, applied, log, new, marks, shape, expected, force or widened, widened)
        outcomes = run(works, new.window)
        unknown = sorted({vbucket for outcome in outcomes for vbucket in outcome.unknown})
        if unknown:
            self._reread(unknown, batch, marks, reread)
            self._advance(batch, applied, self.changes.pieces(), new, expected, run, reread, step, force)
            return
        self._commit(batch, works, outcomes, shape, widened)
        self._account(step, works, outcomes)

    def _evolve(self, new: News) -> tuple[Shape, bool]:
        """The shape after a look at new documents; the tables get its columns, and widening is reported."""
        given = self.options.shapes.get(self.name)
        if given is not None:
            shape = imposed(self.shape, given)
        else:
            documents = list(new.sample())
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

    def _plan(
        self, batch: int, applied: int, log: list[Piece], new: News, marks: list[Mark], shape: Shape,
        expected: int, force: bool, rewrite: bool,
    ) -> list[Work]:
        policy, current, tail = self.options.policy, self.current.pieces(), self.tail.pieces()
        foreign = any(piece.foreign for piece in [*current, *tail])
        ours = [] if foreign else current
        expected = sum(piece.rows for piece in current) if foreign else expected
        ranges = ranges_of(ours, self.options.vbuckets, expected, policy)
        fresh = new.per_range(ranges)
        chosen = worth_merging(ranges, tail, fresh, policy)
        if force or foreign:
            chosen = {(part.lo, part.hi) for part in ranges}
        fresh_marks = any(mark.batch > applied for mark in marks)
        base = Work(
            self.lake.root, self.name, 0, self.options.vbuckets - 1, batch, applied, shape,
            tuple(log if fresh_marks else new.pieces), tuple(tail), tuple(current), tuple(marks) if fresh_marks else (),
            rewrite=rewrite or foreign or force, keep_deleted=self.options.keep_deleted,
            trimmed=self.changes.version(TRIMMED) is not None,
            target_rows=policy.target_rows, max_files=policy.max_files,
        )
        works = [
            replace(base, lo=lo, hi=hi, merge=True, current=tuple(p for p in current if p.overlaps(lo, hi)))
            for lo, hi in sorted(chosen)
        ]
        if len(chosen) == len(ranges):
            return works
        if sum(fresh) <= policy.inline_rows:
            return [*works, replace(base, skip=tuple(sorted(chosen)))]
        rest = [part for part in ranges if (part.lo, part.hi) not in chosen]
        return works + [replace(base, lo=part.lo, hi=part.hi) for part in rest]

    def _commit(
        self, batch: int, works: Sequence[Work], outcomes: Sequence[Outcome], shape: Shape, widened: bool
    ) -> None:
        # Tail files go a batch later than they could, for readers that saw ``current`` a moment too early.
        done = self._covered()
        adds = [piece for outcome in outcomes for piece in outcome.current]
        replaced = list({piece.path: piece for outcome in outcomes for piece in outcome.replaced}.values())
        app = f"{APPLIED}.current"
        if widened:
            self.current.replace(app, batch, adds, row_schema(shape))
            self.tail.replace(APPLIED, batch, [], row_schema(shape))
            return
        fresh = [piece for outcome in outcomes for piece in outcome.tail]
        if adds or replaced:
            if fresh:  # before ``current`` loses a row, the tail must say that it is gone
                self._force_commit(f"{APPLIED}.tail", batch, fresh, [], table="tail")
            self._force_commit(app, batch, adds, replaced)
            fresh = []
        self._force_commit(APPLIED, batch, fresh, done, table="tail")

    def _covered(self) -> list[Piece]:
        merged = self.merged()
        return [piece for piece in self.tail.pieces() if covered(piece, merged) or piece.foreign]

    def merged(self) -> npt.NDArray[np.int64]:
        """The last batch that each vbucket of ``current`` has."""
        ranges = ranges_of(self.current.pieces(), self.options.vbuckets, 0, self.options.policy)
        return frontier(ranges, self.options.vbuckets)

    def _force_commit(
        self, app: str, batch: int, adds: list[Piece], removes: list[Piece], table: str = "current"
    ) -> None:
        """Commit even when this batch has committed before: what is in there was decided by looking at the table."""
        target = self.current if table == "current" else self.tail
        seen = target.version(app)
        if seen is not None and seen >= batch:
            app = f"{app}.again"
            seen = target.version(app)
            batch = 0 if seen is None else seen + 1
        target.commit(app, batch, adds, removes)

    def _reread(self, vbuckets: Sequence[int], batch: int, marks: Sequence[Mark], reread: Reread | None) -> None:
        """The log no longer reaches back: read these vbuckets again, and say so in the log."""
        if reread is None:
            raise ConfigError(
                f"{self.name}: vbuckets {list(vbuckets)} rolled back beyond the retention of the log; "
                "run the sync again with access to the bucket"
            )
        logger.warning("%s: the log does not reach back, reading vbuckets %s again", self.name, list(vbuckets))
        epochs = {
            v: max(m.epoch for m in marks if m.vbucket == v and m.event == Event.ROLLBACK) for v in vbuckets
        }
        written = write_log((_restamp(rows, epochs) for rows in reread(vbuckets)), self.lake.root, batch)
        voids = [Mark(Event.ROLLBACK.value, v, 0, epoch, batch) for v, epoch in epochs.items()]
        pieces = [*written.pieces.get(self.name, []), write_marks(self.lake.root, self.name, voids, batch)]
        for other, extra in written.pieces.items():
            if other != self.name:
                self.lake.table("changes", other).drop_uncommitted(extra)
        self.commit_log(REPAIRS, batch, pieces, voids)

    def _account(self, step: Step, works: Sequence[Work], outcomes: Sequence[Outcome]) -> None:
        step.rows = sum(outcome.rows for outcome in outcomes)
        step.repaired = sum(outcome.repaired for outcome in outcomes)
        step.merged_ranges = sum(work.merge for work in works)
        step.bytes_written = sum(p.size for outcome in outcomes for p in [*outcome.tail, *outcome.current])
        step.rows_current = sum(piece.rows for piece in self.current.pieces())
        step.rows_tail = sum(piece.rows for piece in self.tail.pieces())


def _restamp(rows: pa.RecordBatch, epochs: dict[int, int]) -> pa.RecordBatch:
    """Rows read again belong to the newest epoch of their vbucket."""
    stamped = pa.array([epochs[vbucket] for vbucket in rows.column("vbucket").to_pylist()], pa.int32())
    return rows.set_column(rows.schema.get_field_index("epoch"), rows.schema.field("epoch"), stamped)


class Tables:
    """All collections of a lake; the whole of a batch, after its rows were written by ``write_log``."""

    def __init__(
        self, lake: Lake, app_id: str, options: TableOptions, *, run: Runner = run_inline,
        reread: Reread | None = None,
    ) -> None:
        self.lake, self.app_id, self.options = lake, app_id, options
        self.run, self.reread = run, reread
        self._open: dict[str, CollectionTables] = {}

    def collection(self, name: str) -> CollectionTables:
        if name not in self._open:
            self._open[name] = CollectionTables(self.lake, name, self.options)
        return self._open[name]

    def names(self) -> list[str]:
        return sorted({*self.lake.names(), *self._open})

    def apply(self, batch: int, written: Written, lag: int = 0) -> list[Step]:
        """Commit a batch to every table. The same batch again changes nothing."""
        for name in sorted({*self.names(), *written.pieces}):
            pieces, marks = list(written.pieces.get(name, [])), self._marks_for(name, written)
            if marks:
                pieces.append(write_marks(self.lake.root, name, marks, batch))
            if pieces and not self.collection(name).commit_log(self.app_id, batch, pieces, marks):
                logger.info("%s: batch %d was committed before", name, batch)
        self._note_epochs(written.marks)
        return [self.collection(name).advance(batch, lag, self.run, self.reread) for name in self.names()]

    def prepare(self) -> None:
        """Take over what an earlier run left: a log without marks of an earlier version, epochs from before a crash."""
        marks: list[Mark] = []
        for name in self.names():
            log = self.collection(name).changes
            if log.exists:
                adopt(log, self.collection(name).applied)
                known = read_marks(log.uri, log.pieces())
                catch_up(log, known)
                marks += known
        self._note_epochs(marks)

    def _note_epochs(self, marks: Iterable[Mark]) -> None:
        rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK]
        if not rollbacks:
            return
        known = self.lake.epochs()
        for mark in rollbacks:
            known[mark.vbucket] = max(mark.epoch, known.get(mark.vbucket, 0))
        self.lake.write_epochs(known)

    def last_batch(self) -> int:
        """The newest batch in any log, -1 for none."""
        versions = [self.collection(name).changes.version(self.app_id) for name in self.names()]
        return max((version for version in versions if version is not None), default=-1)

    def _marks_for(self, name: str, written: Written) -> list[Mark]:
        """Rollbacks concern every collection, collection events their own."""
        found = [mark for mark in written.marks if mark.event == Event.ROLLBACK]
        for mark in written.marks:
            if mark.event == Event.ROLLBACK or mark.collection_id is None:
                continue
            if f"{mark.scope}.{mark.collection}" == name or self._owns(name, mark.collection_id):
                found.append(mark)
        return found

    def _owns(self, name: str, collection_id: int) -> bool:
        """Does this table hold documents of a collection with that id? Asked only when one was dropped."""
        return collection_id in self.collection_ids(name)

    def collection_ids(self, name: str) -> set[int]:
        """The ids that the collection of this name has had, as far as its newest log files say."""
        log = self.collection(name).changes
        pieces = [piece for piece in log.pieces() if not piece.marks]
        ids = read_changes(log.uri, pieces[-64:], ["collection_id"]).column("collection_id")
        return set(ids.unique().to_pylist())
