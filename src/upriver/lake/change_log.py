"""The change log: every change of a collection, append-only, in the schema of the feed plus the batch it came with.

Executors write it (`write_log`), file by file, and tell the driver what they wrote. Rollbacks and collection events
are *marks*: they go into files of their own, so that finding them never means reading the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.files import Piece, Span, gather, place, read_pieces, write_piece
from upriver.lake.layout import Lake
from upriver.records.schema import CHANGES, Event

LOG = pa.schema(
    [
        *CHANGES,
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("voided", pa.bool_(), nullable=False),  # taken back by a rollback
    ]
)
DOCUMENTS = [Event.MUTATION.value, Event.DELETION.value, Event.EXPIRATION.value]
# A collection's documents are gone where its vbucket saw one of these.
WIPES = frozenset({Event.COLLECTION_DROPPED.value, Event.COLLECTION_FLUSHED.value})
FLUSH_BYTES = 64 << 20  # larger buffers are given back to the system and asked for again each time, at twice the cost
WAITING_BYTES = 256 << 20  # of all collections together
_DOCUMENTS = pa.array(DOCUMENTS)
_LEGAL = re.compile(r"[A-Za-z0-9_%$-]{1,251}\Z")  # names of scopes and collections, as the protocol allows them


@dataclass(frozen=True)
class Mark:
    """A rollback, or a collection event, of one vbucket."""

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
        """A drop that the manifest told, and no vbucket: nothing that happens to a vbucket takes it back."""
        return self.event == Event.COLLECTION_DROPPED and self.collection_id is None


@dataclass
class Written:
    """What one task did: the files of each collection (by table name), and the marks that came by."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    ids: dict[str, list[int]] = field(default_factory=dict)  # table name -> collection ids
    marks: list[Mark] = field(default_factory=list)
    rows: int = 0
    value_bytes: int = 0
    newest_us: int = 0  # when the newest of these changes was made, 0 for none
    complete: list[int] = field(default_factory=list)  # vbuckets that are consistent where the batch ends
    unread: dict[int, int] = field(default_factory=dict)  # those that were left alone, and where they must go back to

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it to the driver."""
        return {
            "pieces": {name: [asdict(piece) for piece in pieces] for name, pieces in self.pieces.items()},
            "ids": self.ids,
            "marks": [asdict(mark) for mark in self.marks],
            "rows": self.rows,
            "value_bytes": self.value_bytes,
            "newest_us": self.newest_us,
            "complete": self.complete,
            "unread": self.unread,
        }

    @classmethod
    def gather(cls, parts: Iterable[dict[str, Any]]) -> Written:
        """All tasks of a batch together."""
        whole = cls()
        for part in parts:
            for name, pieces in part["pieces"].items():
                whole.pieces.setdefault(name, []).extend(Piece(**piece) for piece in pieces)
            for name, ids in part["ids"].items():
                whole.ids[name] = sorted({*whole.ids.get(name, []), *ids})
            whole.marks.extend(Mark(**mark) for mark in part["marks"])
            whole.rows += part["rows"]
            whole.value_bytes += part["value_bytes"]
            whole.newest_us = max(whole.newest_us, part["newest_us"])
            whole.complete.extend(part["complete"])
            whole.unread.update((int(vbucket), seqno) for vbucket, seqno in part["unread"].items())
        return whole


def table_name(scope: str | None, collection: str | None, collection_id: int) -> str:
    """The name of a collection's tables; one that the manifest no longer names goes by its id.

    So does one whose name no server may give: ``a.b`` in scope ``c`` and ``b`` in scope ``c.a`` would be one table.

    >>> table_name("shop", "orders", 9), table_name(None, None, 9), table_name("..", "orders", 9)
    ('shop.orders', '_unnamed.0x9', '_unnamed.0x9')
    """
    legal = scope and collection and _LEGAL.match(scope) and _LEGAL.match(collection)
    return f"{scope}.{collection}" if legal else f"_unnamed.{collection_id:#x}"


def write_log(batches: Iterable[pa.RecordBatch], lake: str, batch: int) -> Written:
    """Write the rows of one task as log files of their collections under ``lake``."""
    done = Written()
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
                done.pieces.setdefault(full, []).append(_write(waiting.pop(full), lake, full, batch))
                del sizes[full]
    for name, tables in waiting.items():
        done.pieces.setdefault(name, []).append(_write(tables, lake, name, batch))
    return done


def _full(name: str, sizes: dict[str, int]) -> str | None:
    """The collection to write now: the one at hand when it has enough, the largest when all together have too much."""
    if sizes[name] > FLUSH_BYTES:
        return name
    return max(sizes, key=lambda one: sizes[one]) if sum(sizes.values()) > WAITING_BYTES else None


def _by_collection(rows: pa.RecordBatch) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    ids = pc.unique(rows.column("collection_id")).to_pylist()
    for collection_id in ids:
        part = rows if len(ids) == 1 else rows.filter(pc.equal(rows.column("collection_id"), collection_id))
        # The manifest may have learnt the name in the middle of a batch: split by name as well.
        scopes, names = part.column("scope"), part.column("collection")
        if names.null_count in (0, part.num_rows):
            yield table_name(scopes[0].as_py(), names[0].as_py(), collection_id), collection_id, part
        else:
            for mask in (pc.is_null(names), pc.is_valid(names)):
                half = part.filter(mask)
                name = table_name(half.column("scope")[0].as_py(), half.column("collection")[0].as_py(), collection_id)
                yield name, collection_id, half


def _write(tables: Sequence[pa.Table], lake: str, name: str, batch: int) -> Piece:
    table = pa.concat_tables(tables)
    vbuckets = table.column("vbucket")
    # By vbucket, so that repairing one reads little; stable, because order within a vbucket is the order of changes.
    if len(pc.unique(vbuckets)) > 1:
        table = gather(table, pc.array_sort_indices(vbuckets.combine_chunks()))
    table = table.append_column(LOG.field("batch"), pa.repeat(pa.scalar(batch, pa.int64()), table.num_rows))
    table = table.append_column(LOG.field("voided"), pa.repeat(pa.scalar(False), table.num_rows))
    span = pc.min_max(vbuckets).as_py()
    return write_piece(Lake(lake).path("changes", name), place(span["min"], span["max"], batch, batch), table.cast(LOG))


def _marks(rows: pa.RecordBatch, batch: int) -> list[Mark]:
    names = ["event", "vbucket", "seqno", "epoch", "vbuuid", "collection_id", "scope", "collection"]
    return [Mark(batch=batch, **row) for row in rows.select(names).to_pylist()]


def write_marks(lake: str, name: str, marks: Sequence[Mark], batch: int) -> Piece:
    """The marks that concern a collection, as rows of its log."""
    rows = [dict.fromkeys(LOG.names) | asdict(mark) | {"voided": False} for mark in marks]
    table = pa.Table.from_pylist(rows, schema=LOG)
    lo, hi = min(mark.vbucket for mark in marks), max(mark.vbucket for mark in marks)
    return write_piece(Lake(lake).path("changes", name), place(lo, hi, batch, batch, marks=True), table)


def read_marks(root: str, pieces: Iterable[Piece]) -> list[Mark]:
    """All marks in these files."""
    rows = read_changes(root, [piece for piece in pieces if piece.marks])
    return [
        mark
        for part in rows.to_batches()
        if part.num_rows
        for mark in (
            Mark(**row)
            for row in part.select(
                ["event", "vbucket", "seqno", "epoch", "batch", "vbuuid", "collection_id", "scope", "collection"]
            ).to_pylist()
        )
    ]


def read_changes(
    root: str, pieces: Sequence[Piece], columns: Sequence[str] | None = None, span: Span | None = None
) -> pa.Table:
    """Rows of log files; of those that an earlier version wrote, none is voided."""
    return read_pieces(root, pieces, LOG, columns, span, adapt=with_voided)


def with_voided(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows with the column that earlier versions did not have."""
    if "voided" not in schema.names:
        return rows
    if "voided" not in rows.schema.names:
        return rows.append_column(LOG.field("voided"), pa.repeat(pa.scalar(False), rows.num_rows))
    known = rows.column("voided")  # null where another tool rewrote such a file
    position = rows.schema.get_field_index("voided")
    return rows.set_column(position, LOG.field("voided"), known.fill_null(False)) if known.null_count else rows


def read_log(root: str, pieces: Iterable[Piece], lo: int, hi: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Changes of documents, of vbuckets ``lo`` to ``hi``."""
    chosen = [piece for piece in pieces if not piece.marks and piece.overlaps(lo, hi)]
    inside = [piece for piece in chosen if lo <= piece.lo and piece.hi <= hi]
    across = [piece for piece in chosen if not (lo <= piece.lo and piece.hi <= hi)]
    return pa.concat_tables([read_changes(root, inside, columns), read_changes(root, across, columns, (lo, hi))])
