"""Every status of the protocol, and every error that upriver raises.

The tree::

    UpriverError
    ├── ProtocolError
    │   ├── LocalProtocolError      we (or our caller) broke a rule
    │   └── RemoteProtocolError     the peer broke a rule; names the field and the offset
    │       ├── FramingError        the byte stream is unusable: close the connection
    │       └── InvalidMessage      one message is wrong: answer with ``status``
    ├── StatusError                 the peer answered with a status other than success
    │   └── Rollback, NotMyVbucket, KeyNotFound, ...   one class per status
    ├── StoreError                  something is wrong with the data on disk
    │   └── NotOurFile, CorruptStore (DamagedVbucket), DiskFull, DirectoryInUse
    ├── ConnectFailed               no node answered
    ├── HistoryLost                 a rollback, for a reader with on_rollback='fail'
    ├── CheckpointError             something is wrong with a saved position
    │   └── CorruptCheckpoint, ForeignCheckpoint
    └── ConfigError                 options that cannot work

Errors carry raw values in ``args`` so that they survive pickling between Spark executors and the driver.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar


class Status(IntEnum):
    """The status word of a response (docs/protocol/status.md)."""

    SUCCESS = 0x00
    KEY_ENOENT = 0x01
    KEY_EEXISTS = 0x02
    E2BIG = 0x03
    EINVAL = 0x04
    NOT_STORED = 0x05
    DELTA_BADVAL = 0x06
    NOT_MY_VBUCKET = 0x07
    NO_BUCKET = 0x08
    LOCKED = 0x09
    DCP_STREAM_NOT_FOUND = 0x0A
    OPAQUE_NO_MATCH = 0x0B
    EWOULD_THROTTLE = 0x0C
    ECONFIG_ONLY = 0x0D
    NOT_LOCKED = 0x0E
    CAS_VALUE_INVALID = 0x0F
    AUTH_STALE = 0x1F
    AUTH_ERROR = 0x20
    AUTH_CONTINUE = 0x21
    ERANGE = 0x22
    ROLLBACK = 0x23
    EACCESS = 0x24
    NOT_INITIALIZED = 0x25
    ENCRYPTION_KEY_NOT_AVAILABLE = 0x26
    CHECKSUM_MISMATCH = 0x27
    EXPIRY_OVERFLOW = 0x28
    LOCK_EXPIRY_OVERFLOW = 0x29
    RATE_LIMITED_NETWORK_INGRESS = 0x30
    RATE_LIMITED_NETWORK_EGRESS = 0x31
    RATE_LIMITED_MAX_CONNECTIONS = 0x32
    RATE_LIMITED_MAX_COMMANDS = 0x33
    SCOPE_SIZE_LIMIT_EXCEEDED = 0x34
    BUCKET_SIZE_LIMIT_EXCEEDED = 0x35
    BUCKET_RESIDENT_RATIO_TOO_LOW = 0x36
    BUCKET_DATA_SIZE_TOO_BIG = 0x37
    BUCKET_DISK_SPACE_TOO_LOW = 0x38
    BUCKET_PAUSED = 0x50
    CANCELLED = 0x51
    UNKNOWN_FRAME_INFO = 0x80
    UNKNOWN_COMMAND = 0x81
    ENOMEM = 0x82
    NOT_SUPPORTED = 0x83
    EINTERNAL = 0x84
    EBUSY = 0x85
    ETMPFAIL = 0x86
    XATTR_EINVAL = 0x87
    UNKNOWN_COLLECTION = 0x88
    NO_COLLECTIONS_MANIFEST = 0x89
    CANNOT_APPLY_COLLECTIONS_MANIFEST = 0x8A
    COLLECTIONS_MANIFEST_IS_AHEAD = 0x8B
    UNKNOWN_SCOPE = 0x8C
    DCP_STREAM_ID_INVALID = 0x8D
    DURABILITY_INVALID_LEVEL = 0xA0
    DURABILITY_IMPOSSIBLE = 0xA1
    SYNC_WRITE_IN_PROGRESS = 0xA2
    SYNC_WRITE_AMBIGUOUS = 0xA3
    SYNC_WRITE_RE_COMMIT_IN_PROGRESS = 0xA4
    RANGE_SCAN_CANCELLED = 0xA5
    RANGE_SCAN_MORE = 0xA6
    RANGE_SCAN_COMPLETE = 0xA7
    VB_UUID_NOT_EQUAL = 0xA8
    SUBDOC_PATH_ENOENT = 0xC0
    SUBDOC_PATH_MISMATCH = 0xC1
    SUBDOC_PATH_EINVAL = 0xC2
    SUBDOC_PATH_E2BIG = 0xC3
    SUBDOC_DOC_E2DEEP = 0xC4
    SUBDOC_VALUE_CANTINSERT = 0xC5
    SUBDOC_DOC_NOT_JSON = 0xC6
    SUBDOC_NUM_ERANGE = 0xC7
    SUBDOC_DELTA_EINVAL = 0xC8
    SUBDOC_PATH_EEXISTS = 0xC9
    SUBDOC_VALUE_ETOODEEP = 0xCA
    SUBDOC_INVALID_COMBO = 0xCB
    SUBDOC_MULTI_PATH_FAILURE = 0xCC
    SUBDOC_SUCCESS_DELETED = 0xCD
    SUBDOC_XATTR_INVALID_FLAG_COMBO = 0xCE
    SUBDOC_XATTR_INVALID_KEY_COMBO = 0xCF
    SUBDOC_XATTR_UNKNOWN_MACRO = 0xD0
    SUBDOC_XATTR_UNKNOWN_VATTR = 0xD1
    SUBDOC_XATTR_CANT_MODIFY_VATTR = 0xD2
    SUBDOC_MULTI_PATH_FAILURE_DELETED = 0xD3
    SUBDOC_INVALID_XATTR_ORDER = 0xD4
    SUBDOC_XATTR_UNKNOWN_VATTR_MACRO = 0xD5
    SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS = 0xD6
    SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE = 0xD7
    SUBDOC_FIELD_NOT_BINARY_VALUE = 0xD8


# The value of a response with one of these is a payload, never an error's JSON (docs/protocol/status.md).
PAYLOAD_STATUSES = frozenset(
    {
        Status.SUCCESS,
        Status.AUTH_CONTINUE,
        Status.ROLLBACK,
        Status.SUBDOC_SUCCESS_DELETED,
        Status.SUBDOC_MULTI_PATH_FAILURE,
        Status.SUBDOC_MULTI_PATH_FAILURE_DELETED,
        Status.RANGE_SCAN_MORE,
        Status.RANGE_SCAN_COMPLETE,
    }
)


def status_name(code: int) -> str:
    """A status for error messages: its name, if it has one, and its number.

    >>> status_name(0x23), status_name(0xff01)
    ('ROLLBACK 0x23', 'application status 0xff01')
    """
    try:
        return f"{Status(code).name} 0x{code:02x}"
    except ValueError:
        return f"{'application' if code >= 0xFF00 else 'unknown'} status 0x{code:02x}"


class UpriverError(Exception):
    """The base class of every error that upriver raises on purpose."""


class ProtocolError(UpriverError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """We, or the code that called us, broke a rule; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule. ``field`` names what is wrong; ``offset`` is its place in bytes from the frame's start."""

    def __init__(self, reason: str, field: str = "", offset: int = 0, status: Status = Status.EINVAL) -> None:
        super().__init__(reason, field, offset, status)
        self.reason = reason
        self.field = field
        self.offset = offset
        self.status = status

    def __str__(self) -> str:
        where = f"{self.field} at byte {self.offset}: " if self.field else ""
        return f"{where}{self.reason}"


