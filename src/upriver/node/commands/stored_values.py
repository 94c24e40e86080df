"""Stored values taken apart for one request.

Nothing gets into a store that cannot be read, but an older version may have let it in, or a disk may have damaged it.
Such a document fails the request that asks for it, and nothing else.
"""

from __future__ import annotations

from upriver.errors import InvalidMessage, Status, StatusError
from upriver.model import Datatype
from upriver.wire.values import MAX_XATTR_BYTES, body_offset, inflate, split_xattrs


def body_of(datatype: int, value: bytes) -> bytes:
    """What is behind compression and extended attributes; the attributes themselves are not looked at."""
    try:
        plain = inflate(value) if datatype & Datatype.SNAPPY else value
        return plain[body_offset(plain) :] if datatype & Datatype.XATTR else plain
    except InvalidMessage as error:
        raise _unreadable(error.reason) from error


def parts_of(datatype: int, value: bytes) -> tuple[dict[str, bytes], bytes]:
    """Extended attributes by name, and the body."""
    try:
        plain = inflate(value) if datatype & Datatype.SNAPPY else value
        if not datatype & Datatype.XATTR:
            return {}, plain
        if (end := body_offset(plain)) > 4 + MAX_XATTR_BYTES:  # to make objects of them would keep everybody waiting
            raise _unreadable(f"its xattrs are {end - 4} bytes, the limit is {MAX_XATTR_BYTES}")
        return split_xattrs(plain)
    except InvalidMessage as error:
        raise _unreadable(error.reason) from error


def _unreadable(reason: str) -> StatusError:
    return StatusError.of(Status.EINTERNAL, f"the stored document cannot be read: {reason}; write it anew")
