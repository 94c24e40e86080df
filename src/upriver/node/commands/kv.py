"""Reading and writing documents: every plain command of docs/protocol/kv.md#commands, with its quiet form.

Quiet rule: a quiet mutation that succeeds and a quiet get that finds nothing are not answered; everything else is.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from upriver.errors import InvalidArguments, KeyNotFound
from upriver.model import SEQNO_MAX, Document
from upriver.node.cluster.durability import when_durable
from upriver.node.commands.values import shown_value, with_kept_xattrs
from upriver.node.dispatch import Pending, command, document_command
from upriver.wire import Opcode
from upriver.wire.constants import QUIET_OPCODES
from upriver.wire.messages import kv

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import Stored, VBucket

_U32 = Struct(">I")
_DO_NOT_CREATE = 0xFFFF_FFFF
_WITH_KEY = frozenset({Opcode.GETK, Opcode.GETKQ})
_Mutation = kv.Set | kv.Add | kv.Delete | kv.Append | kv.Counter


def get(conn: ClientConnection, request: kv.Get, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    try:
        document = vb.documents.get(key, collection)
    except KeyNotFound:
        if request.opcode not in QUIET_OPCODES:
            raise
        return
    locked = bool(vb.locks) and vb.documents.is_locked(key, collection)
    _reply_document(conn, request, document, cas=SEQNO_MAX if locked else document.cas)


def get_replica(conn: ClientConnection, request: kv.Get) -> None:
    collection, key = conn.split(request.key)
    document = conn.vbucket(request.vbucket).documents.get_replica(key, collection)
    _reply_document(conn, request, document, cas=document.cas)


def store(conn: ClientConnection, request: kv.Set, vb: VBucket) -> Pending:
    """SET and REPLACE."""
    collection, key = conn.split(request.key)
    write = vb.documents.replace if request.opcode in (Opcode.REPLACE, Opcode.REPLACEQ) else vb.documents.set
    datatype, value = with_kept_xattrs(conn.require_bucket(), vb, collection, key, request)
    stored = write(
        key, value, collection, flags=request.flags, expiry=request.expiry, datatype=datatype, cas=request.cas,
        preserve_ttl=request.preserve_ttl,
    )  # fmt: skip
    return _acknowledge(conn, request, vb, stored)


def add(conn: ClientConnection, request: kv.Add, vb: VBucket) -> Pending:
    if request.preserve_ttl:
        raise InvalidArguments("a document that does not exist has no expiry to preserve")
    collection, key = conn.split(request.key)
    stored = vb.documents.add(
        key, request.value, collection, flags=request.flags, expiry=request.expiry, datatype=request.datatype
    )
    return _acknowledge(conn, request, vb, stored)


def delete(conn: ClientConnection, request: kv.Delete, vb: VBucket) -> Pending:
    collection, key = conn.split(request.key)
    return _acknowledge(conn, request, vb, vb.documents.delete(key, collection, cas=request.cas))


def concatenate(conn: ClientConnection, request: kv.Append, vb: VBucket) -> Pending:
    """APPEND and PREPEND."""
    if request.datatype:
        raise InvalidArguments("append and prepend take raw bytes")
    collection, key = conn.split(request.key)
    write = vb.documents.append if request.opcode in (Opcode.APPEND, Opcode.APPENDQ) else vb.documents.prepend
    return _acknowledge(conn, request, vb, write(key, request.value, collection, cas=request.cas))


def count(conn: ClientConnection, request: kv.Counter, vb: VBucket) -> Pending:
    """INCREMENT and DECREMENT."""
    collection, key = conn.split(request.key)
    create = request.expiry != _DO_NOT_CREATE
    number, stored = vb.documents.counter(
        key, request.delta, collection, initial=request.initial, expiry=request.expiry if create else 0,
        create=create, decrement=request.opcode in (Opcode.DECREMENT, Opcode.DECREMENTQ),
    )  # fmt: skip
    return _acknowledge(conn, request, vb, stored, number.to_bytes(8, "big"))


def touch(conn: ClientConnection, request: kv.Touch, vb: VBucket) -> None:
    """TOUCH, and GAT, which also reads the document."""
    collection, key = conn.split(request.key)
    if request.opcode == Opcode.TOUCH:
        conn.reply(request, cas=vb.documents.touch(key, request.expiry, collection).cas)
        return
    try:
        document = vb.documents.get_and_touch(key, request.expiry, collection)
    except KeyNotFound:
        if request.opcode not in QUIET_OPCODES:
            raise
        return
    _reply_document(conn, request, document, cas=document.cas)


def lock(conn: ClientConnection, request: kv.GetLocked, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    document = vb.documents.lock(key, collection, seconds=request.seconds or 0)
    _reply_document(conn, request, document, cas=document.cas)


def unlock(conn: ClientConnection, request: kv.Unlock, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    vb.documents.unlock(key, request.cas, collection)
    conn.reply(request)


def _reply_document(
    conn: ClientConnection, request: kv.Get | kv.Touch | kv.GetLocked, document: Document, cas: int
) -> None:
    """Answer with a document; only the GETK forms repeat its key."""
    datatype, value = shown_value(conn.context, document.datatype, document.value)
    key = request.key if request.opcode in _WITH_KEY else b""
    conn.reply(request, extras=_U32.pack(document.flags), key=key, value=value, cas=cas, datatype=datatype)


def _acknowledge(
    conn: ClientConnection, request: _Mutation, vb: VBucket, stored: Stored, value: bytes = b""
) -> Pending:
    """Answer a mutation, at once or when it is as durable as the request asks for."""
    if request.durability is None:
        reply_stored(conn, request, stored, value)
        return None
    return when_durable(conn, request, vb, stored, lambda final: reply_stored(conn, request, final, value))


def reply_stored(conn: ClientConnection, request: _Mutation | kv.WithMeta, stored: Stored, value: bytes = b"") -> None:
    """Answer a mutation that was written, unless it is a quiet one."""
    if request.opcode not in QUIET_OPCODES:
        conn.reply(request, extras=conn.mutation_token(stored), cas=stored.cas, value=value)


COMMANDS = (
    document_command(kv.Get, get),
    command(kv.Get.under(Opcode.GET_REPLICA), get_replica),
    document_command(kv.Set, store),
    document_command(kv.Add, add),
    document_command(kv.Delete, delete),
    document_command(kv.Append, concatenate),
    document_command(kv.Counter, count),
    document_command(kv.Touch, touch),
    document_command(kv.GetLocked, lock),
    document_command(kv.Unlock, unlock),
)
