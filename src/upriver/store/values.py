"""What the store must know about values: whether they are JSON, and what of them survives a deletion."""

from __future__ import annotations

import orjson

from upriver.errors import InvalidMessage, StatusError, TooBig
from upriver.model import Datatype, Document
from upriver.wire import json_text
from upriver.wire.values import check_value, inflate, inflated_size, join_xattrs, split_xattrs

MOST_XATTR_BYTES = 1 << 20  # of all of a document's extended attributes; a value may be larger by this much
_JSON_STARTS = frozenset(b'{["-0123456789tfn \t\r\n')


def is_json(value: bytes) -> bool:
    """Whether the value is JSON text, by the first byte where that is enough."""
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
    """What is behind compression and xattrs, of a value that every reader will be able to open.

    Nothing else may be stored: what a stream cannot read would stop all who read it. ``TooBig``, or the status of the
    rule that is broken.
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
    """(value, datatype) that a tombstone keeps: the system xattrs, whose names begin with ``_``."""
    if not document.datatype & Datatype.XATTR:
        return b"", 0
    try:
        blob, _ = split_value(document)
        attributes, _ = split_xattrs(blob)
    except InvalidMessage:
        return b"", 0  # it was stored unchecked; there is nothing in it that could be kept
    kept = {name: content for name, content in attributes.items() if name.startswith("_")}
    return (join_xattrs(kept), int(Datatype.XATTR)) if kept else (b"", 0)
