"""Reads and writes the FlatBuffers of version 2 system events: one table of scalars and strings.

Reading checks every offset, so hostile bytes raise ``InvalidMessage`` and nothing else. Writing omits fields that
have their default value, as the format prescribes.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct, calcsize, pack_into, unpack_from
from typing import NamedTuple

from upriver.errors import InvalidMessage

Scalar = int | bool | str


class Column(NamedTuple):
    """One field of a table; its place in the tuple is its vtable slot. Code ``s`` is a string."""

    name: str
    code: str
    default: Scalar = 0


Schema = tuple[Column, ...]
_U32 = Struct("<I")


def read_table(data: bytes, schema: Schema, offset: int = 0) -> dict[str, Scalar]:
    """The fields of the root table, including defaults; ``offset`` is where ``data`` starts in its frame."""
    table = _at(data, "<I", 0, offset)
    vtable = table - _at(data, "<i", table, offset)
    size = _at(data, "<H", vtable, offset)
    found: dict[str, Scalar] = {}
    for slot, column in enumerate(schema):
        entry = 4 + 2 * slot
        relative = _at(data, "<H", vtable + entry, offset) if entry + 2 <= size else 0
        found[column.name] = _read(data, column, table + relative, offset) if relative else column.default
    return found


def _read(data: bytes, column: Column, at: int, offset: int) -> Scalar:
    if column.code == "s":
        return _read_string(data, column, at, offset)
    number = _at(data, "<" + column.code, at, offset)
    return bool(number) if column.code == "?" else number


def _read_string(data: bytes, column: Column, at: int, offset: int) -> str:
    start = at + _at(data, "<I", at, offset)
    length = _at(data, "<I", start, offset)
    if start + 4 + length > len(data):
        raise InvalidMessage(f"string {column.name} overruns the value", "value", offset + start)
    try:
        return data[start + 4 : start + 4 + length].decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"string {column.name} is not UTF-8", "value", offset + start) from error


def _at(data: bytes, code: str, at: int, offset: int) -> int:
    if at < 0 or at + calcsize(code) > len(data):
        near = offset + max(0, min(at, len(data)))
        raise InvalidMessage("a FlatBuffers offset points outside the value", "value", near)
    return int(unpack_from(code, data, at)[0])


def write_table(schema: Schema, fields: Mapping[str, Scalar]) -> bytes:
    """A buffer whose root table has these fields: root offset, vtable, table, then strings."""
    present = [(slot, c) for slot, c in enumerate(schema) if fields.get(c.name, c.default) != c.default]
    slots = 1 + max((slot for slot, _ in present), default=-1)
    vtable_size = 4 + 2 * slots
    table_at = _align(4 + vtable_size, 8) + 4  # the soffset before it keeps eight-byte scalars aligned
    places, table_end = _place(present, table_at)
    buffer = bytearray(table_end)
    vtable_at = table_at - vtable_size
    pack_into("<I", buffer, 0, table_at)
    pack_into("<HH", buffer, vtable_at, vtable_size, table_end - table_at)
    pack_into("<i", buffer, table_at, table_at - vtable_at)
    for slot, column in present:
        at = places[column.name]
        pack_into("<H", buffer, vtable_at + 4 + 2 * slot, at - table_at)
        if column.code != "s":
            pack_into("<" + column.code, buffer, at, fields[column.name])
    for _, column in present:
        if column.code == "s":
            _append_string(buffer, places[column.name], str(fields[column.name]))
    return bytes(buffer)


def _place(present: list[tuple[int, Column]], table_at: int) -> tuple[dict[str, int], int]:
    places: dict[str, int] = {}
    at = table_at + 4
    for _, column in sorted(present, key=lambda item: -_width(item[1])):
        at = _align(at, _width(column))
        places[column.name] = at
        at += _width(column)
    return places, _align(at, 4)


def _append_string(buffer: bytearray, reference: int, text: str) -> None:
    raw = text.encode()
    while len(buffer) % 4:
        buffer.append(0)
    pack_into("<I", buffer, reference, len(buffer) - reference)
    buffer += _U32.pack(len(raw)) + raw + b"\0"


def _width(column: Column) -> int:
    return 4 if column.code == "s" else calcsize("<" + column.code)


def _align(at: int, to: int) -> int:
    return -(-at // to) * to
