"""Changes of the manifest in a cluster: the manager decides, and a member that is asked for a change proposes it.

A proposal waits until the manager has decided and given the new manifest to every member that it can reach. A node
alone decides by itself.
"""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from upriver.errors import StatusError
from upriver.node import log
from upriver.node.cluster.manifest_edits import Edit, EditRefused, edited

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket

DECIDED_S = 30.0  # less than clients wait for an answer
_NO_MANAGER = "the cluster's manager has not decided in time: `upriver cluster start` must be running for it"


class Proposals:
    """The proposals of one bucket that the manager has not decided on yet."""

    def __init__(self) -> None:
        self._edits: dict[str, Edit] = {}
        self._outcomes: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def decided(self, edit: Edit) -> str:
        """Propose an edit and wait; returns the uid of the manifest that has it, or raises ``EditRefused``."""
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
        return await bucket.proposals.decided(edit)
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
        except StatusError as error:  # the manager sees that it is not here, and tries again
            log.warning("manifest_refused", bucket=bucket.name, uid=manifest["uid"], reason=str(error))
        else:
            log.info("manifest_applied", bucket=bucket.name, uid=manifest["uid"])
