"""What a consumer keeps per stream, what it needs from a store, and when it acknowledges bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from upriver.model import FailoverEntry, VbucketState
from upriver.protocol.roles import StoredVbucket
from upriver.wire.constants import Dialect

ACK_EVERY_S = 5.0

Done = Callable[[int, int], None]
"""Called with the vbucket and the status when a handshake has ended."""


class ReplicationTarget(Protocol):
    """How a vbucket takes what a producer sends."""

    def begin_snapshot(self, start: int, end: int, flags: int = 1, purge_seqno: int = 0) -> None: ...
    def apply_records(self, run: bytes | memoryview) -> int: ...
    def advance(self, seqno: int) -> None: ...
    def replace_failover_log(self, entries: Iterable[FailoverEntry]) -> None: ...
    def commit(self, key: bytes, collection_id: int, prepared_seqno: int, commit_seqno: int) -> None: ...
    def abort(self, key: bytes, collection_id: int, prepared_seqno: int, abort_seqno: int) -> None: ...


class ReplicaVbucket(StoredVbucket, Protocol):
    """A vbucket that takes what a producer sends; ``upriver.store.VBucket`` is one."""

    @property
    def high_prepared_seqno(self) -> int: ...
    @property
    def max_cas(self) -> int: ...
    @property
    def manifest_uid(self) -> int: ...
    @property
    def replication(self) -> ReplicationTarget: ...
    def rollback(self, to: int) -> int: ...


class ReplicaStore(Protocol):
    """A bucket of replica vbuckets, as a consumer needs it."""

    @property
    def under_pressure(self) -> bool: ...
    def vbucket(self, number: int) -> ReplicaVbucket: ...
    def set_state(self, number: int, state: VbucketState, *, takeover: bool = False) -> object: ...
    def expect_xattrs(self) -> None: ...


class StreamPhase(Enum):
    WAITING = auto()  # for the control negotiation to end
    ASKED = auto()  # STREAM_REQ is on its way
    LIVE = auto()
    DEAD = auto()  # closed here; late messages are ignored until STREAM_END (docs/protocol/consumer.md#receiving)


@dataclass(slots=True)
class PassiveStream:
    """A stream that a consumer reads, opened by an ADD_STREAM (``answer_opaque``) or by the node itself (``done``)."""

    vbucket: int
    flags: int
    answer_opaque: int | None = None
    done: Done | None = None
    opaque: int = 0
    phase: StreamPhase = StreamPhase.WAITING
    dialect: Dialect = Dialect.DCP
    skipped_branches: int = 0  # uuids given up at the same seqno (docs/protocol/consumer.md#streams, step 3)
    snapshot_start: int = 0
    snapshot_end: int = 0
    ack_marker: bool = False  # answer 0x56 when the snapshot is complete (takeover)
    broken: bool = False  # a change was refused: nothing after it may be stored
    prepared_seqno: int = 0  # the last prepare of the current snapshot; below, the highest level in it
    prepared_level: int = 0

    @property
    def is_live(self) -> bool:
        return self.phase is not StreamPhase.DEAD


class StreamOwner(Protocol):
    """The connection that consumes a vbucket."""

    def kill_stream(self, vbucket: int) -> None: ...


@dataclass(slots=True)
class Registry:
    """The streams of all consumer connections of a bucket: at most one per vbucket.

    See docs/protocol/messages.md#add-stream.
    """

    owners: dict[int, StreamOwner] = field(default_factory=dict)

    def claim(self, vbucket: int, owner: StreamOwner) -> bool:
        return self.owners.setdefault(vbucket, owner) is owner

    def release(self, vbucket: int, owner: StreamOwner) -> None:
        if self.owners.get(vbucket) is owner:
            del self.owners[vbucket]

    def kill(self, vbucket: int) -> None:
        """An administrator made the vbucket active: it must take no more changes from a producer.

        See docs/protocol/vbuckets.md#set-vbucket.
        """
        owner = self.owners.pop(vbucket, None)
        if owner is not None:
            owner.kill_stream(vbucket)


@dataclass(slots=True)
class AckWindow:
    """When to acknowledge: after a fifth of the window, or after five seconds if there is anything.

    >>> window = AckWindow(100)
    >>> window.add(20), window.due(0.0), window.add(1), window.due(0.0)
    (None, 0, None, 21)

    See docs/protocol/flow.md#window.
    """

    size: int
    gathered: int = 0
    since: float = 0.0

    def add(self, count: int) -> None:
        self.gathered += count

    def due(self, now: float) -> int:
        """The number of bytes to acknowledge now; 0 for nothing yet."""
        if not self.gathered:
            self.since = now
            return 0
        if self.gathered * 5 <= self.size and now - self.since < ACK_EVERY_S:
            return 0
        count, self.gathered, self.since = self.gathered, 0, now
        return count
