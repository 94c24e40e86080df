"""HELLO, buckets, and commands about the connection or the whole bucket.

See docs/protocol/kv.md#commands and docs/protocol/session.md#hello.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from upriver.errors import AccessDenied, InvalidArguments, KeyNotFound, NotSupported, StatusError
from upriver.model import Datatype
from upriver.node import log
from upriver.node.dispatch import command
from upriver.wire import Context, Opcode
from upriver.wire.constants import QUIET_OPCODES, Feature
from upriver.wire.messages import session

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection

# The implemented features; others that a client asks for are left out of the answer.
FEATURES = frozenset(
    {
        Feature.TCP_NODELAY, Feature.MUTATION_SEQNO, Feature.XATTR, Feature.XERROR, Feature.SELECT_BUCKET,
        Feature.SNAPPY, Feature.JSON, Feature.DUPLEX, Feature.CLUSTERMAP_CHANGE_NOTIFICATION,
        Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF, Feature.UNORDERED_EXECUTION, Feature.TRACING,
        Feature.ALT_REQUEST, Feature.SYNC_REPLICATION,
        Feature.COLLECTIONS, Feature.SNAPPY_EVERYWHERE, Feature.PRESERVE_TTL, Feature.VATTR,
        Feature.SUBDOC_CREATE_AS_DELETED, Feature.SUBDOC_DOCUMENT_MACRO_SUPPORT,
        Feature.SUBDOC_REPLACE_BODY_WITH_XATTR, Feature.SUBDOC_REPLICA_READ,
        Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION, Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP,
        Feature.SUBDOC_ALLOWS_ACCESS_ON_MULTIPLE_XATTR_KEYS, Feature.SUBDOC_BINARY_XATTR,
        Feature.SUBDOC_ALLOW_REPLICA_READ_ON_DELETED_DOCS, Feature.GET_RANDOM_KEY_INCLUDE_XATTR,
        Feature.DCP_SKIP_DELETES_IN_INITIAL_BACKFILL,
    }
)  # fmt: skip
_NEEDS: dict[Feature, frozenset[Feature]] = {
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION: frozenset({Feature.DUPLEX}),
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF: frozenset({Feature.DUPLEX}),
    Feature.VATTR: frozenset({Feature.XATTR}),
    Feature.SUBDOC_DOCUMENT_MACRO_SUPPORT: frozenset({Feature.XATTR}),
    Feature.RANGE_SCAN_INCLUDE_XATTR: frozenset({Feature.XATTR}),
    Feature.GET_RANDOM_KEY_INCLUDE_XATTR: frozenset({Feature.XATTR, Feature.JSON, Feature.SNAPPY_EVERYWHERE}),
}
_DATATYPES = {Feature.JSON: Datatype.JSON, Feature.SNAPPY: Datatype.SNAPPY, Feature.XATTR: Datatype.XATTR}
_NO_BUCKET = b"@no bucket@"


def hello(conn: ClientConnection, request: session.Hello) -> None:
    asked = frozenset(request.features)
    for feature, needed in _NEEDS.items():
        if feature in asked and not needed <= asked:
            raise InvalidArguments(f"{feature.name} needs {', '.join(sorted(each.name for each in needed))}")
    accepted = {each for each in asked if each in FEATURES}
    if conn.dcp is not None:
        accepted.discard(Feature.UNORDERED_EXECUTION)
    datatypes = sum(bit for feature, bit in _DATATYPES.items() if feature in accepted)
    if conn.dcp is None:  # a DCP connection keeps what it was opened with
        conn.context = Context(collections=Feature.COLLECTIONS in accepted, datatypes=datatypes, check_values=True)
    conn.features = frozenset(accepted)
    conn.agent = _agent(request.agent)
    conn.tracing = False  # this answer still has the usual form
    conn.reply(request, value=b"".join(each.to_bytes(2, "big") for each in sorted(accepted)))
    conn.tracing = Feature.TRACING in accepted


def _agent(name: bytes) -> str:
    """The agent's name; newer clients send JSON with a connection id."""
    text = name.decode("utf-8", "backslashreplace")
    if text.startswith("{"):
        try:
            return str(orjson.loads(name).get("a", text))
        except orjson.JSONDecodeError:
            return text
    return text


