"""The lake as any reader finds it: rows through a Delta reader, and the offsets that the sync has committed.

Nothing here comes from the sync itself. The meaning of rows and files is taken from the documents, so that a mistake in
the code that writes the tables is not repeated in the code that judges them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from upriver.errors import ConfigError
from upriver.lake.verify.comparison import TableView
from upriver.lake.verify.documents import Fingerprint, RowReader

Bounds = tuple[int | None, int | None]  # vbuckets, both included; None for no bound
BATCH_ROWS = 16_384
COLUMNS = (
    "_key", "_seqno", "_vbucket", "_epoch", "_cas", "_changed_at", "_expires_at", "_deleted", "_rest", "_value",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommittedPosition:
    """How far the sync has come in a vbucket.

    ``points`` are its consistent points, newest first. ``unread``: the last batch could not read it, and the next one
    goes back to this seqno or below. ``filter`` is the filter that it was read with.
    """

    vbuuid: int
    seqno: int
    points: tuple[int, ...]
    unread: int | None = None
    filter: str = "*"

    def has(self, collection_id: int, scope_id: int | None) -> bool:
        """Whether this collection was read. A filter is ``*``, ``s`` with the id of a scope, or ids of collections.

        >>> [CommittedPosition(0, 9, (), None, text).has(10, 8) for text in ("*", "s8", "9 a", "9")]
        [True, True, True, False]
        """
        if self.filter.startswith("s"):
            return scope_id is not None and self.filter == f"s{scope_id:x}"
        return self.filter == "*" or f"{collection_id:x}" in self.filter.split()


@dataclass(frozen=True, slots=True)
class Committed:
    """The offsets of the last batch that the sync has committed, and which collections it reads."""

    batch: int
    positions: tuple[CommittedPosition, ...]
    scope: str = ""
    collections: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        """Whether the collection ``scope.collection`` is part of the sync."""
        return in_filter(name, self.scope, self.collections)


def in_filter(name: str, scope: str, collections: tuple[str, ...]) -> bool:
    """Whether a filter lets the collection ``scope.collection`` through.

    >>> in_filter("shop.orders", "shop", ()), in_filter("shop.orders", "", ("shop.users",)), in_filter("a.b", "", ())
    (True, False, True)
    """
    if not collections:
        return not scope or name.partition(".")[0] == scope
    return name in {part if "." in part else f"{scope or '_default'}.{part}" for part in collections}


@dataclass(frozen=True, slots=True)
class DeltaSnapshot:
    """A Delta table in one version."""

    delta: DeltaTable
    path: str

    def dataset(self) -> pads.Dataset:
        if "://" in self.path:
            return self.delta.to_pyarrow_dataset()
        # Arrow's own file system: if Arrow reads through Python, a process that ends soon after may abort.
        return self.delta.to_pyarrow_dataset(filesystem=pafs.SubTreeFileSystem(self.path, pafs.LocalFileSystem()))


class LakeFiles:
    """The directory of a sync, read only."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        if "://" in root:
            self._fs, self._base = pafs.FileSystem.from_uri(self.root)
        else:
            self._fs, self._base = pafs.LocalFileSystem(), self.root
        self.settings = self._json("_upriver/lake.json")
        known = self._json("_upriver/collections.json") or {}
        directories = {info.base_name for kind in ("changes", "current") for info in self._list(kind)}
        self._directories = {_collection_of(directory, known): directory for directory in directories}
        if self.settings is None and not self._directories:
            raise ConfigError(f"--to {root}: there are no tables; `upriver sync ... --to {root}` makes them")

    def names(self) -> list[str]:
        """Collections that have tables."""
        return sorted(self._directories)

    def table(self, kind: str, name: str) -> DeltaSnapshot | None:
        """One of the Delta tables of a collection, in its newest version."""
        if name not in self._directories:
            return None
        path = f"{self.root}/{kind}/{self._directories[name]}"
        try:
            delta = DeltaTable(path)
        except TableNotFoundError:
            return None
        except DeltaError as error:
            raise ConfigError(
                f"a Delta reader cannot open {path} ({str(error).splitlines()[0]}): restore its "
                "_delta_log from a backup, or sync to a new directory"
            ) from error
        have = {field.name for field in delta.schema().fields}
        if kind in ("current", "tail") and (lost := [column for column in COLUMNS if column not in have]):
            raise ConfigError(f"{path} has no column {', '.join(lost)}: another tool wrote it; sync to a new directory")
        return DeltaSnapshot(delta, path)

    def committed(self) -> Committed:
        """What the sync has committed: from ``offsets.json``, or from Spark's checkpoint if there is none."""
        noted = self._json("_upriver/offsets.json")
        if noted is not None:
            chosen = noted.get("filter") or {}
            scope, collections = str(chosen.get("scope") or ""), tuple(chosen.get("collections") or ())
            return Committed(int(noted["batch"]), _positions(noted["offset"], noted), scope, collections)
        batch = self._newest_commit()
        if batch is None:
            raise ConfigError(
                f"--to {self.root}: no batch is committed there (no _upriver/offsets.json, no _upriver/checkpoint), "
                "so a missing row cannot be told from a late one; run `upriver sync` first"
            )
        lines = self._text(f"_upriver/checkpoint/offsets/{batch}") or ""
        return Committed(batch, _positions(json.loads(lines.splitlines()[-1]), {}))

    def _newest_commit(self) -> int | None:
        names = [info.base_name for info in self._list("_upriver/checkpoint/commits", pafs.FileType.File)]
        return max((int(name) for name in names if name.isdigit()), default=None)

    def _list(self, path: str, kind: pafs.FileType = pafs.FileType.Directory) -> list[pafs.FileInfo]:
        found = self._fs.get_file_info(pafs.FileSelector(f"{self._base}/{path}", allow_not_found=True))
        return [info for info in found if info.type == kind]

    def _text(self, path: str) -> str | None:
        try:
            with self._fs.open_input_stream(f"{self._base}/{path}") as source:
                return bytes(source.read()).decode()
        except FileNotFoundError:
            return None

    def _json(self, path: str) -> dict[str, Any] | None:
        text = self._text(path)
        try:
            return None if text is None else dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self.root}/{path} is damaged ({error}): restore it from a backup") from error


