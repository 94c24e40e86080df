"""A blocking conversation with a node: a handshake, then pipelined requests and their answers."""

from __future__ import annotations

import secrets
import ssl
import time
from collections import deque
from collections.abc import Sequence

from upriver.errors import ConfigError, ConnectFailed, FramingError
from upriver.net.blocking import connect, speaks_http
from upriver.net.requests import Encodes, Ends, Opaques, Pending, RequestRun, pending, pending_run
from upriver.protocol.scram import ScramClient
from upriver.protocol.session import Credentials, FeedSettings, Session
from upriver.protocol.topology import Address
from upriver.wire import Frame, FrameSplitter
from upriver.wire.message import Message, Response, decode

PIPELINE_BYTES = 256 * 1024
GREETING_S = 1.0  # a data service answers HELLO at once; after this time, check for a web service


def make_session(agent: str, credentials: Credentials, bucket: str, feed: FeedSettings | None = None) -> Session:
    """The handshake of one connection; each gets a new nonce."""
    return Session(agent, credentials, bucket, _scram, feed)


def _scram(mechanism: str, username: str, password: str) -> ScramClient:
    return ScramClient(mechanism, username, password, secrets.token_urlsafe(18))


def wrong_service(address: Address) -> ConfigError:
    """The error for a connection string that names the port of a web service."""
    return ConfigError(
        f"{address} speaks HTTP: it is a node's management port, or another web service. Give the port of the data "
        "service: 11210 unless it was changed (11207 for couchbases://); without a port, that one is used"
    )


class _Timeout(ConnectFailed):
    """Nothing arrived before the deadline."""


class Conversation:
    """A connection with the handshake of ``session``. If the connection fails, methods raise ``ConnectFailed``.

    A refused handshake raises its ``StatusError``. ``connect_timeout_s`` is for connecting and the handshake together,
    ``request_timeout_s`` for each call of ``ask``.
    """

    def __init__(
        self,
        address: Address,
        session: Session,
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address, self.session = address, session
        self._request_timeout_s, self._tls = request_timeout_s, tls
        self._splitter = FrameSplitter()
        self._frames: deque[Frame] = deque()
        self._opaques = Opaques()
        self._deadline = time.monotonic() + connect_timeout_s
        self._socket = connect(address.host, address.port, connect_timeout_s, tls)
        try:
            self._handshake()
        except BaseException:
            self._socket.close()
            raise

    @property
    def config(self) -> bytes:
        """The JSON of the cluster map that came with the handshake."""
        return self.session.config or b""

    def _handshake(self) -> None:
        [hello] = self.session.start()
        messages = self.session.receive(self._greet(hello))
        while messages:
            self._send(b"".join(message.encode() for message in messages))
            messages = self.session.receive(self._next())

    def _greet(self, hello: Message) -> Response:
        """Send HELLO, and find out if the peer is a web service: that would wait for the end of a line, or hang up."""
        self._send(hello.encode())
        deadline = self._deadline
        self._deadline = min(deadline, time.monotonic() + GREETING_S)
        try:
            return self._next()
        except (ConnectFailed, FramingError) as error:
            left = max(GREETING_S, deadline - time.monotonic())
            if speaks_http(self.address.host, self.address.port, left, self._tls):
                raise wrong_service(self.address) from error
            if not isinstance(error, _Timeout):
                raise
        finally:
            self._deadline = deadline
        return self._next()

    def ask(self, messages: Sequence[Encodes], ends: Ends | None = None) -> list[Response]:
        """One response for each request, in order; with ``ends``, all responses up to that one.

        At most ``PIPELINE_BYTES`` are sent before their answers are read.
        """
        self._deadline = time.monotonic() + self._request_timeout_s
        answers: list[Response] = []
        for part in _parts(messages):
            answers += self._exchange(pending(part, self._opaques, ends, collections=self.session.collections))
        return answers

    def ask_run(self, run: RequestRun) -> list[Response]:
        """The refused requests of a run, and the answer to its fence."""
        self._deadline = time.monotonic() + self._request_timeout_s
        return self._exchange(pending_run(run))

    def _exchange(self, asked: Pending) -> list[Response]:
        self._send(asked.data)
        while not asked.add(self._next()):
            pass
        return asked.answers

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectFailed(f"{self.address}: {error}") from error

    def _next(self) -> Response:
        """The next response; other frames that came with it are kept for the next call."""
        while True:
            while self._frames:
                message = decode(self._frames.popleft())
                if isinstance(message, Response):
                    return message
            self._frames.extend(self._splitter.receive(self._receive()))

    def _receive(self) -> bytes:
        self._socket.settimeout(self._left())
        try:
            data = self._socket.recv(1 << 18)
        except TimeoutError as error:
            raise _Timeout(f"{self.address} did not answer in time") from error
        except OSError as error:
            raise ConnectFailed(f"{self.address}: {error}") from error
        if not data:
            raise ConnectFailed(f"{self.address} closed the connection")
        return data

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise _Timeout(f"{self.address} did not answer in time")
        return left

    def close(self) -> None:
        self._socket.close()


def _parts(messages: Sequence[Encodes]) -> list[list[Encodes]]:
    """Split requests into parts, each sent before its answers are read; larger parts could block both ends."""
    parts: list[list[Encodes]] = []
    size = PIPELINE_BYTES
    for message in messages:
        if size >= PIPELINE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(message)
        size += 64 + len(getattr(message, "key", b"")) + len(getattr(message, "value", b""))
    return parts