def select_bucket(conn: ClientConnection, request: session.SelectBucket) -> None:
    if conn.dcp is not None:
        raise NotSupported("a DCP connection keeps its bucket")
    if request.name == _NO_BUCKET:
        conn.select(None)
    else:
        bucket = conn.node.buckets.find(request.name.decode("utf-8", "backslashreplace"))
        if bucket is None or not conn.access.inside(bucket.name):
            raise _no_such_bucket(conn, request.name)
        conn.select(bucket)
    conn.reply(request)


def _no_such_bucket(conn: ClientConnection, name: bytes) -> StatusError:
    """Access denied: SDKs take "no such key" for a bucket that is being created, and retry until they time out."""
    shown = name.decode("utf-8", "backslashreplace")
    reason = f"there is no bucket {shown!r} for you: it is misspelt, not created or dropped, or you have no role"
    return AccessDenied(reason) if Feature.XERROR in conn.features else KeyNotFound(reason)


def list_buckets(conn: ClientConnection, request: session.ListBuckets) -> None:
    visible = [name for name in conn.node.buckets.names() if conn.access.inside(name)]
    conn.reply(request, value=" ".join(visible).encode())


def noop(conn: ClientConnection, request: session.Noop | session.Verbosity) -> None:
    conn.reply(request)


def version(conn: ClientConnection, request: session.Noop) -> None:
    conn.reply(request, value=conn.node.version.encode())


def leave(conn: ClientConnection, request: session.Noop) -> None:
    """QUIT."""
    if request.opcode not in QUIET_OPCODES:
        conn.reply(request)
    conn.close("client quit")


async def flush_bucket(conn: ClientConnection, request: session.Flush) -> None:
    """Empty the bucket, if the operator allows it: every vbucket starts a new history."""
    bucket = conn.require_bucket()
    if not conn.node.may_flush(bucket):
        raise NotSupported("start the node with --enable-flush, or set the bucket's flushEnabled")
    await bucket.empty()
    log.info("bucket_flushed", bucket=bucket.name, connection=conn.id)
    if request.opcode not in QUIET_OPCODES:
        conn.reply(request)


def traffic(conn: ClientConnection, request: session.Traffic) -> None:
    conn.require_bucket().traffic = request.opcode == Opcode.ENABLE_TRAFFIC
    conn.reply(request)


async def persistence(conn: ClientConnection, request: session.Persistence) -> None:
    """Stop or start the flusher, for tests. As in a real server, doing it twice is an error."""
    bucket = conn.require_bucket()
    stop = request.opcode == Opcode.STOP_PERSISTENCE
    change = bucket.store.stop_persistence if stop else bucket.store.start_persistence
    # In a thread: stopping waits for a commit that is under way.
    if not await conn.node.loop.run_in_executor(None, change):
        raise InvalidArguments("Flusher not running." if stop else "Flusher not shut down.")
    log.info("persistence", bucket=bucket.name, running=not stop, connection=conn.id)
    conn.reply(request)


COMMANDS = (
    command(session.Hello, hello, needs_bucket=False),
    command(session.SelectBucket, select_bucket, needs_bucket=False),
    command(session.ListBuckets, list_buckets, needs_bucket=False),
    command(session.Noop, noop, needs_bucket=False),
    command(session.Noop.under(Opcode.VERSION), version, needs_bucket=False),
    command(session.Noop.under(Opcode.QUIT), leave, needs_bucket=False),
    command(session.Noop.under(Opcode.QUITQ), leave, needs_bucket=False),
    command(session.Verbosity, noop, needs_bucket=False),
    command(session.Flush, flush_bucket),
    command(session.Traffic, traffic),
    command(session.Persistence, persistence),
)
