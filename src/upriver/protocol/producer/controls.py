"""The options of a producer connection: what OPEN and CONTROL set, with every default and error.

``apply_control`` looks the key up in a table of functions; an unknown key or value is ``InvalidArguments``. A stream
keeps the options that the connection had when it was created.

See docs/protocol/open.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import orjson

from upriver.errors import InvalidArguments, NotSupported
from upriver.protocol.flow import SHORTEST_INTERVAL_S, FlowWindow, NoopTimer
from upriver.wire.constants import OpenFlag
from upriver.wire.messages.dcp import Open


class Oso(IntEnum):
    """Whether snapshots may come out of sequence order (docs/protocol/snapshots.md#oso)."""

    OFF = 0
    ON = 1
    WITH_SEQNO_ADVANCED = 2


class Priority(IntEnum):
    """How many sends a connection makes in one turn.

    The ratios are those of docs/protocol/flow.md#priority, in sends instead of messages.
    """

    LOW = 1
    MEDIUM = 2
    HIGH = 4


@dataclass(slots=True)
class ProducerOptions:
    """Everything that OPEN, HELLO and CONTROL have set for one producer connection."""

    name: str
    flags: OpenFlag
    collections: bool  # as HELLO had set it when the connection was opened
    snappy: bool
    noop: NoopTimer
    window: FlowWindow = field(default_factory=FlowWindow)
    priority: Priority = Priority.MEDIUM
    force_value_compression: bool = False
    hifi_mfu: bool = False
    end_on_close: bool = False
    expiry_opcode: bool = False
    stream_ids: bool = False
    sync_writes: bool = False
    consumer_name: str = ""
    oso: Oso = Oso.OFF
    v7_status_codes: bool = False
    flatbuffers: bool = False
    marker_v22: bool = False
    sequential_backfill: bool = False

    @classmethod
    def opened(cls, request: Open, *, collections: bool, snappy: bool, now: float) -> ProducerOptions:
        """The state right after a successful OPEN."""
        name = request.name.decode("utf-8", "backslashreplace")
        return cls(name, OpenFlag(request.flags), collections, snappy, NoopTimer(now))

    @property
    def sync_replication(self) -> bool:
        """Whether the peer is a replica that acknowledges prepares, not just a reader that sees them."""
        return self.sync_writes and bool(self.consumer_name)

    @property
    def can_advance(self) -> bool:
        """Whether SEQNO_ADVANCED may be sent (docs/protocol/snapshots.md#seqno-advanced)."""
        skips = OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL in self.flags
        return self.collections and (not self.sync_writes or not self.flatbuffers or skips)

    @property
    def needs_noop(self) -> bool:
        """Whether streams are refused until noop is on, because of xattrs or collections.

        See docs/protocol/stream-request.md#checks, step 10.
        """
        return OpenFlag.INCLUDE_XATTRS in self.flags or self.collections


def check_open_value(request: Open) -> str:
    """Check the JSON of an OPEN and return its ``consumer_name``, or an empty string.

    No other property is allowed, and this one only for consumer connections.
    """
    if not request.value:
        return ""
    try:
        content = orjson.loads(request.value)
    except ValueError as error:
        raise InvalidArguments("the value is not JSON") from error
    if not isinstance(content, dict):
        raise InvalidArguments("the value is not a JSON object")
    for key, value in content.items():
        if key != "consumer_name":
            raise InvalidArguments(f"unsupported JSON property {key}")
        if request.flags & OpenFlag.PRODUCER or not isinstance(value, str):
            raise InvalidArguments("consumer_name is a string, for consumer connections")
    return str(content.get("consumer_name", ""))


def apply_control(options: ProducerOptions, key: bytes, value: bytes) -> None:
    """Apply one CONTROL message, or raise the error that refuses it."""
    setter = _SETTERS.get(key.decode("latin-1"))
    if setter is None:
        raise InvalidArguments("unknown control key")
    setter(options, value.decode("latin-1"))


Setter = Callable[[ProducerOptions, str], None]


def _is_true(value: str) -> bool:
    return value == "true"


def _require_true(value: str) -> None:
    if value != "true":
        raise InvalidArguments("the only value is 'true'")


def _one_way(attribute: str) -> Setter:
    def apply(options: ProducerOptions, value: str) -> None:
        _require_true(value)
        setattr(options, attribute, True)

    return apply


def _enable_noop(options: ProducerOptions, value: str) -> None:
    options.noop.enabled = _is_true(value)


def _noop_interval(options: ProducerOptions, value: str) -> None:
    try:
        seconds = float(value)
    except ValueError as error:
        raise InvalidArguments("the interval is not a number of seconds") from error
    if not math.isfinite(seconds) or seconds < SHORTEST_INTERVAL_S:
        raise InvalidArguments(f"the interval is shorter than {SHORTEST_INTERVAL_S} s")
    options.noop.interval_s = seconds


def _buffer_size(options: ProducerOptions, value: str) -> None:
    if not (value.isascii() and value.isdigit()) or int(value) > 0xFFFF_FFFF:
        raise InvalidArguments("the size is not a 32-bit number")
    options.window.resize(int(value))


def _ignored(options: ProducerOptions, value: str) -> None:
    pass


def _refused(reason: str) -> Setter:
    def apply(options: ProducerOptions, value: str) -> None:
        raise NotSupported(reason)

    return apply


def _priority(options: ProducerOptions, value: str) -> None:
    if value not in ("high", "medium", "low"):
        raise InvalidArguments("the priority is high, medium or low")
    options.priority = Priority[value.upper()]


def _force_compression(options: ProducerOptions, value: str) -> None:
    if not options.snappy:
        raise InvalidArguments("snappy was not agreed on in HELLO before the connection was opened")
    options.force_value_compression = _is_true(value)


def _hifi_mfu(options: ProducerOptions, value: str) -> None:
    options.hifi_mfu = _is_true(value)


def _end_on_close(options: ProducerOptions, value: str) -> None:
    options.end_on_close = options.end_on_close or _is_true(value)


def _expiry_opcode(options: ProducerOptions, value: str) -> None:
    options.expiry_opcode = _is_true(value) and OpenFlag.INCLUDE_DELETE_TIMES in options.flags


def _stream_ids(options: ProducerOptions, value: str) -> None:
    _require_true(value)
    if options.sync_writes:
        raise NotSupported("stream-ids cannot be combined with sync writes")
    options.stream_ids = True


def _sync_writes(options: ProducerOptions, value: str) -> None:
    _require_true(value)
    if options.stream_ids:
        raise NotSupported("sync writes cannot be combined with stream-ids")
    options.sync_writes = True


def _consumer_name(options: ProducerOptions, value: str) -> None:
    if not value:
        raise InvalidArguments("the name is empty")
    options.consumer_name = value


def _oso(options: ProducerOptions, value: str) -> None:
    modes = {"true": Oso.ON, "true_with_seqno_advanced": Oso.WITH_SEQNO_ADVANCED}
    if value not in modes:
        raise InvalidArguments("the value is true or true_with_seqno_advanced")
    options.oso = modes[value]


def _deleted_user_xattrs(options: ProducerOptions, value: str) -> None:
    if value != "true" or OpenFlag.INCLUDE_DELETED_USER_XATTRS not in options.flags:
        raise InvalidArguments("the connection was not opened with deleted user xattrs")


def _change_streams(options: ProducerOptions, value: str) -> None:
    _require_true(value)
    raise NotSupported("this store keeps no history")


def _marker_version(options: ProducerOptions, value: str) -> None:
    if value != "2.2":
        raise InvalidArguments("the only marker version to ask for is 2.2")
    if not options.collections:
        raise NotSupported("markers of version 2.2 need collections")
    options.marker_v22 = True


def _backfill_order(options: ProducerOptions, value: str) -> None:
    if value not in ("round-robin", "sequential"):
        raise InvalidArguments("the order is round-robin or sequential")
    options.sequential_backfill = value == "sequential"


_SETTERS: dict[str, Setter] = {
    "enable_noop": _enable_noop,
    "set_noop_interval": _noop_interval,
    "connection_buffer_size": _buffer_size,
    "stream_buffer_size": _refused("windows are per connection"),
    "set_priority": _priority,
    "force_value_compression": _force_compression,
    "supports_cursor_dropping": _ignored,  # a slow stream always falls back to disk
    "supports_cursor_dropping_vulcan": _ignored,
    "supports_hifi_MFU": _hifi_mfu,
    "send_stream_end_on_client_close_stream": _end_on_close,
    "enable_expiry_opcode": _expiry_opcode,
    "enable_stream_id": _stream_ids,
    "enable_sync_writes": _sync_writes,
    "consumer_name": _consumer_name,
    "enable_out_of_order_snapshots": _oso,
    "include_deleted_user_xattrs": _deleted_user_xattrs,
    "v7_dcp_status_codes": _one_way("v7_status_codes"),
    "flatbuffers_system_events": _one_way("flatbuffers"),
    "change_streams": _change_streams,
    "max_marker_version": _marker_version,
    "cache_transfer": _refused("cache transfer is not supported"),
    "backfill_order": _backfill_order,
}
