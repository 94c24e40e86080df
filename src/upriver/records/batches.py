"""Turns decoded columns into Arrow record batches without Python work per row.

Keys and values are not copied: a batch refers to the memory that the decoder wrote. Only rows whose value is
compressed or has extended attributes are handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from upriver.model import Datatype, signed
from upriver.records.schema import CHANGES, WIRE, XATTRS, Event, signed_column
from upriver.wire.bulk.decode import Columns
from upriver.wire.values import inflate, split_xattrs

_MUTATION = 0x57
_DOCUMENT_EVENTS = pa.array([Event.MUTATION.value, Event.DELETION.value, Event.EXPIRATION.value])
_WRAPPED = int(Datatype.SNAPPY | Datatype.XATTR)
_whole: WeakKeyDictionary[Columns, Any] = WeakKeyDictionary()

DEFAULT_NAMES: Mapping[int, tuple[str, str]] = {0: ("_default", "_default")}


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """How ``change_batch`` builds its rows."""

    names: Mapping[int, tuple[str, str]] = field(default_factory=lambda: dict(DEFAULT_NAMES))  # id: scope, collection
    xattrs: bool = False  # fill the xattrs column; values never include the attributes either way
    values: bool = True  # False: the stream was opened without values


def wire_batch(columns: Columns, first: int = 0, last: int | None = None) -> pa.RecordBatch:
    """Rows as they came off the wire, in the schema ``WIRE``; nothing is copied.

    The batch is made once per ``Columns`` and then sliced, so a small chunk costs two microseconds. It is valid for
    as long as the columns are.
    """
    whole = _whole.get(columns)
    if whole is None:
        whole = _whole[columns] = _whole_batch(columns)
    return whole.slice(first, (columns.rows if last is None else last) - first)


def _whole_batch(columns: Columns) -> pa.RecordBatch:
    """The whole memory of the columns as one batch, including rows that are not written yet.

    Arrow reads the last offsets, which may not be written yet, so they are set to 0 while the batch is made.
    """
    ends = columns.view("key_at")[-1:], columns.view("value_at")[-1:]
    saved = [end.copy() for end in ends]
    for end in ends:
        end[:] = 0
    rows = columns.sizes.rows
    arrays = [_binary(columns, name, 0, rows) if name in ("key", "value") else _arrow(columns.view(name)[:-1])
              for name in WIRE.names]  # fmt: skip
    batch = pa.RecordBatch.from_arrays(arrays, schema=WIRE)
    for end, last in zip(ends, saved, strict=True):
        end[:] = last
    return batch


def change_batch(columns: Columns, options: ChangeOptions, first: int = 0, last: int | None = None) -> pa.RecordBatch:
    """Rows of the change feed, in the schema ``CHANGES``; rows with event 0 are left out.

    The columns must have been through ``StreamTable.advance``, which fills in snapshot, branch and epoch.
    """
    last = columns.rows if last is None else last
    events, datatypes = columns["event"][first:last], columns["datatype"][first:last]
    scopes, collections = _names(columns["collection_id"][first:last], options.names)
    values, xattrs, datatypes = _values(columns, first, last, events, datatypes, options)
    cas = columns["cas"][first:last]
    wide = {name: columns[name][first:last].astype(np.int64) for name in ("flags", "expiry", "delete_time")}
    made = {
        "event": _event_names(events),
        "vbucket": columns["vbucket"][first:last].astype(np.int32),
        "seqno": signed_column(columns["seqno"][first:last]),
        "rev_seqno": signed_column(columns["rev_seqno"][first:last]),
        "cas": signed_column(cas),
        "timestamp": _timestamps(cas),
        "scope": scopes,
        "collection": collections,
        "collection_id": columns["collection_id"][first:last].astype(np.int64),
        "key": _binary(columns, "key", first, last),
        "value": values,
        "datatype": datatypes.astype(np.int32),
        "xattrs": xattrs,
        **wide,
        **{name: columns[name][first:last] for name in ("epoch", "vbuuid", "snapshot_start", "snapshot_end")},
    }
    arrays = [_arrow(made[name]) for name in CHANGES.names]
    batch = pa.RecordBatch.from_arrays(arrays, schema=CHANGES)
    return batch.filter(pa.array(events != 0)) if columns.dropped else batch


def row_batch(rows: Iterable[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows given by column name (rollbacks, collection events, unusual documents); missing columns are null."""
    return pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=CHANGES)


def rollback_row(vbucket: int, to_seqno: int, lost_vbuuid: int, epoch: int) -> dict[str, Any]:
    """The row for a rollback: it voids the vbucket's changes above ``to_seqno`` from before ``epoch``."""
    return {
        "event": Event.ROLLBACK, "vbucket": vbucket, "seqno": to_seqno, "epoch": epoch, "vbuuid": signed(lost_vbuuid),
    }  # fmt: skip


def _arrow(column: Any) -> pa.Array:
    """The column as an Arrow array; NumPy columns are wrapped, not copied."""
    if not isinstance(column, np.ndarray):
        return column
    return pa.Array.from_buffers(pa.from_numpy_dtype(column.dtype), len(column), [None, pa.py_buffer(column)])


