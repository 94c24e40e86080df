"""Routes that list, make and drop buckets, at the paths of Couchbase's REST API.

The texts of some refusals are those that Couchbase's SDKs look for.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from upriver.errors import ConfigError, KeyExists
from upriver.model import VbucketState
from upriver.node import log
from upriver.node.arguments import number_or_none
from upriver.node.http_cluster import bucket_or_404, describe_node
from upriver.node.http_server import Result, route
from upriver.node.http_wire import Answer, HttpError, Request

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.server import Node

_BAD = HTTPStatus.BAD_REQUEST

def describe_bucket(node: Node, bucket: NodeBucket) -> dict[str, Any]:
    store = bucket.store
    path = f"/pools/default/buckets/{bucket.name}"
    items = sum(vb.item_count for vb in store.existing() if vb.state is VbucketState.ACTIVE)
    found: dict[str, Any] = json.loads(node.cluster_json(bucket))
    found.update(
        bucketType="membase",
        storageBackend="upriver",
        numVBuckets=store.vbuckets,
        replicaNumber=0,
        maxTTL=store.options.max_ttl_s,
        evictionPolicy="fullEviction",
        compressionMode="passive",
        conflictResolutionType="lww" if store.options.lww else "seqno",
        durabilityMinLevel="none",
        controllers={"flush": f"{path}/controller/doFlush"} if node.options.enable_flush else {},
        authType="sasl",
        collectionsManifestUid=f"{store.manifest.uid:x}",
        nodes=[describe_node(node)],
        quota={"ram": store.options.quota_bytes, "rawRAM": store.options.quota_bytes},
        basicStats={"itemCount": items, "memUsed": store.memory_bytes, "diskUsed": store.disk_bytes},
    )
    return found


@route("GET", "/pools/default/buckets")
def list_buckets(node: Node, request: Request) -> Result:
    mine = [bucket for bucket in node.buckets if request.access.inside(bucket.name)]
    return Answer([describe_bucket(node, bucket) for bucket in mine])


@route("GET", "/pools/default/buckets/*")
def get_bucket(node: Node, request: Request, name: str) -> Result:
    return Answer(describe_bucket(node, bucket_or_404(node, name)))


@route("POST", "/pools/default/buckets")
def create_bucket(node: Node, request: Request) -> Result:
    """Takes ``name`` and ``numVBuckets``; what else Couchbase's tools send has no meaning here."""
    arguments = request.arguments()
    name = str(arguments.get("name", ""))
    try:
        node.buckets.create(name, number_or_none(arguments, "numVBuckets", 1, 0xFFFF))
    except KeyExists as error:
        raise HttpError(_BAD, "Bucket with given name already exists", "name") from error
    except ConfigError as error:
        raise HttpError(_BAD, str(error), "name") from error
    return Answer(None, HTTPStatus.ACCEPTED)


@route("DELETE", "/pools/default/buckets/*")
def drop_bucket(node: Node, request: Request, name: str) -> Result:
    if name not in node.buckets.broken:
        bucket_or_404(node, name)
    node.delete_bucket(name)
    return Answer()


@route("POST", "/pools/default/buckets/*/controller/doFlush")
async def flush_bucket(node: Node, request: Request, name: str) -> Result:
    bucket = bucket_or_404(node, name)
    if not node.options.enable_flush:
        raise HttpError(_BAD, "Flush is disabled for the bucket; start the node with --enable-flush")
    await bucket.empty()
    log.info("bucket_flushed", bucket=bucket.name)
    return Answer()
