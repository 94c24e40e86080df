"""Replication from node to node, without a process in between: this node connects to a producer and consumes.

One connection per bucket and source. A connection that breaks, and a stream that ends, are opened again for as long
as the cluster map wants them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from upriver.errors import ConfigError, RemoteProtocolError, Status, StatusError, TemporaryFailure, UpriverError
from upriver.model import VbucketState
from upriver.net.aio_conversation import AsyncConversation
from upriver.net.conversation import make_session
from upriver.node import log
from upriver.node.dcp.consumer import BucketStore, PrepareAcks
from upriver.protocol.consumer.machine import Consumer, StreamClosed
from upriver.protocol.consumer.negotiation import ConsumerOptions, replication_hello
from upriver.protocol.session import Credentials
from upriver.protocol.topology import Address
from upriver.wire.constants import OpenFlag, StreamFlag
from upriver.wire.messages.dcp import Open

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.cluster.cluster_map import NodeAddress
    from upriver.node.server import Node

READ_SIZE = 1 << 17  # bytes read before other tasks have their turn
RETRY_S = 0.25
MAX_RETRY_S = 5.0
CONNECT_S = 5.0
CHECK_S = 0.2
SILENCE_S = 30.0  # the producer sends a noop every second
_FLAGS = (
    OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETE_TIMES | OpenFlag.INCLUDE_DELETED_USER_XATTRS
)


class Replicator:
    """All replication into one bucket of this node."""

    def __init__(self, node: Node, bucket: NodeBucket) -> None:
        self._node, self._bucket = node, bucket
        self._sources: dict[NodeAddress, ReplicationSource] = {}
        self.fenced = False

    def want(self, wanted: dict[NodeAddress, set[int]]) -> None:
        """Consume these vbuckets from these nodes from now on, and nothing else."""
        self.fenced = False
        for address in list(self._sources):
            if address not in wanted:
                self._sources.pop(address).stop()
        for address, vbuckets in wanted.items():
            if address not in self._sources:
                self._sources[address] = ReplicationSource(self._node, self._bucket, address)
            self._sources[address].want(vbuckets)

    def fence(self, source: str) -> None:
        """Consume nothing from a node, given as ``host:port``, until the next ``want``."""
        self.fenced = True
        for address in [each for each in self._sources if str(each) == source]:
            self._sources.pop(address).stop()

    async def take_over(self, vb: int, timeout_s: float) -> None:
        """Become the active owner of a vbucket that is being consumed; raises if that fails.

        See docs/protocol/vbuckets.md#takeover.
        """
        source = next((each for each in self._sources.values() if each.wants(vb)), None)
        if source is None:
            raise ConfigError(f"vbucket {vb} is not replicated to this node")
        await source.take_over(vb, timeout_s)

    def stop(self) -> None:
        for source in self._sources.values():
            source.stop()
        self._sources.clear()


class ReplicationSource:
    """One producer that this node consumes from."""

    def __init__(self, node: Node, bucket: NodeBucket, address: NodeAddress) -> None:
        self._node, self._bucket, self.address = node, bucket, address
        self._wanted: set[int] = set()
        self._machine: Consumer | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._retry_at: dict[int, float] = {}
        self._new_map = asyncio.Event()
        self._task = node.loop.create_task(self._run())

    def want(self, vbuckets: set[int]) -> None:
        for vb in self._wanted - vbuckets:
            if self._machine is not None:
                self._machine.drop_stream(vb)
        self._wanted = set(vbuckets)
        self._new_map.set()
        self._add_missing()

    def wants(self, vb: int) -> bool:
        return vb in self._wanted

    async def take_over(self, vb: int, timeout_s: float) -> None:
        machine = self._machine
        if machine is None:
            raise TemporaryFailure("the source is not connected")
        self._retry_at[vb] = time.monotonic() + timeout_s  # no ordinary stream is opened in between
        machine.drop_stream(vb)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask_for_takeover(machine, vb)
                await self._until_active(machine, vb)
        except BaseException:
            # The manager may now decide otherwise, so this stream must not make the vbucket active later.
            machine.drop_stream(vb)
            self._retry_at.pop(vb, None)
            raise
        self._wanted.discard(vb)

    async def _ask_for_takeover(self, machine: Consumer, vb: int) -> None:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(_: int, status: int) -> None:
            if not answer.done():  # unless the wait was given up
                answer.set_result(status)

        machine.add_streams([vb], done, StreamFlag.TAKEOVER)
        self._flush()
        status = await answer
        if status != Status.SUCCESS:
            raise StatusError.of(status, f"takeover of vbucket {vb}")

    async def _until_active(self, machine: Consumer, vb: int) -> None:
        while self._bucket.store.vbucket(vb).state is not VbucketState.ACTIVE:
            if self._machine is not machine or vb not in machine.streams:
                raise TemporaryFailure(f"the takeover of vbucket {vb} was interrupted")
            await self._bucket.state_change(vb, CHECK_S)

    def stop(self) -> None:
        """Stop consuming; nothing more is written to the store when this returns."""
        self._task.cancel()
        self._forget()

    async def _run(self) -> None:
        delay = RETRY_S
        while True:
            began = time.monotonic()
            try:
                await self._connect_and_consume()
            except (OSError, UpriverError, TimeoutError) as error:
                log.info("replication_lost", source=str(self.address.kv), bucket=self._bucket.name, reason=str(error))
            except Exception:
                log.failure("replication_failed", source=str(self.address.kv), bucket=self._bucket.name)
            finally:
                self._forget()
            delay = RETRY_S if time.monotonic() - began > MAX_RETRY_S else min(MAX_RETRY_S, delay * 2)
            if await self._new_map_within(delay * (0.5 + secrets.randbelow(1000) / 1000)):
                delay = RETRY_S

    async def _new_map_within(self, seconds: float) -> bool:
        """Wait before the next try; True if a new map ends the wait, because the source may be back."""
        self._new_map.clear()
        try:
            async with asyncio.timeout(seconds):
                return await self._new_map.wait()
        except TimeoutError:
            return False

    def _forget(self) -> None:
        if self._machine is not None:
            self._machine.receive_eof()
        if self._writer is not None:
            self._writer.close()
        self._machine = self._writer = None

    async def _connect_and_consume(self) -> None:
        reader, self._writer = await self._connect()
        options = ConsumerOptions(consumer_name=str(self._node.address))
        machine = self._machine = Consumer(BucketStore(self._bucket), self._bucket.passive_streams, options)
        acks = PrepareAcks(machine, self._bucket, self._flush)
        self._retry_at.clear()
        heard = time.monotonic()
        while time.monotonic() - heard < SILENCE_S:
            self._add_missing()
            self._flush()
            if data := await self._read(reader):
                heard = time.monotonic()
                self._consume(machine, data)
                acks.send()
            machine.wake(time.monotonic())
            self._flush()
            await self._writer.drain()
            await asyncio.sleep(0)  # while there is more to read nothing above suspends, so no other task would run
        raise RemoteProtocolError("the producer is silent")

    def _consume(self, machine: Consumer, data: bytes) -> None:
        for event in machine.receive(data, time.monotonic()):
            if isinstance(event, StreamClosed):
                self._retry_at[event.vbucket] = time.monotonic() + RETRY_S

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """The next bytes; empty when it is time to check streams and acknowledgements."""
        try:
            async with asyncio.timeout(CHECK_S):
                data = await reader.read(READ_SIZE)
        except TimeoutError:
            return b""
        if not data:
            raise RemoteProtocolError("the producer closed the connection")
        return data

    def _add_missing(self) -> None:
        """Ask for every wanted stream that is not open."""
        if self._machine is None:
            return
        now = time.monotonic()
        missing = [v for v in self._wanted if v not in self._machine.streams and self._retry_at.get(v, 0.0) <= now]
        if missing:
            self._machine.add_streams(missing, self._added)
            self._flush()

    def _added(self, vb: int, status: int) -> None:
        if status != Status.SUCCESS:
            self._retry_at[vb] = time.monotonic() + RETRY_S
            log.info("replication_refused", vbucket=vb, source=str(self.address.kv), status=f"0x{status:02x}")

    def _flush(self) -> None:
        """Send what waits. A broken connection is noticed by the next read."""
        if self._machine is not None and self._writer is not None and not self._writer.is_closing():
            data = self._machine.data_to_send()
            if data:
                self._writer.write(data)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Log in and open a DCP connection, whose name says which node reads from which."""
        credentials = Credentials(self._node.options.username, self._node.options.password)
        session = make_session("upriver-node", credentials, self._bucket.name)
        address = Address(self.address.host, self.address.kv)
        conversation = AsyncConversation(address, session, connect_timeout_s=CONNECT_S, request_timeout_s=CONNECT_S)
        await conversation.open()
        try:
            name = f"replication:{self.address}->{self._node.address}:{self._bucket.name}"
            requests = [replication_hello("upriver-node"), Open(0, _FLAGS, name.encode())]
            _, opened = await conversation.ask(requests)
        except BaseException:
            conversation.close()
            raise
        if opened.status != Status.SUCCESS:
            conversation.close()
            raise StatusError.of(opened.status, "open the replication connection")
        return conversation.into_stream(1 << 20)
