"""The values that every layer shares: vbucket states, failover logs, documents, claims.

They are plain and immutable, and do no I/O.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag, StrEnum
from typing import NamedTuple

SEQNO_MAX = 0xFFFF_FFFF_FFFF_FFFF
DEFAULT_COLLECTION = 0
MAX_FAILOVER_ENTRIES = 25


class VbucketState(IntEnum):
    """What a node may do with a vbucket. The numbers are DCP's; UPR swaps pending and replica."""

    ACTIVE = 1
    REPLICA = 2
    PENDING = 3
    DEAD = 4


class Datatype(IntFlag):
    """What the bytes of a value are; the bits combine freely (docs/protocol/framing.md#datatype)."""

    RAW = 0
    JSON = 1
    SNAPPY = 2
    XATTR = 4


class FailoverEntry(NamedTuple):
    """History continued under ``uuid`` from ``seqno`` on."""

    uuid: int
    seqno: int


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """The branches of one vbucket's history, newest first; never empty."""

    entries: tuple[FailoverEntry, ...]

    @property
    def uuid(self) -> int:
        """The vbuuid of the current branch."""
        return self.entries[0].uuid

    @classmethod
    def new(cls, uuid: int, seqno: int = 0) -> FailoverLog:
        """The log of a new vbucket."""
        return cls((FailoverEntry(uuid, seqno),))

    @classmethod
    def load(cls, entries: Iterable[tuple[int, int]]) -> FailoverLog | None:
        """A log as it was stored or received, without its invalid entries; None if none is left.

        An entry is invalid if its uuid is 0 or its seqno is above that of the next newer entry
        (docs/protocol/rollback.md#failover-log).
        """
        kept: list[FailoverEntry] = []
        for uuid, seqno in entries:
            if uuid != 0 and (not kept or seqno <= kept[-1].seqno):
                kept.append(FailoverEntry(uuid, seqno))
        return cls(tuple(kept)) if kept else None

    def branch(self, uuid: int, seqno: int, most: int = MAX_FAILOVER_ENTRIES) -> FailoverLog:
        """The log after history branches at ``seqno`` under a new ``uuid``; newer entries belong to a lost branch.

        >>> log = FailoverLog.new(1).branch(2, 50).branch(3, 20)
        >>> [tuple(entry) for entry in log]
        [(3, 20), (1, 0)]
        """
        kept = tuple(entry for entry in self.entries if entry.seqno <= seqno)
        return FailoverLog((FailoverEntry(uuid, seqno), *kept)[:most])

    def roll_back(self, seqno: int, fresh_uuid: int) -> FailoverLog:
        """The log after a rollback to ``seqno``; ``fresh_uuid`` is used only if no entry is left."""
        kept = tuple(entry for entry in self.entries if entry.seqno <= seqno)
        return FailoverLog(kept) if kept else FailoverLog.new(fresh_uuid, seqno)

    def last_seqno_of(self, uuid: int, high_seqno: int) -> int | None:
        """Where the branch ``uuid`` ends: at the next newer entry's seqno, or at ``high_seqno``; None if unknown."""
        for index in range(len(self.entries) - 1, -1, -1):
            if self.entries[index].uuid == uuid:
                return self.entries[index - 1].seqno if index else high_seqno
        return None

    def __iter__(self) -> Iterator[FailoverEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class Document:
    """One version of one key, as stored: a live document, or its tombstone."""

    key: bytes
    value: bytes = b""
    collection_id: int = DEFAULT_COLLECTION
    cas: int = 0
    seqno: int = 0
    rev_seqno: int = 0
    flags: int = 0
    expiry: int = 0
    datatype: int = 0
    deleted: bool = False
    expired: bool = False  # the tombstone of a document that expired
    delete_time: int = 0


class OnRollback(StrEnum):
    """What to do when a vbucket loses history that the reader has read."""

    EMIT = "emit"  # report the rollback, then continue on the new branch
    FAIL = "fail"  # raise ``HistoryLost``
    REWIND = "rewind"  # continue silently: for readers that tolerate repeated changes and changes that were undone


@dataclass(frozen=True, slots=True)
class Claim:
    """What a stream request says about a reader's position (``protocol.position``).

    A claim is true if ``snap_end`` is at least the end of every snapshot that the reader took changes from, and
    ``snap_start`` is a seqno at which the reader had every key.
    """

    vbuuid: int = 0
    seqno: int = 0
    snap_start: int = 0
    snap_end: int = 0

    def __post_init__(self) -> None:
        if not self.snap_start <= self.seqno <= self.snap_end:
            raise ValueError(f"seqno {self.seqno} is outside its snapshot {self.snap_start}..{self.snap_end}")


def signed(number: int) -> int:
    """A u64 as Arrow, Spark and the kernels store it: the same 64 bits, read as a signed number.

    >>> signed(2**64 - 1), signed(7)
    (-1, 7)
    """
    return number - 2**64 if number >= 2**63 else number


def unsigned(number: int) -> int:
    """The u64 behind a signed number.

    >>> unsigned(-1) == 2**64 - 1, unsigned(7)
    (True, 7)
    """
    return number & SEQNO_MAX


def vbucket_of(key: bytes, vbuckets: int) -> int:
    """The vbucket that owns a key (without its collection prefix).

    >>> vbucket_of(b"hello", 1024), vbucket_of(b"airline_10", 1024)
    (528, 361)
    """
    return ((zlib.crc32(key) >> 16) & 0x7FFF) % vbuckets
