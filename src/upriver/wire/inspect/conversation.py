"""Reads both directions of one connection for a dump, and learns its dialect and collections from the frames.

A stream's dialect follows from the size of its request (docs/protocol/upr.md#both) and is remembered by opaque.
Whether collections are on follows from the HELLO response. After missing bytes, as in a capture that lost a packet,
reading resumes at the next plausible frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from upriver.errors import FramingError
from upriver.wire.checks import Context
from upriver.wire.constants import Dialect, Feature, Magic, Opcode, ServerOpcode
from upriver.wire.framing import HEADER_SIZE, MAX_FRAME, Frame, cut_frame, frame_size
from upriver.wire.inspect.dump import FrameDump, dump_broken, dump_frame
from upriver.wire.message import message_class
from upriver.wire.messages.dcp import StreamRequest
from upriver.wire.messages.session import HelloResponse
from upriver.wire.messages.upr import UprStreamRequest


class CapturedConversation:
    """What the frames so far say about how to read the next one.

    A ``dialect`` or ``collections`` of None is learned from the frames.
    """

    def __init__(self, dialect: Dialect | None = None, collections: bool | None = None) -> None:
        self._dialect = dialect
        self._collections = collections
        self._learned: Dialect | None = None
        self._learned_collections = False
        self._streams: dict[int, Dialect] = {}

    def dump(self, frame: Frame) -> FrameDump:
        """Decode a frame by what was learned before, and learn from it."""
        found = dump_frame(frame, self._context(frame))
        if found.error and self._is_dialect_unknown(frame):
            other = dump_frame(frame, replace(found.context, dialect=Dialect.UPR))
            found = found if other.error else other
        self._learn(found)
        return found

    def broken(self, raw: bytes, error: FramingError) -> FrameDump:
        """A dump of bytes that are not a frame."""
        return dump_broken(raw, error, self._context(None))

    def _context(self, frame: Frame | None) -> Context:
        known = self._streams.get(frame.opaque) if frame else None
        dialect = self._dialect or known or self._learned or Dialect.DCP
        collections = self._learned_collections if self._collections is None else self._collections
        return Context(dialect, collections, check_values=self._collections is False)

    def _is_dialect_unknown(self, frame: Frame) -> bool:
        return self._dialect is None and self._learned is None and frame.opaque not in self._streams

    def _learn(self, found: FrameDump) -> None:
        message = found.message
        if isinstance(message, HelloResponse):
            self._learned_collections = Feature.COLLECTIONS in message.features
        elif isinstance(message, StreamRequest | UprStreamRequest):
            self._learned = Dialect.UPR if isinstance(message, UprStreamRequest) else Dialect.DCP
            self._streams[message.opaque] = self._learned
        elif message and message.dialect is Dialect.UPR and message.unmistakable:
            self._learned = self._learned or Dialect.UPR


class DumpReader:
    """Turns the bytes and gaps of one direction of a conversation into dumps.

    Bytes that are not a frame stop the reader: ``stopped`` is then true, and it yields nothing more until ``gap``
    makes it look for the next frame.
    """

    def __init__(self, conversation: CapturedConversation, limit: int = MAX_FRAME) -> None:
        self.stopped = False
        self._read_frames = 0
        self._conversation = conversation
        self._limit = limit
        self._buffer = bytearray()
        self._searching = False

    @property
    def pristine(self) -> bool:
        """Whether nothing has been received yet."""
        return not (self._buffer or self._read_frames or self._searching or self.stopped)

    def receive(self, data: bytes) -> Iterator[FrameDump]:
        """Yield a dump of every frame that is now complete."""
        if self.stopped:
            return
        self._buffer += data
        if self._searching and not self._find_start():
            return
        while len(self._buffer) >= HEADER_SIZE:
            try:
                size = frame_size(self._buffer, 0, self._limit)
            except FramingError as error:
                yield self._stop(error)
                return
            if len(self._buffer) < size:
                return
            frame = cut_frame(self._buffer)
            del self._buffer[:size]
            self._read_frames += 1
            yield self._conversation.dump(frame)

    def gap(self) -> int:
        """Bytes were lost here: drop the unfinished frame, look for the next one, and return how much was dropped."""
        dropped = len(self._buffer)
        self._buffer.clear()
        self._searching, self.stopped = True, False
        return dropped

    def receive_eof(self) -> Iterator[FrameDump]:
        """The bytes end here; a leftover is dumped as an unfinished frame."""
        if self._buffer and not self._searching and not self.stopped:
            size = len(self._buffer)
            yield self._stop(FramingError(f"the bytes end inside a frame, {size} bytes in", "body", size))

    def _stop(self, error: FramingError) -> FrameDump:
        self.stopped = True
        raw = bytes(self._buffer[:_SHOWN])
        self._buffer.clear()
        return self._conversation.broken(raw, error)

    def _find_start(self) -> bool:
        at = find_frame(self._buffer, self._limit)
        if at is None:
            del self._buffer[: max(0, len(self._buffer) - HEADER_SIZE + 1)]
            return False
        del self._buffer[:at]
        self._searching = False
        return True


_SHOWN = 4096


def find_frame(data: bytes | bytearray, limit: int = MAX_FRAME) -> int | None:
    """Where the first plausible frame begins: its header makes sense, and a magic follows the frame."""
    for at in range(len(data) - HEADER_SIZE + 1):
        if data[at] in Magic._value2member_map_ and _is_plausible(data, at, limit):
            return at
    return None


def _is_plausible(data: bytes | bytearray, at: int, limit: int) -> bool:
    try:
        end = at + frame_size(data, at, limit)
    except FramingError:
        return False
    known: type[Opcode] | type[ServerOpcode] = ServerOpcode if data[at] in (0x82, 0x83) else Opcode
    if data[at + 1] not in known._value2member_map_ or data[at + 5] > 7:
        return False
    if end < len(data) and data[end] not in Magic._value2member_map_:
        return False
    return _extras_fit(data[at : at + _LONGEST_EXTRAS])


_LONGEST_EXTRAS = HEADER_SIZE + 2 * 0xFF


def _extras_fit(head: bytes | bytearray) -> bool:
    frame = cut_frame(head.ljust(_LONGEST_EXTRAS, b"\0"))  # the rest may not have arrived yet; its size is known
    cls = message_class(frame)
    return cls is None or cls.declared.fits(frame.extras)
