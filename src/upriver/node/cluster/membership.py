"""A node as a member of a cluster: it does what the newest cluster map says, and reports its seqnos.

The map alone decides which vbuckets are active, replica or dead, and which are replicated from where. A member serves
no client before it is given a map in this run, because the one on disk may be from before a failover.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from upriver.errors import ConfigError, DamagedVbucket, InvalidArguments, NotMyVbucket, StatusError
from upriver.model import VbucketState
from upriver.node import log
from upriver.node.cluster.cluster_map import ClusterMap, KeptMap, NodeAddress, Version, parse_map
from upriver.node.cluster.manifest_changes import take_manifest
from upriver.node.dcp.replicator import Replicator
from upriver.node.http.cluster import bucket_or_404
from upriver.node.http.server import Result, route
from upriver.node.http.wire import Answer, HttpError, Request
from upriver.store.collections.manifest import Manifest

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.server import Node
    from upriver.store import VBucket


def apply_map(node: Node, bucket: NodeBucket, data: Any, *, welcome: bool = False) -> dict[str, int]:
    """Apply a map; one that does not follow the newest map that this node was given is refused.

    After a crash, every map without ``welcome`` is refused: acknowledged writes may be lost here, and the manager must
    know that.
    """
    new, kept = parse_map(data), KeptMap.of(node, bucket)
    _check_successor(node, kept, new)
    if bucket.waits_for_map and not bucket.store.opened_clean and not welcome:
        raise ConfigError("this node has crashed since it last had a map")
    if len(new.owners) != bucket.store.vbuckets:
        raise ConfigError(f"the map has {len(new.owners)} vbuckets, the bucket {bucket.store.vbuckets}")
    me = node.index_in(new)
    _check_readable(bucket, new, me)
    kept.keep(data, new)
    changes = _changes(bucket, new, me)
    bucket.set_states(changes)
    node.set_cluster_map(bucket, new)
    bucket.member = bucket.traffic = True
    bucket.waits_for_map = False
    _replicate(node, bucket, new, me)
    bucket.sync_writes.map_changed()
    bucket.sync_writes.resume_all()
    log.info("cluster_map", bucket=bucket.name, revision=new.revision, changed=len(changes))
    return {"changed": len(changes)}


def _check_successor(node: Node, kept: KeptMap, new: ClusterMap) -> None:
    known = kept.checked()
    if known is None:
        return
    if known.uuid != new.uuid:
        if node.index_in(known) >= 0:
            raise ConfigError("this node is a member of another cluster: remove it there, or erase its data")
        return
    if not new.lineage.follows(kept.version):
        raise ConfigError(
            f"revision {new.revision} (epoch {new.epoch}) does not follow revision {known.revision} "
            f"(epoch {known.epoch}), which this node has: the manager's state is not the newest"
        )


def _check_readable(bucket: NodeBucket, new: ClusterMap, me: int) -> None:
    """Refuse to be active for a vbucket that cannot be read here, if others have copies of it."""
    for vb, what in bucket.store.unreadable.items():
        chain = new.owners[vb]
        if _wanted_state(chain, me) is VbucketState.ACTIVE and any(n >= 0 for n in chain[1:]):
            raise ConfigError(f"vbucket {vb} is damaged here ({what}), and others have copies: fail this node over")


def _changes(bucket: NodeBucket, new: ClusterMap, me: int) -> dict[int, VbucketState]:
    """The vbuckets whose state is not that of the map, with the new state."""
    changes = {}
    for vb, chain in enumerate(new.owners):
        current, wanted = state_of(bucket, vb), _wanted_state(chain, me)
        if current is not wanted and not (current is None and _stays_missing(bucket, vb, wanted)):
            changes[vb] = wanted
    return changes


def _stays_missing(bucket: NodeBucket, vb: int, wanted: VbucketState) -> bool:
    """Whether a missing vbucket stays missing: it need not be here, or it is unreadable and must not become empty."""
    return wanted is VbucketState.DEAD or (wanted is VbucketState.ACTIVE and vb in bucket.store.unreadable)


def _wanted_state(chain: Sequence[int], me: int) -> VbucketState:
    if me < 0 or me not in chain:
        return VbucketState.DEAD
    return VbucketState.ACTIVE if chain[0] == me else VbucketState.REPLICA


def state_of(bucket: NodeBucket, vb: int) -> VbucketState | None:
    try:
        return bucket.store.vbucket(vb).state
    except (NotMyVbucket, DamagedVbucket):
        return None


def _replicate(node: Node, bucket: NodeBucket, new: ClusterMap, me: int) -> None:
    wanted: dict[NodeAddress, set[int]] = {}
    for vb, chain in enumerate(new.owners):
        if me in chain[1:] and chain[0] >= 0:
            wanted.setdefault(new.nodes[chain[0]], set()).add(vb)
    if bucket.replicator is None:
        bucket.replicator = Replicator(node, bucket)
    bucket.replicator.want(wanted)


@route("POST", "/upriver/cluster/*")
async def push(node: Node, request: Request, name: str) -> Result:
    """Take a manager's new map, and the manifest that goes with it."""
    bucket = bucket_or_404(node, name)
    try:
        data = orjson.loads(request.body)
        welcome = isinstance(data, dict) and bool(data.pop("welcome", False))
        if isinstance(data, dict) and data.get("manifest"):
            Manifest.parse(orjson.dumps(data["manifest"]))
        done = apply_map(node, bucket, data, welcome=welcome)
    except (ConfigError, InvalidArguments, orjson.JSONDecodeError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from error
    await take_manifest(bucket, data.get("manifest"))
    return Answer(done)


@route("GET", "/upriver/cluster/*")
def report(node: Node, request: Request, name: str) -> Result:
    """Report the map's revision, and the state, seqnos and branches of every vbucket."""
    return Answer(_report(node, bucket_or_404(node, name)))


@route("GET", "/upriver/cluster/*/map")
def newest_map(node: Node, request: Request, name: str) -> Result:
    """The newest map that this node was given, in this run or before, as it was pushed."""
    data = KeptMap.of(node, bucket_or_404(node, name)).data
    if data is None:
        raise HttpError(HTTPStatus.NOT_FOUND, "this node never had a map")
    return Answer(orjson.dumps(data))


def _report(node: Node, bucket: NodeBucket) -> dict[str, object]:
    kept = KeptMap.of(node, bucket)
    known = kept.checked()
    return {
        "revision": kept.version.revision,
        "epoch": kept.version.epoch,
        "branch": kept.version.branch,
        "uuid": known.uuid if known is not None else "",
        "member": bucket.member,
        "clean": bucket.store.opened_clean,
        "manifest_uid": bucket.store.manifest.uid,
        "fenced": bucket.replicator is not None and bucket.replicator.fenced,
        "vbuckets": {str(vb.id): _report_vbucket(vb) for vb in bucket.store.existing()},
    }


@route("POST", "/upriver/fence/*")
def fence(node: Node, request: Request, name: str) -> Result:
    """Consume nothing from one node until the next map, and report, so that the manager can choose its successor.

    Otherwise a node that only seems to be gone could still get acknowledgements after the choice was made.
    """
    bucket = bucket_or_404(node, name)
    try:
        source = str(orjson.loads(request.body)["source"])
    except (KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f'not {{"source": "host:port"}}: {error}') from error
    if bucket.replicator is not None:
        bucket.replicator.fence(source)
    return Answer(_report(node, bucket))


def _report_vbucket(vb: VBucket) -> list[object]:
    """State, high seqno, persisted seqno, the last seqno where it is consistent, and its branches."""
    consistent = vb.high_seqno if vb.state is VbucketState.ACTIVE or vb.snapshot_complete else vb.complete_seqno
    return [int(vb.state), vb.high_seqno, vb.persisted_seqno, consistent, list(vb.failover_log)]


def replicator_of(bucket: NodeBucket) -> Replicator:
    if bucket.replicator is None:
        raise ConfigError("this node is not a member of a cluster")
    return bucket.replicator


@route("POST", "/upriver/takeover/*")
async def take_over(node: Node, request: Request, name: str) -> Result:
    """Make this node active for vbuckets that it replicates, all at the same time."""
    bucket = bucket_or_404(node, name)
    try:
        wanted = orjson.loads(request.body)
        vbuckets, timeout_s = [int(vb) for vb in wanted["vbuckets"]], float(wanted.get("timeout_s", 60.0))
        planned = Version(int(wanted["epoch"]), int(wanted["revision"]), str(wanted["branch"]))
        _check_plan(KeptMap.of(node, bucket).version, planned)
        replicator = replicator_of(bucket)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from error
    outcomes = await asyncio.gather(*(_take_over_one(replicator, vb, timeout_s) for vb in vbuckets))
    failed = {str(vb): reason for vb, reason in zip(vbuckets, outcomes, strict=True) if reason}
    return Answer({"active": [vb for vb in vbuckets if str(vb) not in failed], "failed": failed})


async def _take_over_one(replicator: Replicator, vb: int, timeout_s: float) -> str:
    """Take over one vbucket; returns why it failed, or an empty string."""
    try:
        await replicator.take_over(vb, timeout_s)
    except (StatusError, ConfigError, TimeoutError) as error:
        return str(error) or "timed out"
    return ""


def _check_plan(current: Version, planned: Version) -> None:
    """Refuse a takeover of an older plan: the request may have been delayed."""
    if planned != current:
        raise ConfigError(f"the takeover was planned for revision {planned.revision}, this is {current.revision}")


# ---------------------------------------------------------------------------------------------- collections


@route("GET", "/upriver/proposals/*")
def proposals(node: Node, request: Request, name: str) -> Result:
    """The manifest changes that clients have asked this member for."""
    return Answer(orjson.dumps(bucket_or_404(node, name).proposals.waiting()))


@route("POST", "/upriver/proposals/*")
def outcomes(node: Node, request: Request, name: str) -> Result:
    """Take the manager's decisions about those changes."""
    bucket_or_404(node, name).proposals.decide(request.json_object())
    return Answer({})


@route("GET", "/upriver/manifest/*")
def own_manifest(node: Node, request: Request, name: str) -> Result:
    return Answer(bucket_or_404(node, name).store.manifest.to_json())


@route("POST", "/upriver/manifest/*")
async def push_manifest(node: Node, request: Request, name: str) -> Result:
    """Take the manifest that this member could not apply together with its map."""
    await take_manifest(bucket_or_404(node, name), request.json_object())
    return Answer({})
