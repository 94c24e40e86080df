"""Routes that list, create, alter and drop scopes and collections, at the paths of Couchbase's REST API."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from upriver.node.cluster.manifest_changes import EditRefused, change_manifest
from upriver.node.http.cluster import bucket_or_404
from upriver.node.http.server import Result, route
from upriver.node.http.wire import Answer, HttpError, Request, flag_or_none, number_or_none
from upriver.store.collections.manifest import MAX_TTL

if TYPE_CHECKING:
    from upriver.node.server import Node

_NEVER, _INHERITED = -1, 0  # a collection's maxTTL over HTTP; in the manifest, 0 and no entry


@route("GET", "/pools/default/buckets/*/scopes")
def get_manifest(node: Node, request: Request, bucket: str) -> Result:
    manifest = json.loads(bucket_or_404(node, bucket).store.manifest.to_json())
    for scope in manifest["scopes"]:
        for collection in scope["collections"]:
            if collection.get("maxTTL") == 0:
                collection["maxTTL"] = _NEVER
    return Answer(manifest)


@route("POST", "/pools/default/buckets/*/scopes")
async def create_scope(node: Node, request: Request, bucket: str) -> Result:
    return await _change(node, bucket, do="create_scope", scope=str(request.arguments().get("name", "")))


@route("DELETE", "/pools/default/buckets/*/scopes/*")
async def drop_scope(node: Node, request: Request, bucket: str, scope: str) -> Result:
    return await _change(node, bucket, do="drop_scope", scope=scope)


@route("POST", "/pools/default/buckets/*/scopes/*/collections")
async def create_collection(node: Node, request: Request, bucket: str, scope: str) -> Result:
    arguments = request.arguments()
    name = str(arguments.pop("name", ""))
    properties = _properties(arguments)
    return await _change(node, bucket, do="create_collection", scope=scope, collection=name, properties=properties)


@route("PATCH", "/pools/default/buckets/*/scopes/*/collections/*")
async def alter_collection(node: Node, request: Request, bucket: str, scope: str, collection: str) -> Result:
    properties = _properties(request.arguments())
    return await _change(node, bucket, do="alter_collection", scope=scope, collection=collection, properties=properties)


@route("DELETE", "/pools/default/buckets/*/scopes/*/collections/*")
async def drop_collection(node: Node, request: Request, bucket: str, scope: str, collection: str) -> Result:
    return await _change(node, bucket, do="drop_collection", scope=scope, collection=collection)


@route("POST", "/pools/default/buckets/*/scopes/@ensureManifest/*")
def ensure_manifest(node: Node, request: Request, bucket: str, uid: str) -> Result:
    """Whether all nodes have this manifest; a change is answered only after all reachable ones have it."""
    current = bucket_or_404(node, bucket).store.manifest.uid
    try:
        known = int(uid, 16) <= current
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{uid!r} is not a manifest uid") from error
    if not known:
        raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"the manifest is at {current:x}")
    return Answer({})


async def _change(node: Node, bucket_name: str, **edit: Any) -> Result:
    try:
        return Answer({"uid": await change_manifest(bucket_or_404(node, bucket_name), edit)})
    except EditRefused as error:
        raise HttpError(error.status, error.reason, error.field_name) from error


def _properties(arguments: dict[str, Any]) -> dict[str, Any]:
    """Properties of a collection as the manifest has them; None removes a property."""
    unknown = sorted(arguments.keys() - {"maxTTL", "history"})
    if unknown:
        what = f"{unknown[0]} is not a setting of a collection here; there are maxTTL and history"
        raise HttpError(HTTPStatus.BAD_REQUEST, what, unknown[0])
    properties: dict[str, Any] = {}
    max_ttl = number_or_none(arguments, "maxTTL", _NEVER, MAX_TTL)
    if max_ttl is not None:
        properties["maxTTL"] = {_NEVER: 0, _INHERITED: None}.get(max_ttl, max_ttl)
    history = flag_or_none(arguments, "history")
    if history is not None:
        properties["history"] = True if history else None
    return properties
