"""Metadata of documents, writes with another cluster's metadata, random documents (docs/protocol/kv.md)."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, TypedDict

from upriver.errors import InvalidArguments, KeyNotFound
from upriver.model import Datatype
from upriver.node.commands.kv import reply_stored
from upriver.node.commands.values import shown_value
from upriver.node.dispatch import command, document_command
from upriver.wire import Opcode
from upriver.wire.constants import QUIET_OPCODES, Feature, MetaOption
from upriver.wire.keys import join_key
from upriver.wire.messages import kv
from upriver.wire.values import inflate

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import VBucket

_META = Struct(">IIIQ")
_DELETES = frozenset({Opcode.DEL_WITH_META, Opcode.DELQ_WITH_META})
_ADDS = frozenset({Opcode.ADD_WITH_META, Opcode.ADDQ_WITH_META})


class _Metadata(TypedDict):
    """What both with-meta writes of a vbucket take."""

    rev_seqno: int
    meta_cas: int
    flags: int
    datatype: int
    cas: int
    options: MetaOption


def get_meta(conn: ClientConnection, request: kv.GetMeta, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    try:
        document = vb.documents.get_meta(key, collection)
    except KeyNotFound:
        if request.opcode not in QUIET_OPCODES:
            raise
        return
    time = document.delete_time if document.deleted else document.expiry
    extras = _META.pack(document.deleted, document.flags, time, document.rev_seqno)
    if request.version == 2:
        extras += bytes((document.datatype,))
    conn.reply(request, extras=extras, cas=document.cas)


def with_meta(conn: ClientConnection, request: kv.WithMeta, vb: VBucket) -> None:
    collection, key = conn.split(request.key)
    if request.datatype & Datatype.XATTR:
        conn.require_bucket().expect_xattrs()
    options = MetaOption(request.options or 0)
    value = request.value[: len(request.value) - (request.nmeta or 0)]
    common = _Metadata(
        rev_seqno=request.rev_seqno, meta_cas=request.new_cas, flags=request.flags, datatype=request.datatype,
        cas=request.cas, options=options,
    )  # fmt: skip
    if request.opcode in _DELETES:
        stored = vb.with_meta.delete(key, collection, delete_time=request.expiry, value=value, **common)
    else:
        add = request.opcode in _ADDS
        stored = vb.with_meta.set(key, value, collection, expiry=request.expiry, add=add, **common)
    reply_stored(conn, request, stored)


def get_random_key(conn: ClientConnection, request: kv.GetRandomKey) -> None:
    """Answer with any document of any active vbucket."""
    collection = _random_collection(conn, request)
    for vb in conn.require_bucket().store.existing():
        try:
            document = vb.documents.get_random(collection)
        except KeyNotFound:
            continue
        key = join_key(collection, document.key) if conn.context.collections else document.key
        datatype, value = _random_value(conn, request, document.datatype, document.value)
        extras = document.flags.to_bytes(4, "big")
        conn.reply(request, extras=extras, key=key, value=value, cas=document.cas, datatype=datatype)
        return
    raise KeyNotFound


def _random_collection(conn: ClientConnection, request: kv.GetRandomKey) -> int:
    if (request.collection_id is not None) != conn.context.collections and request.collection_id is not None:
        raise InvalidArguments("a collection id needs collections")
    return request.collection_id or 0


def _random_value(conn: ClientConnection, request: kv.GetRandomKey, datatype: int, value: bytes) -> tuple[int, bytes]:
    if not request.include_xattr:
        return shown_value(conn.context, datatype, value)
    if Feature.GET_RANDOM_KEY_INCLUDE_XATTR not in conn.features:
        raise InvalidArguments("xattrs were not agreed on in HELLO")
    if datatype & Datatype.SNAPPY and not conn.context.datatypes & Datatype.SNAPPY:
        return datatype & ~Datatype.SNAPPY, inflate(value)
    return datatype, value


COMMANDS = (
    document_command(kv.GetMeta, get_meta),
    document_command(kv.WithMeta, with_meta),
    command(kv.GetRandomKey, get_random_key),
)
