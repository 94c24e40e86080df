"""One unit of work, wherever it runs: bring a stretch of vbuckets from the log into the tail or into ``current``.

It reads and writes files but commits nothing; the driver does, with what comes back. Repeating it is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.apply import rows as state
from upriver.lake.apply.policy import cut, frontier, missing
from upriver.lake.change_log import WIPES, Mark, read_log
from upriver.lake.columns import Shape, fold_rest, row_schema, spill
from upriver.lake.files import Piece, gather, place, read_pieces, uncompressed, within, write_piece
from upriver.lake.layout import Lake
from upriver.records.schema import Event


@dataclass(frozen=True)
class Work:
    """What to do with vbuckets ``lo`` to ``hi`` of one collection. Plain values only: Spark pickles it."""

    lake: str
    name: str
    lo: int
    hi: int
    batch: int
    applied: int  # the last batch that tail and current have
    shape: Shape
    log: tuple[Piece, ...]
    tail: tuple[Piece, ...]
    current: tuple[Piece, ...]
    marks: tuple[Mark, ...] = ()
    skip: tuple[tuple[int, int], ...] = ()  # stretches that another work merges
    merge: bool = False
    rewrite: bool = False  # every file, because types changed
    doubt: bool = False  # some files do not say what they hold: none vouches for anything
    keep_deleted: bool = False
    floors: dict[int, int] = field(default_factory=dict)  # up to which seqno the log was forgotten, by vbucket
    target_rows: int = 131_072
    target_bytes: int = 160 << 20
    max_files: int = 4

    @property
    def schema(self) -> pa.Schema:
        return row_schema(self.shape)

    def covers(self, vbucket: int) -> bool:
        return self.lo <= vbucket <= self.hi and not any(lo <= vbucket <= hi for lo, hi in self.skip)

    def root(self, table: str) -> str:
        return Lake(self.lake).path(table, self.name)


@dataclass
class Outcome:
    """Files to commit, and vbuckets that the log could not restore."""

    tail: list[Piece] = field(default_factory=list)
    current: list[Piece] = field(default_factory=list)
    replaced: list[Piece] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # files that others deleted before they were read
    rows: int = 0
    repaired: int = 0


def forward(work: Work, window: pa.Table | None = None) -> Outcome:
    """Do it. ``window`` is the part of the log that is new, when the caller has read it already."""
    outcome = Outcome()
    rows = _news(work, window, outcome)
    outcome.rows = rows.num_rows
    if outcome.unknown:
        return outcome
    if work.merge:
        _merge(work, rows, outcome)
    elif rows.num_rows:
        first = min(work.applied + 1, work.batch)
        if (np.diff(rows.column("_vbucket").to_numpy()) < 0).any():  # from more than one file
            rows = gather(rows, pc.sort_indices(rows, [("_vbucket", "ascending")]))
        outcome.tail.append(write_piece(work.root("tail"), place(work.lo, work.hi, first, work.batch), rows))
    return outcome


def _news(work: Work, window: pa.Table | None, outcome: Outcome) -> pa.Table:
    """What the new part of the log says about each key, as tail rows."""
    new = [piece for piece in work.log if piece.last > work.applied]
    if window is None:
        window = read_log(work.root("changes"), new, work.lo, work.hi)
    special = sorted({m.vbucket for m in work.marks if m.batch > work.applied and _matters(m)})
    special = [vbucket for vbucket in special if work.covers(vbucket)]
    ours = within(window, (work.lo, work.hi))
    for lo, hi in work.skip:
        ours = ours.filter(pc.or_(pc.less(ours.column("vbucket"), lo), pc.greater(ours.column("vbucket"), hi)))
    if not special:
        return state.tail_rows(ours, work.shape)
    apart = pc.is_in(ours.column("vbucket"), value_set=pa.array(special, pa.int32()))
    parts = [state.tail_rows(ours.filter(pc.invert(apart)), work.shape)]
    parts += [_special(work, vbucket, outcome) for vbucket in special]
    return pa.concat_tables(parts)


def _matters(mark: Mark) -> bool:
    return mark.event == Event.ROLLBACK or mark.event in WIPES


def _special(work: Work, vbucket: int, outcome: Outcome) -> pa.Table:
    """A vbucket that rolled back, or whose collection went."""
    marks = [mark for mark in work.marks if mark.vbucket == vbucket]
    known = _known_keys(work, vbucket)
    if any(mark.event == Event.ROLLBACK and mark.batch > work.applied for mark in marks):
        log = read_log(work.root("changes"), work.log, vbucket, vbucket)
        fixed = state.repair(log, marks, work.applied, known, work.shape, work.floors.get(vbucket, 0))
        outcome.repaired += fixed.rows.num_rows
        if not fixed.complete:
            outcome.unknown.append(vbucket)
        return fixed.rows
    new = [piece for piece in work.log if piece.last > work.applied]
    rows = state.tail_rows(read_log(work.root("changes"), new, vbucket, vbucket), work.shape)
    last = max((mark for mark in marks if mark.event in WIPES), key=lambda mark: mark.order)
    keys = pc.unique(pa.concat_arrays([known, *rows.column("_key").chunks]))
    ends = state.tombstones(keys, state.Gone(vbucket, last.epoch, last.seqno), work.shape)
    return latest(pa.concat_tables([rows, ends]))


def _known_keys(work: Work, vbucket: int) -> pa.Array:
    found = []
    for table, pieces in (("current", work.current), ("tail", work.tail)):
        here = [piece for piece in pieces if piece.overlaps(vbucket, vbucket)]
        found.append(read_pieces(work.root(table), here, work.schema, ["_key"], (vbucket, vbucket)).column("_key"))
    chunks = [chunk for column in found for chunk in column.chunks]
    return pc.unique(pa.chunked_array(chunks, pa.string()))


def latest(rows: pa.Table) -> pa.Table:
    """The winning row of each key."""
    return gather(rows, state.winners(rows.column("_key"), rows.column("_epoch"), rows.column("_seqno")))


def once(rows: pa.Table) -> pa.Table:
    """Each key once. Only files that another writer, or an earlier version of ours, left may have it more often."""
    return rows if pc.count_distinct(rows.column("_key")).as_py() == rows.num_rows else latest(rows)


def waiting_rows(work: Work) -> pa.Table:
    """The tail's rows of this stretch that ``current`` may not have."""
    merged = frontier(work.current, work.hi + 1)
    merged[: work.lo] = np.iinfo(np.int64).max
    pieces = [
        piece for piece in work.tail if piece.overlaps(work.lo, work.hi) and (work.doubt or len(missing(piece, merged)))
    ]
    return read_pieces(work.root("tail"), pieces, work.schema, span=(work.lo, work.hi), adapt=spill)


