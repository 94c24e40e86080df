"""Explains one frame: every field with its name and place, and the rule that a broken frame breaks.

``FrameDump`` is what is known about the frame; ``rows`` lists its fields with the names of the specification, and
``as_json`` gives the object that ``upriver wire decode --json`` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum, IntFlag
from typing import Any, NamedTuple

from upriver.errors import FramingError, InvalidMessage, RemoteProtocolError, status_name
from upriver.model import Datatype
from upriver.wire import keys, values
from upriver.wire.checks import Context, check_sizes
from upriver.wire.constants import Opcode, RequestFrameId, ResponseFrameId, ServerOpcode
from upriver.wire.framing import (
    HEADER,
    HEADER_SIZE,
    Frame,
    FrameInfo,
    decode_duration,
    decode_frame_infos,
    mend_stream_id,
)
from upriver.wire.layout import Declaration, FieldInfo, Number, Repeated, ValueCodec
from upriver.wire.message import Message, decode, message_class
from upriver.wire.messages.dcp import StreamRequest
from upriver.wire.messages.events import SystemEvent
from upriver.wire.messages.stream_value import StreamValue
from upriver.wire.sections import decode_sections, offset_of, size_of

_PREVIEW = 64
_MAGIC_NOTES = {
    0x80: "request", 0x81: "response", 0x08: "request with framing extras", 0x18: "response with framing extras",
    0x82: "server request", 0x83: "server response",
}  # fmt: skip


_UNCOUNTED_STREAM_ID = InvalidMessage(
    "the framing length is 0 but a stream-id begins the body; it should be 3", "framing length", 2
)


class DumpRow(NamedTuple):
    """One line of a dump: a field, its offset, its bytes, and what they mean."""

    name: str
    offset: int
    raw: bytes
    note: str = ""
    broken: bool = False

    @property
    def place(self) -> str:
        """The offsets of the field's bytes, as the specification writes them: ``(6,7)`` or ``(24-31)``."""
        last = self.offset + len(self.raw) - 1
        if len(self.raw) < 2:
            return f"({self.offset})"
        return f"({self.offset}{',' if len(self.raw) == 2 else '-'}{last})"


@dataclass(frozen=True, slots=True)
class FrameDump:
    """What is known about one frame: its bytes, and its message or the rule that it breaks."""

    raw: bytes
    frame: Frame | None
    message: Message | None
    error: RemoteProtocolError | None
    context: Context

    @property
    def name(self) -> str:
        """The opcode's name."""
        return opcode_name(self.raw[1], server=self.raw[0] in (0x82, 0x83)) if len(self.raw) > 1 else "UNKNOWN"

    @property
    def title(self) -> str:
        kind = _MAGIC_NOTES.get(self.raw[0], "not a frame") if self.raw else "nothing"
        layout = f", {_layout_name(self.message)}" if self.message else ""
        return f"{self.name} {kind}{layout}, {len(self.raw)} byte{'' if len(self.raw) == 1 else 's'}"


def _layout_name(message: Message) -> str:
    """The name of a message's class, without ``Dcp``: the opcode beside it already says that."""
    name = type(message).__qualname__
    return name if name == "DcpNoop" else name.removeprefix("Dcp")


def opcode_name(opcode: int, server: bool = False) -> str:
    """The name of an opcode; any byte has one."""
    known: type[Enum] = ServerOpcode if server else Opcode
    return known(opcode).name if opcode in known._value2member_map_ else f"UNKNOWN_0x{opcode:02x}"


def dump_frame(frame: Frame, context: Context) -> FrameDump:
    """Decode one frame as far as possible; no frame raises an error."""
    raw, message = frame.encode(), None
    mended = mend_stream_id(frame)
    error: RemoteProtocolError | None = None if mended is frame else _UNCOUNTED_STREAM_ID
    try:
        message = decode(mended, context)
        _check_content(message, mended)
    except RemoteProtocolError as problem:
        error = error or problem
    return FrameDump(raw, mended, message, error, context)


