"""Routes about the cluster: what clients ask for at bootstrap, ``whoami``, and faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from upriver.errors import ConfigError, StatusError
from upriver.node.cluster.cluster_map import ClusterMap
from upriver.node.http.server import Result, route
from upriver.node.http.wire import Answer, ChunkedAnswer, HttpError, Request

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.cluster.cluster_map import NodeAddress
    from upriver.node.server import Node

_LOOK_S = 0.25
_SIGN_OF_LIFE_S = 10.0
_END_OF_PIECE = b"\n\n\n\n"


def bucket_or_404(node: Node, name: str) -> NodeBucket:
    bucket = node.buckets.find(name)
    if bucket is None:
        raise HttpError(HTTPStatus.NOT_FOUND, "Requested resource not found.")
    return bucket


def describe_nodes(node: Node, cluster_map: ClusterMap) -> list[dict[str, Any]]:
    """The entries of ``nodes``: all members of the cluster, or this node alone."""
    me = max(0, node.index_in(cluster_map))
    return [_describe_node(node, each, this_node=number == me) for number, each in enumerate(cluster_map.nodes)]


def _describe_node(node: Node, address: NodeAddress, *, this_node: bool) -> dict[str, Any]:
    """Other members are described as healthy and of this version: only the manager knows better."""
    found: dict[str, Any] = {
        "hostname": f"{address.host}:{address.mgmt or 8091}",
        "otpNode": f"ns_{address.kv}@{address.host}",  # a lasting name that no other node has
        "status": "healthy",
        "clusterMembership": "active",
        "version": node.version,
        "clusterCompatibility": 7 * 0x10000 + 6,
        "os": "any",
        "ports": {"direct": address.kv},
        "services": ["kv"],
    }
    return {**found, "thisNode": True} if this_node else found


def _versions(node: Node) -> dict[str, Any]:
    return {"implementationVersion": node.version, "isEnterprise": True, "componentsVersion": {}}


@route("GET", "/pools")
def pools(node: Node, request: Request) -> Result:
    pool = {"name": "default", "uri": "/pools/default", "streamingUri": "/poolsStreaming/default"}
    return Answer({**_versions(node), "pools": [pool], "isAdminCreds": bool(request.access.outside)})


@route("GET", "/versions")
def versions(node: Node, request: Request) -> Result:
    return Answer(_versions(node))


@route("GET", "/pools/default")
def pool(node: Node, request: Request) -> Result:
    buckets = sorted(node.buckets, key=lambda bucket: bucket.name)
    maps = [node.cluster_map(bucket) for bucket in buckets] or [ClusterMap.alone(node.address, 0)]
    visible = [bucket for bucket in buckets if request.access.inside(bucket.name)]
    return Answer(
        {
            "name": "default",
            "nodes": describe_nodes(node, max(maps, key=lambda each: len(each.nodes))),
            "buckets": {"uri": "/pools/default/buckets", "terseBucketsBase": "/pools/default/b/",
                        "terseStreamingBucketsBase": "/pools/default/bs/"},
            "bucketNames": [{"bucketName": each.name, "uuid": node.bucket_uuid(each)} for each in visible],
            "balanced": True,
            "rebalanceStatus": "none",
        }
    )  # fmt: skip


@route("GET", "/pools/default/nodeServices")
def node_services(node: Node, request: Request) -> Result:
    return Answer(node.nodes_json())


@route("GET", "/pools/default/b/*")
def terse_bucket(node: Node, request: Request, name: str) -> Result:
    return Answer(node.cluster_json(bucket_or_404(node, name)))


@route("GET", "/pools/default/bs/*")
@route("GET", "/pools/default/bucketsStreaming/*")
def streaming_bucket(node: Node, request: Request, name: str) -> Result:
    return ChunkedAnswer(_configs(node, bucket_or_404(node, name)))


async def _configs(node: Node, bucket: NodeBucket) -> AsyncIterator[bytes]:
    """The cluster map now and whenever it changes, until the bucket is gone."""
    sent = b""
    quiet_s = 0.0
    while node.buckets.find(bucket.name) is bucket:
        current = node.cluster_json(bucket)
        if current != sent:
            yield current + _END_OF_PIECE
            sent, quiet_s = current, 0.0
        elif quiet_s >= _SIGN_OF_LIFE_S:
            yield _END_OF_PIECE
            quiet_s = 0.0
        await asyncio.sleep(_LOOK_S)
        quiet_s += _LOOK_S


@route("GET", "/whoami")
def whoami(node: Node, request: Request) -> Result:
    given = request.basic_credentials()
    roles = [grant.to_json() for grant in request.access.grants]
    return Answer({"id": given[0] if given else "", "domain": "local", "roles": roles})


@route("POST", "/upriver/faults/*")
async def fault(node: Node, request: Request, name: str) -> Result:
    """Carry out a fault, if the node was started with faults enabled."""
    if not node.options.enable_faults:
        raise HttpError(HTTPStatus.NOT_FOUND, "faults are off: start the node with --enable-faults")
    from upriver.node import faults

    try:
        done = faults.run(node, name, request.arguments())
    except (ConfigError, StatusError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from error
    return Answer(json.dumps(done).encode())
