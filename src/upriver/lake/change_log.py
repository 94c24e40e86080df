"""The change log: every change of a collection, append-only, in the schema of the feed plus its batch.

Executors write it (`write_log`), file by file, and tell the driver what they wrote. Rollbacks and collection events are
*marks*. They are kept in separate files, so the log need not be read to find them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.delta import CommitConflict, Table
from upriver.lake.files import DataFile, Span, foreign_slices, gather, new_file_name, read_files, write_file
from upriver.lake.layout import Lake
from upriver.records.schema import CHANGES, Event

LOG = pa.schema(
    [
        *CHANGES,
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("voided", pa.bool_(), nullable=False),  # taken back by a rollback
    ]
)
LOG_ORDER = [("vbucket", "ascending"), ("epoch", "ascending"), ("seqno", "ascending")]
# A collection's documents are gone where its vbucket saw one of these.
WIPES = frozenset({Event.COLLECTION_DROPPED.value, Event.COLLECTION_FLUSHED.value})
FLUSH_BYTES = 64 << 20  # larger buffers are returned to the system and requested again each time, at twice the cost
WAITING_BYTES = 256 << 20  # of all collections together
ADOPTED = "upriver.adopted"
ADOPTED_BYTES = 128 << 20  # of a file of another tool, at a time
_DOCUMENTS = pa.array([Event.MUTATION.value, Event.DELETION.value, Event.EXPIRATION.value])
_MARK_COLUMNS = ["event", "vbucket", "seqno", "epoch", "vbuuid", "collection_id", "scope", "collection"]
_LEGAL = re.compile(r"[A-Za-z0-9_%$-]{1,251}\Z")  # names of scopes and collections, as the protocol allows them


@dataclass(frozen=True)
class LogMark:
    """A rollback or a collection event of one vbucket, as a row of the log."""

    event: str
    vbucket: int
    seqno: int
    epoch: int
    batch: int = 0
    vbuuid: int = 0
    collection_id: int | None = None
    scope: str | None = None
    collection: str | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.seqno

    @property
    def for_good(self) -> bool:
        """Whether this is a drop found in the manifest, not in a vbucket: no rollback takes it back."""
        return self.event == Event.COLLECTION_DROPPED and self.collection_id is None


@dataclass
class WrittenFiles:
    """What one task, or all tasks of a batch, wrote: the log files of each collection, and the marks they met."""

    files: dict[str, list[DataFile]] = field(default_factory=dict)
    ids: dict[str, list[int]] = field(default_factory=dict)  # table name -> collection ids
    marks: list[LogMark] = field(default_factory=list)
    rows: int = 0
    value_bytes: int = 0
    newest_us: int = 0  # when the newest of these changes was made; 0 for none
    complete: list[int] = field(default_factory=list)  # vbuckets that are consistent at the end of the batch
    unread: dict[int, int] = field(default_factory=dict)  # vbuckets that were not read, and the seqno to go back to

    def to_json(self) -> dict[str, Any]:
        """The form in which a task sends it to the driver."""
        return {
            "files": {name: [asdict(file) for file in files] for name, files in self.files.items()},
            "ids": self.ids,
            "marks": [asdict(mark) for mark in self.marks],
            "rows": self.rows,
            "value_bytes": self.value_bytes,
            "newest_us": self.newest_us,
            "complete": self.complete,
            "unread": self.unread,
        }

    @classmethod
    def from_tasks(cls, parts: Iterable[dict[str, Any]]) -> WrittenFiles:
        """What all tasks of a batch sent, together."""
        whole = cls()
        for part in parts:
            for name, files in part["files"].items():
                whole.files.setdefault(name, []).extend(DataFile(**file) for file in files)
            for name, ids in part["ids"].items():
                whole.ids[name] = sorted({*whole.ids.get(name, []), *ids})
            whole.marks.extend(LogMark(**mark) for mark in part["marks"])
            whole.rows += part["rows"]
            whole.value_bytes += part["value_bytes"]
            whole.newest_us = max(whole.newest_us, part["newest_us"])
            whole.complete.extend(part["complete"])
            whole.unread.update((int(vbucket), seqno) for vbucket, seqno in part["unread"].items())
        return whole


def table_name(scope: str | None, collection: str | None, collection_id: int) -> str:
    """The name of a collection's tables; its id, if the manifest no longer has its name.

    A name that servers do not allow is replaced by the id as well: ``a.b`` in scope ``c`` and ``b`` in scope ``c.a``
    would be one table.

    >>> table_name("shop", "orders", 9), table_name(None, None, 9), table_name("..", "orders", 9)
    ('shop.orders', '_unnamed.0x9', '_unnamed.0x9')
    """
    legal = scope and collection and _LEGAL.match(scope) and _LEGAL.match(collection)
    return f"{scope}.{collection}" if legal else f"_unnamed.{collection_id:#x}"


def write_log(batches: Iterable[pa.RecordBatch], lake: str, batch: int) -> WrittenFiles:
    """Write the rows of one task as log files of their collections under ``lake``; marks are only collected."""
    done = WrittenFiles()
    waiting: dict[str, list[pa.Table]] = {}
    sizes: dict[str, int] = {}
    for rows in batches:
        documents = pc.is_in(rows.column("event"), value_set=_DOCUMENTS)
        if not pc.all(documents).as_py():
            done.marks.extend(_marks(rows.filter(pc.invert(documents)), batch))
            rows = rows.filter(documents)
        for name, collection_id, part in _by_collection(rows):
            done.ids[name] = sorted({*done.ids.get(name, []), collection_id})
            done.rows += part.num_rows
            done.value_bytes += part.column("value").nbytes
            done.newest_us = max(done.newest_us, pc.max(part.column("timestamp")).value or 0)
            waiting.setdefault(name, []).append(pa.table(part.select(CHANGES.names)))
            sizes[name] = sizes.get(name, 0) + part.nbytes
            if full := _full(name, sizes):
                done.files.setdefault(full, []).append(_write(waiting.pop(full), lake, full, batch))
                del sizes[full]
    for name, tables in waiting.items():
        done.files.setdefault(name, []).append(_write(tables, lake, name, batch))
    return done


def _full(name: str, sizes: dict[str, int]) -> str | None:
    """The collection to write now: ``name`` if it has enough rows, the largest if all together have too many."""
    if sizes[name] > FLUSH_BYTES:
        return name
    return max(sizes, key=lambda one: sizes[one]) if sum(sizes.values()) > WAITING_BYTES else None


def _by_collection(rows: pa.RecordBatch) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    ids = pc.unique(rows.column("collection_id")).to_pylist()
    for collection_id in ids:
        part = rows if len(ids) == 1 else rows.filter(pc.equal(rows.column("collection_id"), collection_id))
        # The client may have learnt the name in the middle of a batch: split by name as well.
        scopes, names = part.column("scope"), part.column("collection")
        if names.null_count in (0, part.num_rows):
            yield table_name(scopes[0].as_py(), names[0].as_py(), collection_id), collection_id, part
        else:
            for mask in (pc.is_null(names), pc.is_valid(names)):
                half = part.filter(mask)
                name = table_name(half.column("scope")[0].as_py(), half.column("collection")[0].as_py(), collection_id)
                yield name, collection_id, half


def _write(tables: Sequence[pa.Table], lake: str, name: str, batch: int) -> DataFile:
    table = pa.concat_tables(tables)
    vbuckets = table.column("vbucket")
    # Sorted by vbucket, so that a repair reads little; stable, because changes of a vbucket must keep their order.
    if len(pc.unique(vbuckets)) > 1:
        table = gather(table, pc.array_sort_indices(vbuckets.combine_chunks()))
    table = table.append_column(LOG.field("batch"), pa.repeat(pa.scalar(batch, pa.int64()), table.num_rows))
    table = table.append_column(LOG.field("voided"), pa.repeat(pa.scalar(False), table.num_rows))
    span = pc.min_max(vbuckets).as_py()
    return write_file(
        Lake(lake).path("changes", name), new_file_name(span["min"], span["max"], batch, batch), table.cast(LOG)
    )


def _marks(rows: pa.RecordBatch, batch: int) -> list[LogMark]:
    return [LogMark(batch=batch, **row) for row in rows.select(_MARK_COLUMNS).to_pylist()]


def write_marks(lake: str, name: str, marks: Sequence[LogMark], batch: int) -> DataFile:
    """Write the marks that concern a collection as a log file."""
    rows = [dict.fromkeys(LOG.names) | asdict(mark) | {"voided": False} for mark in marks]
    table = pa.Table.from_pylist(rows, schema=LOG)
    lo, hi = min(mark.vbucket for mark in marks), max(mark.vbucket for mark in marks)
    return write_file(Lake(lake).path("changes", name), new_file_name(lo, hi, batch, batch, marks=True), table)


def read_marks(root: str, files: Iterable[DataFile]) -> list[LogMark]:
    """All marks in these files."""
    rows = read_changes(root, [file for file in files if file.marks], [*_MARK_COLUMNS, "batch"])
    return [LogMark(**row) for row in rows.to_pylist()]


def read_changes(
    root: str, files: Sequence[DataFile], columns: Sequence[str] | None = None, span: Span | None = None
) -> pa.Table:
    """Rows of log files; no row is voided in files of earlier versions, which lack the column."""
    return read_files(root, files, LOG, columns, span, adapt=with_voided)


def with_voided(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows with the column ``voided``, which earlier versions did not have."""
    if "voided" not in schema.names:
        return rows
    if "voided" not in rows.schema.names:
        return rows.append_column(LOG.field("voided"), pa.repeat(pa.scalar(False), rows.num_rows))
    known = rows.column("voided")  # null where another tool rewrote an older file
    position = rows.schema.get_field_index("voided")
    return rows.set_column(position, LOG.field("voided"), known.fill_null(False)) if known.null_count else rows


