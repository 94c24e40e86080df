"""From a frame to its handler: the gates of ``protocol.md`` 1.6, then a table from message class to function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from upriver.errors import AccessDenied, InvalidArguments, NoBucket, NotSupported, Status, UnknownCommand
from upriver.node.access.roles import NEEDED, Privilege, lacking
from upriver.wire import Frame, Message, Opcode, OtherResponse, decode
from upriver.wire.constants import Magic, OpenFlag, RequestFrameId, ServerOpcode
from upriver.wire.messages.dcp import Open as DcpOpen

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection

Handler = Callable[["ClientConnection", Any], Awaitable[None] | None]

QUIET = frozenset(
    {
        Opcode.GETQ, Opcode.GETKQ, Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ, Opcode.DELETEQ, Opcode.INCREMENTQ,
        Opcode.DECREMENTQ, Opcode.QUITQ, Opcode.FLUSHQ, Opcode.APPENDQ, Opcode.PREPENDQ, Opcode.GATQ,
        Opcode.GETQ_META, Opcode.SETQ_WITH_META, Opcode.ADDQ_WITH_META, Opcode.DELQ_WITH_META,
    }
)  # fmt: skip
_BEFORE_LOGIN = frozenset(
    {Opcode.HELLO, Opcode.SASL_LIST_MECHS, Opcode.SASL_AUTH, Opcode.SASL_STEP, Opcode.GET_ERROR_MAP}
)
_SUBDOC_WRITES = frozenset({*range(Opcode.SUBDOC_DICT_ADD, Opcode.SUBDOC_COUNTER + 1), Opcode.SUBDOC_MULTI_MUTATION,
                            Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR})  # fmt: skip
_COUNTERS = frozenset({Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ})
_WITH_TTL = _SUBDOC_WRITES | _COUNTERS | {
    Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.ADDQ, Opcode.REPLACE, Opcode.REPLACEQ,
}  # fmt: skip
_DURABLE = _WITH_TTL | {
    Opcode.DELETE, Opcode.DELETEQ, Opcode.APPEND, Opcode.APPENDQ, Opcode.PREPEND, Opcode.PREPENDQ,
}  # fmt: skip
_IMPERSONATION = frozenset(
    {RequestFrameId.IMPERSONATE_USER, RequestFrameId.IMPERSONATE_PRIVILEGE, RequestFrameId.IMPERSONATE_TOKEN}
)
_FIRST_DCP, _LAST_DCP = Opcode.DCP_OPEN, Opcode.DCP_CACHE_TRANSFER_END

_handlers: dict[type[Message], Handler] = {}
_bucketless: set[type[Message]] = set()


def register(handlers: dict[Any, Handler], bucketless: frozenset[type[Message]] = frozenset()) -> None:
    """Add a module's commands; ``bucketless`` are those that need no bucket."""
    _handlers.update(handlers)
    _bucketless.update(bucketless)


def dispatch(conn: ClientConnection, frame: Frame) -> Awaitable[None] | None:
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
    if _FIRST_DCP <= request.opcode <= _LAST_DCP and conn.dcp is None and request.opcode != Opcode.DCP_OPEN:
        raise InvalidArguments("not a DCP connection: open it first")
    entry = _entry_of(type(request))
    if entry is None:
        raise UnknownCommand
    if request.frame_infos:
        _check_frame_infos(request)
    handler, needs_bucket = entry
    if needs_bucket and conn.bucket is None:
        raise NoBucket
    needed = _privilege(request)
    if needed & ~conn.privileges:
        raise AccessDenied(lacking(Privilege(needed & ~conn.privileges)))
    return handler(conn, request)


def _privilege(request: Message) -> int:
    if isinstance(request, DcpOpen):
        return Privilege.DCP_PRODUCER if request.flags & OpenFlag.PRODUCER else Privilege.DCP_CONSUMER
    return NEEDED.get(request.opcode, 0)


def _check_frame_infos(request: Message) -> None:
    """Framing extras that mean something only on some commands (1.2)."""
    for info in request.frame_infos:
        if info.id == RequestFrameId.DURABILITY and request.opcode not in _DURABLE:
            raise InvalidArguments("this command cannot be durable")
        if info.id == RequestFrameId.PRESERVE_TTL and request.opcode not in _WITH_TTL:
            raise NotSupported("this command has no expiry to preserve")
        if info.id in _IMPERSONATION:
            raise AccessDenied("nobody may act for somebody else here")


def _server_request(conn: ClientConnection, frame: Frame) -> None:
    """What only servers ask; the opcodes are a space of their own, so the answer is told apart by its magic."""
    known = frame.opcode in ServerOpcode._value2member_map_
    status = Status.NOT_SUPPORTED if known else Status.UNKNOWN_COMMAND
    conn.write(Frame(Magic.SERVER_RESPONSE, frame.opcode, status, frame.opaque).encode())


def _response(conn: ClientConnection, frame: Frame) -> None:
    """Only a DCP peer has something to answer; a reply to a pushed cluster map is dropped."""
    if frame.magic is Magic.SERVER_RESPONSE or frame.opcode == Opcode.NOOP:
        return
    if conn.dcp is None or not conn.dcp.on_response(OtherResponse.from_frame(frame, conn.context)):
        conn.close(f"response 0x{frame.opcode:02x} that answers nothing")


_entries: dict[type[Message], tuple[Handler, bool] | None] = {}


def _entry_of(cls: type[Message]) -> tuple[Handler, bool] | None:
    """The handler of a class or of the class it is a variant of, and whether it needs a bucket."""
    if cls not in _entries:
        known = next((base for base in cls.__mro__ if base in _handlers), None)
        _entries[cls] = (_handlers[known], known not in _bucketless) if known is not None else None
    return _entries[cls]
