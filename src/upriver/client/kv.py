"""Key-value requests over one blocking connection: one at a time, or pipelined."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator

from upriver.client.options import ConnectOptions
from upriver.errors import RemoteProtocolError, Status, StatusError
from upriver.net.blocking import ConnectFailed, connect
from upriver.protocol.scram import ScramClient
from upriver.protocol.session import Credentials, FeedSettings, Session
from upriver.protocol.topology import Address
from upriver.wire import Frame, FrameSplitter
from upriver.wire.message import Message, Response, decode

AGENT = "upriver/0.1"
PIPELINE_BYTES = 256 * 1024


def make_session(options: ConnectOptions, feed: FeedSettings | None = None) -> Session:
    """The handshake for a connection with these options."""
    credentials = Credentials(options.username, options.password, options.allow_plain or options.tls)
    return Session(AGENT, credentials, options.bucket, _scram, feed)


def _scram(mechanism: str, username: str, password: str) -> ScramClient:
    return ScramClient(mechanism, username, password, secrets.token_urlsafe(18))


class KvConnection:
    """A connection after its handshake, with a bucket selected."""

    def __init__(self, address: Address, options: ConnectOptions) -> None:
        self.address = address
        self._splitter = FrameSplitter()
        self._frames: deque[Frame] = deque()
        self._socket = connect(address.host, address.port, options.connect_timeout_s, options.ssl_context())
        self._socket.settimeout(options.request_timeout_s)
        self.session = make_session(options)
        try:
            self._handshake()
        except BaseException:
            self._socket.close()
            raise

    def _handshake(self) -> None:
        messages = self.session.start()
        while messages:
            self._socket.sendall(b"".join(message.encode() for message in messages))
            messages = self.session.receive(self._next())

    def request(self, message: Message) -> Response:
        """The answer, whatever its status."""
        self._socket.sendall(message.encode())
        return self._next()

    def ask(self, message: Message) -> Response:
        """The answer if it is a success; otherwise the error for its status."""
        response = self.request(message)
        if response.status != Status.SUCCESS:
            detail = getattr(response, "value", b"")[:200].decode("utf-8", "replace")
            raise StatusError.of(response.status, f"{self.address}: {detail}" if detail else str(self.address))
        return response

    def pipeline(self, messages: Iterable[Message]) -> Iterator[Response]:
        """Send many requests, read many answers, in order; at most ``PIPELINE_BYTES`` are on their way."""
        batch: list[bytes] = []
        size = 0
        for message in messages:
            batch.append(message.encode())
            size += len(batch[-1])
            if size >= PIPELINE_BYTES:
                yield from self._flush(batch)
                batch, size = [], 0
        yield from self._flush(batch)

    def _flush(self, batch: list[bytes]) -> Iterator[Response]:
        if not batch:
            return
        self._socket.sendall(b"".join(batch))
        for _ in batch:
            yield self._next()

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
            raise RemoteProtocolError(f"{self.address} closed the connection")
        return data

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> KvConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
