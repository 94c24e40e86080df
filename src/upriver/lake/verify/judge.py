"""Do the tables equal the bucket? A judge of its own, while both go on.

It reads the bucket with nothing but the protocol (``verify_bucket``), the tables with nothing but a Delta reader and
the documented meaning of a row (``verify_lake``, ``verify_documents``), and the offsets that the sync has committed.
The offsets are read first, then the tables, then the bucket. So a key whose last change lies within the offsets must
be in the tables as it is in the bucket; whatever lies beyond them is *late*, and nothing else is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow.compute as pc

from upriver.client.blocking import Database, collection_names
from upriver.errors import ConfigError
from upriver.lake.options import SyncOptions
from upriver.lake.verify.bucket import Contents, Floor, Last, floors, read
from upriver.lake.verify.documents import RowReader, Said
from upriver.lake.verify.tables import Committed, LakeFiles, Rows, within
from upriver.model import SEQNO_MAX

MAX_KEYS = 20
GROUP_CHANGES = 300_000
PATIENCE_S = 2.0
APPLIED = "upriver.applied"  # in the Delta log of the tail: the last batch that tail and current have
KINDS = ("missing", "extra", "different", "duplicate")


class View(StrEnum):
    """Which rows are judged."""

    FRESH = "fresh"
    """``current`` with its tail on top: what `read_table` and the documented SQL view give."""
    CURRENT = "current"
    """The plain Delta table alone."""


@dataclass
class Comparison:
    """What was found for one collection."""

    name: str
    view: View = View.FRESH
    has_table: bool = True
    bucket_rows: int = 0
    table_rows: int = 0
    missing: list[str] = field(default_factory=list)  # in the bucket, not in the table
    extra: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    duplicate: list[str] = field(default_factory=list)  # more than one row
    lost_files: list[str] = field(default_factory=list)  # of the table, gone or unreadable
    late: int = 0  # keys changed after what the sync has committed: not wrong, only not there yet
    waiting: int = 0  # of the wrong ones: right in the fresh view, and in the tail until `current` is rewritten
    differing_vbuckets: list[int] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def differences(self) -> int:
        return sum(len(getattr(self, kind)) for kind in KINDS) + len(self.lost_files)

    def plain(self) -> dict[str, Any]:
        """For ``--json``: counts, and the first keys of each kind."""
        lists = {name: getattr(self, name)[:MAX_KEYS] for name in (*KINDS, "lost_files")}
        return {
            "collection": self.name, "view": self.view.value, "equal": self.equal, "has_table": self.has_table,
            "bucket_rows": self.bucket_rows, "table_rows": self.table_rows, "late": self.late,
            "waiting": self.waiting, "differences": self.differences,
            "differing_vbuckets": self.differing_vbuckets, **lists,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What a reader sees of a key; nothing is said where it is deleted."""

    vbucket: int
    order: tuple[int, int]  # (epoch, seqno)
    said: Said | None


@dataclass
class Shown:
    """The rows of a collection in some vbuckets, as one of the views has them."""

    rows: dict[str, Row] = field(default_factory=dict)
    count: int = 0
    duplicate: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wrong:
    """A key that differs, and how; and when the bucket changed it last."""

    kind: str
    vbucket: int
    changed: int


@dataclass
class Finding:
    """What one look at a collection found."""

    bucket_rows: int = 0
    table_rows: int = 0
    wrong: dict[str, Wrong] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)


def verify(
    options: SyncOptions, collections: Sequence[str] = (), *, rounds: int = 5, view: View | str = View.FRESH
) -> list[Comparison]:
    """Compare every collection of the sync (or some) with the bucket."""
    lake = LakeFiles(options.to)
    with Database(options.connect_options()) as db:
        _must_belong(lake, options, db)
        judge = Judge(db, lake, View(view), _chosen(options, collections, lake, db))
        first = judge.look(sorted(range(db.topology.vbuckets)))
        found = judge.confirmed(first, rounds)
        return [judge.comparison(name, found[name]) for name in judge.ids]


