"""What a value may be wrapped in: snappy over everything, extended attributes in front (``protocol.md`` 1.3, 10.9)."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct

from upriver.errors import InvalidMessage, LocalProtocolError, Status
from upriver.model import Datatype

MAX_INFLATED = 30 * 1024 * 1024
MAX_XATTR_KEY = 15
_U32 = Struct(">I")


def inflated_size(data: bytes | memoryview, offset: int = 0) -> int:
    """The size that a raw snappy block claims to inflate to, from its preamble alone."""
    size = 0
    for at in range(min(5, len(data))):
        size |= (data[at] & 0x7F) << (7 * at)
        if data[at] < 0x80:
            return size
    raise InvalidMessage("snappy preamble does not end", "value", offset)


def inflate(data: bytes | memoryview, offset: int = 0, limit: int = MAX_INFLATED) -> bytes:
    """Undo snappy; a block that claims more than ``limit`` is refused before any memory is taken for it."""
    import cramjam

    size = inflated_size(data, offset)
    if size > limit:
        raise InvalidMessage(f"snappy value inflates to {size} bytes, the limit is {limit}", "value", offset)
    try:
        out = bytes(cramjam.snappy.decompress_raw(bytes(data)))
    except cramjam.DecompressionError as error:
        raise InvalidMessage(f"snappy value cannot be inflated: {error}", "value", offset) from error
    if len(out) != size:
        raise InvalidMessage(f"snappy value inflates to {len(out)} bytes but claims {size}", "value", offset)
    return out


def deflate(data: bytes) -> bytes:
    """Raw snappy, as values travel with the SNAPPY datatype bit."""
    import cramjam

    return bytes(cramjam.snappy.compress_raw(data))


def split_xattrs(value: bytes | memoryview, offset: int = 0) -> tuple[dict[str, bytes], bytes]:
    """Extended attributes by name, and the body behind them; the value must not be compressed."""
    if len(value) < 4:
        raise _bad_xattr("total is cut short", offset)
    (total,) = _U32.unpack_from(value)
    if total > len(value) - 4:
        raise _bad_xattr(f"total is {total} but only {len(value) - 4} bytes follow", offset)
    attributes: dict[str, bytes] = {}
    at, end = 4, 4 + total
    while at < end:
        name, content, size = _pair(value, at, end, offset)
        if name in attributes:
            raise _bad_xattr(f"{name!r} appears twice", offset + at)
        attributes[name] = content
        at += size
    return attributes, bytes(value[end:])


def _pair(value: bytes | memoryview, at: int, end: int, offset: int) -> tuple[str, bytes, int]:
    if end - at < 4:
        raise _bad_xattr("pair length is cut short", offset + at)
    (size,) = _U32.unpack_from(value, at)
    if size > end - at - 4:
        raise _bad_xattr(f"pair length {size} overruns the total", offset + at)
    pair = bytes(value[at + 4 : at + 4 + size])
    name, separator, content = pair.partition(b"\0")
    if not separator or not content.endswith(b"\0"):
        raise _bad_xattr("a pair is two strings, each ended by a zero byte", offset + at + 4)
    if not name:
        raise _bad_xattr("a name is empty", offset + at + 4)
    try:
        return name.decode(), content[:-1], size + 4
    except UnicodeDecodeError as error:
        raise _bad_xattr("a name is not UTF-8", offset + at + 4) from error


def _bad_xattr(reason: str, offset: int) -> InvalidMessage:
    return InvalidMessage(f"xattrs: {reason}", "value", offset, Status.XATTR_EINVAL)


def join_xattrs(attributes: Mapping[str, bytes], body: bytes = b"") -> bytes:
    """The blob for a value with the XATTR datatype bit.

    >>> join_xattrs({"_a": b"1"}, b"{}").hex()
    '00000009000000055f610031007b7d'
    """
    pairs = bytearray()
    for name, content in attributes.items():
        raw = name.encode()
        if not 1 <= len(raw) <= MAX_XATTR_KEY or b"\0" in raw or b"\0" in content:
            raise LocalProtocolError(f"xattr {name!r}: names have 1 to {MAX_XATTR_KEY} bytes, and nothing a zero byte")
        pair = raw + b"\0" + content + b"\0"
        pairs += _U32.pack(len(pair)) + pair
    return _U32.pack(len(pairs)) + bytes(pairs) + body


def check_value(value: bytes | memoryview, datatype: int, offset: int = 0) -> None:
    """Every datatype bit must be true of the value (2.18 steps 8 and 9); JSON is not parsed."""
    plain = inflate(value, offset) if datatype & Datatype.SNAPPY else value
    if datatype & Datatype.XATTR:
        split_xattrs(plain, offset)
