"""A replication connection: two sockets, both authenticated and opened under one name, and a relay between them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from upriver.client._requests.connections import converse_async
from upriver.client.options import ConnectOptions
from upriver.cluster.relay import Answered, Relay, RelayEvent, Side
from upriver.errors import ConnectFailed, Status, StatusError
from upriver.model import VbucketState
from upriver.protocol.consumer.negotiation import replication_hello
from upriver.protocol.topology import Address
from upriver.wire.constants import OpenFlag, StreamFlag
from upriver.wire.message import Message, Response
from upriver.wire.messages.cluster import (
    GetAllVbSeqnos,
    GetAllVbSeqnosResponse,
    GetVbucket,
    GetVbucketResponse,
    SetVbucket,
    SetVbucketWide,
)
from upriver.wire.messages.dcp import AddStream, AddStreamResponse, CloseStream, Open
from upriver.wire.messages.session import Stat

READ_SIZE = 1 << 18
T = TypeVar("T")
_BASIC = OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETE_TIMES
_FLAGS = (_BASIC | OpenFlag.INCLUDE_DELETED_USER_XATTRS, _BASIC)  # servers before 7.0 know only the basic ones


class Endpoint:
    """One end: a socket after its handshake."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address, self.reader, self.writer = address, reader, writer

    @classmethod
    async def connect(cls, address: Address, options: ConnectOptions) -> Endpoint:
        conversation = await converse_async(address, options)
        await conversation.ask([replication_hello("upriver-replicate")])
        return cls(address, *conversation.into_stream(4 << 20))

    async def read(self) -> bytes:
        try:
            data = await self.reader.read(READ_SIZE)
        except OSError as error:
            raise ConnectFailed(f"{self.address}: {error}") from error
        if not data:
            raise ConnectFailed(f"{self.address} closed the connection")
        return data

    async def close(self) -> None:
        self.writer.close()