def dump_broken(raw: bytes, error: RemoteProtocolError, context: Context) -> FrameDump:
    """A dump of bytes that cannot be cut into frames."""
    return FrameDump(raw, None, None, error, context)


def _check_content(message: Message, frame: Frame) -> None:
    """Check what ``decode`` leaves to the producer: snappy, extended attributes, the stream filter."""
    if frame.datatype and frame.value:
        values.check_value(frame.value, frame.datatype, frame.value_at)
    if isinstance(message, StreamRequest):
        StreamValue.parse(message.value, frame.value_at)


# ---------------------------------------------------------------------------------------------- rows


def rows(dump: FrameDump) -> list[DumpRow]:
    """The fields of a frame, in byte order."""
    found = list(_header_rows(dump.raw))
    if dump.frame:
        found += _framing_rows(dump.frame)
        found += _body_rows(dump)
    elif len(dump.raw) > HEADER_SIZE:
        found.append(DumpRow("Body", HEADER_SIZE, dump.raw[HEADER_SIZE:]))
    return [row._replace(broken=_is_broken(row, dump.error)) for row in found]


def _is_broken(row: DumpRow, error: RemoteProtocolError | None) -> bool:
    return error is not None and row.offset <= error.offset < row.offset + max(1, len(row.raw))


def _header_rows(raw: bytes) -> Iterator[DumpRow]:
    if len(raw) < HEADER_SIZE:
        yield DumpRow("Header", 0, raw, f"cut short: {len(raw)} of {HEADER_SIZE} bytes")
        return
    magic, opcode, _, _, datatype, specific, body, _, _ = HEADER.unpack_from(raw)
    flexible, response = magic in (0x08, 0x18), magic in (0x81, 0x18, 0x83)
    yield DumpRow("Magic", 0, raw[0:1], _MAGIC_NOTES.get(magic, "not a magic"))
    yield DumpRow("Opcode", 1, raw[1:2], opcode_name(opcode, server=magic in (0x82, 0x83)))
    if flexible:
        yield DumpRow("Framing length", 2, raw[2:3], str(raw[2]))
        yield DumpRow("Key length", 3, raw[3:4], str(raw[3]))
    else:
        yield DumpRow("Key length", 2, raw[2:4], str(int.from_bytes(raw[2:4], "big")))
    yield DumpRow("Extra length", 4, raw[4:5], str(raw[4]))
    yield DumpRow("Data type", 5, raw[5:6], _flag_names(Datatype, datatype) or "RAW")
    yield (
        DumpRow("Status", 6, raw[6:8], status_name(specific))
        if response
        else DumpRow("Vbucket", 6, raw[6:8], str(specific))
    )
    yield DumpRow("Total body", 8, raw[8:12], str(body))
    yield DumpRow("Opaque", 12, raw[12:16])
    yield DumpRow("CAS", 16, raw[16:24])


def _framing_rows(frame: Frame) -> Iterator[DumpRow]:
    if not frame.framing:
        return
    try:
        infos = decode_frame_infos(frame.framing)
    except InvalidMessage:
        yield DumpRow("Framing extras", HEADER_SIZE, frame.framing)  # the error itself is shown below the rows
        return
    at = HEADER_SIZE
    for info in infos:
        size = len(info.data) + 1 + (info.id >= 15) + (len(info.data) >= 15)
        raw = frame.framing[at - HEADER_SIZE : at - HEADER_SIZE + size]
        yield DumpRow("Framing extra", at, raw, _info_note(info, frame.magic.is_response))
        at += size


def _info_note(info: FrameInfo, response: bool) -> str:
    ids: type[Enum] = ResponseFrameId if response else RequestFrameId
    name = ids(info.id).name if info.id in ids._value2member_map_ else f"unknown id {info.id}"
    number = int.from_bytes(info.data, "big")
    if response and info.id in (ResponseFrameId.SERVER_DURATION, ResponseFrameId.THROTTLE_DURATION):
        return f"{name} {decode_duration(number):.0f} us" if len(info.data) == 2 else name
    return f"{name} {number}" if 0 < len(info.data) <= 2 else f"{name} {_preview(info.data)}".rstrip()


