"""Asyncio connections that read directly into a machine's buffer, and the event loop that they run on."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar, cast

from upriver.errors import ConnectFailed

T = TypeVar("T")


class Machine(Protocol):
    """What a connection needs from the machine behind it; ``lost`` is called once, at the end."""

    def buffer(self) -> memoryview: ...
    def received(self, size: int) -> None: ...
    def lost(self, error: Exception | None) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """One connection. Reading can be paused, which slows the peer down."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()
        self._closed = False
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        self._transport.write(bytes(self._early))
        self._early.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._machine.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if not self._closed:
            self._machine.received(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._machine.lost(exc)

    def write(self, data: bytes) -> None:
        """Send bytes, or keep them until the connection is made."""
        if self._transport is None:
            self._early += data
        elif data and not self._closed:
            self._transport.write(data)

    def pause(self) -> None:
        if self._transport and not self.paused and not self._transport.is_closing():
            self._transport.pause_reading()
            self.paused = True

    def resume(self) -> None:
        if self._transport and self.paused and not self._transport.is_closing():
            self._transport.resume_reading()
        self.paused = False

    def close(self) -> None:
        """Close without telling the machine."""
        self._closed = True
        if self._transport:
            self._transport.abort()


async def connect(
    protocol: asyncio.BaseProtocol, host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None
) -> None:
    """Connect ``protocol``, with TCP_NODELAY; raises ``ConnectFailed``."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            made = loop.create_connection(lambda: protocol, host, port, ssl=tls, server_hostname=host if tls else None)
            transport, _ = await made
    except TimeoutError as error:
        raise ConnectFailed(f"cannot connect to {host}:{port}: no answer within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; an invalid host gives a ValueError
        raise ConnectFailed(f"cannot connect to {host}:{port}: {error}") from error
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def run(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, on uvloop if it is installed: that takes half the time per packet."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
