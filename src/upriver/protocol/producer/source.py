"""What a producer needs from a store: a bucket, its vbuckets and their stream sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from upriver.protocol.roles import StoredVbucket
from upriver.wire.packed import NewSnapshot, StreamEvent

Wake = Callable[[], None]
"""Called by the store once, in any of its threads, when there may be something new."""


class Source(Protocol):
    """One reader's way through a vbucket's history; ``upriver.store.StreamSource`` is one."""

    @property
    def position(self) -> int: ...
    @property
    def backfilling(self) -> bool: ...
    def poll(self) -> StreamEvent | None: ...
    def close(self) -> None: ...
    def hand_over(self, wake: Wake) -> int | None: ...
    def take_back(self, origin: int, position: int) -> None: ...


class SourceVbucket(StoredVbucket, Protocol):
    """A vbucket to stream from; ``upriver.store.VBucket`` is one."""

    @property
    def id(self) -> int: ...
    @property
    def persisted_seqno(self) -> int: ...
    @property
    def purge_seqno(self) -> int: ...
    @property
    def receiving_initial_disk_snapshot(self) -> bool: ...
    def collection_high_seqno(self, collection_id: int) -> int: ...
    def wait(self, wake: Wake) -> None: ...
    def stop_waiting(self, wake: Wake) -> None: ...
    def stream(
        self, start: int, end: int, *, snap_start: int, snap_end: int, collections: frozenset[int] | None, wake: Wake,
        ignore_purged: bool, purge_seqno: int, disk_only: bool, oso: bool, visible_only: bool,
    ) -> Source: ...  # fmt: skip


class InScope(Protocol):
    """What a stream request needs to know about a collection."""

    @property
    def scope_id(self) -> int: ...


class SourceManifest(Protocol):
    """The scopes and collections that a stream request may name."""

    @property
    def scopes(self) -> Mapping[int, object]: ...
    @property
    def collections(self) -> Mapping[int, InScope]: ...


class SourceStore(Protocol):
    """The bucket as the producers of its connections see it."""

    @property
    def vbuckets(self) -> int:
        """The number of vbuckets of the bucket."""

    @property
    def manifest(self) -> SourceManifest: ...

    @property
    def waits_for_map(self) -> bool:
        """Whether the node does not know yet which vbuckets it owns."""

    @property
    def under_pressure(self) -> bool:
        """Whether memory is short: only streams that copy the data may be opened."""

    def vbucket(self, number: int) -> SourceVbucket:
        """The vbucket; ``NotMyVbucket`` if this node does not have it."""

    def memory_floor(self, vbucket: SourceVbucket) -> int:
        """A reader below this seqno has to read from disk."""

    def follow(
        self, vbucket: SourceVbucket, seqno: int, most_bytes: int, wake: Wake
    ) -> tuple[bool, NewSnapshot | None]:
        """What is new for readers that have everything up to ``seqno``; ``wake`` is called once when there is more.

        (False, None), and no call, if they must read on alone: there is more than ``most_bytes``, or more than one
        snapshot.
        """

    def acknowledged(self, vbucket: int, consumer: str, prepared_seqno: int) -> None:
        """A replica has every prepare up to this seqno."""

    def forget_acknowledged(self, vbucket: int, consumer: str) -> None:
        """A replica begins a stream: it will acknowledge its prepares again."""

    def hold_writers(self, vbucket: int, held: bool) -> None:
        """Refuse writes to the vbucket with a temporary status, or allow them again."""

    def retire(self, vbucket: int, done: Callable[[Exception | None], None]) -> None:
        """Make the vbucket dead without ending its streams.

        ``done`` is called, now or later and in the same thread, when the state is on disk, or with the error.
        """
