"""Blocking sockets, for threads and Spark executors: connect, and pump several machines from one thread."""

from __future__ import annotations

import selectors
import socket
import ssl
import time

from upriver.errors import ConnectFailed

__all__ = ["ConnectFailed", "Pipe", "Poller", "connect", "speaks_http"]


class Pipe:
    """One connected, non-blocking socket; bytes that it does not take yet wait in ``pending``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pending = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def write(self, data: bytes) -> None:
        if data:
            self.pending += data
            self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        try:
            while self.pending:
                sent = self.sock.send(self.pending)
                del self.pending[:sent]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return

    def read_into(self, buffer: memoryview) -> int:
        """The number of bytes read; 0 at the end of the stream, -1 if there is nothing now."""
        try:
            return self.sock.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return -1

    def has_buffered(self) -> bool:
        """Whether TLS holds decrypted bytes, which a selector does not see."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def close(self) -> None:
        self.sock.close()


def connect(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connected socket with TCP_NODELAY; ``ConnectFailed`` if that fails or takes longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    sock = None
    try:
        sock = _connect_any(host, port, deadline)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = _with_tls(sock, host, tls, deadline) if tls else sock
        sock.settimeout(timeout_s)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; an invalid host gives a ValueError
        if sock is not None:
            sock.close()
        why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else error
        raise ConnectFailed(f"cannot connect to {host}:{port}: {why}") from error
    return sock


def _connect_any(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first of a host's addresses that answers; all of them share the deadline."""
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(deadline))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _with_tls(sock: socket.socket, host: str, tls: ssl.SSLContext, deadline: float) -> ssl.SSLSocket:
    """Add TLS to a connected socket; the deadline holds even if the peer sends byte by byte."""
    wrapped = tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        wrapped.setblocking(False)
        _shake_hands(wrapped, deadline)
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _shake_hands(wrapped: ssl.SSLSocket, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(wrapped, selectors.EVENT_READ)
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                selector.modify(wrapped, selectors.EVENT_READ)
            except ssl.SSLWantWriteError:
                selector.modify(wrapped, selectors.EVENT_WRITE)
            else:
                return
            selector.select(_left(deadline))


def speaks_http(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None) -> bool:
    """Whether a web server listens there. Any other server takes the request for garbage and hangs up."""
    try:
        with connect(host, port, timeout_s, tls) as sock:
            sock.settimeout(timeout_s)
            sock.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            return sock.recv(5).startswith(b"HTTP")
    except (ConnectFailed, OSError):
        return False


class Poller:
    """Waits until one of several pipes can be read (or written, while bytes are pending)."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, pipe: Pipe) -> None:
        self._selector.register(pipe, selectors.EVENT_READ)

    def remove(self, pipe: Pipe) -> None:
        self._selector.unregister(pipe)

    def wait(self, timeout_s: float) -> list[Pipe]:
        """Wait, send pending bytes, and return the pipes that can be read."""
        ready: list[Pipe] = []
        for key in list(self._selector.get_map().values()):
            pipe: Pipe = key.fileobj  # type: ignore[assignment]
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if pipe.pending else 0)
            if key.events != events:
                self._selector.modify(pipe, events)
            if pipe.has_buffered():
                ready.append(pipe)
        for key, events in self._selector.select(0 if ready else timeout_s):
            pipe = key.fileobj  # type: ignore[assignment]
            if events & selectors.EVENT_WRITE:
                pipe.flush()
            if events & selectors.EVENT_READ and pipe not in ready:
                ready.append(pipe)
        return ready

    def close(self) -> None:
        self._selector.close()
