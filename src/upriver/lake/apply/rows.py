"""What a stretch of the log does to a table: pure functions from changes and marks to rows of the tail.

A tail row says what its key is from (epoch, seqno) on: a document, or deleted. Everything that happens to a table is
said with such rows, so that applying them twice, late or in pieces gives the same table: the greatest (epoch, seqno)
of a key wins. A rollback is no exception: what it brings back is said again under the new epoch.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from upriver.lake.change_log import WIPES, Mark
from upriver.lake.columns import Document, Shape, parser_for, row_schema, to_columns
from upriver.lake.files import gather
from upriver.records.schema import Event

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
JSON_DATATYPE = 0x01
_LIKE_AN_ESCAPE = re.compile(r"\\x[89a-f][0-9a-f]")
SLICE_ROWS = 8_192  # parsed at a time: few enough that Python reuses the memory of their objects
SLICE_BYTES = 16 << 20


def winners(keys: pa.ChunkedArray, epochs: pa.ChunkedArray, seqnos: pa.ChunkedArray) -> Indices:
    """Rows that hold the greatest (epoch, seqno) of their key, in the order of the rows."""
    codes = keys.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((seqnos.to_numpy(), epochs.to_numpy()))
    last = np.zeros(codes.max(initial=-1) + 1, dtype=np.int64)
    last[codes[order]] = order  # of equal indices, numpy keeps the last
    return np.sort(last)


def voided(rows: pa.Table, rollbacks: Iterable[Mark]) -> Mask:
    """Changes that a rollback took back: above its seqno, from an epoch before its own."""
    void = np.zeros(rows.num_rows, dtype=bool)
    vbucket, seqno, epoch = (rows.column(name).to_numpy() for name in ("vbucket", "seqno", "epoch"))
    for layer in _layers(rollbacks):
        bounds = np.zeros((2, int(max(vbucket.max(initial=0), *layer)) + 1), dtype=np.int64)
        for mark in layer.values():
            bounds[:, mark.vbucket] = mark.order
        void |= (seqno > bounds[1, vbucket]) & (epoch < bounds[0, vbucket])
    return void


def _layers(marks: Iterable[Mark]) -> list[dict[int, Mark]]:
    """Marks such that each layer has one of a vbucket at most: a node that fails takes back from hundreds at once."""
    layers: list[dict[int, Mark]] = []
    for mark in marks:
        free = next((layer for layer in layers if mark.vbucket not in layer), None)
        if free is None:
            layers.append(free := {})
        free[mark.vbucket] = mark
    return layers


def wiped(rows: pa.Table, wipes: Iterable[Mark]) -> Mask:
    """Changes from before their collection was dropped or flushed."""
    gone = np.zeros(rows.num_rows, dtype=bool)
    vbucket, seqno, epoch = (rows.column(name).to_numpy() for name in ("vbucket", "seqno", "epoch"))
    for mark in wipes:
        older = (epoch < mark.epoch) | ((epoch == mark.epoch) & (seqno < mark.seqno))
        gone |= (vbucket == mark.vbucket) & older
    return gone


def standing_wipes(marks: Sequence[Mark]) -> list[Mark]:
    """Drops and flushes that no rollback took back."""
    rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK]
    return [
        mark
        for mark in marks
        if mark.event in WIPES
        and (
            mark.for_good
            or not any(
                back.vbucket == mark.vbucket and mark.seqno > back.seqno and mark.epoch < back.epoch
                for back in rollbacks
            )
        )
    ]


def tail_rows(changes: pa.Table, shape: Shape) -> pa.Table:
    """The latest change of every key, as rows of the tail."""
    changes = gather(changes, winners(changes.column("key"), changes.column("epoch"), changes.column("seqno")))
    return as_rows(changes, shape)


def as_rows(changes: pa.Table, shape: Shape) -> pa.Table:
    """Changes as rows of the tail, one for one."""
    with no_collection():
        step = max(1, min(SLICE_ROWS, SLICE_BYTES * changes.num_rows // max(changes.nbytes, 1)))
        slices = range(0, max(changes.num_rows, 1), step)
        return pa.concat_tables([_as_rows(changes.slice(start, step), shape) for start in slices])


@contextmanager
def no_collection() -> Iterator[None]:
    """Parsed documents are trees without cycles; the collector would walk them again and again, for half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _as_rows(changes: pa.Table, shape: Shape) -> pa.Table:
    deleted = pc.not_equal(changes.column("event"), Event.MUTATION.value)
    documents, raw = _documents(changes)
    arrays, rest = to_columns(documents, shape)
    expiry = changes.column("expiry")
    expires = pc.if_else(pc.greater(pc.coalesce(expiry, 0), 0), expiry, None).cast(pa.timestamp("s", tz="UTC"))
    meta = [
        text_keys(changes.column("key")),
        changes.column("seqno"),
        changes.column("vbucket"),
        changes.column("epoch"),
        changes.column("cas"),
        changes.column("timestamp"),
        expires.cast(pa.timestamp("us", tz="UTC")),
        deleted,
        pa.array(rest, pa.string()),
        raw,
    ]
    return pa.table([*meta, *arrays], schema=row_schema(shape))


def _documents(changes: pa.Table) -> tuple[list[Document], pa.Array]:
    """Each change as a JSON object (empty when it is none), and the bytes of those that are no object."""
    values, parse = changes.column("value").to_pylist(), parser_for(changes.column("value"))
    alive = pc.equal(changes.column("event"), Event.MUTATION.value)
    json = pc.equal(pc.bit_wise_and(pc.coalesce(changes.column("datatype"), 0), JSON_DATATYPE), JSON_DATATYPE)
    if pc.all(pc.and_(alive, json)).as_py() and None not in values:
        parsed = [parse(value) for value in values]
        if None not in parsed:
            return parsed, pa.nulls(len(values), pa.binary())  # type: ignore[return-value]
    return _mixed_documents(values, alive.to_pylist(), json.to_pylist(), parse)


