"""What stands between a document command and its vbucket: traffic switched off, not ours, or not ours yet (7.4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from upriver.errors import NotMyVbucket, TemporaryFailure
from upriver.model import VbucketState
from upriver.node.dispatch import Handler
from upriver.wire import Opcode

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import VBucket

DocumentHandler = Callable[["ClientConnection", Any, "VBucket"], Awaitable[None] | None]


def on_active(handler: DocumentHandler) -> Handler:
    """A command that only the active vbucket may do; on a pending one it waits until the vbucket is active."""

    def run(conn: ClientConnection, request: Any) -> Awaitable[None] | None:
        bucket = conn.require_bucket()
        if not bucket.traffic:
            raise TemporaryFailure("traffic is disabled")
        vbucket = bucket.store.vbucket(request.vbucket)
        if vbucket.state is VbucketState.PENDING:
            return _parked(conn, request, handler)
        if vbucket.state is not VbucketState.ACTIVE:
            raise NotMyVbucket
        if bucket.backed_up and request.vbucket in bucket.backed_up and request.opcode not in _READS:
            raise TemporaryFailure("the takeover of this vbucket has to catch up first")
        return handler(conn, request, vbucket)

    return run


_READS = frozenset(
    {
        Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_META, Opcode.GETQ_META, Opcode.SUBDOC_GET,
        Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT, Opcode.SUBDOC_MULTI_LOOKUP,
    }
)  # fmt: skip


async def _parked(conn: ClientConnection, request: Any, handler: DocumentHandler) -> None:
    bucket = conn.require_bucket()
    while (vbucket := bucket.store.vbucket(request.vbucket)).state is VbucketState.PENDING:
        await bucket.state_change(request.vbucket)
    if vbucket.state is not VbucketState.ACTIVE:
        raise NotMyVbucket
    pending = handler(conn, request, vbucket)
    if pending is not None:
        await pending
