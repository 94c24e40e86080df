"""Rows of received documents as the packed records that a replica keeps, corrected where they make no sense.

Live writes come one by one, each in a snapshot of its own, so the way of a single row is short and allocates nothing.

See docs/protocol/consumer.md#receiving.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from upriver.model import SEQNO_MAX, Datatype
from upriver.protocol.consumer.streams import ReplicaVbucket
from upriver.wire.bulk.decode import Columns
from upriver.wire.bulk.encode import RowPacker, pack_columns
from upriver.wire.constants import Opcode
from upriver.wire.framing import HEADER_SIZE
from upriver.wire.keys import join_key
from upriver.wire.packed import RecordKind, pack
from upriver.wire.values import body_offset, inflate

Rows = npt.NDArray[np.int64]
_MUTATION, _DELETION = int(Opcode.DCP_MUTATION), int(Opcode.DCP_DELETION)


def tombstone_value(datatype: int, value: bytes) -> tuple[int, bytes]:
    """What may stay of a tombstone's value, which has been checked: extended attributes, but no body."""
    if not datatype & Datatype.XATTR:
        return 0, b""
    plain = inflate(value) if datatype & Datatype.SNAPPY else value
    end = body_offset(plain)
    return (int(Datatype.XATTR), plain[:end]) if end < len(plain) else (datatype, value)


class Marker(NamedTuple):
    """A snapshot marker, as far as a replica needs it."""

    vbucket: int
    opaque: int
    start: int
    end: int
    flags: int
    purge_seqno: int = 0


_PLACE, _RANGE = Struct(">HxxxxI"), Struct(">QQI")
_V1, _V2 = (bytes((0x80, Opcode.DCP_SNAPSHOT_MARKER, 0, 0, extras, 0)) for extras in (20, 1))
_V2_SIZES = {0: 61, 2: 77}  # by the version that the extras give
_PURGE_SEQNO, _PURGE_AT = Struct(">Q"), HEADER_SIZE + 37


def usual_marker(frame: memoryview) -> Marker | None:
    """The marker in a frame, unless there is anything unusual about it; ``decode`` then says what."""
    head = bytes(frame[:6])
    if head == _V1 and len(frame) == HEADER_SIZE + _RANGE.size:
        found = _RANGE.unpack_from(frame, HEADER_SIZE)
    elif head == _V2 and len(frame) == _V2_SIZES.get(frame[HEADER_SIZE]):
        found = _RANGE.unpack_from(frame, HEADER_SIZE + 1)
    else:
        return None
    purged = _PURGE_SEQNO.unpack_from(frame, _PURGE_AT) if len(frame) == _V2_SIZES[2] else ()
    marker = Marker(*_PLACE.unpack_from(frame, 6), *found, *purged)
    return marker if marker.start <= marker.end else None


class ReceivedRows:
    """The rows of a decoder's current columns, for the stores of their vbuckets."""

    def __init__(self) -> None:
        self._packer = RowPacker()
        self._columns: Columns | None = None

    def use(self, columns: Columns) -> None:
        if columns is not self._columns:
            self._columns = columns
            self._events, self._cas = columns.view("event"), columns.view("cas")
            self._values, self._vbuckets = columns.view("value_at"), columns.view("vbucket")
            self._datatypes, self._stream_ids = columns.view("datatype"), columns.view("stream_id")

    def vbucket(self, row: int) -> int:
        return int(self._vbuckets[row])

    def datatypes(self, first: int, last: int) -> int:
        """Every datatype bit that any of the rows has."""
        if last - first == 1:
            return int(self._datatypes[first])
        return int(np.bitwise_or.reduce(self._datatypes[first:last], initial=0))

    def first_stream_id(self, first: int, last: int) -> int:
        """The first of the rows that came with a stream-id, or ``last``."""
        if last - first == 1:
            return last if not self._stream_ids[first] else first
        found = np.flatnonzero(self._stream_ids[first:last])
        return first + int(found[0]) if found.size else last

    def pack_one(self, columns: Columns, row: int, replica: ReplicaVbucket) -> memoryview:
        """One row's record; the memory is good until the next call."""
        if self._events[row] == _MUTATION and 0 < self._cas[row] < SEQNO_MAX:
            packed = self._packer.pack(columns, row)
            if packed is not None:
                return packed
        return self.pack(columns, np.array([row], np.int64), replica)

    def pack(self, columns: Columns, rows: Rows, replica: ReplicaVbucket) -> memoryview:
        """The rows' records side by side."""
        mend_cas(replica, self._cas, rows)
        tombstones = rows[self._events[rows] != _MUTATION]
        odd = tombstones[self._values[tombstones + 1] > self._values[tombstones]]
        if not odd.size:
            return pack_columns(columns, rows).data
        return memoryview(b"".join(self._pieces(columns, rows, odd)))

    def _pieces(self, columns: Columns, rows: Rows, odd: Rows) -> Iterator[bytes | memoryview]:
        """Runs of rows as they are, and between them tombstones, each without what it must not have."""
        begin = 0
        for row in odd.tolist():
            at = int(np.searchsorted(rows, row))
            if at > begin:
                yield pack_columns(columns, rows[begin:at]).data
            yield self._tombstone(columns, row)
            begin = at + 1
        if begin < rows.size:
            yield pack_columns(columns, rows[begin:]).data

    def _tombstone(self, columns: Columns, row: int) -> bytes:
        names = ("seqno", "rev_seqno", "cas", "delete_time", "collection_id")
        seqno, rev_seqno, cas, time, collection_id = (int(columns.view(name)[row]) for name in names)
        datatype, value = tombstone_value(int(self._datatypes[row]), columns.value(row))
        kind = RecordKind.DELETION if self._events[row] == _DELETION else RecordKind.EXPIRATION
        return pack(
            kind, join_key(collection_id, columns.key(row)), value, seqno=seqno, rev_seqno=rev_seqno, cas=cas,
            time=time, datatype=datatype, collection_id=collection_id,
        )  # fmt: skip


def mend_cas(replica: ReplicaVbucket, cas: npt.NDArray[np.uint64], rows: Rows) -> None:
    """Give documents without a valid CAS a new one: 0 and the largest number are not valid.

    See docs/protocol/consumer.md#receiving.
    """
    bad = rows[(cas[rows] == 0) | (cas[rows] == SEQNO_MAX)]
    if bad.size:
        first = max(replica.max_cas, int(cas[rows].max(initial=0, where=cas[rows] != SEQNO_MAX))) + 1
        cas[bad] = np.arange(first, first + bad.size, dtype=np.uint64)
