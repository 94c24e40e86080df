"""Fuzzed frames over live sessions: ``python tests/node/live_fuzz.py FRAMES [SEED]``, or `make fuzz-live`.

Real requests of every kind, with some of their bytes changed so that they are still framed, go to one node over
connections in every role: plain, producer, consumer, not logged in. The node must not end, hang, have internal errors
or keep growing, and must serve an innocent client throughout. The run ends after the given number of frames.
"""

from __future__ import annotations

import random
import select
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.node.front_node import Served, serve
from tests.node.raw import ALL, Raw, frame
from upriver.errors import Status
from upriver.wire import Opcode
from upriver.wire.constants import OpenFlag
from upriver.wire.messages import dcp, kv, session

BURST = 400  # frames in one send
LIFE = 40  # bursts per connection
FRESH_POOL = 200  # bursts before new frames are generated
PATIENCE_S = 60.0
FINE = {Status.SUCCESS, Status.KEY_ENOENT, Status.NOT_MY_VBUCKET, Status.ETMPFAIL, Status.UNKNOWN_COLLECTION}
# Left out, because the node obeys them: they end the connection, or the service of the whole bucket.
HARMFUL = {
    Opcode.QUIT, Opcode.QUITQ, Opcode.DISABLE_TRAFFIC, Opcode.STOP_PERSISTENCE, Opcode.SET_VBUCKET, Opcode.DEL_VBUCKET,
}  # fmt: skip
EXTRAS = (0, 1, 3, 4, 8, 12, 16, 18, 20, 21, 24, 26, 28, 30, 31, 40, 48)
VALUES = (
    b"", b"v", b"{}", b'{"a":[1,{"b":2}]}', b'{"sid":7}', b'{"collections":["0","8"]}', b'{"uid":"1"}', b"[" * 300,
    b"\xff" * 40, b"\0\0\0\x0c\0\0\0\x08a\x00true\0{}", b"\x05\x10hello",
)  # fmt: skip
KEYS = (b"", b"\0key", b"\0" + b"k" * 249, b"\x08key", b"\xff\xff\xff\xff\x0f", b"dcp", b"vbucket-seqno", b"all")


def made_up(chance: random.Random) -> bytes:
    """A frame whose lengths add up, of any command."""
    opcode = chance.choice([int(each) for each in Opcode]) if chance.random() < 0.9 else chance.randrange(256)
    if opcode in HARMFUL:
        opcode = Opcode.NOOP
    extras, key, value = chance.randbytes(chance.choice(EXTRAS)), chance.choice(KEYS), chance.choice(VALUES)
    if chance.random() < 0.5:
        extras = bytes(len(extras))
    return frame(
        opcode, extras=extras, key=key, value=value, vbucket=chance.choice([0, 1, 2, 3, 64, 65535]),
        cas=chance.choice([0, 0, 0, 1, 2**64 - 1]), datatype=chance.choice([0, 0, 0, 1, 2, 4, 5, 7, 255]),
        opaque=chance.getrandbits(32),
        framing=chance.choice([b"", b"", b"", b"\x11\x01", b"\x50", chance.randbytes(3)]),
    )  # fmt: skip


def changed(raw: bytes, chance: random.Random) -> bytes:
    """The same frame with some bytes after its header changed."""
    found = bytearray(raw)
    for _ in range(chance.randrange(3)):
        if len(found) > 24:
            found[chance.randrange(24, len(found))] = chance.randrange(256)
    return bytes(found)


class Session:
    """One connection that sends bursts and discards the answers."""

    def __init__(self, port: int, number: int) -> None:
        self.raw = Raw(port)
        self.bursts = 0
        role = number % 4
        if role < 3:
            self.raw.hello(*ALL)
            self.raw.bucket()
        if role in (1, 2):
            flags = OpenFlag.PRODUCER if role == 1 else 0
            self.raw.ask(dcp.Open(0, flags, b"fuzz %d" % number))
        self.raw.socket.setblocking(False)

    def send(self, data: bytes, until: float) -> bool:
        """Send it all, reading meanwhile; False if the node closes the connection."""
        view = memoryview(data)
        self.bursts += 1
        while view:
            readable, writable, _ = select.select([self.raw.socket], [self.raw.socket], [], 1.0)
            if time.monotonic() > until:
                raise TimeoutError("the node reads no more")
            try:
                if readable and not self.raw.socket.recv(1 << 18):
                    return False
                if writable:
                    view = view[self.raw.socket.send(view) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def close(self) -> None:
        with suppress(OSError):
            self.raw.socket.close()


def memory_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon"))


def run(served: Served, pid: int, frames: int, seed: int) -> tuple[int, int, float]:
    """Send all frames; returns memory in KiB after a fifth and at the end, and the innocent client's slowest answer."""
    chance = random.Random(seed)
    sessions = [Session(served.kv_port, number) for number in range(8)]
    innocent = Raw(served.kv_port)
    innocent.hello(*ALL)
    innocent.bucket()
    sent = number = early = 0
    slowest, pool = 0.0, [b""]
    while sent < frames:
        if number % FRESH_POOL == 0:
            fresh = [made_up(chance) for _ in range(2000)]
            pool = fresh + [changed(each, chance) for each in fresh for _ in range(4)]
        at = number % len(sessions)
        alive = sessions[at].send(b"".join(chance.choices(pool, k=BURST)), time.monotonic() + PATIENCE_S)
        if not alive or sessions[at].bursts >= LIFE:
            sessions[at].close()
            sessions[at] = Session(served.kv_port, number)
        sent, number = sent + BURST, number + 1
        began = time.monotonic()
        answer = innocent.ask(kv.Get(b"\0key") if number % 2 else session.Noop())
        assert answer.specific in FINE, answer
        slowest = max(slowest, time.monotonic() - began)
        if not early and sent >= frames // 5:
            early = memory_kib(pid)
        if number % 1000 == 0:
            print(f"{sent:,} frames, {memory_kib(pid) // 1024} MiB", flush=True)
    for each in sessions:
        each.close()
    return early, memory_kib(pid), slowest


def main() -> None:
    frames = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    # ``serve`` checks that the node exits with 0 and that its log has no traceback.
    with tempfile.TemporaryDirectory() as at, serve(Path(at) / "data") as served:
        began = time.monotonic()
        early, late, slowest = run(served, served.pid, frames, seed)
    memory = f"memory {early // 1024} MiB after a fifth, {late // 1024} MiB at the end"
    took = f"{frames:,} frames in {time.monotonic() - began:.0f} s"
    print(f"{took}, {memory}, the slowest answer to an innocent client {slowest * 1000:.0f} ms")


if __name__ == "__main__":
    main()
