"""A SET replaces the body only: the extended attributes of the document stay, unless it brings its own.

To look for them costs a read, so a bucket remembers whether anybody ever wrote any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from upriver.errors import KeyNotFound, StatusError
from upriver.model import Datatype
from upriver.node.commands.stored_values import parts_of
from upriver.wire.values import inflate, join_xattrs

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import VBucket


def with_old_xattrs(conn: ClientConnection, request: Any, vb: VBucket) -> tuple[int, bytes]:
    """The datatype and value that a SET or REPLACE has to store."""
    datatype, value = request.datatype, request.value
    bucket = conn.require_bucket()
    if datatype & Datatype.XATTR:
        bucket.expect_xattrs()
        return datatype, value
    if not bucket.has_xattrs:
        return datatype, value
    collection, key = conn.split(request.key)
    try:
        current = vb.get(key, collection)
    except KeyNotFound:
        return datatype, value
    if not current.datatype & Datatype.XATTR:
        return datatype, value
    try:
        xattrs, _ = parts_of(current.datatype, current.value)
    except StatusError:  # nobody can read them: the document is whole again with this value
        return datatype, value
    body = inflate(value) if datatype & Datatype.SNAPPY else value
    return Datatype.XATTR | (datatype & Datatype.JSON), join_xattrs(xattrs, body)