def _mixed_documents(
    values: list[bytes | None], alive: list[bool], json: list[bool], parse: Callable[[bytes], Document | None]
) -> tuple[list[Document], pa.Array]:
    documents: list[Document] = []
    raw: list[bytes | None] = [None] * len(values)
    for index, (value, live, is_json) in enumerate(zip(values, alive, json, strict=True)):
        document = parse(value) if live and is_json and value is not None else None
        if document is None:
            raw[index] = (b"" if value is None else value) if live else None
        documents.append(document if document is not None else {})
    return documents, pa.array(raw, pa.binary())


def text_keys(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    r"""Keys as text; bytes that are no UTF-8 show as escapes, and no two keys as the same text.

    Ordinary text stays as it is. Where there is an escape, or text that looks like one, backslashes are doubled.

    >>> print(*text_keys(pa.chunked_array([[b"a\\b", b"\xff", rb"\xff", b"\\\xff"]])).to_pylist())
    a\b \xff \\xff \\\xff
    """
    try:
        text = keys.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.chunked_array([pa.array([_text_key(key) for key in keys.to_pylist()], pa.string())])
    if pc.any(pc.match_substring(text, "\\x")).as_py():
        return pa.chunked_array([pa.array([_text_key(key) for key in keys.to_pylist()], pa.string())])
    return text


def _text_key(key: bytes) -> str:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return key.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return text.replace("\\", "\\\\") if _LIKE_AN_ESCAPE.search(text) else text


@dataclass(frozen=True)
class Gone:
    """Keys of a vbucket that end at (epoch, seqno)."""

    vbucket: int
    epoch: int
    seqno: int


def tombstones(keys: pa.ChunkedArray | pa.Array, gone: Gone, shape: Shape) -> pa.Table:
    """Rows that delete these keys (as text)."""
    count = len(keys)
    schema = row_schema(shape)
    fixed = {"_seqno": gone.seqno, "_vbucket": gone.vbucket, "_epoch": gone.epoch, "_deleted": True}
    columns = [
        keys
        if field.name == "_key"
        else pa.repeat(pa.scalar(fixed[field.name], field.type), count)
        if field.name in fixed
        else pa.nulls(count, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


@dataclass(frozen=True)
class Repair:
    """What brings one vbucket right after a rollback, and whether the log reached back far enough to know."""

    rows: pa.Table
    complete: bool


def repair(log: pa.Table, marks: Sequence[Mark], applied: int, known: pa.Array, shape: Shape, floor: int) -> Repair:
    """Tail rows that make one vbucket right, from its whole log, its marks and the keys that the table has of it.

    ``applied`` is the last batch that the table has; ``floor`` the seqno up to which the log was trimmed.
    """
    fresh = [mark for mark in marks if mark.event == Event.ROLLBACK and mark.batch > applied]
    newest = max(fresh, key=lambda mark: mark.order)
    lowest = min(mark.seqno for mark in fresh)
    rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK]
    dead = voided(log, rollbacks) | wiped(log, standing_wipes(marks))
    touched = text_keys(log.column("key").filter(pa.array(_touched(log, marks, fresh, applied)))).combine_chunks()
    if lowest == 0 or any(mark.event in WIPES and mark.batch > applied for mark in marks):
        touched = pa.concat_arrays([touched.cast(pa.string()), known.cast(pa.string())])
    touched = pc.unique(touched)
    live = log.filter(pa.array(~dead))
    live = live.filter(pc.is_in(text_keys(live.column("key")), value_set=touched))
    rows = tail_rows(live, shape)
    missing = touched.filter(pc.invert(pc.is_in(touched, value_set=rows.column("_key"))))
    # A rollback below the floor takes back changes that nobody can name any more; above it, what a key was before is
    # the newest that the log has of it, or unknown.
    reaches = lowest >= floor and len(missing) == 0 and not _undone(marks, fresh, applied)
    known_state = floor == 0 or lowest == 0 or reaches
    ends = tombstones(missing, Gone(newest.vbucket, newest.epoch, newest.seqno), shape)
    return Repair(pa.concat_tables([_restamped(rows, newest.epoch), ends]), known_state)


def _touched(log: pa.Table, marks: Sequence[Mark], fresh: Sequence[Mark], applied: int) -> Mask:
    """Changes whose keys may have to change: new ones, those just taken back, all of them if a drop was."""
    if _undone(marks, fresh, applied):
        return np.ones(log.num_rows, dtype=bool)
    recent: Mask = log.column("batch").to_numpy() > applied
    return recent | voided(log, fresh)


def _undone(marks: Sequence[Mark], fresh: Sequence[Mark], applied: int) -> bool:
    """Did these rollbacks take back a drop that the table had followed?"""
    return any(
        mark.event in WIPES
        and mark.batch <= applied
        and not mark.for_good
        and any(mark.seqno > back.seqno and mark.epoch < back.epoch for back in fresh)
        for mark in marks
    )


def _restamped(rows: pa.Table, epoch: int) -> pa.Table:
    """The same rows, said again under the new epoch, so that they win over what was taken back."""
    position = rows.schema.get_field_index("_epoch")
    lifted = pc.max_element_wise(rows.column("_epoch"), pa.scalar(epoch, pa.int32()))
    return rows.set_column(position, rows.schema.field(position), lifted)
