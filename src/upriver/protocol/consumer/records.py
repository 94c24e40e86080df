"""Received changes as the packed records that a replica keeps, with invalid values corrected.

Documents come as rows in bulk (``ReceivedRows``); system events, prepares and UPR documents come as single messages
(``apply_message``). Live writes arrive one by one, each in its own snapshot, so the path of a single row is short and
allocates nothing.

See docs/protocol/consumer.md#receiving.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from upriver.errors import InvalidMessage, Status, StatusError
from upriver.model import SEQNO_MAX, Datatype
from upriver.protocol.consumer.streams import ReplicaVbucket
from upriver.wire.bulk.decode import Columns
from upriver.wire.bulk.encode import RowPacker, pack_columns
from upriver.wire.constants import Opcode
from upriver.wire.framing import HEADER_SIZE
from upriver.wire.keys import join_key, split_key
from upriver.wire.message import Message
from upriver.wire.messages.dcp import Abort, Commit, Prepare, SeqnoAdvanced
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, SystemEvent, to_record
from upriver.wire.messages.upr import UprDeletion, UprExpiration, UprMutation
from upriver.wire.packed import RecordKind, pack
from upriver.wire.values import body_offset, check_value, inflate

Rows = npt.NDArray[np.int64]
_MUTATION, _DELETION = int(Opcode.DCP_MUTATION), int(Opcode.DCP_DELETION)


def tombstone_value(datatype: int, value: bytes) -> tuple[int, bytes]:
    """The datatype and value that a tombstone may keep: extended attributes but no body. The value must be valid."""
    if not datatype & Datatype.XATTR:
        return 0, b""
    plain = inflate(value) if datatype & Datatype.SNAPPY else value
    end = body_offset(plain)
    return (int(Datatype.XATTR), plain[:end]) if end < len(plain) else (datatype, value)


class Marker(NamedTuple):
    """The fields of a snapshot marker that a replica needs."""

    vbucket: int
    opaque: int
    start: int
    end: int
    flags: int
    purge_seqno: int = 0


_PLACE, _RANGE = Struct(">HxxxxI"), Struct(">QQI")
_V1, _V2 = (bytes((0x80, Opcode.DCP_SNAPSHOT_MARKER, 0, 0, extras, 0)) for extras in (20, 1))
_V2_SIZES = {0: 61, 2: 77}  # by the version in the extras
_PURGE_SEQNO, _PURGE_AT = Struct(">Q"), HEADER_SIZE + 37


def usual_marker(frame: memoryview) -> Marker | None:
    """The marker in a frame; None if anything is unusual about it and ``decode`` must look at it."""
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
    """The rows of a decoder's current columns, to be packed for the store."""

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
        """The union of the rows' datatype bits."""
        if last - first == 1:
            return int(self._datatypes[first])
        return int(np.bitwise_or.reduce(self._datatypes[first:last], initial=0))

    def first_stream_id(self, first: int, last: int) -> int:
        """The first row that has a stream-id, or ``last``."""
        if last - first == 1:
            return last if not self._stream_ids[first] else first
        found = np.flatnonzero(self._stream_ids[first:last])
        return first + int(found[0]) if found.size else last

    def pack_one(self, columns: Columns, row: int, replica: ReplicaVbucket) -> memoryview:
        """The record of one row; the memory is valid until the next call."""
        if self._events[row] == _MUTATION and 0 < self._cas[row] < SEQNO_MAX:
            packed = self._packer.pack(columns, row)
            if packed is not None:
                return packed
        return self.pack(columns, np.array([row], np.int64), replica)

    def pack(self, columns: Columns, rows: Rows, replica: ReplicaVbucket) -> memoryview:
        """The records of the rows, side by side."""
        mend_cas(replica, self._cas, rows)
        tombstones = rows[self._events[rows] != _MUTATION]
        odd = tombstones[self._values[tombstones + 1] > self._values[tombstones]]
        if not odd.size:
            return pack_columns(columns, rows).data
        return memoryview(b"".join(self._pieces(columns, rows, odd)))

    def _pieces(self, columns: Columns, rows: Rows, odd: Rows) -> Iterator[bytes | memoryview]:
        """Runs of plain rows, and between them the tombstones, each without its body."""
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
    """Replace invalid CAS values: 0 and the largest number are invalid.

    See docs/protocol/consumer.md#receiving.
    """
    bad = rows[(cas[rows] == 0) | (cas[rows] == SEQNO_MAX)]
    if bad.size:
        first = max(replica.max_cas, int(cas[rows].max(initial=0, where=cas[rows] != SEQNO_MAX))) + 1
        cas[bad] = np.arange(first, first + bad.size, dtype=np.uint64)


