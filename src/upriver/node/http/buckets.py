"""Routes that list, create, change and drop buckets, at the paths of Couchbase's REST API.

The texts of some refusals are those that Couchbase's SDKs look for.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from upriver.errors import ConfigError, KeyExists
from upriver.model import VbucketState
from upriver.node import log
from upriver.node.bucket_settings import BucketSettings
from upriver.node.http.cluster import bucket_or_404, describe_nodes
from upriver.node.http.server import Result, route
from upriver.node.http.wire import Answer, HttpError, Request, number_or_none

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
        replicaNumber=node.cluster_map(bucket).replicas,
        maxTTL=store.options.max_ttl_s,
        evictionPolicy="fullEviction",
        compressionMode="passive",
        conflictResolutionType="lww" if store.options.lww else "seqno",
        durabilityMinLevel="none",
        controllers={"flush": f"{path}/controller/doFlush"} if node.may_flush(bucket) else {},
        authType="sasl",
        nodes=describe_nodes(node, node.cluster_map(bucket)),
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
    """Create a bucket; a setting that this node does not have is refused by name."""
    arguments = request.arguments()
    name = str(arguments.get("name", ""))
    settings = BucketSettings().changed_by(arguments, replicas=0)
    vbuckets = number_or_none(arguments, "numVBuckets", 1, 0xFFFF)
    try:
        node.buckets.create(name, vbuckets, settings)
    except KeyExists as error:
        raise HttpError(_BAD, "Bucket with given name already exists", "name") from error
    except ConfigError as error:
        raise HttpError(_BAD, str(error), "name") from error
    return Answer(None, HTTPStatus.ACCEPTED)


@route("POST", "/pools/default/buckets/*")
def update_bucket(node: Node, request: Request, name: str) -> Result:
    """Change the given settings of a bucket; the others stay."""
    bucket, arguments = bucket_or_404(node, name), request.arguments()
    settings = bucket.settings.changed_by(arguments, node.cluster_map(bucket).replicas)
    store = bucket.store
    if number_or_none(arguments, "numVBuckets", 1, 0xFFFF) not in (None, store.vbuckets):
        raise HttpError(_BAD, f"numVBuckets cannot be changed: it is {store.vbuckets}", "numVBuckets")
    if settings.lww not in (None, store.options.lww):
        raise HttpError(_BAD, "conflictResolutionType cannot be changed", "conflictResolutionType")
    if settings != bucket.settings and (bucket.member or bucket.waits_for_map):
        raise HttpError(_BAD, "a bucket of a cluster has the settings that its nodes were started with")
    node.buckets.change_settings(bucket, settings)
    log.info("bucket_changed", bucket=bucket.name)
    return Answer()


@route("DELETE", "/pools/default/buckets/*")
def drop_bucket(node: Node, request: Request, name: str) -> Result:
    if name not in node.buckets.broken and node.shares(bucket_or_404(node, name)):
        what = "remove this node from the cluster first, or stop the cluster and erase its directories"
        raise HttpError(_BAD, f"the bucket belongs to a cluster, and this node has only a part of it: {what}")
    node.delete_bucket(name)
    return Answer()


@route("POST", "/pools/default/buckets/*/controller/doFlush")
async def flush_bucket(node: Node, request: Request, name: str) -> Result:
    bucket = bucket_or_404(node, name)
    if not node.may_flush(bucket):
        what = "start the node with --enable-flush, or set flushEnabled; a bucket of a cluster is never flushed"
        raise HttpError(_BAD, f"Flush is disabled for the bucket; {what}")
    await bucket.empty()
    log.info("bucket_flushed", bucket=bucket.name)
    return Answer()
