"""What changes do to a table: pure functions from changes and marks of the log to rows of the tail.

A tail row says that, from (epoch, seqno) on, its key has this document or is deleted. The greatest (epoch, seqno) of a
key wins. Everything that happens to a table is written as tail rows, so applying them twice, late or in parts gives the
same table. That includes rollbacks: what a rollback brings back is written again under the new epoch.
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

from upriver.lake.change_log import WIPES, LogMark
from upriver.lake.columns import Document, parser_for, row_schema, to_columns
from upriver.lake.files import gather
from upriver.lake.options import TableShape
from upriver.records.schema import Event

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
JSON_DATATYPE = 0x01
_LIKE_AN_ESCAPE = re.compile(r"\\x[89a-f][0-9a-f]")
SLICE_ROWS = 8_192  # parsed at a time: few enough that Python reuses the memory of their objects
SLICE_BYTES = 16 << 20


def latest_indices(keys: pa.ChunkedArray, epochs: pa.ChunkedArray, seqnos: pa.ChunkedArray) -> Indices:
    """The indices of rows that hold the greatest (epoch, seqno) of their key, ascending."""
    codes = keys.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((seqnos.to_numpy(), epochs.to_numpy()))
    last = np.zeros(codes.max(initial=-1) + 1, dtype=np.int64)
    last[codes[order]] = order  # of equal indices, numpy keeps the last
    return np.sort(last)


def latest(rows: pa.Table) -> pa.Table:
    """The tail rows that hold the greatest (epoch, seqno) of their key."""
    return gather(rows, latest_indices(rows.column("_key"), rows.column("_epoch"), rows.column("_seqno")))


def keep_newer(old: pa.Table, new: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Both tables without the older row of keys that are in both; of equal (epoch, seqno), the row in ``new`` stays."""
    index_in_new = pc.index_in(old.column("_key"), value_set=new.column("_key").combine_chunks())
    in_both = pc.is_valid(index_in_new)
    if not pc.any(in_both).as_py():
        return old, new
    rivals = new.select(["_epoch", "_seqno"]).take(index_in_new.filter(in_both))
    mine = old.select(["_epoch", "_seqno"]).filter(in_both)
    newer = pc.or_(
        pc.greater(mine.column("_epoch"), rivals.column("_epoch")),
        pc.and_(
            pc.equal(mine.column("_epoch"), rivals.column("_epoch")),
            pc.greater(mine.column("_seqno"), rivals.column("_seqno")),
        ),
    )
    if not pc.any(newer).as_py():
        return old.filter(pc.invert(in_both)), new
    staying = old.column("_key").filter(in_both).filter(newer).combine_chunks()
    loses = pc.and_(in_both, pc.invert(pc.is_in(old.column("_key"), value_set=staying)))
    return old.filter(pc.invert(loses)), new.filter(pc.invert(pc.is_in(new.column("_key"), value_set=staying)))


def voided(rows: pa.Table, rollbacks: Iterable[LogMark]) -> Mask:
    """Changes that a rollback took back: above its seqno, from an epoch before its own."""
    void = np.zeros(rows.num_rows, dtype=bool)
    vbucket, seqno, epoch = (rows.column(name).to_numpy() for name in ("vbucket", "seqno", "epoch"))
    for layer in _layers(rollbacks):
        bounds = np.zeros((2, int(max(vbucket.max(initial=0), *layer)) + 1), dtype=np.int64)
        for mark in layer.values():
            bounds[:, mark.vbucket] = mark.order
        void |= (seqno > bounds[1, vbucket]) & (epoch < bounds[0, vbucket])
    return void


def _layers(marks: Iterable[LogMark]) -> list[dict[int, LogMark]]:
    """Marks in layers with at most one mark per vbucket: a failed node rolls hundreds of vbuckets back at once."""
    layers: list[dict[int, LogMark]] = []
    for mark in marks:
        free = next((layer for layer in layers if mark.vbucket not in layer), None)
        if free is None:
            layers.append(free := {})
        free[mark.vbucket] = mark
    return layers