_UPR_KINDS = {UprMutation: RecordKind.MUTATION, UprDeletion: RecordKind.DELETION, UprExpiration: RecordKind.EXPIRATION}


def apply_message(replica: ReplicaVbucket, message: Message, collections: bool) -> int:
    """Store what one message says; returns the seqno that the stream has reached."""
    if isinstance(message, SeqnoAdvanced):
        replica.replication.advance(message.by_seqno)
        return message.by_seqno
    if isinstance(message, SystemEvent):
        return _apply_event(replica, message)
    if isinstance(message, Prepare):
        return _apply_prepare(replica, message, collections)
    if isinstance(message, Commit | Abort):
        return _complete(replica, message, collections)
    if isinstance(message, UprMutation | UprDeletion | UprExpiration):
        return _apply_upr_document(replica, message, collections)
    raise StatusError.of(Status.NOT_SUPPORTED, type(message).__name__)


def _apply_event(replica: ReplicaVbucket, message: SystemEvent) -> int:
    """Store a system event, in the store's own form whatever version it came in."""
    content = message.content()
    event, version, key, value = to_record(content)
    collection_id = content.collection_id if isinstance(content, CollectionBegun | CollectionEnded) else 0
    record = pack(
        RecordKind.SYSTEM_EVENT, key, value, seqno=message.by_seqno, cas=message.cas, collection_id=collection_id,
        extra=event << 8 | version,
    )  # fmt: skip
    replica.replication.apply_records(record)
    return message.by_seqno


def _split(wire_key: bytes, collections: bool) -> tuple[int, bytes]:
    return split_key(wire_key) if collections else (0, wire_key)


def _apply_prepare(replica: ReplicaVbucket, message: Prepare, collections: bool) -> int:
    collection_id, key = _split(message.key, collections)
    datatype, value = message.datatype, message.value
    if message.deleted and value:
        datatype, value = tombstone_value(datatype, value)
    record = pack(
        RecordKind.PREPARE, join_key(collection_id, key), value, seqno=message.by_seqno, rev_seqno=message.rev_seqno,
        cas=_usable_cas(replica, message.cas), flags=message.flags, time=message.expiry, datatype=datatype,
        collection_id=collection_id,
        extra=message.durability_level << 8 | message.deleted,
    )  # fmt: skip
    replica.replication.apply_records(record)
    return message.by_seqno


def _check_value(value: bytes, datatype: int) -> None:
    """Check a UPR value. The decoder cannot, as it does not know where the extended metadata begins."""
    try:
        check_value(value, datatype)
    except InvalidMessage as error:
        raise StatusError.of(error.status, error.reason) from error


def _usable_cas(replica: ReplicaVbucket, cas: int) -> int:
    """The message's CAS, or a new one if it is invalid (0 or the largest number).

    See docs/protocol/consumer.md#receiving.
    """
    return cas if 0 < cas < SEQNO_MAX else replica.max_cas + 1


def _complete(replica: ReplicaVbucket, message: Commit | Abort, collections: bool) -> int:
    collection_id, key = _split(message.key, collections)
    if isinstance(message, Commit):
        replica.replication.commit(key, collection_id, message.prepared_seqno, message.commit_seqno)
        return message.commit_seqno
    replica.replication.abort(key, collection_id, message.prepared_seqno, message.abort_seqno)
    return message.abort_seqno


def _apply_upr_document(
    replica: ReplicaVbucket, message: UprMutation | UprDeletion | UprExpiration, collections: bool
) -> int:
    """Store a UPR document, without its extended metadata, which nothing here uses."""
    collection_id, key = _split(message.key, collections)
    flags, expiry, datatype, value = 0, 0, message.datatype, message.document
    _check_value(value, datatype)
    if isinstance(message, UprMutation):
        flags, expiry = message.flags, message.expiry
    elif value:
        datatype, value = tombstone_value(datatype, value)
    record = pack(
        _UPR_KINDS[type(message)], join_key(collection_id, key), value, seqno=message.by_seqno,
        rev_seqno=message.rev_seqno, cas=_usable_cas(replica, message.cas), datatype=datatype, flags=flags,
        time=expiry, collection_id=collection_id,
    )  # fmt: skip
    replica.replication.apply_records(record)
    return message.by_seqno
