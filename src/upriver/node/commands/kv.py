"""Reading and writing documents: every plain command of ``protocol.md`` 10.2, with its quiet form.

Quiet rule: the success of a quiet mutation and the miss of a quiet get produce no packet; every other outcome does.
"""

from __future__ import annotations

from collections.abc import Awaitable
from struct import Struct
from typing import TYPE_CHECKING, Any

from upriver.errors import InvalidArguments, KeyNotFound, NotSupported
from upriver.model import SEQNO_MAX, Document
from upriver.node.cluster.durability import durably, finish
from upriver.node.commands.kept_xattrs import with_old_xattrs
from upriver.node.commands.vbucket_gate import on_active
from upriver.node.dispatch import Handler
from upriver.wire import Message, Opcode
from upriver.wire.messages import kv

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import Stored, VBucket

_U32 = Struct(">I")
_DO_NOT_CREATE = 0xFFFF_FFFF
_WITH_KEY = frozenset({Opcode.GETK, Opcode.GETKQ})


def reply_document(conn: ClientConnection, request: Any, document: Document, cas: int | None = None) -> None:
    """The answer of GET and its relatives."""
    datatype, value = conn.datatype_out(document.datatype, document.value)
    key = request.key if request.opcode in _WITH_KEY else b""
    shown = document.cas if cas is None else cas
    conn.reply(request, extras=_U32.pack(document.flags), key=key, value=value, cas=shown, datatype=datatype)


def reply_stored(conn: ClientConnection, request: Any, stored: Stored, value: bytes = b"") -> None:
    """The answer of a mutation: silence if it was a quiet one."""
    if not conn.is_quiet(request):
        conn.reply(request, extras=conn.mutation_extras(stored), cas=stored.cas, value=value)


def get(conn: ClientConnection, request: kv.Get) -> Awaitable[None] | None:
    if request.opcode == Opcode.GET_REPLICA:
        collection, key = conn.split(request.key)
        reply_document(conn, request, conn.vbucket(request.vbucket).get_replica(key, collection))
        return None
    return _get_active(conn, request)


def _get(conn: ClientConnection, request: Any, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    try:
        document = vb.get(key, collection)
    except KeyNotFound:
        if not conn.is_quiet(request):
            raise
        return
    locked = bool(vb.locks) and vb.is_locked(key, collection)
    reply_document(conn, request, document, cas=SEQNO_MAX if locked else document.cas)


_get_active = on_active(_get)


def store(conn: ClientConnection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    """SET and REPLACE."""
    collection, key = conn.split(request.key)
    write = vb.replace if request.opcode in (Opcode.REPLACE, Opcode.REPLACEQ) else vb.set
    datatype, value = with_old_xattrs(conn, request, vb)
    stored = write(
        key, value, collection, flags=request.flags, expiry=request.expiry, datatype=datatype, cas=request.cas,
        preserve_ttl=conn.preserve_ttl(request),
    )  # fmt: skip
    return acknowledge(conn, request, vb, stored)


def add(conn: ClientConnection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    if conn.preserve_ttl(request):
        raise InvalidArguments("a document that does not exist has no expiry to preserve")
    collection, key = conn.split(request.key)
    stored = vb.add(
        key, request.value, collection, flags=request.flags, expiry=request.expiry, datatype=request.datatype
    )
    return acknowledge(conn, request, vb, stored)


def delete(conn: ClientConnection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    _no_ttl(conn, request)
    collection, key = conn.split(request.key)
    return acknowledge(conn, request, vb, vb.delete(key, collection, cas=request.cas))


def concatenate(conn: ClientConnection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    """APPEND and PREPEND."""
    _no_ttl(conn, request)
    if request.datatype:
        raise InvalidArguments("append and prepend take raw bytes")
    collection, key = conn.split(request.key)
    write = vb.append if request.opcode in (Opcode.APPEND, Opcode.APPENDQ) else vb.prepend
    return acknowledge(conn, request, vb, write(key, request.value, collection, cas=request.cas))


def count(conn: ClientConnection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    """INCREMENT and DECREMENT."""
    collection, key = conn.split(request.key)
    create = request.expiry != _DO_NOT_CREATE
    number, stored = vb.counter(
        key, request.delta, collection, initial=request.initial, expiry=request.expiry if create else 0,
        create=create, decrement=request.opcode in (Opcode.DECREMENT, Opcode.DECREMENTQ),
    )  # fmt: skip
    return acknowledge(conn, request, vb, stored, number.to_bytes(8, "big"))


def touch(conn: ClientConnection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    collection, key = conn.split(request.key)
    if request.opcode == Opcode.TOUCH:
        stored = vb.touch(key, request.expiry, collection)
        conn.reply(request, cas=stored.cas)
        return None
    try:
        document = vb.get_and_touch(key, request.expiry, collection)
    except KeyNotFound:
        if not conn.is_quiet(request):
            raise
    else:
        reply_document(conn, request, document)
    return None


def lock(conn: ClientConnection, request: kv.GetLocked, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    reply_document(conn, request, vb.lock(key, collection, seconds=request.seconds or 0))


def unlock(conn: ClientConnection, request: kv.Unlock, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    vb.unlock(key, request.cas, collection)
    conn.reply(request)


def _no_ttl(conn: ClientConnection, request: Any) -> None:
    if conn.preserve_ttl(request):
        raise NotSupported("this command has no expiry to preserve")


def acknowledge(
    conn: ClientConnection, request: Any, vb: VBucket, stored: Stored, value: bytes = b""
) -> Awaitable[None] | None:
    """Answer a mutation, at once or when it is as durable as was asked for."""
    return finish(conn, request, vb, stored, lambda final: reply_stored(conn, request, final, value))


HANDLERS: dict[type[Message], Handler] = {
    kv.Get: get,
    kv.Set: on_active(durably(store)),
    kv.Add: on_active(durably(add)),
    kv.Delete: on_active(durably(delete)),
    kv.Append: on_active(durably(concatenate)),
    kv.Counter: on_active(durably(count)),
    kv.Touch: on_active(touch),
    kv.GetLocked: on_active(lock),
    kv.Unlock: on_active(unlock),
}
BUCKETLESS: frozenset[type[Message]] = frozenset()