def _must_belong(lake: LakeFiles, options: SyncOptions, db: Database) -> None:
    known = lake.settings or {}
    ours, theirs = known.get("uuid"), db.topology.bucket_uuid
    if ours and theirs and ours != theirs:
        raise ConfigError(
            f"{options.to} holds tables of bucket '{options.bucket}' with uuid {ours}; this one has uuid {theirs}: "
            "it was deleted and created again, or it is of another cluster"
        )
    bucket, vbuckets = known.get("bucket", options.bucket), known.get("vbuckets", db.topology.vbuckets)
    if (bucket, vbuckets) != (options.bucket, db.topology.vbuckets):
        raise ConfigError(
            f"{options.to} holds tables of bucket '{bucket}' with {vbuckets} vbuckets, not of '{options.bucket}' "
            f"with {db.topology.vbuckets}: name the bucket (--bucket) or the directory (--to) of the other"
        )


def _chosen(options: SyncOptions, collections: Sequence[str], lake: LakeFiles, db: Database) -> dict[str, int | None]:
    """The collections to judge, with their ids in the bucket."""
    ids: dict[str, int | None] = {f"{scope}.{name}": number for number, (scope, name) in collection_names(db).items()}
    committed = lake.committed()
    known = {name for name in {*ids, *lake.names()} if committed.wants(name)}
    asked = tuple(collections) or options.collections
    chosen = {name for name in known if within(name, options.scope, asked)}
    for part in asked:
        if not any(within(name, options.scope, (part,)) for name in chosen):
            where = "the sync of this lake reads" if part in ids else "there are"
            raise ConfigError(f"no collection '{part}' to verify; {where} {', '.join(sorted(known)) or 'none'}")
    if options.scope and not chosen:
        raise ConfigError(f"no collection of scope '{options.scope}' to verify; there are {', '.join(sorted(known))}")
    return {name: ids.get(name) for name in sorted(chosen)}


