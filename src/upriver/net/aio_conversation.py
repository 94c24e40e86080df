"""A conversation with a node on asyncio; any number of tasks may ask at once, and answers come in order.

A connection for a stream of changes does its handshake here and then becomes a byte stream (``into_stream``).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from upriver.errors import ConnectFailed, FramingError, RemoteProtocolError, UpriverError
from upriver.net.aio import connect
from upriver.net.blocking import speaks_http
from upriver.net.conversation import GREETING_S, wrong_service
from upriver.net.requests import Encodes, Ends, Opaques, Pending, RequestRun, pending, pending_run
from upriver.protocol.session import Session
from upriver.protocol.topology import Address
from upriver.wire import FrameSplitter
from upriver.wire.message import Message, Response, decode


@dataclass(slots=True)
class _Waiting:
    """Requests, and the future for their answers."""

    asked: Pending
    done: asyncio.Future[list[Response]]


class AsyncConversation(asyncio.Protocol):
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
        self.broken: UpriverError | None = None
        self._connect_timeout_s, self._request_timeout_s, self._tls = connect_timeout_s, request_timeout_s, tls
        self._splitter = FrameSplitter()
        self._opaques = Opaques()
        self._waiting: deque[_Waiting] = deque()
        self._transport: asyncio.Transport | None = None

    @property
    def config(self) -> bytes:
        """The JSON of the cluster map that came with the handshake."""
        return self.session.config or b""

    async def open(self) -> None:
        """Connect and do the handshake."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connect(self, self.address.host, self.address.port, self._connect_timeout_s, self._tls)
                [hello] = self.session.start()
                messages = self.session.receive(await self._greet(hello))
                while messages:
                    messages = self.session.receive(await self.ask_one(messages[0]))
        except TimeoutError as error:
            self.close()
            raise ConnectFailed(f"{self.address} did not answer within {self._connect_timeout_s:g} s") from error
        except BaseException:
            self.close()
            raise

    async def _greet(self, hello: Message) -> Response:
        """Send HELLO, and find out if the peer is a web service: that would wait for the end of a line, or hang up."""
        answer = asyncio.ensure_future(self.ask_one(hello))
        try:
            await asyncio.wait({answer}, timeout=GREETING_S)
            if not answer.done() or isinstance(answer.exception(), ConnectFailed | FramingError):
                await self._refuse_web_service()
            return await answer
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # mark it as retrieved

    async def _refuse_web_service(self) -> None:
        host, port = self.address.host, self.address.port
        if await asyncio.to_thread(speaks_http, host, port, self._connect_timeout_s, self._tls):
            raise wrong_service(self.address)

    async def ask_one(self, message: Message) -> Response:
        """The answer to a message, sent with its own opaque and without a deadline; for handshakes."""
        [answer] = await self._wait_for(Pending(message.encode(), range(message.opaque, message.opaque + 1)))
        return answer

    async def ask(self, messages: Sequence[Encodes], ends: Ends | None = None) -> list[Response]:
        """One response for each request, in order; with ``ends``, all responses up to that one."""
        if not messages:
            return []
        return await self._wait_with_deadline(
            pending(messages, self._opaques, ends, collections=self.session.collections)
        )

    async def ask_run(self, run: RequestRun) -> list[Response]:
        """The refused requests of a run, and the answer to its fence."""
        return await self._wait_with_deadline(pending_run(run))

    async def _wait_with_deadline(self, asked: Pending) -> list[Response]:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await self._wait_for(asked)
        except TimeoutError as error:
            self.close()
            raise ConnectFailed(f"{self.address} did not answer in time") from error

    async def _wait_for(self, asked: Pending) -> list[Response]:
        if self.broken or self._transport is None:
            raise self.broken or ConnectFailed(f"{self.address} is not connected")
        waiting = _Waiting(asked, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._transport.write(asked.data)
        return await waiting.done

    def into_stream(self, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Hand the connection over as a byte stream; no request may be unanswered."""
        if self.broken or self._transport is None:
            raise self.broken or ConnectFailed(f"{self.address} is not connected")
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=limit, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        return reader, asyncio.StreamWriter(self._transport, protocol, reader, loop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.receive(data):
                message = decode(frame)
                if isinstance(message, Response):
                    self._answered(message)
        except UpriverError as error:
            self._break(error)

    def _answered(self, response: Response) -> None:
        if not self._waiting:
            raise RemoteProtocolError("an answer without a request", "opaque", 12)
        if self._waiting[0].asked.add(response):
            waiting = self._waiting.popleft()
            if not waiting.done.done():
                waiting.done.set_result(waiting.asked.answers)

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(ConnectFailed(f"{self.address} closed the connection{': ' + str(exc) if exc else ''}"))

    def _break(self, error: UpriverError) -> None:
        self.broken = self.broken or error
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done.done():
                waiting.done.set_exception(error)
        if self._transport:
            self._transport.abort()

    def close(self) -> None:
        self._break(ConnectFailed(f"the connection to {self.address} was closed"))
