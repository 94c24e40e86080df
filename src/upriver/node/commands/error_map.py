"""The error map: what every status means, for clients that do not know it (docs/protocol/session.md#error-map).

Every ``Status`` has a row, because some tools stop working at a status that the map does not name; importing this
module fails if one is missing.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

from upriver.errors import Status as S  # noqa: N817 - a table of eighty rows reads better
from upriver.errors import StatusError
from upriver.model import Datatype
from upriver.node.dispatch import command
from upriver.wire.messages.session import GetErrorMap

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection

VERSIONS = (1, 2)
REVISION = 9
_TABLE: dict[S, tuple[str, str]] = {
    S.SUCCESS: ("Success", "success"),
    S.KEY_ENOENT: ("There is no such key", "item-only"),
    S.KEY_EEXISTS: ("The key exists, or its CAS has changed", "item-only"),
    S.E2BIG: ("The value is larger than the node allows", "item-only invalid-input"),
    S.EINVAL: ("The request breaks a rule of the protocol", "internal invalid-input"),
    S.NOT_STORED: ("There is nothing to append or prepend to", "item-only"),
    S.DELTA_BADVAL: ("The document is not a decimal counter", "item-only invalid-input"),
    S.NOT_MY_VBUCKET: ("Another node owns the vbucket", "fetch-config invalid-input"),
    S.NO_BUCKET: ("No bucket is selected on this connection", "conn-state-invalidated"),
    S.LOCKED: ("The document is locked", "item-only item-locked retry-later"),
    S.DCP_STREAM_NOT_FOUND: ("There is no DCP stream for this message", "dcp conn-state-invalidated"),
    S.OPAQUE_NO_MATCH: ("The opaque is not the DCP stream's", "dcp conn-state-invalidated"),
    S.EWOULD_THROTTLE: ("The command would be throttled", "rate-limit retry-later"),
    S.ECONFIG_ONLY: ("Only configuration commands may run in this bucket", "invalid-input"),
    S.NOT_LOCKED: ("The document is not locked", "item-only invalid-input"),
    S.CAS_VALUE_INVALID: ("The CAS is not a valid one", "item-only invalid-input"),
    S.AUTH_STALE: ("The credentials are no longer valid", "conn-state-invalidated auth retry-later"),
    S.AUTH_ERROR: ("Authentication failed", "conn-state-invalidated auth"),
    S.AUTH_CONTINUE: ("Authentication needs another step", "special-handling"),
    S.ERANGE: ("A number is outside its range", "invalid-input"),
    S.ROLLBACK: ("The reader's history diverged; roll back", "dcp special-handling"),
    S.EACCESS: ("The user lacks a privilege", "conn-state-invalidated auth"),
    S.NOT_INITIALIZED: ("The node is not initialized yet", "conn-state-invalidated temp retry-later"),
    S.ENCRYPTION_KEY_NOT_AVAILABLE: ("A key for data at rest is missing", "internal"),
    S.CHECKSUM_MISMATCH: ("A checksum does not match", "internal"),
    S.EXPIRY_OVERFLOW: ("The expiry lies too far in the future", "item-only invalid-input"),
    S.LOCK_EXPIRY_OVERFLOW: ("The lock would last too long", "item-only invalid-input"),
    S.RATE_LIMITED_NETWORK_INGRESS: ("The user sends too many bytes", "rate-limit"),
    S.RATE_LIMITED_NETWORK_EGRESS: ("The user receives too many bytes", "rate-limit"),
    S.RATE_LIMITED_MAX_CONNECTIONS: ("The user has too many connections", "rate-limit"),
    S.RATE_LIMITED_MAX_COMMANDS: ("The user sends too many commands", "rate-limit"),
    S.SCOPE_SIZE_LIMIT_EXCEEDED: ("The scope is full", "system-constraint"),
    S.BUCKET_SIZE_LIMIT_EXCEEDED: ("The scope or bucket is full", "system-constraint"),
    S.BUCKET_RESIDENT_RATIO_TOO_LOW: ("Too little of the bucket is in memory", "system-constraint"),
    S.BUCKET_DATA_SIZE_TOO_BIG: ("The bucket has too much data", "system-constraint"),
    S.BUCKET_DISK_SPACE_TOO_LOW: ("The disk is almost full", "system-constraint"),
    S.BUCKET_PAUSED: ("The bucket is paused", "temp retry-later"),
    S.CANCELLED: ("The operation was cancelled", "internal"),
    S.UNKNOWN_FRAME_INFO: ("A framing extra is unknown", "support"),
    S.UNKNOWN_COMMAND: ("The command is unknown", "support"),
    S.ENOMEM: ("The node is out of memory", "temp retry-later"),
    S.NOT_SUPPORTED: ("The command is not supported", "support"),
    S.EINTERNAL: ("The node failed inside", "internal conn-state-invalidated"),
    S.EBUSY: ("The node is busy", "temp retry-later"),
    S.ETMPFAIL: ("The node cannot do this now", "temp retry-later"),
    S.XATTR_EINVAL: ("The extended attributes are malformed", "invalid-input"),
    S.UNKNOWN_COLLECTION: ("There is no such collection", "item-only"),
    S.NO_COLLECTIONS_MANIFEST: ("There are no collections", "support"),
    S.CANNOT_APPLY_COLLECTIONS_MANIFEST: ("The manifest contradicts the current one", "invalid-input"),
    S.COLLECTIONS_MANIFEST_IS_AHEAD: ("The client knows a newer manifest", "invalid-input"),
    S.UNKNOWN_SCOPE: ("There is no such scope", "item-only"),
    S.DCP_STREAM_ID_INVALID: ("The DCP stream-id is not allowed here", "dcp conn-state-invalidated"),
    S.DURABILITY_INVALID_LEVEL: ("The durability level does not exist", "invalid-input"),
    S.DURABILITY_IMPOSSIBLE: ("There are too few replicas for the durability level", "invalid-input"),
    S.SYNC_WRITE_IN_PROGRESS: ("A durable write of this key is under way", "item-only retry-later"),
    S.SYNC_WRITE_AMBIGUOUS: ("The durable write may or may not happen", "item-only special-handling"),
    S.SYNC_WRITE_RE_COMMIT_IN_PROGRESS: ("A durable write of this key is committed again", "item-only retry-later"),
    S.RANGE_SCAN_CANCELLED: ("The range scan was cancelled", "internal"),
    S.RANGE_SCAN_MORE: ("The range scan has more to give", "success special-handling"),
    S.RANGE_SCAN_COMPLETE: ("The range scan is complete", "success special-handling"),
    S.VB_UUID_NOT_EQUAL: ("The vbucket has another uuid", "invalid-input"),
    S.SUBDOC_PATH_ENOENT: ("The path is not in the document", "subdoc item-only"),
    S.SUBDOC_PATH_MISMATCH: ("The path leads through something of another type", "subdoc item-only"),
    S.SUBDOC_PATH_EINVAL: ("The path is malformed", "subdoc invalid-input"),
    S.SUBDOC_PATH_E2BIG: ("The path is too long or has too many parts", "subdoc invalid-input"),
    S.SUBDOC_DOC_E2DEEP: ("The document is nested too deeply", "subdoc item-only"),
    S.SUBDOC_VALUE_CANTINSERT: ("The value is not JSON that fits there", "subdoc invalid-input"),
    S.SUBDOC_DOC_NOT_JSON: ("The document is not JSON", "subdoc item-only"),
    S.SUBDOC_NUM_ERANGE: ("The number there is no 64-bit integer", "subdoc item-only"),
    S.SUBDOC_DELTA_EINVAL: ("The delta is no 64-bit integer, or 0", "subdoc invalid-input"),
    S.SUBDOC_PATH_EEXISTS: ("The path exists already", "subdoc item-only"),
    S.SUBDOC_VALUE_ETOODEEP: ("The document would be nested too deeply", "subdoc invalid-input"),
    S.SUBDOC_INVALID_COMBO: ("These paths cannot be in one request", "subdoc invalid-input"),
    S.SUBDOC_MULTI_PATH_FAILURE: ("At least one path failed", "subdoc special-handling"),
    S.SUBDOC_SUCCESS_DELETED: ("Success, on a deleted document", "success subdoc item-deleted"),
    S.SUBDOC_XATTR_INVALID_FLAG_COMBO: ("These path flags exclude each other", "subdoc invalid-input"),
    S.SUBDOC_XATTR_INVALID_KEY_COMBO: ("One request may name one extended attribute", "subdoc invalid-input"),
    S.SUBDOC_XATTR_UNKNOWN_MACRO: ("There is no such macro", "subdoc invalid-input"),
    S.SUBDOC_XATTR_UNKNOWN_VATTR: ("There is no such virtual attribute", "subdoc invalid-input"),
    S.SUBDOC_XATTR_CANT_MODIFY_VATTR: ("A virtual attribute cannot be changed", "subdoc invalid-input"),
    S.SUBDOC_MULTI_PATH_FAILURE_DELETED: ("At least one path of a deleted document failed",
                                          "subdoc item-deleted special-handling"),
    S.SUBDOC_INVALID_XATTR_ORDER: ("Paths of extended attributes must come first", "subdoc invalid-input"),
    S.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO: ("There is no such virtual attribute macro", "subdoc invalid-input"),
    S.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS: ("Only a deleted document can be revived", "subdoc invalid-input"),
    S.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE: ("A deleted document cannot have a body", "subdoc invalid-input"),
    S.SUBDOC_FIELD_NOT_BINARY_VALUE: ("The field is not a binary value", "subdoc item-only"),
}  # fmt: skip


@cache
def error_map(version: int) -> bytes:
    """The map in the highest version that we have and the client can read, as JSON."""
    errors = {f"{status:x}": _entry(status) for status in S}
    served = max(each for each in VERSIONS if each <= version)
    return json.dumps({"version": served, "revision": REVISION, "errors": errors}, separators=(",", ":")).encode()


def _entry(status: S) -> dict[str, object]:
    description, attributes = _TABLE[status]
    return {"name": status.name, "desc": description, "attrs": attributes.split()}


def get_error_map(conn: ClientConnection, request: GetErrorMap) -> None:
    if request.version < VERSIONS[0]:
        raise StatusError.of(S.KEY_ENOENT, f"there is no error map before version {VERSIONS[0]}")
    datatype = Datatype.JSON & conn.context.datatypes
    conn.reply(request, value=error_map(min(request.version, VERSIONS[-1])), datatype=datatype)


COMMANDS = (command(GetErrorMap, get_error_map, needs_bucket=False),)

assert set(_TABLE) == set(S), f"statuses without a row: {set(S) - set(_TABLE)}"