def _binary(columns: Columns, name: str, first: int, last: int, validity: pa.Buffer | None = None) -> pa.Array:
    at = columns.view(name + "_at")[first : last + 1]
    return pa.Array.from_buffers(
        pa.binary(), last - first, [validity, pa.py_buffer(at), pa.py_buffer(columns.view(name))]
    )


_LONGEST_CONSTANT = 1 << 16


@lru_cache(256)
def _repeated(text: str | None) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), _LONGEST_CONSTANT)


def _constant(text: str | None, count: int) -> pa.Array:
    """The same text in every row: the usual case, and twenty times cheaper than a lookup per row."""
    if count > _LONGEST_CONSTANT:
        return pa.repeat(pa.scalar(text, pa.string()), count)
    return _repeated(text).slice(0, count)


def _is_constant(numbers: npt.NDArray[Any]) -> bool:
    return len(numbers) > 0 and bool((numbers == numbers[0]).all())


def _event_names(events: npt.NDArray[np.uint8]) -> pa.Array:
    if _is_constant(events) and events[0]:
        return _constant(_DOCUMENT_EVENTS[int(events[0]) - _MUTATION].as_py(), len(events))
    return _DOCUMENT_EVENTS.take(pa.array(np.where(events, events - np.uint8(_MUTATION), 0)))


def _names(ids: npt.NDArray[np.uint32], names: Mapping[int, tuple[str, str]]) -> tuple[pa.Array, pa.Array]:
    """Scope and collection by id; an id without a name gives nulls."""
    if _is_constant(ids):
        scope, collection = names.get(int(ids[0]), (None, None))
        return _constant(scope, len(ids)), _constant(collection, len(ids))
    encoded = pa.array(ids).dictionary_encode()
    known = [names.get(number, (None, None)) for number in encoded.dictionary.to_pylist()]
    scopes, collections = (pa.array([pair[n] for pair in known], pa.string()) for n in (0, 1))
    return scopes.take(encoded.indices), collections.take(encoded.indices)


def _timestamps(cas: npt.NDArray[np.uint64]) -> pa.Array:
    """The times in CAS values: nanoseconds whose low 16 bits are a counter; null where the CAS is not a clock.

    See docs/protocol/kv.md#clocks.
    """
    microseconds = signed_column(cas & np.uint64(0xFFFF_FFFF_FFFF_0000)) // 1000
    missing = (cas == 0) | (cas > np.uint64(2**63))
    mask = missing if missing.any() else None
    return pa.array(microseconds, CHANGES.field("timestamp").type, mask=mask)


def _values(
    columns: Columns, first: int, last: int, events: Any, datatypes: Any, options: ChangeOptions
) -> tuple[pa.Array, pa.Array, Any]:
    """Values without compression and attributes, the attributes, and the datatypes of the values as they are now."""
    count = last - first
    if not options.values:
        return pa.nulls(count, pa.binary()), pa.nulls(count, XATTRS), datatypes
    live = events == _MUTATION
    validity = None if live.all() else pa.py_buffer(np.packbits(live, bitorder="little"))
    values = _binary(columns, "value", first, last, validity)
    at = columns["value_at"][first : last + 1]
    wrapped = np.flatnonzero((datatypes & _WRAPPED != 0) & (at[1:] != at[:-1]) & (events != 0))
    if not len(wrapped):
        return values, pa.nulls(count, XATTRS), datatypes
    return _unwrap(columns, first, values, live, wrapped, datatypes, options)


def _unwrap(
    columns: Columns, first: int, values: pa.Array, live: Any, wrapped: Any, datatypes: Any, options: ChangeOptions
) -> tuple[pa.Array, pa.Array, Any]:
    """Inflate and split the values of the rows in ``wrapped``; the others stay as they are."""
    bodies: list[bytes | None] = []
    attributes: dict[int, dict[str, bytes]] = {}
    for row in wrapped.tolist():
        value, datatype = columns.value(first + row), int(datatypes[row])
        if datatype & Datatype.SNAPPY:
            value = inflate(value)
        if datatype & Datatype.XATTR:
            attributes[row], value = split_xattrs(value)
        bodies.append(value if live[row] else None)
    mask = np.zeros(len(values), bool)
    mask[wrapped] = True
    replaced = pc.replace_with_mask(values, pa.array(mask), pa.array(bodies, pa.binary()))
    xattrs = _maps(len(values), attributes) if options.xattrs else pa.nulls(len(values), XATTRS)
    return replaced, xattrs, np.where(mask, datatypes & ~np.uint8(_WRAPPED), datatypes)


def _maps(count: int, attributes: Mapping[int, Mapping[str, bytes]]) -> pa.Array:
    """One map per row that has attributes, null for the others."""
    sizes = np.zeros(count, np.int32)
    for row, found in attributes.items():
        sizes[row] = len(found)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    missing = np.ones(count + 1, bool)
    missing[list(attributes)] = False
    missing[-1] = False
    pairs = [pair for row in sorted(attributes) for pair in attributes[row].items()]
    names, contents = pa.array([n for n, _ in pairs], pa.string()), pa.array([c for _, c in pairs], pa.binary())
    return pa.MapArray.from_arrays(pa.array(offsets, mask=missing), names, contents)
