"""Reads, writes and checks values: snappy compression, and extended attributes in front of the body.

See docs/protocol/framing.md#datatype and docs/protocol/kv.md#xattrs.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct

from upriver.errors import InvalidMessage, LocalProtocolError, Status
from upriver.model import Datatype

MAX_INFLATED = 30 * 1024 * 1024
MAX_STORED = 21 * 1024 * 1024  # a document and its xattrs
MAX_XATTR_KEY = 15
MAX_XATTR_BYTES = 1024 * 1024  # of the whole section
MAX_XATTRS = 16_384  # a reader makes an object of each; more would delay a server's other clients
_U32 = Struct(">I")


def inflated_size(data: bytes | memoryview, offset: int = 0) -> int:
    """The inflated size that a raw snappy block states in its preamble."""
    size = 0
    for at in range(min(5, len(data))):
        size |= (data[at] & 0x7F) << (7 * at)
        if data[at] < 0x80:
            return size
    raise InvalidMessage("snappy preamble does not end", "value", offset)


def inflate(data: bytes | memoryview, offset: int = 0, limit: int = MAX_INFLATED) -> bytes:
    """Inflate a raw snappy block; one that claims more than ``limit`` is refused before memory is allocated for it."""
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
    """Compress with raw snappy, as in values with the SNAPPY datatype bit."""
    import cramjam

    return bytes(cramjam.snappy.compress_raw(data))


def split_xattrs(value: bytes | memoryview, offset: int = 0) -> tuple[dict[str, bytes], bytes]:
    """Split an uncompressed value into its extended attributes, by name, and its body."""
    end = body_offset(value, offset)
    section = bytes(value[:end])
    attributes: dict[str, bytes] = {}
    at = 4
    while at < end:
        name, content, stop = _pair(section, at, offset)
        if name in attributes:
            raise _bad_xattr(f"{name!r} appears twice", offset + at)
        attributes[name] = content
        at = stop
    return attributes, bytes(value[end:])


def body_offset(value: bytes | memoryview, offset: int = 0) -> int:
    """Where the body begins, behind the extended attributes; the attributes themselves are not checked."""
    if len(value) < 4:
        raise _bad_xattr("total is cut short", offset)
    total: int = _U32.unpack_from(value)[0]
    if total > len(value) - 4:
        raise _bad_xattr(f"total is {total} but only {len(value) - 4} bytes follow", offset)
    return 4 + total


def _pair(section: bytes, at: int, offset: int) -> tuple[str, bytes, int]:
    """The name and content of the pair at ``at``, and where the next one begins."""
    if len(section) - at < 4:
        raise _bad_xattr("pair length is cut short", offset + at)
    begin, size = at + 4, _U32.unpack_from(section, at)[0]
    end = begin + size
    if end > len(section):
        raise _bad_xattr(f"pair length {size} overruns the total", offset + at)
    middle = section.find(b"\0", begin, end)
    if middle < 0 or middle == end - 1 or section[end - 1]:
        raise _bad_xattr("a pair is two strings, each ended by a zero byte", offset + begin)
    if middle == begin:
        raise _bad_xattr("a name is empty", offset + begin)
    try:
        return section[begin:middle].decode(), section[middle + 1 : end - 1], end
    except UnicodeDecodeError as error:
        raise _bad_xattr("a name is not UTF-8", offset + begin) from error


def _bad_xattr(reason: str, offset: int) -> InvalidMessage:
    return InvalidMessage(f"xattrs: {reason}", "value", offset, Status.XATTR_EINVAL)


def join_xattrs(attributes: Mapping[str, bytes], body: bytes = b"") -> bytes:
    """A value with extended attributes in front of its body, for the XATTR datatype bit.

    >>> join_xattrs({"_a": b"1"}, b"{}").hex()
    '00000009000000055f610031007b7d'
    """
    pairs = bytearray()
    for name, content in attributes.items():
        raw = name.encode()
        if not 1 <= len(raw) <= MAX_XATTR_KEY or b"\0" in raw or b"\0" in content:
            raise LocalProtocolError(
                f"xattr {name!r}: a name has 1 to {MAX_XATTR_KEY} bytes; neither name nor value has a zero byte"
            )
        pair = raw + b"\0" + content + b"\0"
        pairs += _U32.pack(len(pair)) + pair
    return _U32.pack(len(pairs)) + bytes(pairs) + body


def check_value(value: bytes | memoryview, datatype: int, offset: int = 0) -> None:
    """Check that the value is what its datatype says, except that the body's JSON is not parsed.

    A value that is too large to store is refused before it is inflated.

    See docs/protocol/messages.md#checks, steps 8 and 9.
    """
    if datatype & Datatype.SNAPPY and MAX_STORED < (size := inflated_size(value, offset)) <= MAX_INFLATED:
        reason = f"the value has {size} bytes when inflated, the limit is {MAX_STORED}"
        raise InvalidMessage(reason, "value", offset, Status.E2BIG)
    plain = inflate(value, offset) if datatype & Datatype.SNAPPY else value
    if datatype & Datatype.XATTR:
        check_xattrs(plain, offset)


def check_xattrs(value: bytes | memoryview, offset: int = 0) -> None:
    """Check that a value's extended attributes may be stored: not too many, valid names, each value a JSON text."""
    size = body_offset(value, offset) - 4
    if size > MAX_XATTR_BYTES:
        reason = f"xattrs are {size} bytes, the limit is {MAX_XATTR_BYTES}"
        raise InvalidMessage(reason, "value", offset, Status.E2BIG)
    attributes, _ = split_xattrs(value[: 4 + size], offset)
    if len(attributes) > MAX_XATTRS:
        reason = f"the document has {len(attributes)} xattrs, the limit is {MAX_XATTRS}"
        raise InvalidMessage(reason, "value", offset, Status.E2BIG)
    for name, content in attributes.items():
        if len(name.encode()) > MAX_XATTR_KEY:
            raise _bad_xattr(f"the name {name!r} is longer than {MAX_XATTR_KEY} bytes", offset)
        if b"\0" in content or not _is_json(content):
            raise _bad_xattr(f"the value of {name!r} is not JSON", offset)


def _is_json(text: bytes) -> bool:
    import orjson

    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
