"""Turns the fields of a message into the sections of a frame and back, as its ``Declaration`` says.

``offset_of`` and ``size_of`` locate a field in a frame, for errors and dumps. ``cut_struct`` and ``cut_bytes`` read
entries of variable size.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Any

from upriver.errors import InvalidMessage, LocalProtocolError
from upriver.wire.framing import Frame
from upriver.wire.layout import Bytes, Declaration, FieldInfo, Number, NumberLayout, Repeated, Section, ValueCodec

_HEADER_FIELDS = {
    "magic": 0, "opcode": 1, "key length": 2, "extras length": 4, "datatype": 5, "vbucket": 6, "status": 6,
    "body length": 8, "opaque": 12, "cas": 16, "frame_infos": 24, "stream_id": 24,
}  # fmt: skip


def encode_sections(declared: Declaration, message: object) -> tuple[bytes, bytes, bytes]:
    """The extras, key and value of a message; ``LocalProtocolError`` names a field that does not fit."""
    extras = _encode_extras(declared, message)
    if declared.repeated:
        extras += _encode_filling(declared.repeated, message)
    key = getattr(message, declared.key_name) if declared.key_name else b""
    value = _pack(declared, declared.value_numbers, message) if declared.value_numbers else b""
    if declared.rest:
        value += _encode_filling(declared.rest, message)
    return extras, key, value


def _encode_filling(info: FieldInfo, message: object) -> bytes:
    content, layout = getattr(message, info.name), info.layout
    try:
        if isinstance(layout, ValueCodec):
            return layout.encode(content)
        if isinstance(layout, Repeated):
            struct = layout.struct
            return b"".join(struct.pack(*(entry if isinstance(entry, tuple) else (entry,))) for entry in content)
    except error as problem:
        raise LocalProtocolError(f"{type(message).__name__}.{info.name}: {problem}") from problem
    return bytes(content)


def _encode_extras(declared: Declaration, message: object) -> bytes:
    if len(declared.shapes) == 1:
        return _pack(declared, next(iter(declared.shapes.values())), message)
    numbers = (f for f in declared.fields if isinstance(f.layout, Number) and f.layout.section is Section.EXTRAS)
    present = {info.name for info in numbers if getattr(message, info.name) is not None}
    for shape in declared.shapes.values():
        if set(shape.names) == present:
            return _pack(declared, shape, message)
    raise LocalProtocolError(f"{type(message).__name__}: these fields cannot be sent together: {sorted(present)}")


def _pack(declared: Declaration, shape: NumberLayout, message: object) -> bytes:
    try:
        return shape.struct.pack(*[getattr(message, name) for name in shape.names])
    except error as problem:  # struct.error names neither the field nor its limits
        for name in shape.names:
            _check_fits(declared, name, message)
        raise LocalProtocolError(f"{type(message).__name__}: {problem}") from problem


def _check_fits(declared: Declaration, name: str, message: object) -> None:
    layout = next(info.layout for info in declared.fields if info.name == name)
    content = getattr(message, name)
    assert isinstance(layout, Number)
    try:
        Struct(">" + layout.code).pack(content)
    except error as problem:
        raise LocalProtocolError(f"{type(message).__name__}.{name}: {content!r} does not fit") from problem


def decode_sections(declared: Declaration, frame: Frame) -> dict[str, Any]:
    """The declared fields of a frame whose sizes have been checked, without absent optional numbers."""
    shape = declared.shape_of(frame.extras)
    found: dict[str, Any] = dict(zip(shape.names, shape.struct.unpack_from(frame.extras), strict=True))
    if declared.key_name:
        found[declared.key_name] = frame.key
    rest, at = frame.value, 0
    if declared.value_numbers:
        numbers = declared.value_numbers
        found.update(zip(numbers.names, numbers.struct.unpack_from(rest), strict=True))
        at = numbers.struct.size
    if declared.rest:
        found[declared.rest.name] = _decode_filling(declared.rest, rest[at:], frame.value_at + at)
    if declared.repeated:
        tail = frame.extras[shape.struct.size :]
        found[declared.repeated.name] = _decode_filling(declared.repeated, tail, frame.extras_at + shape.struct.size)
    return found


def _decode_filling(info: FieldInfo, data: bytes, offset: int) -> Any:
    layout = info.layout
    if isinstance(layout, ValueCodec):
        return layout.decode(data, offset)
    if isinstance(layout, Repeated):
        return tuple(layout.make(*entry) for entry in layout.struct.iter_unpack(data))
    return data


def offset_of(declared: Declaration, name: str, frame: Frame) -> int:
    """Where a field starts, in bytes from the start of the frame; an unknown name means the value."""
    if name in _HEADER_FIELDS and name not in (info.name for info in declared.fields):
        return _HEADER_FIELDS[name]
    extras = declared.shape_of(frame.extras)
    if name in extras.names:
        return frame.extras_at + extras.offset_of(name)
    numbers = declared.value_numbers
    if numbers and name in numbers.names:
        return frame.value_at + numbers.offset_of(name)
    if name == declared.key_name or name == "key":
        return frame.key_at
    if declared.repeated and name == declared.repeated.name:
        return frame.extras_at + extras.struct.size
    return frame.value_at + declared.value_size


def size_of(declared: Declaration, info: FieldInfo, frame: Frame) -> int:
    """How many bytes a field takes in this frame."""
    layout = info.layout
    if isinstance(layout, Number):
        return Struct(">" + layout.code).size
    if isinstance(layout, Bytes) and layout.section is Section.KEY:
        return len(frame.key)
    if isinstance(layout, Repeated) and layout.section is Section.EXTRAS:
        return len(frame.extras) - declared.shape_of(frame.extras).struct.size
    return len(frame.value) - declared.value_size


def cut_struct(struct: Struct, data: bytes, at: int, offset: int) -> tuple[tuple[int, ...], int]:
    """The numbers at ``at`` and where they end; ``offset`` is where ``data`` starts in its frame, for the error."""
    if at + struct.size > len(data):
        raise InvalidMessage("an entry is cut short", "value", offset + at)
    return struct.unpack_from(data, at), at + struct.size


def cut_bytes(data: bytes, at: int, size: int, offset: int) -> tuple[bytes, int]:
    """The ``size`` bytes at ``at`` and where they end."""
    if at + size > len(data):
        raise InvalidMessage(f"an entry of {size} bytes has only {len(data) - at}", "value", offset + at)
    return data[at : at + size], at + size