class FramingError(RemoteProtocolError):
    """The byte stream cannot be cut into frames from here on: close the connection."""


class InvalidMessage(RemoteProtocolError):
    """A well-framed message whose content breaks a rule: answer with ``status`` and keep the connection."""


class StatusError(UpriverError):
    """The peer refused a request. ``of`` finds the class by status: ``StatusError.of(0x07)`` is a ``NotMyVbucket``."""

    status: Status = Status.EINTERNAL
    _by_status: ClassVar[dict[int, type[StatusError]]] = {}

    def __init_subclass__(cls, status: Status | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if status is not None:
            cls.status = status
            StatusError._by_status[status] = cls

    def __init__(self, context: str = "") -> None:
        super().__init__(context)
        self.context = context

    def __str__(self) -> str:
        summary = (type(self).__doc__ or "").strip().split("\n")[0]
        detail = f": {self.context}" if self.context else f": {summary}" if summary else ""
        return f"{status_name(self.status)}{detail}"

    @staticmethod
    def of(status: int, context: str = "") -> StatusError:
        """The error for a status word; a status without a class of its own gives ``OtherStatus``."""
        cls = StatusError._by_status.get(status)
        if cls is None or cls is Rollback:
            return OtherStatus(status, context)
        return cls(context)


class OtherStatus(StatusError):
    """The peer refused the request."""

    def __init__(self, code: int, context: str = "") -> None:
        super().__init__(context)
        self.args = (code, context)
        self.code = code
        if code in Status._value2member_map_:
            self.status = Status(code)

    def __str__(self) -> str:
        return f"{status_name(self.code)}{': ' + self.context if self.context else ''}"


class KeyNotFound(StatusError, status=Status.KEY_ENOENT):
    """No such key."""


class KeyExists(StatusError, status=Status.KEY_EEXISTS):
    """The key exists, or its CAS has changed since it was read."""


class TooBig(StatusError, status=Status.E2BIG):
    """The document is larger than the node allows."""


class InvalidArguments(StatusError, status=Status.EINVAL):
    """The request breaks a rule of the protocol."""


class InvalidCas(StatusError, status=Status.CAS_VALUE_INVALID):
    """The document's CAS is a time too far in the future."""


class NotStored(StatusError, status=Status.NOT_STORED):
    """There is no document to append or prepend to."""


class BadDelta(StatusError, status=Status.DELTA_BADVAL):
    """The document is not a decimal counter."""


class NotMyVbucket(StatusError, status=Status.NOT_MY_VBUCKET):
    """This node does not own the vbucket; ask the node that the cluster map names."""


class NoBucket(StatusError, status=Status.NO_BUCKET):
    """No bucket is selected on this connection."""


class Locked(StatusError, status=Status.LOCKED):
    """Another client has locked the document."""


class NotLocked(StatusError, status=Status.NOT_LOCKED):
    """The document is not locked."""


class AuthenticationFailed(StatusError, status=Status.AUTH_ERROR):
    """Wrong user name or password."""


class OutOfRange(StatusError, status=Status.ERANGE):
    """A seqno or vbucket is outside its range."""


class Rollback(StatusError, status=Status.ROLLBACK):
    """Our history diverged; restart the stream at ``seqno``."""

    def __init__(self, seqno: int) -> None:
        super().__init__()
        self.args = (seqno,)
        self.seqno = seqno

    def __str__(self) -> str:
        return f"roll back to seqno {self.seqno}"


class AccessDenied(StatusError, status=Status.EACCESS):
    """The client has not logged in, or its user lacks the privilege."""


class UnknownCommand(StatusError, status=Status.UNKNOWN_COMMAND):
    """The peer does not know this command."""


class OutOfMemory(StatusError, status=Status.ENOMEM):
    """The node is out of memory."""


class NotSupported(StatusError, status=Status.NOT_SUPPORTED):
    """The peer knows the command but does not support it."""


class InternalError(StatusError, status=Status.EINTERNAL):
    """The node failed internally."""


class Busy(StatusError, status=Status.EBUSY):
    """The node is busy; try again later."""


class TemporaryFailure(StatusError, status=Status.ETMPFAIL):
    """The node cannot do this now; try again."""


class BadXattr(StatusError, status=Status.XATTR_EINVAL):
    """The extended attributes are malformed."""


class UnknownCollection(StatusError, status=Status.UNKNOWN_COLLECTION):
    """No such collection."""


class UnknownScope(StatusError, status=Status.UNKNOWN_SCOPE):
    """No such scope."""


class NoCollectionsManifest(StatusError, status=Status.NO_COLLECTIONS_MANIFEST):
    """The server has no collections, or HELLO did not ask for them."""


class CannotApplyManifest(StatusError, status=Status.CANNOT_APPLY_COLLECTIONS_MANIFEST):
    """The collections manifest contradicts the current one."""


class StreamIdInvalid(StatusError, status=Status.DCP_STREAM_ID_INVALID):
    """A stream-id is missing, unknown, or not allowed here."""


class DurabilityImpossible(StatusError, status=Status.DURABILITY_IMPOSSIBLE):
    """There are too few replicas for the durability level."""


class SyncWriteInProgress(StatusError, status=Status.SYNC_WRITE_IN_PROGRESS):
    """Another durable write of this key is under way."""


class SyncWriteAmbiguous(StatusError, status=Status.SYNC_WRITE_AMBIGUOUS):
    """The durable write may or may not take effect."""


class StoreError(UpriverError):
    """Something is wrong with the data on disk."""


class NotOurFile(StoreError):
    """A file in the data directory was not written by upriver; move it away, or point --data elsewhere."""


class CorruptStore(StoreError):
    """A store file is damaged; restore it from a copy or delete the bucket's directory."""


class DamagedVbucket(CorruptStore, InternalError):
    """Part of a vbucket's data on disk is damaged; only requests that need that part fail."""

    def __init__(self, vbucket: int, file: str, what: str) -> None:
        super().__init__(f"vbucket {vbucket} is damaged in {file}: {what}; `upriver inspect --check` lists all damage")
        self.args = (vbucket, file, what)
        self.vbucket = vbucket
        self.file = file
        self.what = what

    def __str__(self) -> str:
        return self.context


class DirectoryInUse(StoreError):
    """Another process has this directory open; stop it first."""


class DiskFull(StoreError):
    """The disk is full: this write was not made, and every write acknowledged before is safe."""


class ConfigError(UpriverError):
    """An option that cannot work; the message says which one and what is allowed."""


class ConnectFailed(UpriverError):
    """No connection could be made; the message names host and port."""


class HistoryLost(UpriverError):
    """A vbucket lost its history above ``to_seqno``: undo the changes above it, then resume there."""

    def __init__(self, vbucket: int, to_seqno: int, lost_branch: int) -> None:
        super().__init__(vbucket, to_seqno, lost_branch)
        self.vbucket = vbucket
        self.to_seqno = to_seqno
        self.lost_branch = lost_branch

    def __str__(self) -> str:
        return (
            f"vbucket {self.vbucket} lost history: branch {self.lost_branch:x} is gone above seqno {self.to_seqno}; "
            f"undo this vbucket's changes above {self.to_seqno}, then resume there (on_rollback='emit' reports "
            "rollbacks instead of stopping)"
        )


class CheckpointError(UpriverError):
    """Something is wrong with a saved position."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint cannot be read; delete it to read everything from the beginning."""


class ForeignCheckpoint(CheckpointError):
    """A checkpoint belongs to another bucket; use another checkpoint name, or delete it."""


TEMPORARY = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM, Status.NOT_INITIALIZED})


def is_retryable(error: Exception) -> bool:
    """Whether the request may succeed later: the node is down, busy or starting, or another node owns the vbucket.

    >>> is_retryable(ConnectFailed("refused")), is_retryable(NotMyVbucket()), is_retryable(KeyNotFound())
    (True, True, False)
    """
    if isinstance(error, StatusError):
        return error.status in TEMPORARY or error.status == Status.NOT_MY_VBUCKET
    return isinstance(error, ConnectFailed | OSError)
