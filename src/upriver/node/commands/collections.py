"""The manifest, and the ids of scopes and collections (docs/protocol/collections.md#commands)."""

from __future__ import annotations

from http import HTTPStatus
from struct import Struct
from typing import TYPE_CHECKING

from upriver.errors import CannotApplyManifest, InvalidArguments, TemporaryFailure
from upriver.model import Datatype
from upriver.node import log
from upriver.node.cluster.manifest_changes import EditRefused, change_manifest
from upriver.node.dispatch import command
from upriver.wire import Opcode
from upriver.wire.messages import cluster

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection

_ID = Struct(">QI")


async def set_manifest(conn: ClientConnection, request: cluster.SetManifest) -> None:
    """Replace the manifest; a member of a cluster proposes it to the manager."""
    bucket = conn.require_bucket()
    if bucket.member or bucket.waits_for_map:
        await _propose(conn, request)
        return
    await bucket.apply_manifest(request.manifest)
    log.info("manifest_applied", bucket=bucket.name, uid=f"{bucket.store.manifest.uid:x}")
    conn.reply(request)


async def _propose(conn: ClientConnection, request: cluster.SetManifest) -> None:
    text = bytes(request.manifest).decode("utf-8", "replace")
    try:
        await change_manifest(conn.require_bucket(), {"do": "replace", "manifest": text})
    except EditRefused as error:
        late = error.status == HTTPStatus.SERVICE_UNAVAILABLE
        raise (TemporaryFailure if late else CannotApplyManifest)(error.reason) from error
    conn.reply(request)


def get_manifest(conn: ClientConnection, request: cluster.GetManifest) -> None:
    if request.vbucket:
        raise InvalidArguments("the vbucket must be 0")
    value = conn.require_bucket().store.manifest.to_json()
    conn.reply(request, value=value, datatype=Datatype.JSON & conn.context.datatypes)


def get_id(conn: ClientConnection, request: cluster.GetCollectionId) -> None:
    manifest = conn.require_bucket().store.manifest
    is_scope = request.opcode == Opcode.COLLECTIONS_GET_SCOPE_ID
    path = request.path.decode("utf-8", "backslashreplace")
    found = manifest.find_scope(path) if is_scope else manifest.find_collection(path)
    conn.reply(request, extras=_ID.pack(manifest.uid, found.id))


COMMANDS = (
    command(cluster.SetManifest, set_manifest),
    command(cluster.GetManifest, get_manifest),
    command(cluster.GetCollectionId, get_id),
)
