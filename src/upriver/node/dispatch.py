"""From a frame to its handler: every check of docs/protocol/framing.md#malformed in order, then a table of handlers by
message class.

A handler is a function of the connection and one message; mypy checks that the two belong together. It answers and
returns None, or returns an awaitable that answers later. A ``StatusError`` that it raises becomes the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from upriver.errors import (
    AccessDenied,
    InvalidArguments,
    NoBucket,
    NotMyVbucket,
    Status,
    TemporaryFailure,
    UnknownCommand,
)
from upriver.model import VbucketState
from upriver.node.access.roles import NEEDED, Privilege, lacking
from upriver.wire import Frame, Message, Opcode, OtherResponse, decode
from upriver.wire.constants import DCP_OPCODES, Magic, OpenFlag, RequestFrameId, ServerOpcode
from upriver.wire.messages.dcp import Open as DcpOpen

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import VBucket

M = TypeVar("M", bound=Message)
Pending = Awaitable[None] | None  # what a handler returns: None if it has answered

_BEFORE_LOGIN = frozenset(
    {Opcode.HELLO, Opcode.SASL_LIST_MECHS, Opcode.SASL_AUTH, Opcode.SASL_STEP, Opcode.GET_ERROR_MAP}
)
_IMPERSONATION = frozenset(
    {RequestFrameId.IMPERSONATE_USER, RequestFrameId.IMPERSONATE_PRIVILEGE, RequestFrameId.IMPERSONATE_TOKEN}
)
_READS = frozenset(
    {
        Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_META, Opcode.GETQ_META, Opcode.SUBDOC_GET,
        Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT, Opcode.SUBDOC_MULTI_LOOKUP,
    }
)  # fmt: skip


class Command(NamedTuple):
    """One row of the table: a message and its handler."""

    message: type[Message]
    handler: Callable[..., Pending]
    needs_bucket: bool = True
    on_active: bool = False  # the handler also takes the active vbucket


def command(
    message: type[M], handler: Callable[[ClientConnection, M], Pending], *, needs_bucket: bool = True
) -> Command:
    """A command that any connection may send, by default with a bucket selected."""
    return Command(message, handler, needs_bucket)


def document_command(message: type[M], handler: Callable[[ClientConnection, M, VBucket], Pending]) -> Command:
    """A command that only the active vbucket carries out."""
    return Command(message, handler, on_active=True)


def dispatch(conn: ClientConnection, frame: Frame) -> Pending:
    """Check, decode and handle one frame; raises the error that answers it."""
    if frame.magic.is_response:
        _response(conn, frame)
        return None
    if frame.magic is Magic.SERVER_REQUEST:
        _server_request(conn, frame)
        return None
    if not conn.authenticated and frame.opcode not in _BEFORE_LOGIN:
        raise AccessDenied
    request = decode(frame, conn.context)
    opcode = request.opcode
    if opcode in DCP_OPCODES and conn.dcp is None and opcode != Opcode.DCP_OPEN:
        raise InvalidArguments("not a DCP connection: open it first")
    found = conn.node.commands.get(type(request))
    if found is None:
        raise UnknownCommand
    if request.frame_infos and any(info.id in _IMPERSONATION for info in request.frame_infos):
        raise AccessDenied("no user may act for another here")
    if conn.bucket is None and found.needs_bucket:
        raise NoBucket
    needed = NEEDED.get(opcode, 0)
    if isinstance(request, DcpOpen):
        needed = Privilege.DCP_PRODUCER if request.flags & OpenFlag.PRODUCER else Privilege.DCP_CONSUMER
    if needed & ~conn.privileges:
        raise AccessDenied(lacking(Privilege(needed & ~conn.privileges)))
    return on_active(conn, request, found.handler) if found.on_active else found.handler(conn, request)


def on_active(
    conn: ClientConnection, request: M, handler: Callable[[ClientConnection, M, VBucket], Pending]
) -> Pending:
    """Call a handler with the active vbucket; a durable write is only prepared by it.

    A command for a pending vbucket waits until the state of the vbucket changes.

    See docs/protocol/vbuckets.md#states.
    """
    bucket = conn.require_bucket()
    if not bucket.traffic:
        raise TemporaryFailure("traffic is disabled")
    vbucket = bucket.store.vbucket(request.vbucket)
    if vbucket.state is VbucketState.PENDING:
        return _when_not_pending(conn, request, handler)
    if vbucket.state is not VbucketState.ACTIVE:
        raise NotMyVbucket
    if bucket.backed_up and request.vbucket in bucket.backed_up and request.opcode not in _READS:
        raise TemporaryFailure("the takeover of this vbucket has to catch up first")
    durability = request.durability
    if durability is None:
        return handler(conn, request, vbucket)
    bucket.sync_writes.replicas_needed(vbucket.id)
    with vbucket.durable.preparing(durability.level):
        return handler(conn, request, vbucket)


async def _when_not_pending(
    conn: ClientConnection, request: M, handler: Callable[[ClientConnection, M, VBucket], Pending]
) -> None:
    bucket = conn.require_bucket()
    while bucket.store.vbucket(request.vbucket).state is VbucketState.PENDING:
        await bucket.state_change(request.vbucket)
    pending = on_active(conn, request, handler)
    if pending is not None:
        await pending


def _server_request(conn: ClientConnection, frame: Frame) -> None:
    """Refuse a request between servers. They have opcodes of their own, so the answer has a magic of its own."""
    known = frame.opcode in ServerOpcode._value2member_map_
    status = Status.NOT_SUPPORTED if known else Status.UNKNOWN_COMMAND
    conn.write(Frame(Magic.SERVER_RESPONSE, frame.opcode, status, frame.opaque).encode())


def _response(conn: ClientConnection, frame: Frame) -> None:
    """Pass an answer to the DCP role of the connection. The answer to a pushed cluster map is dropped."""
    if frame.magic is Magic.SERVER_RESPONSE or frame.opcode == Opcode.NOOP:
        return
    if conn.dcp is None or not conn.dcp.on_response(OtherResponse.from_frame(frame, conn.context)):
        conn.close(f"response 0x{frame.opcode:02x} that answers nothing")
