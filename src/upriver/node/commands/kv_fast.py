"""Plain GETs and SETs, straight from the receive buffer and without a message object: four times as fast.

Only the usual case is handled here: no framing extras, no CAS on a SET, the default collection or no collections, an
active vbucket. For everything else a function returns False and the frame goes through ``dispatch``, where every rule
is checked, so the rules are in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from upriver.errors import KeyNotFound, StatusError
from upriver.model import VbucketState
from upriver.node.access.roles import Privilege
from upriver.node.commands import answers
from upriver.node.commands.values import shown_value
from upriver.wire import Opcode
from upriver.wire.constants import Feature
from upriver.wire.framing import HEADER

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection

FastHandler = Callable[["ClientConnection", bytes | bytearray, int, int], bool]

_TOKEN_RESPONSE = Struct(">BBHBBHIIQQQ")
_GET_RESPONSE = Struct(">BBHBBHIIQI")
_EXPIRY = Struct(">II")
_TOKEN = Struct(">QQ")
_RESPONSE = 0x81
_JSON_OR_RAW = 1
_LONGEST_KEY = 250
_READ, _WRITE = int(Privilege.READ), int(Privilege.WRITE)


class _Request(NamedTuple):
    opcode: int
    opaque: int


def _set(conn: ClientConnection, data: bytes | bytearray, at: int, size: int) -> bool:
    bucket = conn.bucket
    _, opcode, key_len, extras_len, datatype, vbucket_id, _, opaque, cas = HEADER.unpack_from(data, at)
    prefix = 1 if conn.context.collections else 0
    if (
        bucket is None or not conn.privileges & _WRITE or not bucket.traffic or bucket.has_xattrs or bucket.backed_up
        or extras_len != 8 or cas or datatype > _JSON_OR_RAW or datatype & ~conn.context.datatypes
        or not prefix < key_len <= _LONGEST_KEY
    ):  # fmt: skip
        return False
    key_at = at + 32
    if prefix and data[key_at]:
        return False
    try:
        vbucket = bucket.store.vbucket(vbucket_id)
        if vbucket.state is not VbucketState.ACTIVE:
            return False
        flags, expiry = _EXPIRY.unpack_from(data, at + 24)
        value_at = key_at + key_len
        key, value = bytes(data[key_at + prefix : value_at]), bytes(data[value_at : at + size])
        stored = vbucket.documents.set(key, value, 0, flags=flags, expiry=expiry, datatype=datatype)
    except StatusError as error:
        answers.fail_with(conn, _Request(opcode, opaque), error)
        return True
    if opcode == Opcode.SET:
        if not conn.tracing:
            bucket.responses[0] += 1  # as ``ClientConnection.reply`` does
        _answer_set(conn, opaque, stored.cas, stored.vbuuid, stored.seqno)
    return True


def _answer_set(conn: ClientConnection, opaque: int, cas: int, vbuuid: int, seqno: int) -> None:
    if conn.tracing:
        token = _TOKEN.pack(vbuuid, seqno) if Feature.MUTATION_SEQNO in conn.features else b""
        conn.reply(_Request(Opcode.SET, opaque), extras=token, cas=cas)
    elif Feature.MUTATION_SEQNO in conn.features:
        conn.write(_TOKEN_RESPONSE.pack(_RESPONSE, Opcode.SET, 0, 16, 0, 0, 16, opaque, cas, vbuuid, seqno))
    else:
        conn.write(HEADER.pack(_RESPONSE, Opcode.SET, 0, 0, 0, 0, 0, opaque, cas))


def _get(conn: ClientConnection, data: bytes | bytearray, at: int, size: int) -> bool:
    bucket = conn.bucket
    _, opcode, key_len, extras_len, datatype, vbucket_id, body, opaque, cas = HEADER.unpack_from(data, at)
    prefix = 1 if conn.context.collections else 0
    if (
        bucket is None or not conn.privileges & _READ or not bucket.traffic or extras_len or cas or datatype
        or body != key_len or not prefix < key_len <= _LONGEST_KEY
    ):  # fmt: skip
        return False
    key_at = at + 24
    if prefix and data[key_at]:
        return False
    try:
        vbucket = bucket.store.vbucket(vbucket_id)
        if vbucket.state is not VbucketState.ACTIVE or vbucket.locks:
            return False
        document = vbucket.documents.get(bytes(data[key_at + prefix : at + size]), 0)
        datatype, value = shown_value(conn.context, document.datatype, document.value)
    except KeyNotFound as error:
        if opcode == Opcode.GET:
            answers.fail_with(conn, _Request(opcode, opaque), error)
        return True
    except StatusError as error:
        answers.fail_with(conn, _Request(opcode, opaque), error)
        return True
    if conn.tracing:
        extras = document.flags.to_bytes(4, "big")
        conn.reply(_Request(opcode, opaque), extras=extras, value=value, cas=document.cas, datatype=datatype)
        return True
    bucket.responses[0] += 1
    head = _GET_RESPONSE.pack(
        _RESPONSE, opcode, 0, 4, datatype, 0, 4 + len(value), opaque, document.cas, document.flags
    )
    conn.write(head + value)
    return True


HANDLERS: dict[int, FastHandler] = {Opcode.SET: _set, Opcode.SETQ: _set, Opcode.GET: _get, Opcode.GETQ: _get}