class Judge:
    """Looks at bucket and tables, as often as it takes to be sure."""

    def __init__(self, db: Database, lake: LakeFiles, view: View, ids: Mapping[str, int | None]) -> None:
        self.db, self.lake, self.view, self.ids = db, lake, view, ids
        self.settled = False  # nothing moved during the last look
        self._old_ids: dict[str, set[int]] = {}

    def look(self, vbuckets: Sequence[int]) -> dict[str, Finding]:
        """Compare some vbuckets, group by group."""
        before, committed = self._versions(), self.lake.committed()
        found = {name: Finding() for name in self.ids}
        for group in self._groups(vbuckets):
            shown = {name: self._shown(name, group) for name in self.ids}
            contents = read(self.db, group)
            floor = floors(self.db, committed, self._filter(committed))
            for name in self.ids:
                self._judge(name, contents, shown[name], self._unless_new(name, floor, committed), found[name])
        for name in self.ids:
            self._let_wait(name, committed, found[name])
        self.settled = before == self._versions() and committed == self.lake.committed()
        return found

    def confirmed(self, first: dict[str, Finding], rounds: int) -> dict[str, Finding]:
        """What is still wrong when looked at again; a sync at work may be between two of its commits."""
        for _ in range(rounds):
            suspects = {wrong.vbucket for found in first.values() for wrong in found.wrong.values()}
            broken = any(found.broken for found in first.values())
            if self.settled or not (suspects or broken):
                break
            time.sleep(PATIENCE_S)
            again = self.look(range(self.db.topology.vbuckets) if broken else sorted(suspects))
            for name, found in first.items():
                found.late |= found.wrong.keys() & again[name].late
                found.wrong = {key: again[name].wrong[key] for key in found.wrong if key in again[name].wrong}
                found.broken &= again[name].broken
        return first

    def comparison(self, name: str, found: Finding) -> Comparison:
        has_table = self.lake.table("current", name) is not None
        made = Comparison(name, self.view, has_table, found.bucket_rows, found.table_rows, late=len(found.late))
        for key, wrong in sorted(found.wrong.items()):
            getattr(made, wrong.kind).append(key)
        made.lost_files = sorted(found.broken)
        made.differing_vbuckets = sorted({wrong.vbucket for wrong in found.wrong.values()})
        if self.view is View.CURRENT and found.wrong:
            made.waiting = self._waiting(name, found.wrong)
        return made

    def _groups(self, vbuckets: Sequence[int]) -> list[tuple[int, ...]]:
        """Vbuckets in runs without gaps, of a size that fits in memory."""
        highs = self.db.high_seqnos()
        groups: list[list[int]] = []
        size = 0
        for vbucket in vbuckets:
            if not groups or size > GROUP_CHANGES or groups[-1][-1] != vbucket - 1:
                groups.append([])
                size = 0
            groups[-1].append(vbucket)
            size += highs.get(vbucket, 0)
        return [tuple(group) for group in groups]

    def _filter(self, committed: Committed) -> list[int] | None:
        """The ids of the collections that the sync reads, None for all there are."""
        if not committed.scope and not committed.collections:
            return None
        names = collection_names(self.db).items()
        return [number for number, (scope, name) in names if committed.wants(f"{scope}.{name}")]

    def _unless_new(self, name: str, floor: Sequence[Floor], committed: Committed) -> list[Floor]:
        """The floors of a collection: 0 where the sync has not read it yet, because its filter became wider."""
        number = self.ids[name]
        if number is None:
            return list(floor)
        scope = self._scopes().get(number)
        return [
            one if place.has(number, scope) else Floor(0) for one, place in zip(floor, committed.places, strict=True)
        ]

    def _scopes(self) -> dict[int, int]:
        """The id of the scope that each collection is in."""
        return {
            int(collection["uid"], 16): int(scope["uid"], 16)
            for scope in self.db.manifest()["scopes"]
            for collection in scope["collections"]
        }

    def _versions(self) -> list[int | None]:
        tables = [self.lake.table(kind, name) for name in self.ids for kind in ("tail", "current")]
        return [None if table is None else table.delta.version() for table in tables]

    # ---------------------------------------------------------------------------------------------- tables

    def _shown(self, name: str, group: Sequence[int]) -> Shown:
        """What a reader sees. The tail is looked at before ``current``, or a change that moves would be missed."""
        shown = Shown()
        news: dict[str, Row] = {}
        if self.view is View.FRESH:
            for key, row in self._rows("tail", name, group, shown):
                if key not in news or row.order >= news[key].order:
                    news[key] = row
        seen: set[str] = set()
        for key, row in self._rows("current", name, group, shown):
            shown.count += row.said is not None
            if key in seen:
                shown.duplicate.add(key)
            seen.add(key)
            if key not in shown.rows or row.order > shown.rows[key].order:
                shown.rows[key] = row
        _on_top(shown, news)
        return shown

    def _rows(self, kind: str, name: str, group: Sequence[int], shown: Shown) -> Iterable[tuple[str, Row]]:
        table = self.lake.table(kind, name)
        if table is None:
            return
        lo = None if group[0] == 0 else group[0]
        hi = None if group[-1] == self.db.topology.vbuckets - 1 else group[-1]
        says, rows = RowReader.of(table.delta), Rows(table, lo, hi)
        for row in rows:
            said = says(row) if row["_deleted"] is False else None  # NOT NULL is not true: no query shows such a row
            order = row["_epoch"] or 0, row["_seqno"] or 0
            yield str(row["_key"]), Row(-1 if row["_vbucket"] is None else row["_vbucket"], order, said)
        shown.broken += [f"{kind}/{name}/{path}" for path in rows.broken]

    def _waiting(self, name: str, wrong: Mapping[str, Wrong]) -> int:
        """How many of these keys have a row in the tail."""
        shown, vbuckets = Shown(), sorted({one.vbucket for one in wrong.values()})
        tail = self._rows("tail", name, range(vbuckets[0], vbuckets[-1] + 1), shown)
        return len(wrong.keys() & {key for key, _ in tail})

    # ---------------------------------------------------------------------------------------------- the verdict

    def _judge(self, name: str, contents: Contents, shown: Shown, floor: Sequence[Floor], found: Finding) -> None:
        number = self.ids[name]
        truth = contents.of(number) if number is not None else {}
        found.bucket_rows += sum(last.said is not None for last in truth.values())
        found.table_rows += shown.count
        found.broken.update(shown.broken)
        for key in {*truth, *shown.rows}:
            last, row = truth.get(key), shown.rows.get(key)
            kind = "duplicate" if key in shown.duplicate else _difference(last, row)
            if kind is None:
                continue
            vbucket = last.vbucket if last is not None else row.vbucket if row is not None else 0
            changed = last.seqno if last is not None else self._wiped(name, contents, vbucket)
            if last is None and vbucket in contents.moving:
                changed = SEQNO_MAX
            at = row.order[1] if row is not None else None
            here = floor[vbucket] if vbucket in range(len(floor)) else Floor(SEQNO_MAX)
            same_change = last is not None and at == last.seqno and not here.forked
            if kind != "duplicate" and not same_change and here.is_late(changed, at):
                found.late.add(key)
            else:
                found.wrong[key] = Wrong(kind, vbucket, changed)

    def _let_wait(self, name: str, committed: Committed, found: Finding) -> None:
        """In a large load, tables are held back while the log runs ahead: what is in the log is late, not lost."""
        log, tail = self.lake.table("changes", name), self.lake.table("tail", name)
        if not found.wrong or log is None:
            return
        if tail is None and self.lake.table("current", name) is not None:
            return  # it was made before ``current``, and is lost with all that waited in it
        applied = None if tail is None else tail.delta.transaction_version(APPLIED)
        if applied is not None and applied >= committed.batch:
            return
        newer = pc.field("batch") > (-1 if applied is None else applied)
        rows = log.dataset().to_table(columns=["vbucket", "seqno"], filter=newer).to_pydict()
        waiting = set(zip(rows["vbucket"], rows["seqno"], strict=True))
        held = {key for key, one in found.wrong.items() if (one.vbucket, one.changed) in waiting}
        found.late |= held
        found.wrong = {key: one for key, one in found.wrong.items() if key not in held}

    def _wiped(self, name: str, contents: Contents, vbucket: int) -> int:
        """The seqno at which documents that the bucket knows nothing of went with their collection; 0 for none."""
        number = self.ids[name]
        ids = {*self._ids_before(name), *([] if number is None else [number])}
        return max((contents.wiped.get((one, vbucket), 0) for one in ids), default=0)

    def _ids_before(self, name: str) -> set[int]:
        """The ids that a collection of this name has had, as the log of the tables tells."""
        if name not in self._old_ids:
            log = self.lake.table("changes", name)
            column = [] if log is None else log.dataset().to_table(columns=["collection_id"]).column(0)
            self._old_ids[name] = set() if log is None else set(pc.unique(column).drop_null().to_pylist())
        return self._old_ids[name]


def _on_top(shown: Shown, news: Mapping[str, Row]) -> None:
    """Lay the tail over ``current``: of a key, the greater (epoch, seqno) wins."""
    for key, row in news.items():
        old = shown.rows.get(key)
        if old is None or row.order >= old.order:
            shown.count += (row.said is not None) - (old is not None and old.said is not None)
            shown.rows[key] = row


def _difference(last: Last | None, row: Row | None) -> str | None:
    """How the bucket and the row of a key differ, if they do."""
    there = last.said if last is not None else None
    here = row.said if row is not None else None
    if there is None:
        return None if here is None else "extra"
    if here is None:
        return "missing"
    same = there.same(here) and last is not None and row is not None and last.vbucket == row.vbucket
    return None if same else "different"
