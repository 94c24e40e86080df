"""The commands of a DCP connection towards a producer (``protocol.md`` 2 to 5)."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from struct import Struct
from typing import TYPE_CHECKING, Any

from upriver.errors import (
    InvalidArguments,
    KeyNotFound,
    NotMyVbucket,
    NotSupported,
    Rollback,
    Status,
    StreamIdInvalid,
    TemporaryFailure,
)
from upriver.model import DEFAULT_COLLECTION, Datatype, VbucketState
from upriver.node import log
from upriver.node.dcp.producer import Producer
from upriver.node.dcp.producer_stream import ProducerStream
from upriver.node.dcp.takeover import Takeover
from upriver.node.dispatch import Handler
from upriver.protocol.producer.controls import Oso, ProducerOptions, apply_control, check_open_value
from upriver.protocol.producer.stream_request import Attempt, attempt_of, decide
from upriver.wire import Message
from upriver.wire.constants import Dialect, Feature, OpenFlag, StreamFlag
from upriver.wire.messages import dcp, events, upr

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import VBucket

_ENTRY = Struct(">QQ")
_CLUSTER_MANAGER = "@ns_server"
_BACKFILL_SHARE = 0.96  # of the memory quota; above it no stream is opened (5.4, step 21)

# Set by whoever implements the consumer role; given the connection, the request and its consumer_name.
open_consumer: Callable[[ClientConnection, dcp.Open, str], None] | None = None


def open_connection(conn: ClientConnection, request: dcp.Open) -> None:
    consumer_name = check_open_value(request)
    if Feature.UNORDERED_EXECUTION in conn.features:
        raise NotSupported("DCP does not go with unordered execution")
    if conn.dcp is not None:
        raise InvalidArguments("the connection is open already")
    bucket = conn.require_bucket()
    is_producer = bool(request.flags & OpenFlag.PRODUCER)
    if not is_producer and open_consumer is None:
        raise NotSupported("this node is not a consumer")
    name = request.name.decode("utf-8", "backslashreplace")
    _supersede(bucket.dcp_connections.get(name), conn)
    conn.context = replace(conn.context, datatypes=conn.context.datatypes | Datatype.JSON)
    bucket.dcp_connections[name] = conn
    if is_producer:
        snappy = Feature.SNAPPY in conn.features
        collections = conn.context.collections
        options = ProducerOptions.opened(request, collections=collections, snappy=snappy, now=time.monotonic())
        conn.dcp = Producer(conn, bucket, options)
    else:
        assert open_consumer is not None
        open_consumer(conn, request, consumer_name)
    log.info("dcp_open", connection=conn.id, name=name, flags=f"0x{request.flags:x}", bucket=bucket.name)
    conn.reply(request)


def _supersede(old: ClientConnection | None, new: ClientConnection) -> None:
    """A name belongs to the connection that opened it last."""
    if old is not None and old is not new:
        if old.dcp is not None:
            old.dcp.close()
        old.close(f"connection {new.id} took its name")


def for_producer(handler: Callable[[ClientConnection, Any, Producer], None]) -> Handler:
    """A command that only a producer takes: to anyone else it ends the connection (1.6)."""

    def run(conn: ClientConnection, request: Any) -> None:
        if isinstance(conn.dcp, Producer):
            handler(conn, request, conn.dcp)
        else:
            conn.close(f"command 0x{request.opcode:02x} to a consumer")

    return run


def not_for_producer(conn: ClientConnection, request: Any) -> None:
    """What only a producer sends. Consumers register their own handlers over this one."""
    conn.close(f"command 0x{request.opcode:02x} to a producer")


def control(conn: ClientConnection, request: dcp.DcpControl, producer: Producer) -> None:
    changed = copy(producer.options)  # the streams that there are keep what they were created with
    apply_control(changed, request.key, request.value)
    producer.options = changed
    producer.schedule()
    conn.reply(request)


def buffer_ack(conn: ClientConnection, request: dcp.BufferAck, producer: Producer) -> None:
    producer.acknowledged(request.bytes)


def failover_log(conn: ClientConnection, request: Message, producer: Producer) -> None:
    conn.reply(request, value=_log_bytes(conn.vbucket(request.vbucket)))


def _log_bytes(vbucket: VBucket) -> bytes:
    return b"".join(_ENTRY.pack(*entry) for entry in vbucket.failover_log)


def seqno_acknowledged(conn: ClientConnection, request: dcp.SeqnoAcknowledged, producer: Producer) -> None:
    if not producer.options.sync_replication:
        raise InvalidArguments("sync replication is not enabled on this connection")
    conn.vbucket(request.vbucket)
    stream = producer.streams.get((request.vbucket, 0))
    if stream is None or stream.opaque != request.opaque:
        return  # of a stream that has ended: what it acknowledged may be of another branch
    producer.settle(stream)
    if request.prepared_seqno > max(stream.last_sent_seqno, stream.start_seqno):
        conn.close(f"acknowledged seqno {request.prepared_seqno}, which was never sent")
        return
    acknowledged = producer.bucket.on_seqno_acknowledged
    if acknowledged is not None:
        acknowledged(request.vbucket, producer.options.consumer_name, request.prepared_seqno)


# ---------------------------------------------------------------------------------------------- streams


def stream_request(conn: ClientConnection, request: Any, producer: Producer) -> None:
    attempt = _attempt(conn, request, producer)
    try:
        decide(attempt)
        stream = _make_stream(producer, attempt, request.opaque)
    except Rollback as error:
        _reply_rollback(conn, request, attempt, error.seqno)
        return
    except KeyNotFound:  # the vbucket went between two looks
        if attempt.dialect is Dialect.UPR:
            raise
        raise NotMyVbucket from None
    conn.reply(request, value=_log_bytes(conn.vbucket(request.vbucket)))
    producer.add(stream)
    if producer.options.sync_replication:
        producer.bucket.sync_writes.forget(request.vbucket, producer.options.consumer_name)
    log.info(
        "stream_open", connection=conn.id, vbucket=attempt.vbucket_id, start=attempt.start, end=attempt.end,
        flags=f"0x{attempt.flags:x}", sid=attempt.stream_id,
    )  # fmt: skip


def _attempt(conn: ClientConnection, request: Any, producer: Producer) -> Attempt:
    if producer.bucket.waits_for_map:
        raise TemporaryFailure("this node does not know yet what it owns")
    store = producer.bucket.store
    try:
        vbucket: VBucket | None = store.vbucket(request.vbucket)
    except NotMyVbucket:
        vbucket = None
    return attempt_of(
        request, options=producer.options, manifest=store.manifest, vbucket=vbucket, live=producer.streams,
        stream_count=len(producer.streams), max_streams=conn.node.options.limits.max_streams,
        memory_full=_memory_is_short(conn, producer),
    )  # fmt: skip


def _memory_is_short(conn: ClientConnection, producer: Producer) -> bool:
    """Writers are told to come back later, and so is who wants to read; but never what makes copies of the data."""
    if conn.user == _CLUSTER_MANAGER or producer.options.consumer_name:
        return False
    store = producer.bucket.store
    options = store.options
    return store.dirty_bytes > options.dirty_bytes or store.memory_bytes > _BACKFILL_SHARE * options.quota_bytes


def _reply_rollback(conn: ClientConnection, request: Any, attempt: Attempt, seqno: int) -> None:
    """DCP puts the seqno into the value, UPR into the extras (12.1)."""
    where = "extras" if attempt.dialect is Dialect.UPR else "value"
    conn.reply(request, status=Status.ROLLBACK, **{where: seqno.to_bytes(8, "big")})  # type: ignore[arg-type]


def _make_stream(producer: Producer, attempt: Attempt, opaque: int) -> ProducerStream:
    stream = ProducerStream(producer, attempt, opaque)
    vbucket: Any = attempt.facts
    stream.source = vbucket.stream(
        attempt.start,
        attempt.end,
        snap_start=attempt.snap_start,
        snap_end=attempt.snap_end,
        collections=_source_filter(producer, attempt),
        wake=producer.wake_of(stream),
        ignore_purged=attempt.asks(StreamFlag.IGNORE_PURGED_TOMBSTONES),
        purge_seqno=attempt.value.purge_seqno or 0,
        disk_only=attempt.asks(StreamFlag.DISK_ONLY),
        oso=producer.options.oso is not Oso.OFF,
        visible_only=not producer.options.sync_writes,
    )
    if attempt.asks(StreamFlag.TAKEOVER) and vbucket.state is VbucketState.ACTIVE:
        stream.takeover = Takeover(stream)
    return stream


def _source_filter(producer: Producer, attempt: Attempt) -> frozenset[int] | None:
    """What the store may leave out. A scope grows, so its stream looks at everything."""
    if not producer.options.collections:
        return frozenset((DEFAULT_COLLECTION,))
    return None if attempt.scope_id is not None else attempt.collection_ids


def close_stream(conn: ClientConnection, request: dcp.CloseStream, producer: Producer) -> None:
    given = request.stream_id
    if producer.options.stream_ids != (given is not None):
        raise StreamIdInvalid("a stream-id is needed" if given is None else "stream-ids are not enabled")
    stream = producer.streams.get((request.vbucket, given or 0))
    if stream is None:
        others = given is not None and any(vbucket == request.vbucket for vbucket, _ in producer.streams)
        raise StreamIdInvalid if others else KeyNotFound
    conn.reply(request)
    producer.close_stream(stream)
    log.info("stream_closed", connection=conn.id, vbucket=request.vbucket, sid=given or 0)


HANDLERS: dict[type[Message], Handler] = {
    dcp.Open: open_connection,
    dcp.DcpControl: for_producer(control),
    dcp.BufferAck: for_producer(buffer_ack),
    dcp.GetDcpFailoverLog: for_producer(failover_log),
    dcp.StreamRequest: for_producer(stream_request),
    upr.UprStreamRequest: for_producer(stream_request),
    dcp.CloseStream: for_producer(close_stream),
    dcp.SeqnoAcknowledged: for_producer(seqno_acknowledged),
    **dict.fromkeys(
        (
            dcp.AddStream, dcp.StreamEnd, dcp.SnapshotMarker, dcp.SnapshotMarkerV20, dcp.SnapshotMarkerV22,
            dcp.DcpMutation, dcp.DcpDeletion, dcp.DeletionV2, dcp.Expiration, dcp.SetVbucketState, dcp.DcpNoop,
            dcp.Prepare, dcp.Commit, dcp.Abort, dcp.SeqnoAdvanced, dcp.OsoSnapshot, dcp.CacheTransferEnd,
            events.SystemEvent, events.CacheTransfer, upr.UprStreamEnd, upr.UprSnapshotMarker, upr.UprMutation,
            upr.UprDeletion, upr.UprExpiration, upr.UprFlush, upr.UprSetVbucketState,
        ),
        not_for_producer,
    ),
}  # fmt: skip
BUCKETLESS: frozenset[type[Message]] = frozenset()