def read_log(root: str, files: Iterable[DataFile], lo: int, hi: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Changes of documents, of vbuckets ``lo`` to ``hi``."""
    chosen = [file for file in files if not file.marks and file.overlaps(lo, hi)]
    inside = [file for file in chosen if lo <= file.lo and file.hi <= hi]
    across = [file for file in chosen if not (lo <= file.lo and file.hi <= hi)]
    return pa.concat_tables([read_changes(root, inside, columns), read_changes(root, across, columns, (lo, hi))])


def adopt_foreign(log: Table, applied: int) -> None:
    """Rewrite log files that another tool wrote, as ``OPTIMIZE`` does, so that their names say what they hold.

    Such a file mixes marks with changes, and applied batches with unapplied ones. Our files never do.
    ``applied`` is the last batch that tail and current have.
    """
    for file in log.files():
        if file.foreign:
            slices = foreign_slices(log.uri, file, LOG, ADOPTED_BYTES)
            ours = [replace(made, made_ms=file.made_ms) for rows in slices for made in _ours(log.uri, rows, applied)]
            try:
                log.commit(ADOPTED, log.next_version(ADOPTED), ours, [file], rearrange=True)
            except CommitConflict:
                log.drop_uncommitted(ours)
                raise


def _ours(root: str, rows: pa.Table, applied: int) -> Iterator[DataFile]:
    """Write rows as files of ours: applied changes, unapplied changes, and marks."""
    rows = with_voided(rows, LOG)
    rows = gather(rows, pc.sort_indices(rows, LOG_ORDER))
    old = pc.less_equal(rows.column("batch"), applied)
    documents = pc.is_in(rows.column("event"), value_set=_DOCUMENTS)
    for part, marks in (
        (rows.filter(pc.and_(documents, old)), False),
        (rows.filter(pc.and_not(documents, old)), False),
        (rows.filter(pc.invert(documents)), True),
    ):
        if part.num_rows:
            span, batches = (pc.min_max(part.column(name)).as_py() for name in ("vbucket", "batch"))
            path = new_file_name(span["min"], span["max"], batches["min"], batches["max"], marks=marks)
            yield write_file(root, path, part)
