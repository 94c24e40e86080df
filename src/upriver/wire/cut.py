"""Entries of variable size, cut out of a value; an entry that runs over its end is an error that says where."""

from __future__ import annotations

from struct import Struct

from upriver.errors import InvalidMessage


def cut_struct(struct: Struct, data: bytes, at: int, offset: int) -> tuple[tuple[int, ...], int]:
    if at + struct.size > len(data):
        raise InvalidMessage("an entry is cut short", "value", offset + at)
    return struct.unpack_from(data, at), at + struct.size


def cut_bytes(data: bytes, at: int, size: int, offset: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise InvalidMessage(f"{size} bytes are announced, {len(data) - at} follow", "value", offset + at)
    return data[at : at + size], at + size