def _collection_of(directory: str, known: Iterable[str] = ()) -> str:
    """The collection of a directory: ``!25`` stands for ``%``; a long name is cut and ends in its checksum.

    >>> _collection_of("shop.50!25")
    'shop.50%'
    """
    cut, _, checksum = directory.partition("!!")
    if checksum:
        return next((name for name in known if hashlib.sha256(name.encode()).hexdigest()[:32] == checksum), directory)
    return unquote(cut.replace("!", "%"))


def _positions(offset: dict[str, Any], noted: dict[str, Any]) -> tuple[CommittedPosition, ...]:
    """The offset of the source, by vbucket, with what tasks reported about its batch."""
    try:
        columns = [offset[name].split(" ") for name in ("vbuuids", "seqnos", "behind")]
        filters = offset.get("filters") or ["*"]
        filter_of = offset.get("filter_of") or "0" * len(columns[0])
        complete, unread = int(noted.get("complete") or "0", 16), int(offset.get("unread") or "0", 16)
        left = {int(vbucket): int(seqno) for vbucket, seqno in (noted.get("unread") or {}).items()}
        found = []
        for vb, (vbuuid, text, behind, which) in enumerate(zip(*columns, filter_of, strict=True)):
            seqno = int(text)
            points = () if behind == "-" else tuple(seqno - int(back) for back in behind.split(","))
            if complete >> vb & 1 and seqno not in (0, *points[:1]):
                points = (seqno, *points)
            back = left.get(vb, seqno if unread >> vb & 1 else None)
            found.append(CommittedPosition(int(vbuuid, 16), seqno, points, back, filters[int(which, 16)]))
    except (KeyError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"verify cannot read the committed offset of the lake: {error!r}") from error
    return tuple(found)


@dataclass
class RowScan:
    """Iterates over the rows of one table in some vbuckets; ``broken`` are the data files that could not be read."""

    table: DeltaSnapshot
    lo: int | None  # vbuckets, both included; None: no bound
    hi: int | None
    broken: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        dataset = self.table.dataset()
        chosen = self._chosen()
        for fragment in dataset.get_fragments(chosen):
            try:
                batches = fragment.to_batches(schema=dataset.schema, filter=chosen, batch_size=BATCH_ROWS)
                for batch in batches:
                    yield from batch.to_pylist()
            except (OSError, pa.ArrowInvalid):
                self.broken.append(str(fragment.path))

    def _chosen(self) -> pc.Expression:
        vbucket = pc.field("_vbucket")
        if self.lo is None and self.hi is None:
            return pc.scalar(True)
        if self.lo is None:
            return vbucket.is_null() | (vbucket <= self.hi)
        return (vbucket >= self.lo) if self.hi is None else (vbucket >= self.lo) & (vbucket <= self.hi)


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
