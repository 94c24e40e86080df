"""Blocking sockets, for threads and Spark executors: connect, and pump several machines from one thread."""

from __future__ import annotations

import selectors
import socket
import ssl

from upriver.errors import ConnectFailed

__all__ = ["ConnectFailed", "Pipe", "Poller", "connect"]


class Pipe:
    """One connected socket that never blocks; bytes that cannot leave yet wait in ``pending``."""

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
        """Send what the socket takes now."""
        try:
            while self.pending:
                sent = self.sock.send(self.pending)
                del self.pending[:sent]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return

    def read_into(self, buffer: memoryview) -> int:
        """Bytes read; 0 at the end of the stream, -1 when there is nothing now."""
        try:
            return self.sock.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return -1

    def has_buffered(self) -> bool:
        """TLS may hold decrypted bytes that no selector sees."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def close(self) -> None:
        self.sock.close()


def connect(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connected socket with TCP_NODELAY; ``ConnectFailed`` says why not."""
    sock = None
    try:
        sock = socket.create_connection((host, port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return tls.wrap_socket(sock, server_hostname=host) if tls else sock
    except (OSError, ssl.SSLError) as error:
        if sock is not None:
            sock.close()
        raise ConnectFailed(f"cannot connect to {host}:{port}: {error}") from error


class Poller:
    """Waits until one of several pipes can be read (or written, while bytes are pending)."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, pipe: Pipe) -> None:
        self._selector.register(pipe, selectors.EVENT_READ)

    def remove(self, pipe: Pipe) -> None:
        self._selector.unregister(pipe)

    def wait(self, timeout_s: float) -> list[Pipe]:
        """Pipes that can be read now; pending bytes are sent along the way."""
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
