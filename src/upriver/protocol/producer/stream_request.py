"""The decision on a stream request: every check of docs/protocol/stream-request.md#checks after decoding, in its order.

``decide`` walks ``CHECKS``; the first that fails raises the status to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from upriver.errors import (
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    NotMyVbucket,
    NotSupported,
    OutOfMemory,
    OutOfRange,
    Rollback,
    StreamIdInvalid,
    TemporaryFailure,
    UnknownCollection,
    UnknownScope,
)
from upriver.model import DEFAULT_COLLECTION, SEQNO_MAX, Claim, VbucketState
from upriver.protocol import history
from upriver.protocol.producer.controls import ProducerOptions
from upriver.protocol.producer.source import SourceManifest, SourceVbucket
from upriver.wire.constants import Dialect, StreamFlag
from upriver.wire.messages.dcp import StreamRequest
from upriver.wire.messages.stream_value import StreamValue
from upriver.wire.messages.upr import UprStreamRequest


@dataclass(slots=True)
class Attempt:
    """A stream request while it is checked; some checks change its numbers."""

    options: ProducerOptions
    manifest: SourceManifest
    vbucket: SourceVbucket | None
    streams: Collection[tuple[int, int]]  # (vbucket, stream-id) of the streams that run on this connection
    max_streams: int
    memory_full: bool
    vbucket_id: int
    dialect: Dialect
    flags: int
    start: int
    end: int
    vbuuid: int
    snap_start: int
    snap_end: int
    raw_value: bytes = b""
    high: int = 0
    value: StreamValue = field(default_factory=StreamValue)
    collection_ids: frozenset[int] | None = None
    scope_id: int | None = None

    def asks(self, flag: StreamFlag) -> bool:
        """Whether the request has the flag; plain numbers are ten times as fast as an IntFlag."""
        return self.flags & flag.value != 0

    @property
    def stream_id(self) -> int:
        return self.value.sid or 0

    @property
    def facts(self) -> SourceVbucket:
        assert self.vbucket is not None
        return self.vbucket

    @property
    def collection_high(self) -> int | None:
        """The highest seqno in the collections of the filter; for a legacy stream, in the default one.

        See docs/protocol/rollback.md#decision.
        """
        ids = self.collection_ids
        if ids is None and not self.options.collections:
            ids = frozenset((DEFAULT_COLLECTION,))
        if ids is None:
            return None
        return max((self._high_of(each) for each in ids), default=0)

    def _high_of(self, collection_id: int) -> int:
        try:
            return self.facts.collection_high_seqno(collection_id)
        except UnknownCollection:  # this vbucket does not know the collection yet, or no longer
            return 0


def attempt_of(
    request: StreamRequest | UprStreamRequest, *, options: ProducerOptions, manifest: SourceManifest,
    vbucket: SourceVbucket | None, streams: Collection[tuple[int, int]], max_streams: int, memory_full: bool,
) -> Attempt:  # fmt: skip
    """The attempt for a request of either dialect. UPR has no snapshot range: it claims just its start.

    See docs/protocol/upr.md#both.
    """
    if isinstance(request, UprStreamRequest):
        dialect, span, raw_value = Dialect.UPR, (request.start_seqno, request.start_seqno), b""
    else:
        dialect, span, raw_value = Dialect.DCP, (request.snap_start_seqno, request.snap_end_seqno), request.value
    return Attempt(
        options, manifest, vbucket, streams, max_streams, memory_full, request.vbucket, dialect, int(request.flags),
        request.start_seqno, request.end_seqno, request.vbuuid, *span, raw_value,
    )  # fmt: skip


def decide(attempt: Attempt) -> Attempt:
    """The request as it will be served; raises the error that refuses it."""
    for check in UPR_CHECKS if attempt.dialect is Dialect.UPR else CHECKS:
        check(attempt)
    return attempt


def _value_allowed(attempt: Attempt) -> None:
    if attempt.raw_value and not attempt.options.collections:
        raise InvalidArguments("the request must not include a value without collections")


def _no_cache_transfer(attempt: Attempt) -> None:
    if attempt.asks(StreamFlag.CACHE_TRANSFER):
        raise InvalidArguments("cache transfer is not supported")


def _vbucket_exists(attempt: Attempt) -> None:
    if attempt.vbucket is None:
        raise NotMyVbucket


def _vbucket_state(attempt: Attempt) -> None:
    state = attempt.facts.state
    allowed = (VbucketState.ACTIVE,) if attempt.asks(StreamFlag.ACTIVE_VB_ONLY) else _STREAMING_STATES
    if state not in allowed:
        raise NotMyVbucket
    attempt.high = attempt.facts.high_seqno


_STREAMING_STATES = (VbucketState.ACTIVE, VbucketState.REPLICA)


def _from_latest(attempt: Attempt) -> None:
    if attempt.asks(StreamFlag.FROM_LATEST):
        attempt.start = attempt.snap_start = attempt.snap_end = attempt.high
        attempt.vbuuid = attempt.vbuuid or attempt.facts.failover_log.uuid


def _noop_enabled(attempt: Attempt) -> None:
    if attempt.options.needs_noop and not attempt.options.noop.enabled:
        raise NotSupported("enable_noop is required for xattrs and collections")


def _start_before_end(attempt: Attempt) -> None:
    if attempt.start > attempt.end:
        raise OutOfRange(f"start {attempt.start} is beyond end {attempt.end}")


def _start_in_snapshot(attempt: Attempt) -> None:
    if not attempt.snap_start <= attempt.start <= attempt.snap_end:
        raise OutOfRange(f"start {attempt.start} is outside its snapshot {attempt.snap_start}..{attempt.snap_end}")


def _filter(attempt: Attempt) -> None:
    if not attempt.options.collections:
        if DEFAULT_COLLECTION not in attempt.manifest.collections:
            raise UnknownCollection("the default collection was dropped")
        return
    attempt.value = StreamValue.parse(attempt.raw_value)
    attempt.scope_id, listed = attempt.value.scope, attempt.value.collections
    if attempt.scope_id is not None:
        if attempt.scope_id not in attempt.manifest.scopes:
            raise UnknownScope(f"no scope {attempt.scope_id:x}")
        entries = attempt.manifest.collections.items()
        attempt.collection_ids = frozenset(each for each, entry in entries if entry.scope_id == attempt.scope_id)
    elif listed is not None:
        for each in listed:
            if each not in attempt.manifest.collections:
                raise UnknownCollection(f"no collection {each:x}")
        attempt.collection_ids = frozenset(listed)


def _stream_id(attempt: Attempt) -> None:
    if attempt.options.stream_ids != bool(attempt.stream_id):
        raise StreamIdInvalid("a stream-id is needed" if attempt.options.stream_ids else "stream-ids are not enabled")


def _no_filtered_sync_writes(attempt: Attempt) -> None:
    if attempt.value.collections is not None and attempt.options.sync_writes:
        raise NotSupported("a list of collections cannot be combined with sync writes")


def _no_such_stream_yet(attempt: Attempt) -> None:
    if (attempt.vbucket_id, attempt.stream_id) in attempt.streams:
        raise KeyExists("the stream exists already")


def _history(attempt: Attempt) -> None:
    wanted = Claim(attempt.vbuuid, attempt.start, attempt.snap_start, attempt.snap_end)
    strict = attempt.asks(StreamFlag.STRICT_VB_UUID)
    known_purge_seqno = attempt.value.purge_seqno or 0
    _obey(history.decide(_facts(attempt), wanted, strict=strict, known_purge_seqno=known_purge_seqno))


def _upr_history(attempt: Attempt) -> None:
    _obey(history.decide_upr(_facts(attempt), attempt.vbuuid, attempt.start))


def _facts(attempt: Attempt) -> history.History:
    ignore = attempt.asks(StreamFlag.IGNORE_PURGED_TOMBSTONES)
    purge_seqno = 0 if ignore else attempt.facts.purge_seqno
    return history.History(attempt.facts.failover_log, attempt.high, purge_seqno, attempt.collection_high)


def _obey(decision: history.UprDecision) -> None:
    if isinstance(decision, history.RollbackTo):
        raise Rollback(decision.seqno)
    if isinstance(decision, history.UnknownUuid):
        raise KeyNotFound("no such branch of history")


def _adjust_end(attempt: Attempt) -> None:
    if attempt.asks(StreamFlag.TAKEOVER):
        attempt.end = SEQNO_MAX
    if attempt.asks(StreamFlag.TO_LATEST):
        ids = attempt.collection_ids
        attempt.end = attempt.high if ids is None else max(map(attempt.facts.collection_high_seqno, ids), default=0)
    if attempt.asks(StreamFlag.DISK_ONLY):
        attempt.end = attempt.facts.persisted_seqno


def _start_exists(attempt: Attempt) -> None:
    if attempt.start > attempt.high:
        raise OutOfRange(f"start {attempt.start} is beyond the high seqno {attempt.high}")


def _memory(attempt: Attempt) -> None:
    if len(attempt.streams) >= attempt.max_streams:
        raise OutOfMemory(f"this connection has {len(attempt.streams)} streams already")
    if attempt.memory_full:
        raise TemporaryFailure("no memory for a backfill")


def _initial_snapshot(attempt: Attempt) -> None:
    if attempt.facts.receiving_initial_disk_snapshot:
        raise TemporaryFailure("the replica is still receiving its first snapshot")


def _settle(attempt: Attempt) -> None:
    if attempt.start == attempt.snap_start and attempt.snap_end > attempt.high and attempt.options.can_advance:
        attempt.snap_end = attempt.snap_start
    facts = attempt.facts
    if facts.state is VbucketState.REPLICA and not facts.snapshot_complete and attempt.end > attempt.start:
        attempt.end = max(attempt.end, facts.snapshot[1])


Check = Callable[[Attempt], None]

CHECKS: tuple[Check, ...] = (
    _value_allowed,
    _no_cache_transfer,
    _vbucket_exists,  # 6
    _vbucket_state,  # 7, 8
    _from_latest,  # 9
    _noop_enabled,  # 10
    _start_before_end,  # 11
    _start_in_snapshot,  # 12
    _filter,  # 13, 13b
    _stream_id,  # 14
    _no_filtered_sync_writes,  # 15
    _no_such_stream_yet,  # 16
    _history,  # 17
    _adjust_end,  # 18
    _start_before_end,  # 19
    _start_exists,  # 20
    _memory,  # 21
    _initial_snapshot,  # 22
    _settle,
)

# UPR has no noops, filters or snapshot ranges; a start at or beyond the end is out of range
# (docs/protocol/upr.md#differences).


def _upr_start_before_end(attempt: Attempt) -> None:
    if attempt.start >= attempt.end:
        raise OutOfRange(f"start {attempt.start} is not before end {attempt.end}")


UPR_CHECKS: tuple[Check, ...] = (
    _vbucket_exists,
    _vbucket_state,
    _upr_start_before_end,
    _no_such_stream_yet,
    _upr_history,
    _adjust_end,
    _start_exists,
    _memory,
    _initial_snapshot,
)
