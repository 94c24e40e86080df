"""Checks on values: whether they are JSON, whether readers can open them, and what a deletion keeps."""

from __future__ import annotations

import orjson

from upriver.errors import InvalidMessage, StatusError, TooBig
from upriver.model import Datatype, Document
from upriver.wire import json_text
from upriver.wire.values import check_value, inflate, inflated_size, join_xattrs, split_xattrs

MOST_XATTR_BYTES = 1 << 20  # for all xattrs of a document; a value may be larger by this much
_JSON_STARTS = frozenset(b'{["-0123456789tfn \t\r\n')


def is_json(value: bytes) -> bool:
    """Whether the value is JSON text; the first byte alone rules out most others."""
    if not value or value[0] not in _JSON_STARTS:
        return False
    if len(value) > json_text.LARGE:
        return json_text.is_json(value)
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError:
        return False
    return True


def split_value(document: Document) -> tuple[bytes, bytes]:
    """(xattr blob with its length, body) of a value, inflated; the blob is empty without xattrs."""
    value = inflate(document.value) if document.datatype & Datatype.SNAPPY else document.value
    if not document.datatype & Datatype.XATTR:
        return b"", value
    size = 4 + int.from_bytes(value[:4], "big")
    return value[:size], value[size:]


def checked_body(value: bytes, datatype: int, most_bytes: int) -> bytes:
    """The body without compression and xattrs, of a value that every reader can open.

    Nothing else may be stored: a value that a stream cannot read would stop all its readers. Raises ``TooBig``, or the
    status of the broken rule.
    """
    try:
        if datatype & Datatype.SNAPPY and inflated_size(value) > most_bytes + MOST_XATTR_BYTES:
            raise TooBig(f"{inflated_size(value)} bytes when inflated")
        blob, body = split_value(Document(b"", value, datatype=datatype))
        if len(blob) > MOST_XATTR_BYTES + 4:
            raise TooBig(f"{len(blob)} bytes of extended attributes, at most {MOST_XATTR_BYTES} are allowed")
        check_value(blob, datatype & Datatype.XATTR)
    except InvalidMessage as error:
        raise StatusError.of(error.status, str(error)) from error
    if len(body) > most_bytes:
        raise TooBig(f"{len(body)} bytes, at most {most_bytes} are allowed")
    return body


def surviving_xattrs(document: Document) -> tuple[bytes, int]:
    """(value, datatype) of the tombstone: it keeps the system xattrs, whose names begin with ``_``."""
    if not document.datatype & Datatype.XATTR:
        return b"", 0
    try:
        blob, _ = split_value(document)
        attributes, _ = split_xattrs(blob)
    except InvalidMessage:
        return b"", 0  # an older version stored it unchecked; nothing in it can be kept
    kept = {name: content for name, content in attributes.items() if name.startswith("_")}
    return (join_xattrs(kept), int(Datatype.XATTR)) if kept else (b"", 0)
