"""``sink.c`` for machines without a compiler: the same commands and output, slower."""

from __future__ import annotations

import socket
import struct
import sys
import time

HEADER = struct.Struct(">BBHBBHIIQ")


def frame(opcode: int, vbucket: int = 0, extras: bytes = b"", key: bytes = b"", value: bytes = b"") -> bytes:
    body = extras + key + value
    return HEADER.pack(0x80, opcode, len(key), len(extras), 0, vbucket, len(body), vbucket, 0) + body


class Peer:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.buffer = bytearray()
        self.socket.sendall(frame(0x89, key=b"default"))
        self.take(1)

    def frames(self) -> list[tuple[int, int, int]]:
        """(opcode, status, size) of every frame of one receive; the bytes stay in ``taken``."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise SystemExit("sink: connection closed")
        self.buffer += data
        found, at = [], 0
        while len(self.buffer) - at >= HEADER.size:
            size = HEADER.size + int.from_bytes(self.buffer[at + 8 : at + 12], "big")
            if len(self.buffer) - at < size:
                break
            found.append((self.buffer[at + 1], at, size))
            at += size
        self.taken = bytes(self.buffer[:at])
        del self.buffer[:at]
        return found

    def take(self, count: int) -> None:
        while count > 0:
            count -= len(self.frames())


def stream(port: int, name: str, vbuckets: int, wanted: int, latency: bool) -> None:
    peer = Peer(port)
    peer.socket.sendall(frame(0x50, extras=struct.pack(">II", 0, 1), key=name.encode()))
    peer.take(1)
    print("open", flush=True)
    request = struct.pack(">IIQQQQQ", 0, 0, 0, 2**64 - 1, 0, 0, 0)
    peer.socket.sendall(b"".join(frame(0x53, vb, request) for vb in range(vbuckets)))
    mutations, size, began, delays = 0, 0, 0.0, []
    while mutations < wanted:
        for opcode, at, length in peer.frames():
            if opcode == 0x57:
                began = began or time.monotonic()
                mutations, size = mutations + 1, size + length
                if latency:
                    value = at + 24 + 31 + int.from_bytes(peer.taken[at + 2 : at + 4], "big")
                    sent = int.from_bytes(peer.taken[value : value + 8], "big")
                    delays.append((time.monotonic_ns() - sent) // 1000)
    delays.sort()
    quantiles = f" {delays[len(delays) // 2]} {delays[len(delays) * 99 // 100]}" if latency else ""
    print(f"{mutations} {size} {time.monotonic() - began:.6f}{quantiles}")


def write(port: int, vbuckets: int, wanted: int, value_bytes: int, window: int, rate: int) -> None:
    peer = Peer(port)
    rest = bytes(value_bytes - 8)
    sent = answered = 0
    began = time.monotonic()
    while answered < wanted:
        due = int((time.monotonic() - began) * rate) if rate else wanted
        count = min(wanted - sent, due - sent, window - (sent - answered))
        now = time.monotonic_ns().to_bytes(8, "big")
        numbers = range(sent, sent + max(0, count))
        peer.socket.sendall(
            b"".join(frame(0x01, n % vbuckets, bytes(8), b"user::%012d" % n, now + rest) for n in numbers)
        )
        sent += len(numbers)
        if sent > answered:
            answered += len(peer.frames())
        else:
            time.sleep(0.0002)
    print(f"{answered} {time.monotonic() - began:.6f}")


if __name__ == "__main__":
    if sys.argv[1] == "stream":
        stream(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), len(sys.argv) > 6)
    else:
        write(*map(int, sys.argv[2:8]))
