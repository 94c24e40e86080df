"""The tables of one collection: a batch goes into the log, then tail and ``current`` are brought forward from it.

Order is everything: the log commits first, then new rows of the tail, then ``current``, then the tail gives up what
``current`` has, with the mark of what is applied. A crash between any two leaves work that the replay of the batch
finds and finishes; no step does harm when repeated, and a reader in between sees every change once.

Others may rewrite the files of a table at any moment (``OPTIMIZE``). Every step looks at the tables as they are, and is
done again when what it wanted to replace is no longer there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upriver.errors import ConfigError, UpriverError
from upriver.lake.apply import ahead
from upriver.lake.apply.ahead import Ahead, Highs
from upriver.lake.apply.foreign import adopt
from upriver.lake.apply.merge import Outcome, Work
from upriver.lake.apply.policy import (
    Policy,
    Range,
    frontier,
    hold,
    in_doubt,
    missing,
    overdue,
    ranges_of,
    spanned,
    superseded,
    worth_merging,
)
from upriver.lake.apply.unapplied import News
from upriver.lake.apply.voiding import void
from upriver.lake.change_log import LOG, WIPES, Mark, read_marks, write_log, write_marks
from upriver.lake.columns import META, Shape, column_field, evolve, imposed, observe, row_schema, shape_of
from upriver.lake.delta import TRIES, Moved, Table
from upriver.lake.files import Piece, discard, now_ms, read_pieces, remember, uncompressed
from upriver.lake.layout import APPLIED, REPAIRS, TRIMMED, Lake
from upriver.records.schema import Event

logger = logging.getLogger("upriver.sync")
T = TypeVar("T")
UNKNOWN_FLOOR = 2**63 - 1
AHEAD = "upriver.ahead"
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


@dataclass(frozen=True)
class Goal:
    """How far an advance goes, and with whom: ``settle`` leaves nothing waiting, ``force`` also writes all files."""

    batch: int
    lag: int
    run: Runner
    reread: Reread | None
    force: bool = False
    settle: bool = False


@dataclass(frozen=True)
class Seen:
    """The tables as a step found them."""

    applied: int
    log: list[Piece]
    tail: list[Piece]
    current: list[Piece]
    marks: list[Mark] = field(default_factory=list)

    @property
    def new(self) -> list[Piece]:
        return [piece for piece in self.log if piece.last > self.applied]

    @property
    def doubt(self) -> bool:
        return in_doubt(self.current) or any(piece.foreign for piece in self.tail)


class CollectionTables:
    """The tables of one collection, kept open between batches."""

    def __init__(self, lake: Lake, name: str, options: TableOptions) -> None:
        self.lake, self.name, self.options = lake, name, options
        self.changes, self.tail, self.current = (lake.table(kind, name) for kind in ("changes", "tail", "current"))
        self._vbuckets: dict[str, npt.NDArray[np.int64]] = {}  # of tail files that were looked into

    def commit_log(self, app_id: str, batch: int, pieces: Sequence[Piece], marks: Sequence[Mark] = ()) -> bool:
        """Append a batch to the log, and mark what its rollbacks took back; False when it was there before."""
        self.changes.create(LOG, f"every change of {self.name}")
        remember(pieces)
        return self._until_it_stands(partial(self._commit_log, app_id, batch, pieces, marks))

    def _commit_log(self, app_id: str, batch: int, pieces: Sequence[Piece], marks: Sequence[Mark]) -> bool:
        seen = self.changes.version(app_id)
        rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK] if seen is None or seen < batch else []
        old = self.log()
        again = void(self.changes.uri, [*old, *pieces], rollbacks)
        removes = [piece for piece in old if piece.path in again]
        adds = [again.get(piece.path, piece) for piece in [*pieces, *removes]]
        with discarded_when_moved(self.changes, again.values()):
            done = self.changes.commit(app_id, batch, adds, removes)
        discard(self.changes.uri, [piece.path for piece in pieces if piece.path in again])
        return done

    def log(self) -> list[Piece]:
        """The files of the log as they are now, all of them ours."""
        self.changes.refresh()
        adopt(self.changes, self.applied)
        return self.changes.pieces()

    def floors(self) -> dict[int, int]:
        """Up to which seqno the log was forgotten, by vbucket."""
        noted = self.lake.floors(self.name)
        if noted is None and self.changes.version(TRIMMED) is not None:  # by an earlier version, who knows what
            return dict.fromkeys(range(self.options.vbuckets), UNKNOWN_FLOOR)
        return noted or {}

    def _until_it_stands(self, step: Callable[[], T]) -> T:
        """Do a step again for as long as others change its tables under it."""
        for _ in range(TRIES):
            versions = self._versions()
            try:
                return step()
            except Moved as moved:
                logger.info("%s: %s was changed by another writer, looking again", self.name, moved)
            except FileNotFoundError:  # a file that was replaced, and vacuumed at once
                self.refresh()
                if self._versions() == versions:
                    raise
        raise UpriverError(f"{self.name}: another writer changes the tables all the time; stop it, then sync again")

    def refresh(self) -> None:
        """See what others did to the tables."""
        for table in (self.changes, self.tail, self.current):
            table.refresh()

    def _versions(self) -> list[int]:
        return [table.delta.version() for table in (self.changes, self.tail, self.current) if table.exists]

    @property
    def applied(self) -> int:
        """The last batch that tail and current have, -1 for none."""
        version = self.tail.version(APPLIED)
        return -1 if version is None else version

    @property
    def shape(self) -> Shape:
        return shape_of(self.current.schema()) if self.current.exists else {}

    def advance(
        self, batch: int, lag: int, run: Runner, reread: Reread | None, *, force: bool = False, settle: bool = False
    ) -> Step:
        """Bring tail and current to ``batch``; ``settle`` leaves nothing in the tail that ``current`` does not have.

        ``force`` writes every file of ``current`` again.
        """
        if not self.changes.exists:
            return Step(self.name)
        return self._until_it_stands(partial(self._look, Goal(batch, lag, run, reread, force, settle)))

    def _look(self, goal: Goal) -> Step:
        """Decide whether there is something to do; what we committed ourselves is known without another look."""
        step, seen = Step(self.name), self._seen()
        if not (seen.new or goal.force or (goal.settle and seen.tail) or self._overdue(seen)):
            return step
        self.refresh()
        self.log()
        seen = self._seen()
        unapplied = sum(piece.rows for piece in seen.new if not piece.marks)
        in_tables = sum(piece.rows for piece in [*seen.current, *seen.tail])
        late = any(self._age_s(piece) > self.options.policy.staleness_s / 2 for piece in seen.new)
        if not (goal.force or goal.settle or late) and hold(unapplied, in_tables, goal.lag, self.options.policy):
            step.held = True
            return step
        news = News(self.changes.uri, seen.new, self.options.vbuckets)
        seen = replace(seen, marks=read_marks(self.changes.uri, seen.log))
        self._step(replace(goal, batch=max(goal.batch, seen.applied)), seen, news, unapplied + goal.lag, step)
        return step

    def _seen(self) -> Seen:
        return Seen(self.applied, self.changes.pieces(), self.tail.pieces(), self.current.pieces())

    def _age_s(self, piece: Piece) -> float:
        return (now_ms() - piece.made_ms) / 1000

    def _step(self, goal: Goal, seen: Seen, news: News, expected: int, step: Step) -> None:
        shape, widened = self._evolve(news)
        works = self._plan(goal, seen, news, shape, expected, widened)
        outcomes = goal.run(works, news.window)
        unknown = sorted({vbucket for outcome in outcomes for vbucket in outcome.unknown})
        if unknown:
            self._reread(unknown, goal, seen.marks)
            log = self.log()
            seen = replace(seen, log=log, marks=read_marks(self.changes.uri, log))
            self._step(goal, seen, news, expected, step)
            return
        since = min((piece.made_ms for piece in seen.new), default=0)
        tail = [replace(piece, made_ms=since) for outcome in outcomes for piece in outcome.tail]
        current = [piece for outcome in outcomes for piece in outcome.current]
        replaced = list({piece.path: piece for outcome in outcomes for piece in outcome.replaced}.values())
        remember([*tail, *current])
        with discarded_when_moved(self.tail, tail), discarded_when_moved(self.current, current):
            if widened:
                self._replace_all(goal.batch, seen, current, shape)
            else:
                self._commit(goal.batch, seen, tail, current, replaced)
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

    def _plan(self, goal: Goal, seen: Seen, new: News, shape: Shape, expected: int, widened: bool) -> list[Work]:
        policy, rewrite = self.options.policy, goal.force or widened or seen.doubt
        if seen.doubt:  # no file says where it begins and ends: cut the table anew
            rows, size = sum(piece.rows for piece in seen.current), uncompressed(self.current.uri, seen.current)
            ranges = ranges_of([], self.options.vbuckets, rows, policy, size)
        else:
            size = new.bytes * expected // max(new.rows, 1)
            ranges = ranges_of(seen.current, self.options.vbuckets, expected, policy, size)
        fresh = new.per_range(ranges)
        every = {(part.lo, part.hi) for part in ranges}
        chosen = every if rewrite else self._chosen(goal, seen, ranges, fresh)
        fresh_marks = any(mark.batch > seen.applied for mark in seen.marks)
        base = Work(
            self.lake.root,
            self.name,
            0,
            self.options.vbuckets - 1,
            goal.batch,
            seen.applied,
            shape,
            tuple(seen.log if fresh_marks else new.pieces),
            tuple(seen.tail),
            tuple(seen.current),
            tuple(seen.marks) if fresh_marks else (),
            rewrite=rewrite,
            doubt=seen.doubt,
            keep_deleted=self.options.keep_deleted,
            floors=self.floors() if fresh_marks else {},
            target_rows=policy.target_rows,
            target_bytes=policy.target_bytes,
            max_files=policy.max_files,
        )
        works = [
            replace(base, lo=lo, hi=hi, merge=True, current=tuple(p for p in seen.current if p.overlaps(lo, hi)))
            for lo, hi in sorted(chosen)
        ]
        if len(chosen) == len(ranges):
            return works
        if sum(fresh) <= policy.inline_rows and new.bytes <= policy.inline_bytes:
            return [*works, replace(base, skip=tuple(sorted(chosen)))]
        rest = [part for part in ranges if (part.lo, part.hi) not in chosen]
        return works + [replace(base, lo=part.lo, hi=part.hi) for part in rest]

    def _chosen(self, goal: Goal, seen: Seen, ranges: Sequence[Range], fresh: Sequence[int]) -> set[tuple[int, int]]:
        """The ranges to merge now: those that are worth it, and those that have to be."""
        chosen = worth_merging(ranges, seen.tail, fresh, self.options.policy) | self._overdue(seen, ranges)
        wiped = {mark.vbucket for mark in seen.marks if mark.batch > seen.applied and mark.event in WIPES}
        shaken = {mark.vbucket for mark in seen.marks if mark.batch > seen.applied and mark.event == Event.ROLLBACK}
        urgent = wiped
        if goal.settle or self.options.policy.staleness_s == 0:
            merged = frontier(seen.current, self.options.vbuckets)
            urgent = wiped | shaken | {v for p in seen.tail for v in missing(p, merged, self._present).tolist()}
            chosen |= {(part.lo, part.hi) for part, rows in zip(ranges, fresh, strict=True) if rows}
        return chosen | {(p.lo, p.hi) for p in ranges if any(p.lo <= vbucket <= p.hi for vbucket in urgent)}

    def _overdue(self, seen: Seen, ranges: Sequence[Range] | None = None) -> set[tuple[int, int]]:
        """Ranges whose changes have waited for too long; tail files that have not are not even looked into."""
        policy = self.options.policy
        old = [piece for piece in seen.tail if self._age_s(piece) >= policy.staleness_s / 2]
        if not old:
            return set()
        if ranges is None:
            ranges = ranges_of(seen.current, self.options.vbuckets, 0, policy)
        merged = frontier(seen.current, self.options.vbuckets)
        return overdue(ranges, old, merged, now_ms(), policy, self._present)

    def _present(self, piece: Piece) -> npt.NDArray[np.int64]:
        """The vbuckets that a tail file really has rows of."""
        if piece.path not in self._vbuckets:
            rows = read_pieces(self.tail.uri, [piece], pa.schema(META), ["_vbucket"])
            live = {known.path for known in self.tail.pieces()}
            self._vbuckets = {path: found for path, found in self._vbuckets.items() if path in live}
            self._vbuckets[piece.path] = np.unique(rows.column("_vbucket").to_numpy()).astype(np.int64)
        return self._vbuckets[piece.path]

    def _replace_all(self, batch: int, seen: Seen, adds: list[Piece], shape: Shape) -> None:
        self.current.replace(f"{APPLIED}.current", batch, adds, row_schema(shape), seen.current)
        self.tail.replace(APPLIED, batch, [], row_schema(shape), seen.tail)

    def _commit(self, batch: int, seen: Seen, fresh: list[Piece], adds: list[Piece], replaced: list[Piece]) -> None:
        # Tail files go a batch later than they could, for readers that saw ``current`` a moment too early.
        done = seen.tail if seen.doubt else self._superseded(seen)
        if adds or replaced:
            if fresh:  # before ``current`` loses a row, the tail must say that it is gone
                self._force_commit(f"{APPLIED}.tail", batch, fresh, [], table="tail")
            self._force_commit(f"{APPLIED}.current", batch, adds, replaced)
            fresh = []
        self._force_commit(APPLIED, batch, fresh, done, table="tail")

    def _superseded(self, seen: Seen) -> list[Piece]:
        def known(piece: Piece) -> npt.NDArray[np.int64]:
            return self._vbuckets[piece.path] if piece.path in self._vbuckets else spanned(piece)

        return superseded(seen.tail, frontier(seen.current, self.options.vbuckets), known)

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

    def _reread(self, vbuckets: Sequence[int], goal: Goal, marks: Sequence[Mark]) -> None:
        """The log no longer reaches back: read these vbuckets again, and say so in the log."""
        logger.warning("%s: the log does not reach back, reading vbuckets %s again", self.name, list(vbuckets))
        epochs = {v: max(m.epoch for m in marks if m.vbucket == v and m.event == Event.ROLLBACK) for v in vbuckets}
        pieces, voids, found = self._read(epochs, goal.reread, goal.batch)
        ahead.note(self.lake, self.name, found)
        self.commit_log(REPAIRS, goal.batch, pieces, voids)

    def read_again(self, vbuckets: Sequence[int], reread: Reread | None, batch: int) -> None:
        """What was read of these vbuckets is lost since: read them again, under an epoch of their own."""
        logger.warning("%s: a failover lost what was read again of vbuckets %s", self.name, list(vbuckets))
        known = self.lake.epochs()
        epochs = {vbucket: known.get(vbucket, 0) + 1 for vbucket in vbuckets}
        self.lake.write_epochs({**known, **epochs})
        pieces, voids, found = self._read(epochs, reread, batch)
        seen = self.changes.version(AHEAD)
        self.commit_log(AHEAD, 0 if seen is None else seen + 1, pieces, voids)
        ahead.note(self.lake, self.name, {vbucket: found.get(vbucket, Ahead(0, 0)) for vbucket in vbuckets})

    def _read(
        self, epochs: dict[int, int], reread: Reread | None, batch: int
    ) -> tuple[list[Piece], list[Mark], dict[int, Ahead]]:
        """Files with all that the bucket has of these vbuckets, marks that take back all else, how far it was read.

        Older versions than these are not in the log, so it begins where they end.
        """
        if reread is None:
            raise ConfigError(
                f"{self.name}: vbuckets {sorted(epochs)} rolled back beyond the retention of the log; "
                "run the sync again with access to the bucket"
            )
        highs = Highs()

        def rows() -> Iterator[pa.RecordBatch]:
            for part in reread(sorted(epochs)):
                highs.see(part)
                yield _restamp(part, epochs)

        written = write_log(rows(), self.lake.root, batch)
        voids = [Mark(Event.ROLLBACK.value, v, 0, epoch, batch) for v, epoch in epochs.items()]
        pieces = [*written.pieces.get(self.name, []), write_marks(self.lake.root, self.name, voids, batch)]
        for other, extra in written.pieces.items():
            if other != self.name:
                self.lake.table("changes", other).drop_uncommitted(extra)
        ends = {vbucket: highs.found[vbucket].seqno if vbucket in highs.found else 0 for vbucket in epochs}
        self.lake.write_floors(self.name, {**self.floors(), **ends})
        return pieces, voids, highs.found

    def _account(self, step: Step, works: Sequence[Work], outcomes: Sequence[Outcome]) -> None:
        step.rows = sum(outcome.rows for outcome in outcomes)
        step.repaired = sum(outcome.repaired for outcome in outcomes)
        step.merged_ranges = sum(work.merge for work in works)
        step.bytes_written = sum(p.size for outcome in outcomes for p in [*outcome.tail, *outcome.current])
        step.rows_current = sum(piece.rows for piece in self.current.pieces())
        step.rows_tail = sum(piece.rows for piece in self.tail.pieces())


@contextmanager
def discarded_when_moved(table: Table, made: Iterable[Piece]) -> Iterator[None]:
    """Delete the files that a step wrote when it has to be done again."""
    try:
        yield
    except Moved:
        table.drop_uncommitted(made)
        raise


def _restamp(rows: pa.RecordBatch, epochs: dict[int, int]) -> pa.RecordBatch:
    """Rows read again belong to the newest epoch of their vbucket."""
    stamped = pa.array([epochs[vbucket] for vbucket in rows.column("vbucket").to_pylist()], pa.int32())
    return rows.set_column(rows.schema.get_field_index("epoch"), rows.schema.field("epoch"), stamped)
