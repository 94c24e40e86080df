"""Turns bytes into frames and back: the 24-byte header, framing extras, and a splitter for byte streams.

This module checks a frame only as far as needed to find the next one; ``message`` decodes its content. A byte stream
that fails these checks cannot be read any further: ``FramingError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from struct import Struct
from struct import error as struct_error

from upriver.errors import FramingError, InvalidMessage, LocalProtocolError, Status
from upriver.wire.constants import Magic, Opcode, RequestFrameId

HEADER = Struct(">BBHBBHIIQ")
HEADER_SIZE = HEADER.size
MAX_FRAME = 30 * 1024 * 1024
MAX_UNAUTHENTICATED_FRAME = 16 * 1024

_LARGE = 64 * 1024  # bytes; a larger body is copied only once
_FLEXIBLE = (Magic.ALT_REQUEST, Magic.ALT_RESPONSE)
_MAGICS = {int(magic): magic for magic in Magic}
_MAX_ESCAPED = 15 + 0xFF


@dataclass(slots=True)
class Frame:
    """One frame, cut into its sections. ``specific`` is the vbucket of a request and the status of a response."""

    magic: Magic
    opcode: int
    specific: int = 0
    opaque: int = 0
    cas: int = 0
    datatype: int = 0
    framing: bytes = b""
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""

    @property
    def size(self) -> int:
        return HEADER_SIZE + len(self.framing) + len(self.extras) + len(self.key) + len(self.value)

    # Where each section starts, in bytes from the frame's start, for error offsets.
    @property
    def extras_at(self) -> int:
        return HEADER_SIZE + len(self.framing)

    @property
    def key_at(self) -> int:
        return self.extras_at + len(self.extras)

    @property
    def value_at(self) -> int:
        return self.key_at + len(self.key)

    def encode(self) -> bytes:
        """The frame's bytes; ``LocalProtocolError`` if a number or a section does not fit."""
        body = len(self.framing) + len(self.extras) + len(self.key) + len(self.value)
        lengths = len(self.key)
        if self.magic in _FLEXIBLE:
            if lengths > 0xFF:
                raise LocalProtocolError(
                    f"a key of {lengths} bytes is too long for a frame with framing extras, the limit is 255"
                )
            lengths |= len(self.framing) << 8
        elif self.framing:
            raise LocalProtocolError(f"magic 0x{self.magic:02x} has no framing extras")
        try:
            head = HEADER.pack(
                self.magic, self.opcode, lengths, len(self.extras), self.datatype,
                self.specific, body, self.opaque, self.cas,
            )  # fmt: skip
        except struct_error as error:
            raise LocalProtocolError(f"a header field is out of its range: {self.describe()}") from error
        return b"".join((head, self.framing, self.extras, self.key, self.value))

    def describe(self) -> str:
        """The header as text, for error messages."""
        return (
            f"opcode 0x{self.opcode:02x}, datatype {self.datatype}, vbucket or status {self.specific}, "
            f"opaque {self.opaque}, cas {self.cas}, framing extras {len(self.framing)}, extras {len(self.extras)}, "
            f"key {len(self.key)} bytes"
        )


def frame_size(data: bytes | bytearray | memoryview, at: int = 0, limit: int = MAX_FRAME) -> int:
    """The size of the frame at ``at``, whose 24 header bytes must be there. Raises ``FramingError``."""
    magic, _, key_len, extras_len, _, _, body, _, _ = HEADER.unpack_from(data, at)
    if magic not in _MAGICS:
        raise FramingError(f"0x{magic:02x} is not a magic", "magic", 0)
    if HEADER_SIZE + body > limit:
        raise FramingError(f"frame is {HEADER_SIZE + body} bytes, the limit is {limit}", "body length", 8)
    framing_len = 0
    if magic in _FLEXIBLE:
        framing_len, key_len = key_len >> 8, key_len & 0xFF
    if framing_len + extras_len + key_len > body:
        raise FramingError(
            f"framing extras {framing_len} + extras {extras_len} + key {key_len} exceed the body of {body}",
            "body length",
            8,
        )
    return HEADER_SIZE + int(body)


def cut_frame(data: bytes | bytearray | memoryview, at: int = 0) -> Frame:
    """The frame at ``at``; the caller has checked its size with ``frame_size``."""
    magic, opcode, key_len, extras_len, datatype, specific, body, opaque, cas = HEADER.unpack_from(data, at)
    if body > _LARGE:
        data = memoryview(data)  # slicing a bytearray copies once, and ``bytes()`` would copy again
    extras_at = at + HEADER_SIZE
    framing = b""
    if magic in _FLEXIBLE:
        framing_len, key_len = key_len >> 8, key_len & 0xFF
        framing = bytes(data[extras_at : extras_at + framing_len])
        extras_at += framing_len
    key_at = extras_at + extras_len
    value_at = key_at + key_len
    return Frame(
        _MAGICS[magic], opcode, specific, opaque, cas, datatype, framing,
        bytes(data[extras_at:key_at]), bytes(data[key_at:value_at]), bytes(data[value_at : at + HEADER_SIZE + body]),
    )  # fmt: skip