def wiped(rows: pa.Table, wipes: Iterable[LogMark]) -> Mask:
    """Changes from before their collection was dropped or flushed."""
    gone = np.zeros(rows.num_rows, dtype=bool)
    vbucket, seqno, epoch = (rows.column(name).to_numpy() for name in ("vbucket", "seqno", "epoch"))
    for mark in wipes:
        older = (epoch < mark.epoch) | ((epoch == mark.epoch) & (seqno < mark.seqno))
        gone |= (vbucket == mark.vbucket) & older
    return gone


def standing_wipes(marks: Sequence[LogMark]) -> list[LogMark]:
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


def tail_rows(changes: pa.Table, shape: TableShape) -> pa.Table:
    """The latest change of every key, as rows of the tail."""
    newest = latest_indices(changes.column("key"), changes.column("epoch"), changes.column("seqno"))
    return as_rows(gather(changes, newest), shape)


def as_rows(changes: pa.Table, shape: TableShape) -> pa.Table:
    """Changes as rows of the tail, one for one."""
    with no_garbage_collection():
        step = max(1, min(SLICE_ROWS, SLICE_BYTES * changes.num_rows // max(changes.nbytes, 1)))
        slices = range(0, max(changes.num_rows, 1), step)
        return pa.concat_tables([_as_rows(changes.slice(start, step), shape) for start in slices])


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Parsed documents are trees without cycles; the collector would spend as much time on them as parsing does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _as_rows(changes: pa.Table, shape: TableShape) -> pa.Table:
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
    """The JSON object of each change, empty where there is none, and the bytes of values that are not JSON objects."""
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
    r"""Keys as text: bytes that are not UTF-8 become escapes, and no two keys become the same text.

    Ordinary text stays as it is. In a key with an escape, or with text that looks like one, backslashes are doubled.

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


def tombstones(keys: pa.ChunkedArray | pa.Array, mark: LogMark, shape: TableShape) -> pa.Table:
    """Rows that delete these keys (as text) from a mark on."""
    count = len(keys)
    schema = row_schema(shape)
    fixed = {"_seqno": mark.seqno, "_vbucket": mark.vbucket, "_epoch": mark.epoch, "_deleted": True}
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
class RepairedRows:
    """Tail rows that repair one vbucket after a rollback, and whether the log reached back far enough."""

    rows: pa.Table
    complete: bool


def repair(
    log: pa.Table, marks: Sequence[LogMark], applied: int, known: pa.Array, shape: TableShape, floor: int
) -> RepairedRows:
    """Repair one vbucket from its whole log, its marks, and the keys that tail and current have of it (``known``).

    ``applied`` is the last batch that the tables have; ``floor`` the seqno up to which the log was trimmed.
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
    # A rollback below the floor takes back changes that are no longer in the log. Above the floor, the state of a key
    # before the rollback is the newest change in the log, or unknown.
    reaches = lowest >= floor and len(missing) == 0 and not _drop_undone(marks, fresh, applied)
    complete = floor == 0 or lowest == 0 or reaches
    ends = tombstones(missing, newest, shape)
    return RepairedRows(pa.concat_tables([_lifted(rows, newest.epoch), ends]), complete)


def _touched(log: pa.Table, marks: Sequence[LogMark], fresh: Sequence[LogMark], applied: int) -> Mask:
    """Changes whose keys may need new rows: new changes and those just voided; all, if a drop was undone."""
    if _drop_undone(marks, fresh, applied):
        return np.ones(log.num_rows, dtype=bool)
    recent: Mask = log.column("batch").to_numpy() > applied
    return recent | voided(log, fresh)


def _drop_undone(marks: Sequence[LogMark], fresh: Sequence[LogMark], applied: int) -> bool:
    """Whether these rollbacks took back a drop that the tables had applied."""
    return any(
        mark.event in WIPES
        and mark.batch <= applied
        and not mark.for_good
        and any(mark.seqno > back.seqno and mark.epoch < back.epoch for back in fresh)
        for mark in marks
    )


def _lifted(rows: pa.Table, epoch: int) -> pa.Table:
    """The same rows under the new epoch, so that they win over what was taken back."""
    position = rows.schema.get_field_index("_epoch")
    lifted = pc.max_element_wise(rows.column("_epoch"), pa.scalar(epoch, pa.int32()))
    return rows.set_column(position, rows.schema.field(position), lifted)
