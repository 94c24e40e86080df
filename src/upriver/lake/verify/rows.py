"""The rows of a collection as a reader of the lake sees them, in one of the views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from upriver.lake.verify.comparison import TableView
from upriver.lake.verify.documents import Fingerprint, RowReader
from upriver.lake.verify.tables import LakeFiles, RowScan

Bounds = tuple[int | None, int | None]  # vbuckets, both included; None for no bound


@dataclass(frozen=True, slots=True)
class TableRow:
    """What a reader sees of a key."""

    vbucket: int
    order: tuple[int, int]  # (epoch, seqno)
    document: Fingerprint | None  # None: deleted


@dataclass
class CollectionRows:
    """The rows of a collection in some vbuckets, by key."""

    rows: dict[str, TableRow] = field(default_factory=dict)
    count: int = 0  # of documents
    duplicate: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)  # data files that cannot be read


def read_rows(lake: LakeFiles, name: str, view: TableView, bounds: Bounds) -> CollectionRows:
    """What a reader sees. The tail is read before ``current``, or a row that moves in between would be missed."""
    found = CollectionRows()
    newest: dict[str, TableRow] = {}
    if view is TableView.FRESH:
        for key, row in _scan(lake, "tail", name, bounds, found.broken):
            if key not in newest or row.order >= newest[key].order:
                newest[key] = row
    seen: set[str] = set()
    for key, row in _scan(lake, "current", name, bounds, found.broken):
        found.count += row.document is not None
        if key in seen:
            found.duplicate.add(key)
        seen.add(key)
        if key not in found.rows or row.order > found.rows[key].order:
            found.rows[key] = row
    _lay_on_top(found, newest)
    return found


def tail_keys(lake: LakeFiles, name: str, bounds: Bounds) -> set[str]:
    """The keys that have a row in the tail."""
    return {key for key, _ in _scan(lake, "tail", name, bounds, [])}


def _scan(lake: LakeFiles, kind: str, name: str, bounds: Bounds, broken: list[str]) -> Iterator[tuple[str, TableRow]]:
    table = lake.table(kind, name)
    if table is None:
        return
    document_of, scan = RowReader.of(table.delta), RowScan(table, *bounds)
    for row in scan:
        # A query with NOT _deleted does not show a row where _deleted is null.
        document = document_of(row) if row["_deleted"] is False else None
        order = row["_epoch"] or 0, row["_seqno"] or 0
        yield str(row["_key"]), TableRow(-1 if row["_vbucket"] is None else row["_vbucket"], order, document)
    broken += [f"{kind}/{name}/{path}" for path in scan.broken]


def _lay_on_top(found: CollectionRows, newest: Mapping[str, TableRow]) -> None:
    """Lay the tail over ``current``: of a key, the greater (epoch, seqno) wins."""
    for key, row in newest.items():
        old = found.rows.get(key)
        if old is None or row.order >= old.order:
            found.count += (row.document is not None) - (old is not None and old.document is not None)
            found.rows[key] = row