def _merge(work: Work, rows: pa.Table, outcome: Outcome) -> None:
    """Rewrite the files of ``current`` that hold a changed key, and add what is new."""
    news = latest(pa.concat_tables([waiting_rows(work), rows]))
    total = sum(piece.rows for piece in work.current) + news.num_rows
    size = uncompressed(work.root("current"), work.current) + news.nbytes
    parts = max(total // work.target_rows, size // work.target_bytes)  # twice as much as there should be is cut
    everything = work.rewrite or len(work.current) > work.max_files or parts >= 2
    kept: list[pa.Table] = []
    for piece in work.current:
        if not everything and not _touches(work, piece, news):
            continue
        old = read_pieces(work.root("current"), [piece], work.schema, span=(work.lo, work.hi), adapt=spill)
        old, news = settle(old, news)
        kept.append(old)
        outcome.replaced.append(piece)
    if not work.keep_deleted:
        _leave_tombstones(work, news, outcome)
        news = news.filter(pc.invert(news.column("_deleted")))
    table = pa.concat_tables([*kept, news])
    table = fold_rest(once(table) if work.rewrite else table, work.shape)
    if parts >= 2:
        parts = max(-(-table.num_rows // work.target_rows), -(-table.nbytes // work.target_bytes))
    for part in cut(work.lo, work.hi, parts):
        path = place(part.lo, part.hi, 0, work.batch)
        outcome.current.append(write_piece(work.root("current"), path, within(table, (part.lo, part.hi))))


def _leave_tombstones(work: Work, news: pa.Table, outcome: Outcome) -> None:
    """Rows of the tail stay until every range has them; if one is of a key that is now gone, the tail must say so."""
    ended = news.filter(news.column("_deleted"))
    pieces = [piece for piece in work.tail if piece.overlaps(work.lo, work.hi)]
    if not ended.num_rows or not pieces:
        return
    waiting = read_pieces(work.root("tail"), pieces, work.schema, ["_key"], (work.lo, work.hi)).column("_key")
    ended = ended.filter(pc.is_in(ended.column("_key"), value_set=pc.unique(waiting)))
    if ended.num_rows:
        path = place(work.lo, work.hi, work.batch, work.batch)
        outcome.tail.append(write_piece(work.root("tail"), path, ended))


def _touches(work: Work, piece: Piece, news: pa.Table) -> bool:
    keys = read_pieces(work.root("current"), [piece], work.schema, ["_key"]).column("_key")
    return bool(pc.any(pc.is_in(keys, value_set=news.column("_key").combine_chunks())).as_py())


def settle(old: pa.Table, news: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Of rows with the same key in both, the greater (epoch, seqno) stays; of equals, the new one."""
    place_in_news = pc.index_in(old.column("_key"), value_set=news.column("_key").combine_chunks())
    hit = pc.is_valid(place_in_news)
    if not pc.any(hit).as_py():
        return old, news
    rivals = news.select(["_epoch", "_seqno"]).take(place_in_news.filter(hit))
    mine = old.select(["_epoch", "_seqno"]).filter(hit)
    newer = pc.or_(
        pc.greater(mine.column("_epoch"), rivals.column("_epoch")),
        pc.and_(
            pc.equal(mine.column("_epoch"), rivals.column("_epoch")),
            pc.greater(mine.column("_seqno"), rivals.column("_seqno")),
        ),
    )
    if not pc.any(newer).as_py():
        return old.filter(pc.invert(hit)), news
    staying = mine.append_column("_key", old.column("_key").filter(hit)).filter(newer).column("_key").combine_chunks()
    loses = pc.and_(hit, pc.invert(pc.is_in(old.column("_key"), value_set=staying)))
    return old.filter(pc.invert(loses)), news.filter(pc.invert(pc.is_in(news.column("_key"), value_set=staying)))


def as_plain(outcome: Outcome) -> dict[str, Any]:
    """As JSON can carry it to the driver."""
    from dataclasses import asdict

    return asdict(outcome)


def from_plain(plain: dict[str, Any]) -> Outcome:
    files = {name: [Piece(**piece) for piece in plain[name]] for name in ("tail", "current", "replaced")}
    return Outcome(**{**plain, **files})


def run_inline(works: Sequence[Work], window: pa.Table | None = None) -> list[Outcome]:
    """All of it here; ``window`` is the new part of the log, when the caller has read it."""
    return [forward(work, window) for work in works]
