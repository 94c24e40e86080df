"""Key-value requests over one blocking connection, pipelined."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

from upriver.client._feed.reconnects import refusal
from upriver.client._requests.operations import Encodes
from upriver.client._requests.pending import Ends, Opaques, Question, question
from upriver.client.options import ConnectOptions
from upriver.errors import ConfigError, ConnectFailed, FramingError, StatusError
from upriver.net.blocking import connect, speaks_http
from upriver.protocol.scram import ScramClient
from upriver.protocol.session import Credentials, FeedSettings, Session
from upriver.protocol.topology import Address
from upriver.wire import Frame, FrameSplitter
from upriver.wire.message import Message, Response, decode

AGENT = "upriver/0.1"
PIPELINE_BYTES = 256 * 1024
GREETING_S = 1.0  # a data service says hello at once; after so long we look whether it is another service


def make_session(options: ConnectOptions, feed: FeedSettings | None = None) -> Session:
    """The handshake for a connection with these options."""
    credentials = Credentials(options.username, options.password, options.allow_plain or options.tls)
    return Session(AGENT, credentials, options.bucket, _scram, feed)


def _scram(mechanism: str, username: str, password: str) -> ScramClient:
    return ScramClient(mechanism, username, password, secrets.token_urlsafe(18))


def wrong_service(address: Address) -> ConfigError:
    """For a connection string that names the port of a web service."""
    return ConfigError(
        f"{address} speaks HTTP: it is a node's management port, or another web service. Give the port of the data "
        "service: 11210 unless it was changed (11207 for couchbases://); without a port, that one is used"
    )


class _TooLate(ConnectFailed):
    """Nothing came until a deadline."""


class KvConnection:
    """A connection after its handshake, with a bucket selected. Trouble with it is a ``ConnectFailed``.

    ``again``: the cluster has accepted us before, so a bucket that is not there is a node that restarts.
    """

    def __init__(self, address: Address, options: ConnectOptions, *, again: bool = False) -> None:
        self.address, self._options = address, options
        self._splitter = FrameSplitter()
        self._frames: deque[Frame] = deque()
        self._opaques = Opaques()
        self._deadline = time.monotonic() + options.connect_timeout_s  # for all of it, not for each step
        self._socket = connect(address.host, address.port, options.connect_timeout_s, options.ssl_context())
        self.session = make_session(options)
        try:
            self._handshake()
        except StatusError as error:
            self._socket.close()
            raise refusal(error, address, again) from error
        except BaseException:
            self._socket.close()
            raise

    @property
    def config(self) -> bytes:
        return self.session.config or b""

    def _handshake(self) -> None:
        [hello] = self.session.start()
        messages = self.session.receive(self._greet(hello))
        while messages:
            self._send(b"".join(message.encode() for message in messages))
            messages = self.session.receive(self._next(self._deadline))

    def _greet(self, hello: Message) -> Response:
        """Say hello. A web service waits for the rest of a line that never ends, or hangs up."""
        self._send(hello.encode())
        try:
            return self._next(min(self._deadline, time.monotonic() + GREETING_S))
        except (ConnectFailed, FramingError) as error:
            if self._is_web_service():
                raise wrong_service(self.address) from error
            if not isinstance(error, _TooLate):
                raise
        return self._next(self._deadline)

    def _is_web_service(self) -> bool:
        left = max(GREETING_S, self._deadline - time.monotonic())
        return speaks_http(self.address.host, self.address.port, left, self._options.ssl_context())

    def ask(self, messages: Sequence[Encodes]) -> list[Response]:
        """One response for each request, in order; at most ``PIPELINE_BYTES`` are on their way."""
        deadline = self._begin()
        answers: list[Response] = []
        for part in _parts(messages):
            answers += self._exchange(question(part, self._opaques, collections=self.session.collections), deadline)
        return answers

    def ask_many(self, message: Encodes, ends: Callable[[Response], bool]) -> list[Response]:
        """All responses to a request, up to the one that ends them."""
        return self._exchange(self._question_of(message, ends), self._begin())

    def _question_of(self, message: Encodes, ends: Ends) -> Question:
        return question([message], self._opaques, ends, collections=self.session.collections)

    def _begin(self) -> float:
        self._deadline = time.monotonic() + self._options.request_timeout_s
        return self._deadline

    def _exchange(self, asked: Question, deadline: float) -> list[Response]:
        self._send(asked.data)
        while not asked.take(self._next(deadline)):
            pass
        return asked.answers

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(self._left(self._deadline))
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectFailed(f"{self.address}: {error}") from error

    def _next(self, deadline: float) -> Response:
        """The next response; frames that came with it wait for the next call."""
        while True:
            while self._frames:
                message = decode(self._frames.popleft())
                if isinstance(message, Response):
                    return message
            self._frames.extend(self._splitter.receive(self._receive(deadline)))

    def _left(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _TooLate(f"{self.address} did not answer in time")
        return left

    def _receive(self, deadline: float) -> bytes:
        self._socket.settimeout(self._left(deadline))
        try:
            data = self._socket.recv(1 << 18)
        except TimeoutError as error:
            raise _TooLate(f"{self.address} did not answer in time") from error
        except OSError as error:
            raise ConnectFailed(f"{self.address}: {error}") from error
        if not data:
            raise ConnectFailed(f"{self.address} closed the connection")
        return data

    def close(self) -> None:
        self._socket.close()


def _parts(messages: Sequence[Encodes]) -> list[list[Encodes]]:
    """Requests that are sent before their answers are read: with more, both ends could wait for each other."""
    parts: list[list[Encodes]] = []
    size = PIPELINE_BYTES
    for message in messages:
        if size >= PIPELINE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(message)
        size += _size(message)
    return parts


def _size(message: Encodes) -> int:
    return 64 + len(getattr(message, "key", b"")) + len(getattr(message, "value", b""))
