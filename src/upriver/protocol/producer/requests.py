"""What a producer does with each request: a table from message class to function.

See docs/protocol/messages.md, docs/protocol/open.md and docs/protocol/stream-request.md.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from upriver.errors import (
    InvalidArguments,
    KeyNotFound,
    NotMyVbucket,
    Rollback,
    Status,
    StreamIdInvalid,
    TemporaryFailure,
)
from upriver.model import DEFAULT_COLLECTION, VbucketState
from upriver.protocol.producer.controls import Oso, apply_control
from upriver.protocol.producer.source import SourceVbucket
from upriver.protocol.producer.stream import ProducerStream
from upriver.protocol.producer.stream_request import Attempt, attempt_of, decide
from upriver.protocol.producer.takeover import Takeover
from upriver.protocol.roles import WrongRole
from upriver.wire.constants import Dialect, StreamFlag
from upriver.wire.message import Message
from upriver.wire.messages.dcp import (
    BufferAck,
    CloseStream,
    DcpControl,
    GetDcpFailoverLog,
    SeqnoAcknowledged,
    StreamRequest,
)
from upriver.wire.messages.upr import UprStreamRequest

if TYPE_CHECKING:
    from upriver.protocol.producer.machine import Producer

_ENTRY = Struct(">QQ")


class RequestAnswer(NamedTuple):
    """The parts of a response that a handler decides."""

    status: int = Status.SUCCESS
    extras: bytes = b""
    value: bytes = b""


def control(producer: Producer, request: DcpControl, now: float) -> RequestAnswer:
    changed = copy(producer.options)  # existing streams keep the old options
    apply_control(changed, request.key, request.value)
    producer.use_options(changed)
    return RequestAnswer()


def buffer_ack(producer: Producer, request: BufferAck, now: float) -> None:
    producer.options.window.acknowledge(request.bytes)


def failover_log(producer: Producer, request: GetDcpFailoverLog, now: float) -> RequestAnswer:
    return RequestAnswer(value=_log_bytes(producer.store.vbucket(request.vbucket)))


def _log_bytes(vbucket: SourceVbucket) -> bytes:
    return b"".join(_ENTRY.pack(*entry) for entry in vbucket.failover_log)


def seqno_acknowledged(producer: Producer, request: SeqnoAcknowledged, now: float) -> None:
    if not producer.options.sync_replication:
        raise InvalidArguments("sync replication is not enabled on this connection")
    producer.store.vbucket(request.vbucket)
    stream = producer.streams.get((request.vbucket, 0))
    if stream is None or stream.opaque != request.opaque:
        return  # from a stream that has ended; the seqno may be of another branch
    if request.prepared_seqno > max(stream.last_sent_seqno, stream.start_seqno):
        raise WrongRole(f"acknowledged seqno {request.prepared_seqno}, which was never sent", "prepared_seqno", 24)
    producer.store.acknowledged(request.vbucket, producer.options.consumer_name, request.prepared_seqno)


def close_stream(producer: Producer, request: CloseStream, now: float) -> RequestAnswer:
    given = request.stream_id
    if producer.options.stream_ids != (given is not None):
        raise StreamIdInvalid("a stream-id is needed" if given is None else "stream-ids are not enabled")
    stream = producer.streams.get((request.vbucket, given or 0))
    if stream is None:
        others = given is not None and any(vbucket == request.vbucket for vbucket, _ in producer.streams)
        raise StreamIdInvalid if others else KeyNotFound
    producer.close_stream(stream)
    return RequestAnswer()


def stream_request(producer: Producer, request: StreamRequest | UprStreamRequest, now: float) -> RequestAnswer:
    store, options = producer.store, producer.options
    if store.waits_for_map:
        raise TemporaryFailure("this node does not know yet what it owns")
    try:
        vbucket: SourceVbucket | None = store.vbucket(request.vbucket)
    except NotMyVbucket:
        vbucket = None
    copies_data = producer.limits.ignores_pressure or bool(options.consumer_name)
    attempt = attempt_of(
        request, options=options, manifest=store.manifest, vbucket=vbucket, streams=producer.streams,
        max_streams=producer.limits.max_streams, memory_full=not copies_data and store.under_pressure,
    )  # fmt: skip
    try:
        decide(attempt)
        stream = _make_stream(producer, attempt, request.opaque, now)
    # DCP puts the seqno into the value, UPR into the extras (docs/protocol/upr.md#differences)
    except Rollback as error:
        seqno = error.seqno.to_bytes(8, "big")
        is_upr = attempt.dialect is Dialect.UPR
        return RequestAnswer(Status.ROLLBACK, extras=seqno) if is_upr else RequestAnswer(Status.ROLLBACK, value=seqno)
    except KeyNotFound:  # the vbucket was removed during the checks
        if attempt.dialect is Dialect.UPR:
            raise
        raise NotMyVbucket from None
    answer = RequestAnswer(value=_log_bytes(stream.vbucket))
    producer.add(stream)
    if options.sync_replication:
        store.forget_acknowledged(request.vbucket, options.consumer_name)
    return answer


def _make_stream(producer: Producer, attempt: Attempt, opaque: int, now: float) -> ProducerStream:
    stream = ProducerStream(producer, attempt, opaque)
    stream.source = stream.vbucket.stream(
        attempt.start,
        attempt.end,
        snap_start=attempt.snap_start,
        snap_end=attempt.snap_end,
        collections=_source_filter(attempt),
        wake=producer.wake_of(stream),
        ignore_purged=attempt.asks(StreamFlag.IGNORE_PURGED_TOMBSTONES),
        purge_seqno=attempt.value.purge_seqno or 0,
        disk_only=attempt.asks(StreamFlag.DISK_ONLY),
        oso=attempt.options.oso is not Oso.OFF,
        visible_only=not attempt.options.sync_writes,
    )
    if attempt.asks(StreamFlag.TAKEOVER) and stream.vbucket.state is VbucketState.ACTIVE:
        stream.takeover = Takeover(stream, now)
    return stream


def _source_filter(attempt: Attempt) -> frozenset[int] | None:
    """The collections that the store must read; None for all. A scope can grow, so its stream reads everything."""
    if not attempt.options.collections:
        return frozenset((DEFAULT_COLLECTION,))
    return None if attempt.scope_id is not None else attempt.collection_ids


HANDLERS: dict[type[Message], Callable[[Producer, Any, float], RequestAnswer | None]] = {
    DcpControl: control,
    BufferAck: buffer_ack,
    GetDcpFailoverLog: failover_log,
    StreamRequest: stream_request,
    UprStreamRequest: stream_request,
    CloseStream: close_stream,
    SeqnoAcknowledged: seqno_acknowledged,
}
