"""The value of a stored document: what a client sees of it, its extended attributes, and which of them a SET keeps.

The store takes no unreadable value, but an older version may have let one in, or a disk may have damaged one. An
unreadable document fails the request that asks for it, and no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from upriver.errors import InvalidMessage, KeyNotFound, Status, StatusError
from upriver.model import Datatype
from upriver.wire import Context, kv
from upriver.wire.values import MAX_XATTR_BYTES, body_offset, inflate, join_xattrs, split_xattrs

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.store import VBucket


def shown_value(context: Context, datatype: int, value: bytes) -> tuple[int, bytes]:
    """Datatype and value as a GET answers them: never with xattrs, compressed and marked as JSON as HELLO agreed."""
    if datatype & Datatype.XATTR or (datatype & Datatype.SNAPPY and not context.datatypes & Datatype.SNAPPY):
        value = _body_of(datatype, value)
        datatype &= Datatype.JSON
    return datatype & context.datatypes, value


def _body_of(datatype: int, value: bytes) -> bytes:
    """The body without compression and extended attributes; the attributes are not parsed."""
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
        if (end := body_offset(plain)) > 4 + MAX_XATTR_BYTES:  # parsing them would hold up all other clients
            raise _unreadable(f"its xattrs are {end - 4} bytes, the limit is {MAX_XATTR_BYTES}")
        return split_xattrs(plain)
    except InvalidMessage as error:
        raise _unreadable(error.reason) from error


def _unreadable(reason: str) -> StatusError:
    return StatusError.of(Status.EINTERNAL, f"the stored document cannot be read: {reason}; write it again")


def with_kept_xattrs(
    bucket: NodeBucket, vbucket: VBucket, collection_id: int, key: bytes, request: kv.Set
) -> tuple[int, bytes]:
    """The datatype and value that a SET or REPLACE stores: the old extended attributes stay unless it has its own.

    Looking for them costs a read, so a bucket remembers whether any were ever written.
    """
    datatype, value = request.datatype, request.value
    if datatype & Datatype.XATTR:
        bucket.expect_xattrs()
        return datatype, value
    if not bucket.has_xattrs:
        return datatype, value
    try:
        current = vbucket.documents.get(key, collection_id)
    except KeyNotFound:
        return datatype, value
    if not current.datatype & Datatype.XATTR:
        return datatype, value
    try:
        xattrs, _ = parts_of(current.datatype, current.value)
    except StatusError:  # the old attributes cannot be read; they are dropped
        return datatype, value
    body = inflate(value) if datatype & Datatype.SNAPPY else value
    return Datatype.XATTR | (datatype & Datatype.JSON), join_xattrs(xattrs, body)
