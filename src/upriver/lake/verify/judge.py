"""Do the tables equal the bucket? The judge, which works while the sync and other clients write.

It reads the bucket with nothing but the protocol (``bucket``), the tables with nothing but a Delta reader and the
documented meaning of a row (``tables``, ``documents``), and the offsets that the sync has committed. The offsets are
read first, then the tables, then the bucket. So a key whose last change lies within the offsets must be in the tables
as it is in the bucket. A key whose last change lies beyond them is *late*, and no other key is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pyarrow.compute as pc

from upriver.client.blocking import Database, collection_names
from upriver.errors import ConfigError
from upriver.lake.options import SyncOptions
from upriver.lake.verify.bucket import BucketContents, Floor, LastChange, floors, read
from upriver.lake.verify.comparison import Comparison, Difference, Differences, TableView
from upriver.lake.verify.tables import (
    Bounds,
    CollectionRows,
    Committed,
    LakeFiles,
    TableRow,
    in_filter,
    read_rows,
    tail_keys,
)
from upriver.model import SEQNO_MAX

GROUP_CHANGES = 300_000
PATIENCE_S = 2.0
APPLIED = "upriver.applied"  # in the Delta log of the tail: the last batch that tail and current have


def compare(
    options: SyncOptions, collections: Sequence[str] = (), *, rounds: int = 5, view: TableView | str = TableView.FRESH
) -> list[Comparison]:
    """Compare every collection of a sync, or some of them, with the bucket: what ``upriver verify`` does.

    Differences are looked at again, up to ``rounds`` times, while a sync is at work.
    """
    lake = LakeFiles(options.to)
    with Database(options.connect_options()) as db:
        _check_bucket(lake, options, db)
        judge = Judge(db, lake, TableView(view), _collection_ids(options, collections, lake, db))
        found = judge.confirmed(judge.look(range(db.topology.vbuckets)), rounds)
        return [judge.comparison(name, found[name]) for name in judge.ids]


def _check_bucket(lake: LakeFiles, options: SyncOptions, db: Database) -> None:
    """``ConfigError`` unless the tables are of this bucket."""
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


def _collection_ids(
    options: SyncOptions, collections: Sequence[str], lake: LakeFiles, db: Database
) -> dict[str, int | None]:
    """The collections to judge, with their ids in the bucket."""
    ids: dict[str, int | None] = {f"{scope}.{name}": number for number, (scope, name) in collection_names(db).items()}
    committed = lake.committed()
    known = {name for name in {*ids, *lake.names()} if committed.wants(name)}
    asked = tuple(collections) or options.collections
    chosen = {name for name in known if in_filter(name, options.scope, asked)}
    for part in asked:
        if not any(in_filter(name, options.scope, (part,)) for name in chosen):
            where = "the sync of this lake reads" if part in ids else "there are"
            raise ConfigError(f"no collection '{part}' to verify; {where} {', '.join(sorted(known)) or 'none'}")
    if options.scope and not chosen:
        raise ConfigError(f"no collection of scope '{options.scope}' to verify; there are {', '.join(sorted(known))}")
    return {name: ids.get(name) for name in sorted(chosen)}


class Judge:
    """Looks at bucket and tables, as often as it takes to be sure."""

    def __init__(self, db: Database, lake: LakeFiles, view: TableView, ids: Mapping[str, int | None]) -> None:
        self.db, self.lake, self.view, self.ids = db, lake, view, ids
        self.unchanged = False  # whether the sync committed nothing during the last look
        self._old_ids: dict[str, set[int]] = {}

    def look(self, vbuckets: Sequence[int]) -> dict[str, Differences]:
        """Compare some vbuckets, group by group: offsets first, then tables, then the bucket."""
        before, committed = self._versions(), self.lake.committed()
        found = {name: Differences() for name in self.ids}
        for group in self._groups(vbuckets):
            rows = {name: read_rows(self.lake, name, self.view, self._bounds(group)) for name in self.ids}
            contents = read(self.db, group)
            floor = floors(self.db, committed, self._filter(committed))
            for name in self.ids:
                self._judge(name, contents, rows[name], self._floors_of(name, floor, committed), found[name])
        for name in self.ids:
            self._excuse_held_back(name, committed, found[name])
        self.unchanged = before == self._versions() and committed == self.lake.committed()
        return found

    def confirmed(self, first: dict[str, Differences], rounds: int) -> dict[str, Differences]:
        """What is still wrong when looked at again; a sync at work may be between two of its commits."""
        for _ in range(rounds):
            suspects = {wrong.vbucket for found in first.values() for wrong in found.wrong.values()}
            broken = any(found.broken for found in first.values())
            if self.unchanged or not (suspects or broken):
                break
            time.sleep(PATIENCE_S)
            again = self.look(range(self.db.topology.vbuckets) if broken else sorted(suspects))
            for name, found in first.items():
                found.late |= found.wrong.keys() & again[name].late
                found.wrong = {key: again[name].wrong[key] for key in found.wrong if key in again[name].wrong}
                found.broken &= again[name].broken
        return first

    def comparison(self, name: str, found: Differences) -> Comparison:
        has_table = self.lake.table("current", name) is not None
        made = Comparison(name, self.view, has_table, found.bucket_rows, found.table_rows, late=len(found.late))
        for key, wrong in sorted(found.wrong.items()):
            made.keys(wrong.kind).append(key)
        made.lost_files = sorted(found.broken)
        made.differing_vbuckets = sorted({wrong.vbucket for wrong in found.wrong.values()})
        if self.view is TableView.CURRENT and found.wrong:
            vbuckets = range(made.differing_vbuckets[0], made.differing_vbuckets[-1] + 1)
            made.waiting = len(found.wrong.keys() & tail_keys(self.lake, name, self._bounds(vbuckets)))
        return made

    # ---------------------------------------------------------------------------------------------- what to look at

    def _groups(self, vbuckets: Sequence[int]) -> list[tuple[int, ...]]:
        """Vbuckets in runs without gaps that fit in memory."""
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

    def _bounds(self, group: Sequence[int]) -> Bounds:
        """The vbuckets to read. The outer groups are unbounded, so a row of an impossible vbucket is read once."""
        last = self.db.topology.vbuckets - 1
        return None if group[0] == 0 else group[0], None if group[-1] == last else group[-1]

    def _versions(self) -> list[int | None]:
        tables = [self.lake.table(kind, name) for name in self.ids for kind in ("tail", "current")]
        return [None if table is None else table.delta.version() for table in tables]

    def _filter(self, committed: Committed) -> list[int] | None:
        """The ids of the collections that the sync reads, None for all."""
        if not committed.scope and not committed.collections:
            return None
        names = collection_names(self.db).items()
        return [number for number, (scope, name) in names if committed.wants(f"{scope}.{name}")]

    def _floors_of(self, name: str, floor: Sequence[Floor], committed: Committed) -> list[Floor]:
        """The floors of a collection: 0 where the sync has not read it yet, because its filter became wider."""
        number = self.ids[name]
        if number is None:
            return list(floor)
        scopes = {
            int(collection["uid"], 16): int(scope["uid"], 16)
            for scope in self.db.manifest()["scopes"]
            for collection in scope["collections"]
        }
        return [
            one if position.has(number, scopes.get(number)) else Floor(0)
            for one, position in zip(floor, committed.positions, strict=True)
        ]

    # ---------------------------------------------------------------------------------------------- the verdict

    def _judge(
        self, name: str, contents: BucketContents, shown: CollectionRows, floor: Sequence[Floor], found: Differences
    ) -> None:
        number = self.ids[name]
        truth = contents.of(number) if number is not None else {}
        found.bucket_rows += sum(last.document is not None for last in truth.values())
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
            row_seqno = row.order[1] if row is not None else None
            here = floor[vbucket] if vbucket in range(len(floor)) else Floor(SEQNO_MAX)
            same_change = last is not None and row_seqno == last.seqno and not here.forked
            if kind != "duplicate" and not same_change and here.is_late(changed, row_seqno):
                found.late.add(key)
            else:
                found.wrong[key] = Difference(kind, vbucket, changed)

    def _excuse_held_back(self, name: str, committed: Committed, found: Differences) -> None:
        """In a large load, the tables are held back while the log runs ahead: a change in the log is late, not lost."""
        log, tail = self.lake.table("changes", name), self.lake.table("tail", name)
        if not found.wrong or log is None:
            return
        if tail is None and self.lake.table("current", name) is not None:
            return  # the tail is created before ``current``, so it was lost with its rows
        applied = None if tail is None else tail.delta.transaction_version(APPLIED)
        if applied is not None and applied >= committed.batch:
            return
        newer = pc.field("batch") > (-1 if applied is None else applied)
        rows = log.dataset().to_table(columns=["vbucket", "seqno"], filter=newer).to_pydict()
        in_log = set(zip(rows["vbucket"], rows["seqno"], strict=True))
        held = {key for key, one in found.wrong.items() if (one.vbucket, one.changed) in in_log}
        found.late |= held
        found.wrong = {key: one for key, one in found.wrong.items() if key not in held}

    def _wiped(self, name: str, contents: BucketContents, vbucket: int) -> int:
        """The seqno at which the collection of a document that the bucket lacks was dropped or flushed; 0 for none."""
        number = self.ids[name]
        ids = {*self._ids_before(name), *([] if number is None else [number])}
        return max((contents.wiped.get((one, vbucket), 0) for one in ids), default=0)

    def _ids_before(self, name: str) -> set[int]:
        """The ids that a collection of this name has had, according to the change log."""
        if name not in self._old_ids:
            log = self.lake.table("changes", name)
            column = [] if log is None else log.dataset().to_table(columns=["collection_id"]).column(0)
            self._old_ids[name] = set() if log is None else set(pc.unique(column).drop_null().to_pylist())
        return self._old_ids[name]


def _difference(last: LastChange | None, row: TableRow | None) -> str | None:
    """How the bucket and the row of a key differ, None if they do not."""
    there = last.document if last is not None else None
    here = row.document if row is not None else None
    if there is None:
        return None if here is None else "extra"
    if here is None:
        return "missing"
    same = there.same(here) and last is not None and row is not None and last.vbucket == row.vbucket
    return None if same else "different"
