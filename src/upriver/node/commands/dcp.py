"""The commands of a DCP connection: OPEN gives it a role, and the role handles the rest.

See docs/protocol/messages.md, docs/protocol/open.md and docs/protocol/stream-request.md.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from upriver.errors import InvalidArguments, NotSupported
from upriver.model import Datatype
from upriver.node import log
from upriver.node.dcp.consumer import ConsumerRole
from upriver.node.dcp.producer import ProducerRole
from upriver.node.dispatch import command
from upriver.protocol.producer.controls import ProducerOptions, check_open_value
from upriver.wire import Message
from upriver.wire.constants import Feature, OpenFlag
from upriver.wire.messages import dcp, events, upr

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection


def open_connection(conn: ClientConnection, request: dcp.Open) -> None:
    consumer_name = check_open_value(request)
    if Feature.UNORDERED_EXECUTION in conn.features:
        raise NotSupported("DCP cannot be combined with unordered execution")
    if conn.dcp is not None:
        raise InvalidArguments("the connection is open already")
    bucket = conn.require_bucket()
    name = request.name.decode("utf-8", "backslashreplace")
    _supersede(bucket.dcp_connections.get(name), conn)
    conn.context = replace(conn.context, datatypes=conn.context.datatypes | Datatype.JSON)
    bucket.dcp_connections[name] = conn
    if request.flags & OpenFlag.PRODUCER:
        snappy = Feature.SNAPPY in conn.features
        collections = conn.context.collections
        options = ProducerOptions.opened(request, collections=collections, snappy=snappy, now=time.monotonic())
        conn.dcp = ProducerRole(conn, bucket, options)
    else:
        consumer = conn.dcp = ConsumerRole(conn, bucket, request, consumer_name)
        conn.receive_raw = consumer.receive
    log.info("dcp_open", connection=conn.id, name=name, flags=f"0x{request.flags:x}", bucket=bucket.name)
    conn.reply(request)


def _supersede(old: ClientConnection | None, new: ClientConnection) -> None:
    """Close the older connection of a name: a name belongs to the connection that opened it last."""
    if old is not None and old is not new:
        if old.dcp is not None:
            old.dcp.close()
        old.close(f"connection {new.id} took its name")


def to_producer(conn: ClientConnection, request: Message) -> None:
    """Any command but OPEN. A consumer handles its own commands before ``dispatch``, so any that gets here ends it.

    See docs/protocol/framing.md#malformed.
    """
    if isinstance(conn.dcp, ProducerRole):
        conn.dcp.receive(request)
    else:
        conn.close(f"command 0x{request.opcode:02x} to a consumer")


_FOR_A_ROLE: tuple[type[Message], ...] = (
    dcp.DcpControl, dcp.BufferAck, dcp.GetDcpFailoverLog, dcp.StreamRequest, upr.UprStreamRequest, dcp.CloseStream,
    dcp.SeqnoAcknowledged, dcp.AddStream, dcp.StreamEnd, dcp.SnapshotMarker, dcp.SnapshotMarkerV20,
    dcp.SnapshotMarkerV22, dcp.DcpMutation, dcp.DcpDeletion, dcp.DeletionV2, dcp.Expiration, dcp.SetVbucketState,
    dcp.DcpNoop, dcp.Prepare, dcp.Commit, dcp.Abort, dcp.SeqnoAdvanced, dcp.OsoSnapshot, dcp.CacheTransferEnd,
    events.SystemEvent, events.CacheTransfer, upr.UprStreamEnd, upr.UprSnapshotMarker, upr.UprMutation,
    upr.UprDeletion, upr.UprExpiration, upr.UprFlush, upr.UprSetVbucketState,
)  # fmt: skip
COMMANDS = (command(dcp.Open, open_connection), *(command(message, to_producer) for message in _FOR_A_ROLE))
