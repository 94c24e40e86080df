"""Key-value requests over one asyncio connection: any number of tasks may ask at once; answers come in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from upriver.client.kv import make_session
from upriver.client.operations import Encodes
from upriver.client.options import ConnectOptions
from upriver.client.pacing import located
from upriver.errors import ConnectFailed, StatusError, UpriverError
from upriver.net.aio import connect
from upriver.protocol.topology import Address
from upriver.wire import FrameSplitter
from upriver.wire.message import Response, decode


@dataclass(slots=True)
class _Question:
    """Answers that somebody waits for: ``count`` of them, or all up to the one that ``ends`` them."""

    count: int
    ends: Callable[[Response], bool] | None
    done: asyncio.Future[list[Response]]
    answers: list[Response] = field(default_factory=list)

    def take(self, response: Response) -> bool:
        self.answers.append(response)
        return self.ends(response) if self.ends else len(self.answers) == self.count


class AsyncKvConnection(asyncio.Protocol):
    """A connection after its handshake, with a bucket selected. Trouble with it is a ``ConnectFailed``."""

    def __init__(self, address: Address, options: ConnectOptions) -> None:
        self.address = address
        self.session = make_session(options)
        self.broken: UpriverError | None = None
        self._options = options
        self._splitter = FrameSplitter()
        self._questions: deque[_Question] = deque()
        self._transport: asyncio.Transport | None = None

    @property
    def config(self) -> bytes:
        return self.session.config or b""

    async def open(self) -> None:
        options, address = self._options, self.address
        await connect(self, address.host, address.port, options.connect_timeout_s, options.ssl_context())
        try:
            messages = self.session.start()
            while messages:
                [answer] = await self.ask(messages)
                messages = self.session.receive(answer)
        except StatusError as error:
            self.close()
            raise located(error, address) from error
        except BaseException:
            self.close()
            raise

    async def ask(
        self, messages: Sequence[Encodes], *, ends: Callable[[Response], bool] | None = None
    ) -> list[Response]:
        """One response for each request, in order; with ``ends``, all responses up to that one."""
        if self.broken or self._transport is None:
            raise self.broken or ConnectFailed(f"{self.address} is not connected")
        if not messages:
            return []
        question = _Question(len(messages), ends, asyncio.get_running_loop().create_future())
        self._questions.append(question)
        self._transport.write(b"".join(message.encode() for message in messages))
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                return await question.done
        except TimeoutError as error:
            self.close()
            raise ConnectFailed(f"{self.address} did not answer in time") from error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.receive(data):
                message = decode(frame)
                if isinstance(message, Response) and self._questions and self._questions[0].take(message):
                    question = self._questions.popleft()
                    if not question.done.done():
                        question.done.set_result(question.answers)
        except UpriverError as error:
            self._break(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(ConnectFailed(f"{self.address} closed the connection{': ' + str(exc) if exc else ''}"))

    def _break(self, error: UpriverError) -> None:
        self.broken = self.broken or error
        while self._questions:
            question = self._questions.popleft()
            if not question.done.done():
                question.done.set_exception(error)
        if self._transport:
            self._transport.abort()

    def close(self) -> None:
        self._break(ConnectFailed(f"the connection to {self.address} was closed"))
