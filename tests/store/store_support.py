"""Helpers for the store's tests: small buckets, and reading a source to its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from upriver.store import Bucket, End, Run, SnapshotStart, StoreOptions, StreamSource
from upriver.wire.packed import SUPERSEDED, RecordHead, unpack

SMALL = StoreOptions(background=False, block_bytes=4096, checkpoint_bytes=2048, quota_bytes=64 << 20)
BACKGROUND = StoreOptions(flush_delay_s=0.01, quota_bytes=64 << 20)


class Record(NamedTuple):
    """A record of a stream, with its key without the collection prefix."""

    seqno: int
    key: bytes
    value: bytes
    head: RecordHead


class Clock:
    """A clock that moves when told to."""

    def __init__(self, seconds: int = 1_800_000_000) -> None:
        self.seconds = seconds

    def __call__(self) -> int:
        return self.seconds * 1_000_000_000


def open_bucket(path: Path | str, options: StoreOptions = SMALL, vbuckets: int = 4, **more: Any) -> Bucket:
    return Bucket.open(path, name="test", vbuckets=vbuckets, options=options, **more)


def records(run: Run) -> Iterator[Record]:
    """The records of a run that are in its range and not superseded."""
    at = 0
    while at < len(run.data):
        head, key, value = unpack(run.data, at)
        at += head.size
        if not head.kind & SUPERSEDED and run.after < head.seqno <= run.upto:
            yield Record(head.seqno, key[1:] if head.kind != 3 else key, value, head)


def events(source: StreamSource) -> list[Any]:
    """All events that the source has now; runs become lists of records."""
    found: list[Any] = []
    while (event := source.poll()) is not None:
        found.append(list(records(event)) if isinstance(event, Run) else event)
        if isinstance(event, End):
            break
    return found


def changes(source: StreamSource) -> list[Record]:
    return [record for event in events(source) if isinstance(event, list) for record in event]


def markers(source: StreamSource) -> list[tuple[int, int, int]]:
    return [(e.start, e.end, e.flags) for e in events(source) if isinstance(e, SnapshotStart)]
