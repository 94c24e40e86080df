"""Reading and writing documents: every plain command of ``protocol.md`` 10.2, with its quiet form.

Quiet rule: the success of a quiet mutation and the miss of a quiet get produce no packet; every other outcome does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from struct import Struct
from typing import TYPE_CHECKING, Any

from upriver.errors import InvalidArguments, KeyNotFound, NotSupported, SyncWriteAmbiguous
from upriver.model import SEQNO_MAX, Datatype, Document
from upriver.node.dispatch import Handler
from upriver.node.vbucket_gate import on_active
from upriver.wire import Message, Opcode, kv
from upriver.wire.constants import DurabilityLevel
from upriver.wire.values import inflate, join_xattrs, split_xattrs

if TYPE_CHECKING:
    from upriver.node.connection import Connection
    from upriver.store import Stored, VBucket

_U32 = Struct(">I")
_DO_NOT_CREATE = 0xFFFF_FFFF
_WITH_KEY = frozenset({Opcode.GETK, Opcode.GETKQ})


def reply_document(conn: Connection, request: Any, document: Document, cas: int | None = None) -> None:
    """The answer of GET and its relatives."""
    datatype, value = conn.datatype_out(document.datatype, document.value)
    key = request.key if request.opcode in _WITH_KEY else b""
    shown = document.cas if cas is None else cas
    conn.reply(request, extras=_U32.pack(document.flags), key=key, value=value, cas=shown, datatype=datatype)


def reply_stored(conn: Connection, request: Any, stored: Stored, value: bytes = b"") -> None:
    """The answer of a mutation: silence if it was a quiet one."""
    if not conn.is_quiet(request):
        conn.reply(request, extras=conn.mutation_extras(stored), cas=stored.cas, value=value)


def get(conn: Connection, request: kv.Get) -> Awaitable[None] | None:
    if request.opcode == Opcode.GET_REPLICA:
        collection, key = conn.split(request.key)
        reply_document(conn, request, conn.vbucket(request.vbucket).get_replica(key, collection))
        return None
    return _get_active(conn, request)


def _get(conn: Connection, request: Any, vb: VBucket) -> None:
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


def store(conn: Connection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    """SET and REPLACE; a durable SET is prepared, then committed."""
    collection, key = conn.split(request.key)
    level = conn.durability(request)
    if level is not None and request.opcode in (Opcode.SET, Opcode.SETQ) and not conn.preserve_ttl(request):
        prepared = vb.prepare(
            key, request.value, collection, level=level, flags=request.flags, expiry=request.expiry,
            datatype=request.datatype, cas=request.cas,
        )  # fmt: skip
        return _commit(conn, request, vb, prepared, level)
    write = vb.replace if request.opcode in (Opcode.REPLACE, Opcode.REPLACEQ) else vb.set
    datatype, value = _with_old_xattrs(conn, request, vb)
    stored = write(
        key, value, collection, flags=request.flags, expiry=request.expiry, datatype=datatype, cas=request.cas,
        preserve_ttl=conn.preserve_ttl(request),
    )  # fmt: skip
    return acknowledge(conn, request, vb, stored)


def _with_old_xattrs(conn: Connection, request: Any, vb: VBucket) -> tuple[int, bytes]:
    """A SET replaces the body only: extended attributes of the document stay, unless it brings its own."""
    datatype, value = request.datatype, request.value
    bucket = conn.require_bucket()
    if datatype & Datatype.XATTR:
        bucket.expect_xattrs()
    if datatype & Datatype.XATTR or not bucket.has_xattrs:
        return datatype, value
    collection, key = conn.split(request.key)
    try:
        current = vb.get(key, collection)
    except KeyNotFound:
        return datatype, value
    if not current.datatype & Datatype.XATTR:
        return datatype, value
    stored = inflate(current.value) if current.datatype & Datatype.SNAPPY else current.value
    body = inflate(value) if datatype & Datatype.SNAPPY else value
    xattrs, _ = split_xattrs(stored)
    return Datatype.XATTR | datatype & Datatype.JSON, join_xattrs(xattrs, body)


def add(conn: Connection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    if conn.preserve_ttl(request):
        raise InvalidArguments("a document that does not exist has no expiry to preserve")
    collection, key = conn.split(request.key)
    stored = vb.add(
        key, request.value, collection, flags=request.flags, expiry=request.expiry, datatype=request.datatype
    )
    return acknowledge(conn, request, vb, stored)


def delete(conn: Connection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    _no_ttl(conn, request)
    collection, key = conn.split(request.key)
    level = conn.durability(request)
    if level is not None:
        vb.get(key, collection)
        prepared = vb.prepare(key, b"", collection, level=level, deleted=True, cas=request.cas)
        return _commit(conn, request, vb, prepared, level)
    return acknowledge(conn, request, vb, vb.delete(key, collection, cas=request.cas))


def concatenate(conn: Connection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    """APPEND and PREPEND."""
    _no_ttl(conn, request)
    if request.datatype:
        raise InvalidArguments("append and prepend take raw bytes")
    collection, key = conn.split(request.key)
    write = vb.append if request.opcode in (Opcode.APPEND, Opcode.APPENDQ) else vb.prepend
    return acknowledge(conn, request, vb, write(key, request.value, collection, cas=request.cas))


def count(conn: Connection, request: Any, vb: VBucket) -> Awaitable[None] | None:
    """INCREMENT and DECREMENT."""
    collection, key = conn.split(request.key)
    create = request.expiry != _DO_NOT_CREATE
    number, stored = vb.counter(
        key, request.delta, collection, initial=request.initial, expiry=request.expiry if create else 0,
        create=create, decrement=request.opcode in (Opcode.DECREMENT, Opcode.DECREMENTQ),
    )  # fmt: skip
    return acknowledge(conn, request, vb, stored, number.to_bytes(8, "big"))


def touch(conn: Connection, request: Any, vb: VBucket) -> Awaitable[None] | None:
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


def lock(conn: Connection, request: kv.GetLocked, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    reply_document(conn, request, vb.lock(key, collection, seconds=request.seconds or 0))


def unlock(conn: Connection, request: kv.Unlock, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    vb.unlock(key, request.cas, collection)
    conn.reply(request)


def _no_ttl(conn: Connection, request: Any) -> None:
    if conn.preserve_ttl(request):
        raise NotSupported("this command has no expiry to preserve")


# ---------------------------------------------------------------------------------------------- durability


def acknowledge(
    conn: Connection, request: Any, vb: VBucket, stored: Stored, value: bytes = b""
) -> Awaitable[None] | None:
    """Answer a mutation, at once or when it is as durable as was asked for.

    Without replicas the active node is the majority, so only the levels that name the disk have to wait.
    """
    level = conn.durability(request)
    if level is None or level == DurabilityLevel.MAJORITY:
        reply_stored(conn, request, stored, value)
        return None
    return _acknowledge_persisted(conn, request, vb, stored, value)


async def _acknowledge_persisted(conn: Connection, request: Any, vb: VBucket, stored: Stored, value: bytes) -> None:
    await _persisted(conn, request, vb, stored.seqno)
    reply_stored(conn, request, stored, value)


def _commit(conn: Connection, request: Any, vb: VBucket, prepared: Stored, level: int) -> Awaitable[None] | None:
    if level == DurabilityLevel.MAJORITY:
        _finish_commit(conn, request, vb, prepared)
        return None
    return _commit_persisted(conn, request, vb, prepared)


async def _commit_persisted(conn: Connection, request: Any, vb: VBucket, prepared: Stored) -> None:
    await _persisted(conn, request, vb, prepared.seqno)
    _finish_commit(conn, request, vb, prepared)


def _finish_commit(conn: Connection, request: Any, vb: VBucket, prepared: Stored) -> None:
    collection, key = conn.split(request.key)
    reply_stored(conn, request, vb.commit(key, collection, prepared.seqno))


async def _persisted(conn: Connection, request: Any, vb: VBucket, seqno: int) -> None:
    waiting = conn.require_bucket().waits.until(vb.id, seqno)
    try:
        await asyncio.wait_for(waiting, conn.node.options.limits.persistence_wait_s)
    except TimeoutError as error:
        raise SyncWriteAmbiguous("not on disk in time") from error


HANDLERS: dict[type[Message], Handler] = {
    kv.Get: get,
    kv.Set: on_active(store),
    kv.Add: on_active(add),
    kv.Delete: on_active(delete),
    kv.Append: on_active(concatenate),
    kv.Counter: on_active(count),
    kv.Touch: on_active(touch),
    kv.GetLocked: on_active(lock),
    kv.Unlock: on_active(unlock),
}
BUCKETLESS: frozenset[type[Message]] = frozenset()