class FrameSplitter:
    """Cuts a byte stream, in pieces of any size, into frames.

    ``receive`` yields the complete frames and keeps the rest. After a ``FramingError`` every call raises it again,
    because no later byte can be trusted.
    """

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._error: FramingError | None = None

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)

    def receive(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Yield every complete frame; consume the iterator fully before the next call."""
        if self._error:
            raise self._error
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEADER_SIZE:
                size = frame_size(self._buffer, at, self.limit)
                if len(self._buffer) - at < size:
                    break
                frame = cut_frame(self._buffer, at)
                at += size
                yield frame
        except FramingError as error:
            self._error = error
            raise
        finally:
            del self._buffer[:at]

    def receive_eof(self) -> None:
        """The peer closed the connection; leftover bytes are an unfinished frame, which is an error."""
        if self._buffer:
            size = len(self._buffer)
            raise FramingError(f"connection ended inside a frame, {size} bytes in", "body", size)


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """One framing extra: an id and its bytes (docs/protocol/framing.md#framing-extras)."""

    id: int
    data: bytes = b""


def encode_frame_infos(infos: tuple[FrameInfo, ...]) -> bytes:
    """Framing extras as bytes; ids and lengths from 15 on take an escape byte.

    >>> encode_frame_infos((FrameInfo(2, b"\\0G"), FrameInfo(16, b"x" * 15))).hex()
    '220047ff0100787878787878787878787878787878'
    """
    out = bytearray()
    for info in infos:
        if not (0 <= info.id <= _MAX_ESCAPED and len(info.data) <= _MAX_ESCAPED):
            raise LocalProtocolError(f"framing extra {info.id} of {len(info.data)} bytes: both are at most 270")
        id_nibble, length_nibble = min(info.id, 15), min(len(info.data), 15)
        out.append(id_nibble << 4 | length_nibble)
        if id_nibble == 15:
            out.append(info.id - 15)
        if length_nibble == 15:
            out.append(len(info.data) - 15)
        out += info.data
    return bytes(out)


def decode_frame_infos(framing: bytes, offset: int = HEADER_SIZE) -> tuple[FrameInfo, ...]:
    """The framing extras of a frame; ``InvalidMessage`` if one overruns the section."""
    infos = []
    at = 0
    while at < len(framing):
        start = at
        identifier, length = framing[at] >> 4, framing[at] & 0x0F
        at += 1
        if identifier == 15:
            identifier, at = 15 + _escape(framing, at, offset), at + 1
        if length == 15:
            length, at = 15 + _escape(framing, at, offset), at + 1
        if at + length > len(framing):
            raise InvalidMessage(
                f"framing extra {identifier} of {length} bytes overruns the section", "framing extras", offset + start
            )
        infos.append(FrameInfo(identifier, framing[at : at + length]))
        at += length
    return tuple(infos)


def _escape(framing: bytes, at: int, offset: int) -> int:
    if at >= len(framing):
        raise InvalidMessage("framing extra ends before its escape byte", "framing extras", offset + at)
    return framing[at]


_MENDABLE = (Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION)
_STREAM_ID_HEAD = RequestFrameId.STREAM_ID << 4 | 2


def mend_stream_id(frame: Frame) -> Frame:
    """Repair a frame whose body begins with a stream-id that its framing length does not count.

    Real servers send deletions and expirations like that. Without a stream-id, the byte 0x22 would begin a seqno
    above 2**61, so the frame can mean nothing else.

    See docs/protocol/pitfalls.md#forgotten-framing-length.
    """
    if frame.magic is not Magic.ALT_REQUEST or frame.framing or frame.opcode not in _MENDABLE:
        return frame
    body = frame.extras + frame.key + frame.value
    if len(frame.value) < 3 or body[0] != _STREAM_ID_HEAD:
        return frame
    key_at = 3 + len(frame.extras)
    value_at = key_at + len(frame.key)
    return replace(frame, framing=body[:3], extras=body[3:key_at], key=body[key_at:value_at], value=body[value_at:])


_FIXED_SIZES = {
    RequestFrameId.BARRIER: (0,),
    RequestFrameId.DURABILITY: (1, 3),
    RequestFrameId.STREAM_ID: (2,),
    RequestFrameId.PRESERVE_TTL: (0,),
    RequestFrameId.IMPERSONATE_TOKEN: (2,),
}


def check_request_frame_infos(infos: tuple[FrameInfo, ...], offset: int = HEADER_SIZE) -> None:
    """Check the framing extras of a request: known ids, right sizes, valid durability level and timeout.

    See docs/protocol/framing.md#framing-extras.
    """
    for info in infos:
        if info.id not in RequestFrameId._value2member_map_:
            raise InvalidMessage(
                f"framing extra {info.id} is unknown", "framing extras", offset, Status.UNKNOWN_FRAME_INFO
            )
        sizes = _FIXED_SIZES.get(RequestFrameId(info.id))
        if sizes is not None and len(info.data) not in sizes:
            name = RequestFrameId(info.id).name
            raise InvalidMessage(f"{name} has {len(info.data)} bytes, not {sizes[-1]}", "framing extras", offset)
        if info.id == RequestFrameId.DURABILITY:
            _check_durability(info.data, offset)


def _check_durability(data: bytes, offset: int) -> None:
    if not 1 <= data[0] <= 3:
        raise InvalidMessage(
            f"durability level {data[0]} does not exist", "framing extras", offset, Status.DURABILITY_INVALID_LEVEL
        )
    if len(data) == 3 and int.from_bytes(data[1:], "big") in (0, 0xFFFF):
        raise InvalidMessage("durability timeouts 0 and 65535 are reserved", "framing extras", offset)


def encode_duration(microseconds: float) -> int:
    """A server duration as the u16 of response frame 0; accurate to a few percent, for up to minutes.

    See docs/protocol/framing.md#framing-extras.
    """
    return min(0xFFFF, round(float((microseconds * 2) ** (1 / 1.74))))


def decode_duration(encoded: int) -> float:
    """A server duration in microseconds."""
    return float(encoded**1.74) / 2
