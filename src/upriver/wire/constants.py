"""Every number on the wire that is not a length: magics, opcodes, flags, features.

Names follow docs/protocol/; each class docstring cites the section with its table.
"""

from __future__ import annotations

from enum import Enum, IntEnum, IntFlag


class Dialect(Enum):
    """Which of the two protocols a stream speaks; the size of its stream request decides.

    See docs/protocol/upr.md#both.
    """

    DCP = "dcp"
    UPR = "upr"


class Magic(IntEnum):
    """The first byte of a frame (docs/protocol/framing.md#header)."""

    REQUEST = 0x80
    RESPONSE = 0x81
    ALT_REQUEST = 0x08
    ALT_RESPONSE = 0x18
    SERVER_REQUEST = 0x82
    SERVER_RESPONSE = 0x83

    @property
    def is_response(self) -> bool:
        return self in _RESPONSES

    @property
    def is_flexible(self) -> bool:
        """Whether the frame has framing extras and a one-byte key length."""
        return self in (Magic.ALT_REQUEST, Magic.ALT_RESPONSE)

    @property
    def is_server(self) -> bool:
        """Whether the server initiated the exchange: its opcodes are a separate space."""
        return self in (Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE)


_RESPONSES = frozenset({Magic.RESPONSE, Magic.ALT_RESPONSE, Magic.SERVER_RESPONSE})


class Opcode(IntEnum):
    """What a client or DCP frame asks for (docs/protocol/messages.md#overview and docs/protocol/kv.md#commands)."""

    GET = 0x00
    SET = 0x01
    ADD = 0x02
    REPLACE = 0x03
    DELETE = 0x04
    INCREMENT = 0x05
    DECREMENT = 0x06
    QUIT = 0x07
    FLUSH = 0x08
    GETQ = 0x09
    NOOP = 0x0A
    VERSION = 0x0B
    GETK = 0x0C
    GETKQ = 0x0D
    APPEND = 0x0E
    PREPEND = 0x0F
    STAT = 0x10
    SETQ = 0x11
    ADDQ = 0x12
    REPLACEQ = 0x13
    DELETEQ = 0x14
    INCREMENTQ = 0x15
    DECREMENTQ = 0x16
    QUITQ = 0x17
    FLUSHQ = 0x18
    APPENDQ = 0x19
    PREPENDQ = 0x1A
    VERBOSITY = 0x1B
    TOUCH = 0x1C
    GAT = 0x1D
    GATQ = 0x1E
    HELLO = 0x1F
    SASL_LIST_MECHS = 0x20
    SASL_AUTH = 0x21
    SASL_STEP = 0x22
    SET_VBUCKET = 0x3D
    GET_VBUCKET = 0x3E
    DEL_VBUCKET = 0x3F
    GET_ALL_VB_SEQNOS = 0x48
    DCP_OPEN = 0x50
    DCP_ADD_STREAM = 0x51
    DCP_CLOSE_STREAM = 0x52
    DCP_STREAM_REQ = 0x53
    DCP_GET_FAILOVER_LOG = 0x54
    DCP_STREAM_END = 0x55
    DCP_SNAPSHOT_MARKER = 0x56
    DCP_MUTATION = 0x57
    DCP_DELETION = 0x58
    DCP_EXPIRATION = 0x59
    DCP_FLUSH = 0x5A
    DCP_SET_VBUCKET_STATE = 0x5B
    DCP_NOOP = 0x5C
    DCP_BUFFER_ACK = 0x5D
    DCP_CONTROL = 0x5E
    DCP_SYSTEM_EVENT = 0x5F
    DCP_PREPARE = 0x60
    DCP_SEQNO_ACKNOWLEDGED = 0x61
    DCP_COMMIT = 0x62
    DCP_ABORT = 0x63
    DCP_SEQNO_ADVANCED = 0x64
    DCP_OSO_SNAPSHOT = 0x65
    DCP_CACHE_TRANSFER = 0x66
    DCP_CACHE_TRANSFER_END = 0x67
    STOP_PERSISTENCE = 0x80
    START_PERSISTENCE = 0x81
    GET_REPLICA = 0x83
    LIST_BUCKETS = 0x87
    SELECT_BUCKET = 0x89
    OBSERVE_SEQNO = 0x91
    OBSERVE = 0x92
    GET_LOCKED = 0x94
    UNLOCK_KEY = 0x95
    GET_FAILOVER_LOG = 0x96
    GET_META = 0xA0
    GETQ_META = 0xA1
    SET_WITH_META = 0xA2
    SETQ_WITH_META = 0xA3
    ADD_WITH_META = 0xA4
    ADDQ_WITH_META = 0xA5
    DEL_WITH_META = 0xA8
    DELQ_WITH_META = 0xA9
    ENABLE_TRAFFIC = 0xAD
    DISABLE_TRAFFIC = 0xAE
    COMPACT_DB = 0xB3
    GET_CLUSTER_CONFIG = 0xB5
    GET_RANDOM_KEY = 0xB6
    SEQNO_PERSISTENCE = 0xB7
    COLLECTIONS_SET_MANIFEST = 0xB9
    COLLECTIONS_GET_MANIFEST = 0xBA
    COLLECTIONS_GET_ID = 0xBB
    COLLECTIONS_GET_SCOPE_ID = 0xBC
    SUBDOC_GET = 0xC5
    SUBDOC_EXISTS = 0xC6
    SUBDOC_DICT_ADD = 0xC7
    SUBDOC_DICT_UPSERT = 0xC8
    SUBDOC_DELETE = 0xC9
    SUBDOC_REPLACE = 0xCA
    SUBDOC_ARRAY_PUSH_LAST = 0xCB
    SUBDOC_ARRAY_PUSH_FIRST = 0xCC
    SUBDOC_ARRAY_INSERT = 0xCD
    SUBDOC_ARRAY_ADD_UNIQUE = 0xCE
    SUBDOC_COUNTER = 0xCF
    SUBDOC_MULTI_LOOKUP = 0xD0
    SUBDOC_MULTI_MUTATION = 0xD1
    SUBDOC_GET_COUNT = 0xD2
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0xD3
    GET_ERROR_MAP = 0xFE


