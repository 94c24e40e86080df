"""A bare client over a real socket: sends the bytes of a test, and reads the answers frame by frame."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType

from upriver.wire import Context, Frame, FrameSplitter, Magic, Message, Opcode, decode
from upriver.wire.constants import Feature
from upriver.wire.messages import session as session_messages

BASIC = (Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON, Feature.XATTR, Feature.MUTATION_SEQNO)
ALL = (*BASIC, Feature.SNAPPY, Feature.COLLECTIONS, Feature.ALT_REQUEST)
_ROUNDS, _REST_S, _MARK = 5, 0.02, 0x0DD0_0DD0


class Raw:
    """One connection. ``closed`` tells a disconnect from silence."""

    def __init__(self, port: int, timeout: float = 60.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._splitter = FrameSplitter()
        self._frames: list[Frame] = []
        self.context = Context()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    def send(self, *messages: Message | bytes) -> None:
        self.socket.sendall(b"".join(m if isinstance(m, bytes) else m.frame().encode() for m in messages))

    def receive(self) -> Frame:
        """The next frame; ``ConnectionError`` when the node has closed."""
        while not self._frames:
            data = self.socket.recv(1 << 18)
            if not data:
                raise ConnectionError("closed by the node")
            self._frames.extend(self._splitter.receive(data))
        return self._frames.pop(0)

    def message(self) -> Message:
        return decode(self.receive(), self.context)

    def ask(self, message: Message | bytes) -> Frame:
        """Send one request and take the next response."""
        self.send(message)
        return self.response()

    def response(self) -> Frame:
        while True:
            frame = self.receive()
            if frame.magic.is_response:
                return frame

    def messages(self) -> Iterator[Message]:
        while True:
            yield self.message()

    def is_silent(self, for_s: float = 0.3) -> bool:
        """Whether nothing arrives for ``for_s`` seconds."""
        patience = self.socket.gettimeout()
        self.socket.settimeout(for_s)
        try:
            self._frames.insert(0, self.receive())
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(patience)
        return False

    def until_quiet(self) -> list[Frame]:
        """All requests that arrive until the node has none left: it then only answers a NOOP."""
        found: list[Frame] = []
        rounds = 0
        while rounds < _ROUNDS:
            self.send(session_messages.Noop(opaque=_MARK))
            rounds += 1
            while (got := self.receive()).opaque != _MARK:
                if not got.magic.is_response:
                    found.append(got)
                    rounds = 0
            time.sleep(_REST_S)
        return found

    def is_closed(self) -> bool:
        """Whether the node closes the connection; discards everything that comes before."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def hello(self, *features: int) -> None:
        answer = self.ask(session_messages.Hello(b"test", tuple(features)))
        assert answer.specific == 0
        accepted = struct.unpack(f">{len(answer.value) // 2}H", answer.value)
        self.context = Context(collections=Feature.COLLECTIONS in accepted)

    def bucket(self, name: bytes = b"default") -> None:
        assert self.ask(session_messages.SelectBucket(name)).specific == 0


def frame(
    opcode: int, *, extras: bytes = b"", key: bytes = b"", value: bytes = b"", vbucket: int = 0, cas: int = 0,
    datatype: int = 0, opaque: int = 0, framing: bytes = b"", magic: Magic | None = None,
) -> bytes:  # fmt: skip
    """The bytes of a frame, unchecked, so that it may break the rules."""
    magic = magic or (Magic.ALT_REQUEST if framing else Magic.REQUEST)
    return Frame(magic, opcode, vbucket, opaque, cas, datatype, framing, extras, key, value).encode()


def ready(port: int, *features: int) -> Raw:
    """A connection with features and the default bucket."""
    raw = Raw(port)
    raw.hello(*(features or BASIC))
    raw.bucket()
    return raw


__all__ = ["ALL", "BASIC", "Opcode", "Raw", "frame", "ready"]