def _body_rows(dump: FrameDump) -> Iterator[DumpRow]:
    frame = dump.frame
    assert frame is not None
    fields = fields_of(frame, dump.context)
    if fields is None:
        yield from _plain_rows(frame)
        return
    declared, content = fields
    for info in declared.fields:
        if info.name in content:
            yield from _field_rows(declared, info, content[info.name], frame)
    if declared.key.document and dump.context.collections and dump.message:
        collection_id, key = keys.split_key(frame.key)
        yield DumpRow("collection", 0, b"", f"{collection_id}, key {_preview(key)}")
    yield from _content_rows(dump.message)


def fields_of(frame: Frame, context: Context) -> tuple[Declaration, dict[str, Any]] | None:
    """The declared fields of a frame, even if it breaks a later rule; ``None`` if they cannot be read."""
    cls = message_class(frame, context)
    if cls is None:
        return None
    try:
        check_sizes(cls.declared, frame, keys.MAX_WIRE_KEY)
        return cls.declared, decode_sections(cls.declared, frame)
    except InvalidMessage:  # the caller already has the first broken rule
        return None


def _plain_rows(frame: Frame) -> Iterator[DumpRow]:
    for name, at, raw in (
        ("Extras", frame.extras_at, frame.extras),
        ("Key", frame.key_at, frame.key),
        ("Value", frame.value_at, frame.value),
    ):
        if raw:
            yield DumpRow(name, at, raw, _preview(raw))


def _field_rows(declared: Declaration, info: FieldInfo, content: Any, frame: Frame) -> Iterator[DumpRow]:
    at = offset_of(declared, info.name, frame)
    raw = _bytes_at(frame, at, size_of(declared, info, frame))
    if isinstance(info.layout, Number):
        yield DumpRow(info.name, at, raw, _number_note(info, content))
    elif isinstance(info.layout, Repeated):
        each = info.layout.struct.size
        for index, entry in enumerate(content):
            start = index * each
            yield DumpRow(f"{info.name}[{index}]", at + start, raw[start : start + each], _entry_note(info, entry))
    elif isinstance(info.layout, ValueCodec):
        yield DumpRow(info.name, at, raw, f"{len(content)} entries")
        for index, entry in enumerate(content):
            yield DumpRow(f"  [{index}]", at, b"", _entry_note(info, entry))
    elif raw:
        yield DumpRow(info.name, at, raw, _preview(raw))


def _bytes_at(frame: Frame, at: int, size: int) -> bytes:
    body = frame.framing + frame.extras + frame.key + frame.value
    return body[at - HEADER_SIZE : at - HEADER_SIZE + size]


def _content_rows(message: Message | None) -> Iterator[DumpRow]:
    if isinstance(message, SystemEvent):
        yield DumpRow("content", 0, b"", str(message.content()))


def _number_note(info: FieldInfo, number: int) -> str:
    if info.enum and issubclass(info.enum, IntFlag):
        return _flag_names(info.enum, number) or "none"
    if info.enum:
        known = info.enum._value2member_map_
        return str(known[number].name) if number in known else f"{number} is not known"
    if info.name in ("expiry", "delete_time") and number > _RELATIVE:
        return _moment(number)
    return str(number)


_RELATIVE = 30 * 24 * 3600  # a larger expiry is a point in time, a smaller one a duration (docs/protocol/kv.md#clocks)


def _moment(seconds: int) -> str:
    from datetime import UTC, datetime

    return f"{seconds} = {datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _entry_note(info: FieldInfo, entry: Any) -> str:
    if isinstance(entry, int):
        return _number_note(info, entry)
    return ", ".join(f"{name}={_shown(name, content)}" for name, content in entry._asdict().items())


def _shown(name: str, content: Any) -> str:
    if isinstance(content, bytes):
        return _preview(content)
    return f"0x{content:x}" if "uuid" in name or name == "cas" else str(content)