# TAP and old replication and checkpoint commands: once known, refused today with NotSupported
# (docs/protocol/framing.md#malformed).
REMOVED_OPCODES = frozenset(
    {
        *range(0x30, 0x3D),
        *range(0x40, 0x48),
        0x97,
        0x9E,
        0x9F,
        0xA6,
        0xA7,
        0xAA,
        0xAC,
        0xB0,
        0xB1,
        0xC1,
        0xC2,
        0xF0,
        0xF2,
    }
)

# Writes that may wait for replicas (framing extra 1).
DURABLE_OPCODES = frozenset(
    {
        Opcode.SET,
        Opcode.SETQ,
        Opcode.ADD,
        Opcode.ADDQ,
        Opcode.REPLACE,
        Opcode.REPLACEQ,
        Opcode.DELETE,
        Opcode.DELETEQ,
        Opcode.INCREMENT,
        Opcode.INCREMENTQ,
        Opcode.DECREMENT,
        Opcode.DECREMENTQ,
        Opcode.APPEND,
        Opcode.APPENDQ,
        Opcode.PREPEND,
        Opcode.PREPENDQ,
        *range(Opcode.SUBDOC_DICT_ADD, Opcode.SUBDOC_COUNTER + 1),
        Opcode.SUBDOC_MULTI_MUTATION,
        Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR,
    }
)
# Commands that may preserve the expiry of the document they replace.
TTL_OPCODES = DURABLE_OPCODES - {
    Opcode.DELETE, Opcode.DELETEQ, Opcode.APPEND, Opcode.APPENDQ, Opcode.PREPEND, Opcode.PREPENDQ,
}  # fmt: skip
# Commands that are answered only with an error, or when a GET finds its document.
QUIET_OPCODES = frozenset(
    {
        Opcode.GETQ, Opcode.GETKQ, Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ, Opcode.DELETEQ, Opcode.INCREMENTQ,
        Opcode.DECREMENTQ, Opcode.QUITQ, Opcode.FLUSHQ, Opcode.APPENDQ, Opcode.PREPENDQ, Opcode.GATQ,
        Opcode.GETQ_META, Opcode.SETQ_WITH_META, Opcode.ADDQ_WITH_META, Opcode.DELQ_WITH_META,
    }
)  # fmt: skip
DCP_OPCODES = range(Opcode.DCP_OPEN, Opcode.DCP_CACHE_TRANSFER_END + 1)


