"""Routes that list, make and drop buckets, scopes and collections, at the paths of Couchbase's REST API.

The texts of some refusals are those that Couchbase's SDKs look for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from upriver.errors import ConfigError, KeyExists
from upriver.model import VbucketState
from upriver.node import log
from upriver.node.http_cluster import bucket_or_404, describe_node
from upriver.node.http_server import Result, route
from upriver.node.http_wire import Answer, HttpError, Request

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.server import Node

_FIRST_ID = 8  # ids 1 to 7 are reserved (9.1)
_BAD = HTTPStatus.BAD_REQUEST

# ---------------------------------------------------------------------------------------------- buckets


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
    return Answer([describe_bucket(node, bucket) for bucket in node.buckets])


@route("GET", "/pools/default/buckets/*")
def get_bucket(node: Node, request: Request, name: str) -> Result:
    return Answer(describe_bucket(node, bucket_or_404(node, name)))


@route("POST", "/pools/default/buckets")
def create_bucket(node: Node, request: Request) -> Result:
    """Takes ``name`` and ``numVBuckets``; what else Couchbase's tools send has no meaning here."""
    arguments = request.arguments()
    name = str(arguments.get("name", ""))
    try:
        node.buckets.create(name, _number(arguments, "numVBuckets", 1, 0xFFFF))
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


def _number(arguments: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """A number among the arguments; None if it is not there."""
    text = str(arguments.get(name, "")).strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not low <= int(text[:12]) <= high:
        raise HttpError(_BAD, f"{name} must be a number from {low} to {high}", name)
    return int(text)


# ---------------------------------------------------------------------------------------------- collections

Manifest = dict[str, Any]


@route("GET", "/pools/default/buckets/*/scopes")
def get_manifest(node: Node, request: Request, bucket: str) -> Result:
    return Answer(bucket_or_404(node, bucket).store.manifest.to_json())


@route("POST", "/pools/default/buckets/*/scopes")
async def create_scope(node: Node, request: Request, bucket: str) -> Result:
    name = str(request.arguments().get("name", ""))

    def change(manifest: Manifest, new_id: str) -> None:
        if any(scope["name"] == name for scope in manifest["scopes"]):
            raise HttpError(_BAD, f'Scope with name "{name}" already exists', "name")
        manifest["scopes"].append({"name": name, "uid": new_id, "collections": []})

    return await _apply(node, bucket, change)


@route("DELETE", "/pools/default/buckets/*/scopes/*")
async def drop_scope(node: Node, request: Request, bucket: str, scope: str) -> Result:
    return await _apply(node, bucket, lambda manifest, _: manifest["scopes"].remove(_scope(manifest, scope)))


@route("POST", "/pools/default/buckets/*/scopes/*/collections")
async def create_collection(node: Node, request: Request, bucket: str, scope: str) -> Result:
    arguments = request.arguments()
    name = str(arguments.get("name", ""))

    def change(manifest: Manifest, new_id: str) -> None:
        inside = _scope(manifest, scope)["collections"]
        if any(collection["name"] == name for collection in inside):
            raise HttpError(_BAD, f'Collection with name "{name}" in scope "{scope}" already exists', "name")
        inside.append({"name": name, "uid": new_id, **_properties(arguments)})

    return await _apply(node, bucket, change)


@route("PATCH", "/pools/default/buckets/*/scopes/*/collections/*")
async def alter_collection(node: Node, request: Request, bucket: str, scope: str, collection: str) -> Result:
    properties = _properties(request.arguments())
    return await _apply(node, bucket, lambda manifest, _: _collection(manifest, scope, collection).update(properties))


@route("DELETE", "/pools/default/buckets/*/scopes/*/collections/*")
async def drop_collection(node: Node, request: Request, bucket: str, scope: str, collection: str) -> Result:
    def change(manifest: Manifest, _: str) -> None:
        _scope(manifest, scope)["collections"].remove(_collection(manifest, scope, collection))

    return await _apply(node, bucket, change)


@route("POST", "/pools/default/buckets/*/scopes/@ensureManifest/*")
def ensure_manifest(node: Node, request: Request, bucket: str, uid: str) -> Result:
    """Has every node this manifest? There is one node, and it has what it told."""
    current = bucket_or_404(node, bucket).store.manifest.uid
    try:
        known = int(uid, 16) <= current
    except ValueError as error:
        raise HttpError(_BAD, f"{uid!r} is not a manifest uid") from error
    if not known:
        raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"the manifest is at {current:x}")
    return Answer({})


async def _apply(node: Node, bucket_name: str, change: Callable[[Manifest, str], None]) -> Result:
    """Change a copy of the manifest and apply it under the next uid; the store checks names and rules."""
    bucket = bucket_or_404(node, bucket_name)
    async with bucket.manifest_changes:
        manifest: Manifest = json.loads(bucket.store.manifest.to_json())
        uid = int(manifest["uid"], 16) + 1
        manifest["uid"] = f"{uid:x}"
        change(manifest, f"{_unused_id(manifest, uid):x}")
        await bucket.apply_manifest(json.dumps(manifest).encode())
    log.info("manifest_applied", bucket=bucket.name, uid=manifest["uid"])
    return Answer({"uid": manifest["uid"]})


def _unused_id(manifest: Manifest, uid: int) -> int:
    """An id that was never used: as the uid only grows, so does this, past drops and all."""
    taken = [int(scope["uid"], 16) for scope in manifest["scopes"]]
    taken += [int(each["uid"], 16) for scope in manifest["scopes"] for each in scope["collections"]]
    return max(uid + _FIRST_ID - 1, *(each + 1 for each in taken))


def _scope(manifest: Manifest, name: str) -> dict[str, Any]:
    for scope in manifest["scopes"]:
        if scope["name"] == name:
            found: dict[str, Any] = scope
            return found
    raise HttpError(HTTPStatus.NOT_FOUND, f'Scope with name "{name}" is not found')


def _collection(manifest: Manifest, scope: str, name: str) -> dict[str, Any]:
    for collection in _scope(manifest, scope)["collections"]:
        if collection["name"] == name:
            found: dict[str, Any] = collection
            return found
    raise HttpError(HTTPStatus.NOT_FOUND, f'Collection with name "{name}" in scope "{scope}" is not found')


def _properties(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a collection; a TTL of 0 means that there is none."""
    properties: dict[str, Any] = {}
    max_ttl = _number(arguments, "maxTTL", 0, 0x7FFF_FFFF)
    if max_ttl:
        properties["maxTTL"] = max_ttl
    if str(arguments.get("history", "")).lower() == "true":
        properties["history"] = True
    return properties
