"""Key-value requests over one blocking connection, pipelined."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence

from upriver.client.operations import Encodes
from upriver.client.options import ConnectOptions
from upriver.client.pacing import located
from upriver.errors import ConnectFailed, StatusError
from upriver.net.blocking import connect
from upriver.protocol.scram import ScramClient
from upriver.protocol.session import Credentials, FeedSettings, Session
from upriver.protocol.topology import Address
from upriver.wire import Frame, FrameSplitter
from upriver.wire.message import Response, decode

AGENT = "upriver/0.1"
PIPELINE_BYTES = 256 * 1024


def make_session(options: ConnectOptions, feed: FeedSettings | None = None) -> Session:
    """The handshake for a connection with these options."""
    credentials = Credentials(options.username, options.password, options.allow_plain or options.tls)
    return Session(AGENT, credentials, options.bucket, _scram, feed)


def _scram(mechanism: str, username: str, password: str) -> ScramClient:
    return ScramClient(mechanism, username, password, secrets.token_urlsafe(18))


class KvConnection:
    """A connection after its handshake, with a bucket selected. Trouble with it is a ``ConnectFailed``."""

    def __init__(self, address: Address, options: ConnectOptions) -> None:
        self.address = address
        self._splitter = FrameSplitter()
        self._frames: deque[Frame] = deque()
        self._socket = connect(address.host, address.port, options.connect_timeout_s, options.ssl_context())
        self._socket.settimeout(options.request_timeout_s)
        self.session = make_session(options)
        try:
            self._handshake()
        except StatusError as error:
            self._socket.close()
            raise located(error, address) from error
        except BaseException:
            self._socket.close()
            raise

    @property
    def config(self) -> bytes:
        return self.session.config or b""

    def _handshake(self) -> None:
        messages = self.session.start()
        while messages:
            self._send(b"".join(message.encode() for message in messages))
            messages = self.session.receive(self._next())

    def ask(self, messages: Sequence[Encodes]) -> list[Response]:
        """One response for each request, in order; at most ``PIPELINE_BYTES`` are on their way."""
        answers: list[Response] = []
        size = 0
        out: list[bytes] = []
        for message in messages:
            out.append(message.encode())
            size += len(out[-1])
            if size >= PIPELINE_BYTES:
                answers += self._exchange(out)
                out, size = [], 0
        return answers + self._exchange(out)

    def ask_many(self, message: Encodes, ends: Callable[[Response], bool]) -> list[Response]:
        """All responses to a request, up to the one that ends them."""
        self._send(message.encode())
        answers = [self._next()]
        while not ends(answers[-1]):
            answers.append(self._next())
        return answers

    def _exchange(self, batch: list[bytes]) -> list[Response]:
        if batch:
            self._send(b"".join(batch))
        return [self._next() for _ in batch]

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectFailed(f"{self.address}: {error}") from error

    def _next(self) -> Response:
        """The next response; frames that came with it wait for the next call."""
        while True:
            while self._frames:
                message = decode(self._frames.popleft())
                if isinstance(message, Response):
                    return message
            self._frames.extend(self._splitter.receive(self._receive()))

    def _receive(self) -> bytes:
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            raise ConnectFailed(f"{self.address}: {error}") from error
        if not data:
            raise ConnectFailed(f"{self.address} closed the connection")
        return data

    def close(self) -> None:
        self._socket.close()