class ServerOpcode(IntEnum):
    """What a server asks of a client, magic 0x82 (docs/protocol/framing.md#header)."""

    CLUSTERMAP_CHANGE_NOTIFICATION = 0x01
    AUTHENTICATE = 0x02
    ACTIVE_EXTERNAL_USERS = 0x03
    GET_AUTHORIZATION = 0x04


class RequestFrameId(IntEnum):
    """Framing extras of a request (docs/protocol/framing.md#framing-extras)."""

    BARRIER = 0
    DURABILITY = 1
    STREAM_ID = 2
    IMPERSONATE_USER = 4
    PRESERVE_TTL = 5
    IMPERSONATE_PRIVILEGE = 6
    IMPERSONATE_TOKEN = 7


class ResponseFrameId(IntEnum):
    """Framing extras of a response (docs/protocol/framing.md#framing-extras)."""

    SERVER_DURATION = 0
    READ_UNITS = 1
    WRITE_UNITS = 2
    THROTTLE_DURATION = 3


class DurabilityLevel(IntEnum):
    MAJORITY = 1
    MAJORITY_AND_PERSIST_ON_ACTIVE = 2
    PERSIST_TO_MAJORITY = 3


class OpenFlag(IntFlag):
    """Flags of DCP_OPEN (docs/protocol/open.md)."""

    PRODUCER = 0x001
    INCLUDE_XATTRS = 0x004
    NO_VALUE = 0x008
    INCLUDE_DELETE_TIMES = 0x020
    NO_VALUE_WITH_UNDERLYING_DATATYPE = 0x040
    INCLUDE_DELETED_USER_XATTRS = 0x100
    SKIP_DELETES_IN_INITIAL_BACKFILL = 0x200


class StreamFlag(IntFlag):
    """Flags of DCP_STREAM_REQ and DCP_ADD_STREAM (docs/protocol/stream-request.md#flags)."""

    TAKEOVER = 0x001
    DISK_ONLY = 0x002
    TO_LATEST = 0x004
    NO_VALUE = 0x008
    ACTIVE_VB_ONLY = 0x010
    STRICT_VB_UUID = 0x020
    FROM_LATEST = 0x040
    IGNORE_PURGED_TOMBSTONES = 0x080
    CACHE_TRANSFER = 0x100


class MarkerFlag(IntFlag):
    """Flags of DCP_SNAPSHOT_MARKER (docs/protocol/messages.md#snapshot-marker)."""

    MEMORY = 0x01
    DISK = 0x02
    CHECKPOINT = 0x04
    ACK = 0x08
    HISTORY = 0x10
    MAY_CONTAIN_DUPLICATES = 0x20


class StreamEndStatus(IntEnum):
    """Why a DCP stream ended (docs/protocol/snapshots.md#stream-end)."""

    OK = 0
    CLOSED = 1
    STATE_CHANGED = 2
    DISCONNECTED = 3
    SLOW = 4
    BACKFILL_FAIL = 5
    ROLLBACK = 6
    FILTER_EMPTY = 7
    LOST_PRIVILEGES = 8


class UprStreamEndStatus(IntEnum):
    """Why a UPR stream ended (docs/protocol/upr.md#differences); 1 has another meaning than in DCP."""

    OK = 0
    STATE_CHANGED = 1


