"""A network that misbehaves: a proxy before each node through which its clients and the other nodes reach it.

It forwards bytes and, when told to, cuts connections in the middle of a message, holds everything back for a while, or
delivers late and in small pieces.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

CHUNK = 1 << 16


class Wire:
    """What one proxy does to bytes now; ``quiet_until`` holds them, ``late_s`` and ``most`` delay and split them."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.target = 0
        self.quiet_until = 0.0
        self.rough_until = 0.0
        self.late_s = 0.0
        self.most = CHUNK

    def is_rough(self) -> bool:
        return time.monotonic() < self.rough_until


class Link:
    """One connection through the proxy. After ``left`` more bytes it breaks, if that is not None."""

    def __init__(self, wire: Wire, inside: asyncio.StreamWriter, outside: asyncio.StreamWriter) -> None:
        self.wire, self.writers = wire, (inside, outside)
        self.left: int | None = None

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until either side is gone; then close both."""
        try:
            while data := await reader.read(CHUNK):
                await asyncio.sleep(max(0.0, self.wire.quiet_until - time.monotonic()))
                await (self._deliver_roughly(data, writer) if self.wire.is_rough() else self._deliver(data, writer))
        except (ConnectionError, OSError):
            pass  # the other direction breaks with it, and both users of the connection notice
        finally:
            self.cut()

    async def _deliver(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if self.left is not None:
            data, self.left = data[: self.left], self.left - len(data)
        writer.write(data)
        await writer.drain()
        if self.left is not None and self.left <= 0:
            raise ConnectionResetError

    async def _deliver_roughly(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.wire.random.uniform(0, self.wire.late_s))
        while data and self.wire.is_rough():
            size = self.wire.random.randint(1, self.wire.most)
            await self._deliver(data[:size], writer)
            data = data[size:]
            await asyncio.sleep(0)
        if data:
            await self._deliver(data, writer)

    def cut(self) -> None:
        for writer in self.writers:
            if not writer.is_closing():
                writer.transport.abort()


class UnrulyProxy:
    """Listens on ``port`` and forwards to ``target`` on this machine; its methods may be called from any thread."""

    def __init__(self, loop: ProxyLoop, seed: str) -> None:
        self._loop, self.wire = loop, Wire(seed)
        self._links: set[Link] = set()
        self._server = loop.call(lambda: asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_node, from_us = await asyncio.open_connection("127.0.0.1", self.wire.target)
        except OSError:
            writer.transport.abort()
            return
        link = Link(self.wire, from_us, writer)
        self._links.add(link)
        await asyncio.gather(link.carry(reader, from_us), link.carry(to_node, writer))
        self._links.discard(link)

    def cut(self, most_bytes: int) -> None:
        """Every connection breaks after some more bytes, anywhere in a message."""

        def cut() -> None:
            for link in self._links:
                link.left = self.wire.random.randint(0, most_bytes)
                if not link.left:
                    link.cut()

        self._loop.soon(cut)

    def hold(self, seconds: float) -> None:
        """Nothing arrives for a while, and nothing breaks."""
        self.wire.quiet_until = time.monotonic() + seconds

    def roughen(self, seconds: float, late_s: float, most: int) -> None:
        """For a while everything is late and in pieces of at most ``most`` bytes."""
        self.wire.late_s, self.wire.most = late_s, most
        self.wire.rough_until = time.monotonic() + seconds

    def calm(self) -> None:
        """A good network from now on."""
        self.wire.quiet_until = self.wire.rough_until = 0.0

        def spare() -> None:
            for link in self._links:
                link.left = None

        self._loop.soon(spare)


class ProxyLoop:
    """The thread in which proxies work."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, make: Callable[[], object]) -> asyncio.Server:
        found: Future[asyncio.Server] = asyncio.run_coroutine_threadsafe(make(), self._loop)  # type: ignore[arg-type]
        return found.result(30)

    def soon(self, work: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        async def stop() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