class ReplicationConnection:
    """Opens both ends and forwards bytes until it is closed; calls ``on_event`` with the events of the relay."""

    def __init__(self, producer: Endpoint, consumer: Endpoint, name: str) -> None:
        self.ends = {Side.PRODUCER: producer, Side.CONSUMER: consumer}
        self.name = name
        self.relay = Relay()
        self.on_event: Callable[[RelayEvent], None] | None = None
        self._answers: dict[int, asyncio.Future[list[Response]]] = {}
        self._parts: defaultdict[int, list[Response]] = defaultdict(list)  # responses of incomplete answers
        self._pumps: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls, producer: Address, consumer: Address, options: ConnectOptions, name: str, *, consumer_name: str = "",
        consumer_options: ConnectOptions | None = None,
    ) -> ReplicationConnection:  # fmt: skip
        """Both ends connected, authenticated and opened as DCP connections called ``name``."""
        source = await Endpoint.connect(producer, options)
        try:
            target = await Endpoint.connect(consumer, consumer_options or options)
        except BaseException:
            await source.close()
            raise
        connection = cls(source, target, name)
        connection._pumps = [asyncio.create_task(connection._pump(side)) for side in Side]
        try:
            await connection._open(consumer_name)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _open(self, consumer_name: str) -> None:
        name = self.name.encode()
        await self._ask_either(Side.PRODUCER, [Open(0, flags | OpenFlag.PRODUCER, name) for flags in _FLAGS])
        value = b'{"consumer_name":"%s"}' % consumer_name.encode() if consumer_name else b""
        datatype = 1 if value else 0
        await self._ask_either(Side.CONSUMER, [Open(0, flags, name, value, datatype=datatype) for flags in _FLAGS])

    async def _ask_either(self, side: Side, messages: Sequence[Message]) -> None:
        """Ask in the newest form that the server understands."""
        *newer, oldest = messages
        for message in newer:
            response = await self.request(side, message)
            if response.status != Status.EINVAL:
                self._check(side, message, response)
                return
        await self.ask(side, oldest)

    async def ask(self, side: Side, message: Message, timeout_s: float = 60.0) -> Response:
        """Send a request of our own; a refusal is raised as its ``StatusError``."""
        response = await self.request(side, message, timeout_s)
        self._check(side, message, response)
        return response

    def _check(self, side: Side, message: Message, response: Response) -> None:
        if response.status != Status.SUCCESS:
            raise StatusError.of(response.status, f"{type(message).__name__} at {self.ends[side].address}")

    async def request(self, side: Side, message: Message, timeout_s: float = 60.0) -> Response:
        return (await self._exchange(side, message, timeout_s))[-1]

    async def stat(self, side: Side, message: Stat) -> list[Response]:
        """A group of statistics: one response for each, and one that ends the list."""
        return await self._exchange(side, message, 60.0)

    async def _exchange(self, side: Side, message: Message, timeout_s: float) -> list[Response]:
        self.relay.request(side, message)
        answer = self._answers[message.opaque] = asyncio.get_running_loop().create_future()
        await self._send(side)
        try:
            return await self.wait_for(answer, timeout_s)
        except TimeoutError:
            what = f"{self.ends[side].address} did not answer {type(message).__name__} in {timeout_s:g} s"
            raise ConnectFailed(what) from None

    async def wait_for(self, awaited: asyncio.Future[T], timeout_s: float) -> T:
        """The result of a future; raises if the connection closes first."""
        waits: set[asyncio.Future[Any]] = {awaited, *self._pumps}
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if awaited in done:
            return awaited.result()
        for pump in done:
            pump.result()
        raise TimeoutError

    async def add_stream(self, vbucket: int, *, takeover: bool = False) -> AddStreamResponse:
        """Tell the consumer to stream a vbucket; returns when the handshake has ended."""
        flags = StreamFlag.TAKEOVER if takeover else StreamFlag(0)
        response = await self.ask(Side.CONSUMER, AddStream(flags, vbucket=vbucket))
        assert isinstance(response, AddStreamResponse)
        return response

    async def close_stream(self, vbucket: int) -> None:
        """Close a stream at both ends; it may be closed already."""
        await asyncio.gather(*(self.request(side, CloseStream(vbucket=vbucket)) for side in Side))

    async def vbucket_state(self, side: Side, vbucket: int) -> VbucketState | None:
        """The state of a vbucket at one side; None if it is not there."""
        response = await self.request(side, GetVbucket(vbucket=vbucket))
        if response.status == Status.NOT_MY_VBUCKET:
            return None
        if not isinstance(response, GetVbucketResponse):
            raise StatusError.of(response.status, f"the state of vbucket {vbucket} at {self.ends[side].address}")
        return VbucketState(response.state)

    async def set_vbucket(self, side: Side, vbucket: int, state: VbucketState) -> None:
        await self._ask_either(side, [SetVbucket(state, vbucket=vbucket), SetVbucketWide(state, vbucket=vbucket)])

    async def high_seqnos(self, side: Side, state: VbucketState) -> dict[int, int]:
        """The high seqnos of a side's vbuckets in this state."""
        response = await self.ask(side, GetAllVbSeqnos(state))
        assert isinstance(response, GetAllVbSeqnosResponse)
        return dict(response.seqnos)

    async def _pump(self, side: Side) -> None:
        """Forward one direction; read on only when the other side has taken the bytes."""
        while True:
            data = await self.ends[side].read()
            for event in self.relay.receive(side, data):
                self._happened(event)
            await self._send(side.other)
            await asyncio.sleep(0)  # let the other direction run even if this one never waits

    async def _send(self, side: Side) -> None:
        writer = self.ends[side].writer
        spans = self.relay.take(side)
        if spans:
            writer.writelines(spans)
            await writer.drain()

    def _happened(self, event: RelayEvent) -> None:
        if isinstance(event, Answered):
            self._answered(event)
        elif self.on_event is not None:
            self.on_event(event)

    def _answered(self, event: Answered) -> None:
        opaque = event.request.opaque
        self._parts[opaque].append(event.response)
        if event.last:
            parts, answer = self._parts.pop(opaque), self._answers.pop(opaque, None)
            if answer is not None and not answer.done():
                answer.set_result(parts)

    async def wait_closed(self) -> None:
        """Return when a side closes its connection; raises if it broke."""
        await asyncio.gather(*self._pumps)

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for end in self.ends.values():
            await end.close()