class UprVbucketState(IntEnum):
    """Vbucket states as the UPR document numbers them: pending and replica are swapped.

    See docs/protocol/upr.md#differences.
    """

    ACTIVE = 1
    PENDING = 2
    REPLICA = 3
    DEAD = 4


class SystemEventId(IntEnum):
    """Events of DCP_SYSTEM_EVENT (docs/protocol/collections.md#system-events)."""

    BEGIN_COLLECTION = 0
    END_COLLECTION = 1
    CREATE_SCOPE = 3
    DROP_SCOPE = 4
    MODIFY_COLLECTION = 5


class OsoFlag(IntEnum):
    START = 1
    END = 2


class Feature(IntEnum):
    """What HELLO turns on for a connection (docs/protocol/session.md#hello)."""

    DATATYPE = 0x01
    TLS = 0x02
    TCP_NODELAY = 0x03
    MUTATION_SEQNO = 0x04
    TCP_DELAY = 0x05
    XATTR = 0x06
    XERROR = 0x07
    SELECT_BUCKET = 0x08
    OLD_COLLECTIONS = 0x09
    SNAPPY = 0x0A
    JSON = 0x0B
    DUPLEX = 0x0C
    CLUSTERMAP_CHANGE_NOTIFICATION = 0x0D
    UNORDERED_EXECUTION = 0x0E
    TRACING = 0x0F
    ALT_REQUEST = 0x10
    SYNC_REPLICATION = 0x11
    COLLECTIONS = 0x12
    SNAPPY_EVERYWHERE = 0x13
    PRESERVE_TTL = 0x14
    VATTR = 0x15
    PITR = 0x16
    SUBDOC_CREATE_AS_DELETED = 0x17
    SUBDOC_DOCUMENT_MACRO_SUPPORT = 0x18
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0x19
    REPORT_UNIT_USAGE = 0x1A
    NON_BLOCKING_THROTTLING_MODE = 0x1B
    SUBDOC_REPLICA_READ = 0x1C
    GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION = 0x1D
    DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP = 0x1E
    CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF = 0x1F
    SUBDOC_ALLOWS_ACCESS_ON_MULTIPLE_XATTR_KEYS = 0x20
    SUBDOC_BINARY_XATTR = 0x21
    RANGE_SCAN_INCLUDE_XATTR = 0x22
    SUBDOC_ALLOW_REPLICA_READ_ON_DELETED_DOCS = 0x23
    GET_RANDOM_KEY_INCLUDE_XATTR = 0x24
    MUTATE_WITH_META = 0x25
    DCP_SKIP_DELETES_IN_INITIAL_BACKFILL = 0x26


class MetaOption(IntFlag):
    """The options of a with-meta command (docs/protocol/kv.md#with-meta)."""

    FORCE = 0x01
    FORCE_ACCEPT = 0x02
    REGENERATE_CAS = 0x04
    SKIP_CONFLICT_RESOLUTION = 0x08
    IS_EXPIRATION = 0x10


class PathFlag(IntFlag):
    """Flags of a sub-document path (docs/protocol/subdoc.md)."""

    MKDIR_P = 0x01
    XATTR = 0x04
    EXPAND_MACROS = 0x10
    BINARY = 0x20


class DocFlag(IntFlag):
    """Flags of the document in a sub-document command (docs/protocol/subdoc.md)."""

    MKDOC = 0x01
    ADD = 0x02
    ACCESS_DELETED = 0x04
    CREATE_AS_DELETED = 0x08
    REVIVE = 0x10
    REPLICA_READ = 0x20


class ObserveState(IntEnum):
    """The state of a key in an OBSERVE answer (docs/protocol/kv.md#commands)."""

    NOT_PERSISTED = 0x00
    PERSISTED = 0x01
    NOT_FOUND = 0x80
    LOGICALLY_DELETED = 0x81
