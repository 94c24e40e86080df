"""Changes of the manifest: edits of one scope or collection, and who decides on them.

A node alone applies an edit itself. A member of a cluster proposes it to the manager and waits until the manager has
decided and has given the new manifest to every member that it can reach. An edit is a small dictionary, so that it can
travel to the manager. The texts of some refusals are those that Couchbase's SDKs look for.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from upriver.errors import StatusError
from upriver.node import log
from upriver.store import Manifest

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket

Edit = Mapping[str, Any]
Draft = dict[str, Any]
_FIRST_ID = 8  # ids 1 to 7 are reserved (docs/protocol/collections.md#manifest)
DECIDED_S = 30.0  # less than clients wait for an answer
_NO_MANAGER = "the cluster's manager has not decided in time: `upriver cluster start` must be running for it"


class EditRefused(Exception):
    """An edit that cannot be done, and why; ``status`` is an HTTP status."""

    def __init__(self, status: HTTPStatus, reason: str, field_name: str = "_") -> None:
        super().__init__(status, reason, field_name)
        self.status, self.reason, self.field_name = status, reason, field_name


def edited(manifest: bytes, edit: Edit) -> bytes:
    """The manifest after an edit, under the next uid; ``EditRefused`` says what is wrong with the edit."""
    current = Manifest.parse(manifest)
    try:
        if edit["do"] == "replace":
            new = Manifest.parse(edit["manifest"])
        else:
            new = Manifest.parse(_drafted(json.loads(manifest), edit))
        current.check_successor(new)
    except StatusError as error:
        raise EditRefused(HTTPStatus.BAD_REQUEST, str(error)) from error
    return new.to_json()


def _drafted(draft: Draft, edit: Edit) -> bytes:
    uid = int(draft["uid"], 16) + 1
    draft["uid"] = f"{uid:x}"
    try:
        change = _EDITS[edit["do"]]
    except KeyError as error:
        raise EditRefused(HTTPStatus.BAD_REQUEST, f"there is no change {edit['do']!r}") from error
    change(draft, edit, f"{_unused_id(draft, uid):x}")
    return json.dumps(draft).encode()


def _unused_id(draft: Draft, uid: int) -> int:
    """An id that was never used: it grows with the uid, so the ids of dropped collections do not return."""
    taken = [int(scope["uid"], 16) for scope in draft["scopes"]]
    taken += [int(each["uid"], 16) for scope in draft["scopes"] for each in scope["collections"]]
    return max(uid + _FIRST_ID - 1, *(each + 1 for each in taken))


def _create_scope(draft: Draft, edit: Edit, new_id: str) -> None:
    name = edit["scope"]
    if any(scope["name"] == name for scope in draft["scopes"]):
        raise EditRefused(HTTPStatus.BAD_REQUEST, f'Scope with name "{name}" already exists', "name")
    draft["scopes"].append({"name": name, "uid": new_id, "collections": []})


def _drop_scope(draft: Draft, edit: Edit, _: str) -> None:
    if edit["scope"] == "_default":
        raise EditRefused(HTTPStatus.BAD_REQUEST, "the scope _default is part of every bucket and cannot be dropped")
    draft["scopes"].remove(_scope(draft, edit["scope"]))


def _create_collection(draft: Draft, edit: Edit, new_id: str) -> None:
    scope, name = edit["scope"], edit["collection"]
    inside = _scope(draft, scope)["collections"]
    if any(collection["name"] == name for collection in inside):
        what = f'Collection with name "{name}" in scope "{scope}" already exists'
        raise EditRefused(HTTPStatus.BAD_REQUEST, what, "name")
    inside.append({"name": name, "uid": new_id})
    _set(inside[-1], edit["properties"])


def _alter_collection(draft: Draft, edit: Edit, _: str) -> None:
    _set(_collection(draft, edit), edit["properties"])


def _drop_collection(draft: Draft, edit: Edit, _: str) -> None:
    _scope(draft, edit["scope"])["collections"].remove(_collection(draft, edit))


def _set(collection: Draft, properties: Mapping[str, Any]) -> None:
    """Set properties of a collection; None removes one."""
    for name, value in properties.items():
        if value is None:
            collection.pop(name, None)
        else:
            collection[name] = value


def _scope(draft: Draft, name: str) -> Draft:
    for scope in draft["scopes"]:
        if scope["name"] == name:
            found: Draft = scope
            return found
    raise EditRefused(HTTPStatus.NOT_FOUND, f'Scope with name "{name}" is not found')


def _collection(draft: Draft, edit: Edit) -> Draft:
    scope, name = edit["scope"], edit["collection"]
    for collection in _scope(draft, scope)["collections"]:
        if collection["name"] == name:
            found: Draft = collection
            return found
    raise EditRefused(HTTPStatus.NOT_FOUND, f'Collection with name "{name}" in scope "{scope}" is not found')


_EDITS: dict[str, Callable[[Draft, Edit, str], None]] = {
    "create_scope": _create_scope,
    "drop_scope": _drop_scope,
    "create_collection": _create_collection,
    "alter_collection": _alter_collection,
    "drop_collection": _drop_collection,
}


# ---------------------------------------------------------------------------------------------- proposals


class Proposals:
    """The proposals of one bucket that the manager has not decided on yet."""

    def __init__(self) -> None:
        self._edits: dict[str, Edit] = {}
        self._outcomes: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def propose(self, edit: Edit) -> str:
        """Propose an edit and wait for the decision; returns the uid of the new manifest, or raises ``EditRefused``."""
        name = secrets.token_hex(8)
        self._edits[name] = edit
        self._outcomes[name] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(DECIDED_S):
                outcome = await self._outcomes[name]
        except TimeoutError as error:
            raise EditRefused(HTTPStatus.SERVICE_UNAVAILABLE, _NO_MANAGER) from error
        finally:
            del self._edits[name], self._outcomes[name]
        if "uid" not in outcome:
            raise EditRefused(HTTPStatus(outcome["status"]), outcome["reason"], outcome["field"])
        return str(outcome["uid"])

    def waiting(self) -> dict[str, Edit]:
        return dict(self._edits)

    def decide(self, outcomes: dict[str, Any]) -> None:
        for name, outcome in outcomes.items():
            waits = self._outcomes.get(name)
            if waits is not None and not waits.done():
                waits.set_result(outcome)


async def change_manifest(bucket: NodeBucket, edit: Edit) -> str:
    """Apply an edit, or propose it; returns the new uid. ``EditRefused`` if it cannot be done."""
    if bucket.member or bucket.waits_for_map:
        return await bucket.proposals.propose(edit)
    async with bucket.manifest_changes:
        await bucket.apply_manifest(edited(bucket.store.manifest.to_json(), edit))
    uid = f"{bucket.store.manifest.uid:x}"
    log.info("manifest_applied", bucket=bucket.name, uid=uid)
    return uid


async def take_manifest(bucket: NodeBucket, manifest: Any) -> None:
    """Take the manager's manifest, unless this node has it already."""
    async with bucket.manifest_changes:
        if not manifest or int(manifest["uid"], 16) <= bucket.store.manifest.uid:
            return
        try:
            await bucket.apply_manifest(orjson.dumps(manifest))
        except StatusError as error:  # the manager sees that this node lacks it, and tries again
            log.warning("manifest_refused", bucket=bucket.name, uid=manifest["uid"], reason=str(error))
        else:
            log.info("manifest_applied", bucket=bucket.name, uid=manifest["uid"])
