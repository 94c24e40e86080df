"""The administrator's commands: vbucket states, compaction, the cluster map.

See docs/protocol/vbuckets.md and docs/protocol/kv.md#commands.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

import orjson

from upriver.errors import InvalidArguments, NotMyVbucket
from upriver.model import Datatype, VbucketState
from upriver.node import log
from upriver.node.dispatch import command
from upriver.wire import Message
from upriver.wire.messages import cluster

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection

_STATE_KEYS = frozenset({"topology", "expected_next_state", "use_snapshot"})
_SYNCHRONOUS = b"async=0"
_MOST_CHAINS, _LONGEST_CHAIN = 2, 4


def set_vbucket(conn: ClientConnection, request: cluster.SetVbucket | cluster.SetVbucketWide) -> Awaitable[None]:
    """Change the state at once and answer when it is on disk; requests that come together share one commit."""
    bucket = conn.require_bucket()
    state = VbucketState(request.state)
    topology = _topology(request.value, state) if request.value else None
    if topology is not None and bucket.member:
        raise InvalidArguments("the map of the cluster decides the topology of its vbuckets")
    revived = state is VbucketState.ACTIVE and _is_dead(bucket, request.vbucket)
    bucket.set_state(request.vbucket, state, topology=topology, durable=False)
    bucket.sync_writes.map_changed()
    log.info("vbucket_state", bucket=bucket.name, vbucket=request.vbucket, state=state.name.lower())
    return _reply_when_on_disk(bucket, conn, request, revived)


def _is_dead(bucket: NodeBucket, vbucket_id: int) -> bool:
    try:
        return bucket.store.vbucket(vbucket_id).state is VbucketState.DEAD
    except NotMyVbucket:
        return False


async def _reply_when_on_disk(bucket: NodeBucket, conn: ClientConnection, request: Message, revived: bool) -> None:
    """Answer when the state is on disk.

    A vbucket that was dead then releases its memory, so that it is streamed from disk as one snapshot, as in real
    servers.
    """
    await bucket.on_disk()
    if revived:
        bucket.store.vbucket(request.vbucket).release_memory()
    conn.reply(request)


def _topology(value: bytes, state: VbucketState) -> list[list[str | None]] | None:
    try:
        content = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidArguments("the value is not JSON") from error
    if not isinstance(content, dict) or content.keys() - _STATE_KEYS:
        raise InvalidArguments(f"the value is an object with no keys but {', '.join(sorted(_STATE_KEYS))}")
    topology: list[list[str | None]] | None = content.get("topology")
    if topology is None:
        return None
    if state is not VbucketState.ACTIVE:
        raise InvalidArguments("only an active vbucket has a topology")
    _check_topology(topology)
    return topology


def _check_topology(topology: object) -> None:
    if not isinstance(topology, list) or not 1 <= len(topology) <= _MOST_CHAINS:
        raise InvalidArguments("a topology is one or two chains")
    for chain in topology:
        if not isinstance(chain, list) or not 1 <= len(chain) <= _LONGEST_CHAIN or not isinstance(chain[0], str):
            raise InvalidArguments("a chain is one to four nodes, and the first has a name")
        if any(node is not None and not isinstance(node, str) for node in chain):
            raise InvalidArguments("a node is a name or null")


def get_vbucket(conn: ClientConnection, request: cluster.GetVbucket) -> None:
    conn.reply(request, value=conn.vbucket(request.vbucket).state.to_bytes(4, "big"))


def delete_vbucket(conn: ClientConnection, request: cluster.DeleteVbucket) -> None:
    if request.value not in (b"", _SYNCHRONOUS):
        raise InvalidArguments("the only value is async=0")
    bucket = conn.require_bucket()
    bucket.delete_vbucket(request.vbucket)
    log.info("vbucket_deleted", bucket=bucket.name, vbucket=request.vbucket)
    conn.reply(request)


def compact(conn: ClientConnection, request: cluster.CompactDb) -> Awaitable[None] | None:
    conn.vbucket(request.vbucket)
    return _compact(conn, request)


async def _compact(conn: ClientConnection, request: cluster.CompactDb) -> None:
    """Compact in a thread: a large file takes a while."""
    store = conn.require_bucket().store
    drop = bool(request.drop_deletes)
    # As in real servers, 0 means no limit.
    limit = None if drop or not request.purge_before_seq else request.purge_before_seq
    await conn.node.loop.run_in_executor(
        None,
        lambda: store.compact(
            request.vbucket, purge_before_s=request.purge_before_ts, purge_before_seqno=limit, drop_deletes=drop
        ),
    )  # fmt: skip
    conn.reply(request)


def cluster_config(conn: ClientConnection, request: cluster.GetClusterConfig) -> None:
    datatype = Datatype.JSON & conn.context.datatypes
    if conn.bucket is None:
        conn.reply(request, value=conn.node.nodes_json(), datatype=datatype)
        return
    current = conn.node.cluster_map(conn.bucket)
    known = request.revision is not None and request.epoch is not None
    if known and not current.is_newer_than(request.epoch or 0, request.revision or 0):
        conn.reply(request)
        return
    conn.map_revision_sent = (current.epoch, current.revision)
    conn.reply(request, value=conn.node.cluster_json(conn.bucket), datatype=datatype)


COMMANDS = (
    command(cluster.SetVbucket, set_vbucket),
    command(cluster.SetVbucketWide, set_vbucket),
    command(cluster.GetVbucket, get_vbucket),
    command(cluster.DeleteVbucket, delete_vbucket),
    command(cluster.CompactDb, compact),
    command(cluster.GetClusterConfig, cluster_config, needs_bucket=False),
)
