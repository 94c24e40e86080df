"""Collection prefixes of keys: ids as unsigned LEB128 in the shortest form, at most five bytes.

See docs/protocol/framing.md#key-prefix.
"""

from __future__ import annotations

from upriver.errors import InvalidMessage

MAX_KEY = 250
MAX_COLLECTION_KEY = 246
MAX_WIRE_KEY = 251
_LAST_RESERVED = 7


def encode_leb128(number: int) -> bytes:
    """A u32 as LEB128 in the shortest form.

    >>> encode_leb128(0x555).hex(), encode_leb128(0xffffffff).hex()
    ('d50a', 'ffffffff0f')
    """
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode_leb128(data: bytes | memoryview, offset: int = 0) -> tuple[int, int]:
    """The number at the start of ``data`` and its size in bytes; ``offset`` is only for the error's position."""
    number = 0
    for at in range(min(5, len(data))):
        byte = data[at]
        number |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            if at and byte == 0:
                raise InvalidMessage("collection id is not in its shortest LEB128 form", "key", offset + at)
            if number > 0xFFFF_FFFF:
                raise InvalidMessage("collection id does not fit in 32 bits", "key", offset + at)
            return number, at + 1
    raise InvalidMessage("collection id has no stop byte within 5 bytes", "key", offset)


def join_key(collection_id: int, key: bytes) -> bytes:
    """The key with its prefix, as it is sent on a connection with collections."""
    return encode_leb128(collection_id) + key


def split_key(wire_key: bytes | memoryview, offset: int = 0) -> tuple[int, bytes]:
    """Split a prefixed key into collection id and key; checks every rule of docs/protocol/framing.md#key-prefix."""
    collection_id, size = decode_leb128(wire_key, offset)
    if 1 <= collection_id <= _LAST_RESERVED:
        raise InvalidMessage(f"collection id {collection_id} is reserved", "key", offset)
    if size == len(wire_key):
        raise InvalidMessage("nothing follows the collection id", "key", offset + size)
    limit = MAX_KEY if collection_id == 0 else MAX_COLLECTION_KEY
    if len(wire_key) - size > limit:
        raise InvalidMessage(f"key is {len(wire_key) - size} bytes, the limit is {limit}", "key", offset)
    return collection_id, bytes(wire_key[size:])