def _flag_names(flags: type[IntFlag], number: int) -> str:
    names = [str(flag.name) for flag in flags if flag and number & flag]
    rest = number & ~sum(flags)
    return "|".join([*names, f"0x{rest:x}"] if rest else names)


def _preview(raw: bytes) -> str:
    text = as_text(raw[:_PREVIEW])
    shown = raw[: _PREVIEW // 2].hex() if text is None else text
    whole = len(raw) <= (_PREVIEW // 2 if text is None else _PREVIEW)
    return shown if whole else f"{shown}... ({len(raw)} bytes)"


def as_text(raw: bytes) -> str | None:
    """The bytes as text if they are printable UTF-8, else None."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in "\n\r\t" for char in text) else None


# ---------------------------------------------------------------------------------------------- JSON


def as_json(dump: FrameDump) -> dict[str, Any]:
    """The JSON object for one frame: header, ``fields``, ``key``, ``value``, and ``error`` if it is broken."""
    found = _header_json(dump)
    if dump.frame:
        found |= _body_json(dump.frame, dump)
    elif len(dump.raw) > HEADER_SIZE:
        found["value"] = _bytes_json(dump.raw[HEADER_SIZE:])
    if dump.error:
        found["error"] = error_json(dump.error)
    return found


def error_json(error: RemoteProtocolError) -> dict[str, Any]:
    """What is wrong and where; ``status`` is what a server answers, ``None`` if it closes the connection instead."""
    status = None if isinstance(error, FramingError) else int(error.status)
    return {"field": error.field, "offset": error.offset, "reason": error.reason, "status": status}


def _header_json(dump: FrameDump) -> dict[str, Any]:
    if len(dump.raw) < HEADER_SIZE:
        return {"value": _bytes_json(dump.raw)}
    magic, opcode, _, _, datatype, specific, _, opaque, cas = HEADER.unpack_from(dump.raw)
    word = "status" if magic in (0x81, 0x18, 0x83) else "vbucket"
    return {
        "magic": magic, "opcode": opcode, "name": dump.name, word: specific, "opaque": opaque, "cas": cas,
        "datatype": datatype,
    }  # fmt: skip


def _body_json(frame: Frame, dump: FrameDump) -> dict[str, Any]:
    fields = fields_of(frame, dump.context)
    found: dict[str, Any] = {"fields": _fields_json(*fields) if fields else {}}
    if isinstance(dump.message, SystemEvent):
        found["fields"]["content"] = _plain(dump.message.content())
    if not fields and frame.extras:
        found["fields"]["extras"] = _bytes_json(frame.extras)
    found["key"], found["value"] = _bytes_json(frame.key), _bytes_json(frame.value)
    if dump.message and dump.message.declared.key.document and dump.context.collections and frame.key:
        found["collection_id"], key = keys.split_key(frame.key)
        found["key"] = _bytes_json(key)
    if dump.message and dump.message.stream_id is not None:
        found["stream_id"] = dump.message.stream_id
    return found


def _fields_json(declared: Declaration, content: dict[str, Any]) -> dict[str, Any]:
    whole = {declared.key_name}
    if declared.rest and not isinstance(declared.rest.layout, ValueCodec | Repeated):
        whole.add(declared.rest.name)  # the plain value is shown once, as ``value``
    names = (info.name for info in declared.fields if info.name in content and info.name not in whole)
    return {name: _plain(content[name]) for name in names}


def _plain(content: Any) -> Any:
    if isinstance(content, bytes):
        return _bytes_json(content)
    if isinstance(content, tuple) and hasattr(content, "_asdict"):
        return {name: _plain(each) for name, each in content._asdict().items()}
    if isinstance(content, tuple):
        return [_plain(each) for each in content]
    if is_dataclass(content) and not isinstance(content, type):
        return asdict(content)
    return content


def _bytes_json(raw: bytes) -> str | dict[str, str]:
    text = as_text(raw)
    return {"hex": raw.hex()} if text is None else text
