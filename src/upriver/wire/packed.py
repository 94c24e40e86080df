"""Packed records, and the events in which a stream source hands out runs of them.

A record is a change packed into bytes: a little-endian header of 64 bytes, the key (always with its collection
prefix) and the value. Records lie side by side in memory checkpoints and disk blocks. The store hands out runs of
them, and a producer encodes each run into frames without a Python object per record. Store and producer share only
this module.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HEADER = Struct("<IBBHQQQIIQIIQ")
HEADER_SIZE = HEADER.size

SUPERSEDED = 0x80  # in ``kind``: the same run has a newer version of the key, so readers skip this record


class RecordKind(IntEnum):
    """What a record is: the low seven bits of its ``kind`` byte."""

    MUTATION = 0
    DELETION = 1
    EXPIRATION = 2
    SYSTEM_EVENT = 3
    PREPARE = 4
    COMMIT = 5
    ABORT = 6


class RecordHead(NamedTuple):
    """The header of a record, its fields in the order on disk.

    ``time`` is the expiry of a live document and the deletion time of a tombstone. ``prev_seqno`` is the seqno of
    the version that this one replaced (0: none); a rollback needs it. What ``extra`` means depends on the kind: for
    COMMIT and ABORT the prepared seqno; for SYSTEM_EVENT ``event << 8 | version``; for PREPARE
    ``durability level << 8 | deleted``; for a MUTATION the nru byte.
    """

    size: int
    kind: int
    datatype: int
    key_len: int
    seqno: int
    rev_seqno: int
    cas: int
    flags: int
    time: int
    prev_seqno: int
    value_len: int
    collection_id: int
    extra: int


# Byte offsets of the header's fields, for kernels.
AT_SIZE, AT_KIND, AT_DATATYPE, AT_KEY_LEN = 0, 4, 5, 6
AT_SEQNO, AT_REV, AT_CAS = 8, 16, 24
AT_FLAGS, AT_TIME, AT_PREV = 32, 36, 40
AT_VALUE_LEN, AT_COLLECTION, AT_EXTRA = 48, 52, 56


def pack(
    kind: int,
    key: bytes,
    value: bytes = b"",
    *,
    seqno: int,
    rev_seqno: int = 0,
    cas: int = 0,
    flags: int = 0,
    time: int = 0,
    datatype: int = 0,
    prev_seqno: int = 0,
    collection_id: int = 0,
    extra: int = 0,
) -> bytes:
    """One record as bytes; ``key`` carries its collection prefix."""
    header = HEADER.pack(
        HEADER_SIZE + len(key) + len(value), kind, datatype, len(key), seqno, rev_seqno, cas,
        flags, time, prev_seqno, len(value), collection_id, extra,
    )  # fmt: skip
    return b"".join((header, key, value))


def unpack(data: bytes | bytearray | memoryview, at: int = 0) -> tuple[RecordHead, bytes, bytes]:
    """The record at ``at``: its header, prefixed key and value."""
    head = RecordHead._make(HEADER.unpack_from(data, at))
    key_at = at + HEADER_SIZE
    value_at = key_at + head.key_len
    return head, bytes(data[key_at:value_at]), bytes(data[value_at : value_at + head.value_len])


# ---------------------------------------------------------------------------------------------- source events


class SnapshotStart(NamedTuple):
    """The runs that follow, up to the one whose ``upto`` is ``end``, form one snapshot.

    ``last_matching`` is the last seqno of the snapshot that passes the stream's filter, 0 if none does.
    """

    start: int
    end: int
    flags: int
    last_matching: int
    max_visible: int
    high_completed: int
    high_prepared: int
    purge_seqno: int


class Run(NamedTuple):
    """Packed records side by side; only those with ``after < seqno <= upto`` count.

    ``data`` is valid until the source is polled again or closed.
    """

    data: memoryview
    after: int
    upto: int
    memory: bool


class OsoStart(NamedTuple):
    """Runs of one disk snapshot follow, in any order and without a marker (docs/protocol/snapshots.md#oso)."""


class OsoEnd(NamedTuple):
    """The out-of-order snapshot is complete; ``max_seqno`` is where the disk snapshot ended."""

    max_seqno: int


class EndReason(Enum):
    """Why a source ended."""

    OK = "ok"
    STATE_CHANGED = "state changed"
    ROLLBACK = "rollback"
    BACKFILL_FAILED = "backfill failed"
    FILTER_EMPTY = "filter empty"


class End(NamedTuple):
    """The last event of a source."""

    reason: EndReason


class NewSnapshot(NamedTuple):
    """A whole new snapshot in memory, for live streams; its records at ``address`` are valid while ``data`` lives."""

    first: int
    last: int
    begins_checkpoint: bool
    address: int
    size: int
    data: npt.NDArray[np.uint8]


StreamEvent: TypeAlias = SnapshotStart | Run | OsoStart | OsoEnd | End
