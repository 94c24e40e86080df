"""Key-value requests over one asyncio connection: any number of tasks may ask at once; answers come in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from upriver.client._feed.reconnects import refusal
from upriver.client._requests.blocking import GREETING_S, make_session, wrong_service
from upriver.client._requests.operations import Encodes
from upriver.client._requests.pending import Opaques, Question, question
from upriver.client.options import ConnectOptions
from upriver.errors import ConnectFailed, FramingError, RemoteProtocolError, StatusError, UpriverError
from upriver.net.aio import connect
from upriver.net.blocking import speaks_http
from upriver.protocol.topology import Address
from upriver.wire import FrameSplitter
from upriver.wire.message import Message, Response, decode


@dataclass(slots=True)
class _Waiting:
    """A question, and who waits for its answers."""

    asked: Question
    done: asyncio.Future[list[Response]]


class AsyncKvConnection(asyncio.Protocol):
    """A connection after its handshake, with a bucket selected. Trouble with it is a ``ConnectFailed``.

    ``again``: the cluster has accepted us before, so a bucket that is not there is a node that restarts.
    """

    def __init__(self, address: Address, options: ConnectOptions, *, again: bool = False) -> None:
        self.address = address
        self.session = make_session(options)
        self.broken: UpriverError | None = None
        self._options, self._again = options, again
        self._splitter = FrameSplitter()
        self._opaques = Opaques()
        self._waiting: deque[_Waiting] = deque()
        self._transport: asyncio.Transport | None = None

    @property
    def config(self) -> bytes:
        return self.session.config or b""

    async def open(self) -> None:
        """Connect and shake hands, both within ``connect_timeout_s``."""
        timeout_s = self._options.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._open()
        except TimeoutError as error:
            self.close()
            raise ConnectFailed(f"{self.address} did not answer within {timeout_s:g} s") from error
        except StatusError as error:
            self.close()
            raise refusal(error, self.address, self._again) from error
        except BaseException:
            self.close()
            raise

    async def _open(self) -> None:
        options, address = self._options, self.address
        await connect(self, address.host, address.port, options.connect_timeout_s, options.ssl_context())
        [hello] = self.session.start()
        messages = self.session.receive(await self._greet(hello))
        while messages:
            messages = self.session.receive(await self._answer(messages[0]))

    async def _greet(self, hello: Message) -> Response:
        """Say hello. A web service waits for the rest of a line that never ends, or hangs up."""
        answer = asyncio.ensure_future(self._answer(hello))
        try:
            await asyncio.wait({answer}, timeout=GREETING_S)
            if not answer.done() or isinstance(answer.exception(), ConnectFailed | FramingError):
                await self._must_not_be_a_web_service()
            return await answer
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # somebody has seen it

    async def _must_not_be_a_web_service(self) -> None:
        host, port, tls = self.address.host, self.address.port, self._options.ssl_context()
        if await asyncio.to_thread(speaks_http, host, port, self._options.connect_timeout_s, tls):
            raise wrong_service(self.address)

    async def _answer(self, message: Message) -> Response:
        """The answer to a message of the handshake."""
        [answer] = await self._wait_for(Question(message.encode(), range(message.opaque, message.opaque + 1)))
        return answer

    async def ask(
        self, messages: Sequence[Encodes], *, ends: Callable[[Response], bool] | None = None
    ) -> list[Response]:
        """One response for each request, in order; with ``ends``, all responses up to that one."""
        if not messages:
            return []
        asked = question(messages, self._opaques, ends, collections=self.session.collections)
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                return await self._wait_for(asked)
        except TimeoutError as error:
            self.close()
            raise ConnectFailed(f"{self.address} did not answer in time") from error

    async def _wait_for(self, asked: Question) -> list[Response]:
        if self.broken or self._transport is None:
            raise self.broken or ConnectFailed(f"{self.address} is not connected")
        waiting = _Waiting(asked, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._transport.write(asked.data)
        return await waiting.done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.receive(data):
                message = decode(frame)
                if isinstance(message, Response):
                    self._take(message)
        except UpriverError as error:
            self._break(error)

    def _take(self, response: Response) -> None:
        if not self._waiting:
            raise RemoteProtocolError("an answer to nothing that was asked", "opaque", 12)
        if self._waiting[0].asked.take(response):
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
