"""Error answers: their JSON, the cluster map in NOT_MY_VBUCKET, and the statuses of clients without XERROR.

See docs/protocol/framing.md#error-answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from upriver.errors import InvalidMessage, Rollback, Status, StatusError
from upriver.model import Datatype
from upriver.wire.constants import Feature

if TYPE_CHECKING:
    from upriver.node.connection import Answerable, ClientConnection

_REMAPPED = {
    Status.LOCKED: Status.KEY_EEXISTS,
    Status.CAS_VALUE_INVALID: Status.KEY_EEXISTS,
    Status.NOT_LOCKED: Status.ETMPFAIL,
    Status.SYNC_WRITE_IN_PROGRESS: Status.ETMPFAIL,
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS: Status.ETMPFAIL,
    Status.CANNOT_APPLY_COLLECTIONS_MANIFEST: Status.EINTERNAL,
}
_DISCONNECT = frozenset(
    {
        Status.EACCESS, Status.NO_BUCKET, Status.AUTH_STALE, Status.DURABILITY_INVALID_LEVEL,
        Status.DURABILITY_IMPOSSIBLE, Status.SYNC_WRITE_AMBIGUOUS, Status.DCP_STREAM_ID_INVALID,
        Status.RANGE_SCAN_CANCELLED, Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE, Status.VB_UUID_NOT_EQUAL,
    }
)  # fmt: skip
_COLLECTION_STATUSES = frozenset({Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE})


def fail_with(conn: ClientConnection, request: Answerable, error: StatusError | InvalidMessage) -> None:
    """Answer with the error of an exception."""
    if isinstance(error, Rollback):
        conn.reply(request, status=Status.ROLLBACK, value=error.seqno.to_bytes(8, "big"))
    elif isinstance(error, InvalidMessage):
        fail(conn, request, error.status, str(error))
    else:
        fail(conn, request, error.status, error.context)


def fail(conn: ClientConnection, request: Answerable, status: Status, context: str = "") -> None:
    """Answer with an error, remapped for a client without extended errors; some errors end its connection instead."""
    if Feature.XERROR not in conn.features:
        if status in _DISCONNECT:
            conn.close(f"{status.name} and no extended errors")
            return
        status = _plain_status(conn, status)
    if status is Status.NOT_MY_VBUCKET:
        found = _cluster_map(conn)
        conn.reply(request, status=status, value=found, datatype=Datatype.JSON & conn.context.datatypes if found else 0)
        return
    value = _error_json(conn, status, context)
    datatype = Datatype.JSON & conn.context.datatypes if value else 0
    conn.reply(request, status=status, value=value, datatype=datatype)


def _plain_status(conn: ClientConnection, status: Status) -> Status:
    if status in _COLLECTION_STATUSES:
        return status if conn.context.collections else Status.EINVAL
    return _REMAPPED.get(status, status)


def _error_json(conn: ClientConnection, status: Status, context: str) -> bytes:
    content: dict[str, object] = {"error": {"context": context}} if context else {}
    if status in _COLLECTION_STATUSES and conn.bucket is not None:
        content["manifest_uid"] = f"{conn.bucket.store.manifest.uid:x}"
    return orjson.dumps(content) if content else b""


def _cluster_map(conn: ClientConnection) -> bytes:
    """The map as JSON; empty if the client has it and asked HELLO not to get it twice."""
    if conn.bucket is None:
        return b""
    current = conn.node.cluster_map(conn.bucket)
    revision = (current.epoch, current.revision)
    if Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP in conn.features and conn.map_revision_sent == revision:
        return b""
    conn.map_revision_sent = revision
    return conn.node.cluster_json(conn.bucket)
