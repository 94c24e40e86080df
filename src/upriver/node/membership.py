"""A node as a member of a cluster: it does what the newest cluster map says, and reports how far it is.

The map alone decides: vbuckets become active, replica or dead by it, and replication streams are kept up by it. A
node that was told to be a member serves nobody before it has a map of this run, because the one it remembers may be
from before a failover.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from upriver.errors import ConfigError, NotMyVbucket, StatusError
from upriver.model import VbucketState
from upriver.node import log
from upriver.node.cluster_map import ClusterMap, NodeAddress
from upriver.node.http_cluster import bucket_or_404
from upriver.node.http_server import Result, route
from upriver.node.http_wire import Answer, HttpError, Request
from upriver.node.replicator import Replicator
from upriver.wire.keys import split_key

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.server import Node


def parse_map(data: Any) -> ClusterMap:
    """The map that a manager pushes; ``ConfigError`` says what is wrong with it."""
    try:
        nodes = tuple(NodeAddress(n["host"], n["kv"], n.get("mgmt")) for n in data["nodes"])
        owners = [[int(index) for index in row] for row in data["owners"]]
        found = ClusterMap(nodes, owners, int(data["revision"]), int(data["epoch"]), int(data["replicas"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a cluster map: {error!r}") from error
    if any(not row or max(row) >= len(nodes) for row in owners):
        raise ConfigError("the cluster map names a node that it does not list")
    return found


def apply_map(node: Node, bucket: NodeBucket, new: ClusterMap) -> dict[str, int]:
    """Become what the map says; an older map is refused."""
    current = node.cluster_map(bucket)
    if bucket.member and not new.is_newer_than(current.epoch, current.revision):
        raise ConfigError(f"revision {new.revision} is not newer than {current.revision}")
    if len(new.owners) != bucket.store.vbuckets:
        raise ConfigError(f"the map has {len(new.owners)} vbuckets, the bucket {bucket.store.vbuckets}")
    me = node.index_in(new)
    changed = 0
    for vb, chain in enumerate(new.owners):
        changed += _set(bucket, vb, _wanted_state(chain, me))
    node.set_cluster_map(bucket, new)
    bucket.member = bucket.traffic = True
    _replicate(node, bucket, new, me)
    log.info("cluster_map", bucket=bucket.name, revision=new.revision, changed=changed)
    return {"changed": changed}


def _wanted_state(chain: Any, me: int) -> VbucketState:
    if me < 0 or me not in chain:
        return VbucketState.DEAD
    return VbucketState.ACTIVE if chain[0] == me else VbucketState.REPLICA


def state_of(bucket: NodeBucket, vb: int) -> VbucketState | None:
    try:
        return bucket.store.vbucket(vb).state
    except NotMyVbucket:
        return None


def _set(bucket: NodeBucket, vb: int, wanted: VbucketState) -> bool:
    current = state_of(bucket, vb)
    if current is wanted or (current is None and wanted is VbucketState.DEAD):
        return False
    vbucket = bucket.set_state(vb, wanted)
    if wanted is VbucketState.ACTIVE:
        # What a majority had prepared may have been acknowledged to a client: it must not be lost (7, durability).
        for wire_key, seqno in list(vbucket.pending.items()):
            collection_id, key = split_key(wire_key)
            vbucket.commit(key, collection_id, seqno)
    return True


def _replicate(node: Node, bucket: NodeBucket, new: ClusterMap, me: int) -> None:
    wanted: dict[NodeAddress, set[int]] = {}
    for vb, chain in enumerate(new.owners):
        if me in chain[1:] and chain[0] >= 0:
            wanted.setdefault(new.nodes[chain[0]], set()).add(vb)
    if bucket.replicator is None:
        bucket.replicator = Replicator(node, bucket)
    bucket.replicator.want(wanted)


@route("POST", "/upriver/cluster/*")
def push(node: Node, request: Request, name: str) -> Result:
    """A manager's new map."""
    try:
        return Answer(apply_map(node, bucket_or_404(node, name), parse_map(orjson.loads(request.body))))
    except (ConfigError, orjson.JSONDecodeError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from error


@route("GET", "/upriver/cluster/*")
def report(node: Node, request: Request, name: str) -> Result:
    """Revision, and per vbucket state, seqnos and branch: what a manager decides by."""
    bucket = bucket_or_404(node, name)
    current = node.cluster_map(bucket)
    vbuckets = {
        str(vb.id): [int(vb.state), vb.high_seqno, vb.persisted_seqno, vb.uuid, int(vb.snapshot_complete)]
        for vb in bucket.store.existing()
    }
    return Answer({"revision": current.revision, "epoch": current.epoch, "member": bucket.member, "vbuckets": vbuckets})


def replicator_of(bucket: NodeBucket) -> Replicator:
    if bucket.replicator is None:
        raise ConfigError("this node is not a member of a cluster")
    return bucket.replicator


@route("POST", "/upriver/takeover/*")
async def take_over(node: Node, request: Request, name: str) -> Result:
    """Make this node the active owner of a vbucket that it replicates."""
    bucket = bucket_or_404(node, name)
    try:
        wanted = orjson.loads(request.body)
        vb, timeout_s = int(wanted["vbucket"]), float(wanted.get("timeout_s", 60.0))
        await replicator_of(bucket).take_over(vb, timeout_s)
    except (KeyError, ValueError, ConfigError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from error
    except (StatusError, TimeoutError) as error:
        raise HttpError(HTTPStatus.CONFLICT, str(error) or "timed out") from error
    return Answer({"vbucket": vb, "state": "active"})
