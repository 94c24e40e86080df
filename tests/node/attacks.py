"""Attacks on one node over loopback: what an innocent client notices, and how much memory the node takes.

``python tests/node/attacks.py [SECONDS]`` runs each for a few seconds and prints a table. Every attack is bounded in
time and in connections, and stops by itself. `make attacks` runs it; figures are measured, never asserted in tests.
"""

from __future__ import annotations

import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import cramjam

from tests.node.live_fuzz import HARMFUL
from tests.node.raw import Raw, frame
from upriver.protocol.scram import encode_plain
from upriver.wire import Opcode
from upriver.wire.messages import kv, session
from upriver.wire.messages.session import SaslAuth

MIB = 1 << 20
USER, PASSWORD = "ann", "secret"


class Target:
    """A separate node for one attack."""

    def __init__(self, data: Path) -> None:
        command = [sys.executable, "-m", "upriver", "serve", "--data", str(data), "--kv-port", "0", "--http-port", "0",
                   "--vbuckets", "64", "--lazy", "--username", USER, "--enable-flush"]  # fmt: skip
        self.log = (data.parent / f"{data.name}.log").open("w+")
        self.process = subprocess.Popen(
            [*command, "--password", PASSWORD], stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(2)]
        self.kv_port, self.http_port = (int(line.strip().rpartition(":")[2]) for line in lines)

    def memory_mib(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")) // 1024

    def stop(self) -> str:
        """Stop the node; says whether the log has a traceback."""
        self.process.terminate()
        code = self.process.wait(60)
        self.log.seek(0)
        text = self.log.read()
        return "" if code == 0 and "Traceback" not in text else f"exit {code}: {text[-500:]}"


def log_in(port: int, timeout: float = 60.0) -> Raw:
    raw = Raw(port, timeout)
    raw.hello(0x06, 0x07, 0x08, 0x0A, 0x0B)
    assert raw.ask(SaslAuth(b"PLAIN", encode_plain(USER, PASSWORD))).specific == 0
    raw.bucket()
    return raw


class Innocent(threading.Thread):
    """A client that gets and sets one document after the other, and notes how long each takes."""

    def __init__(self, port: int, until: float) -> None:
        super().__init__(daemon=True)
        self.raw, self.until = log_in(port), until
        self.took: list[float] = []

    def run(self) -> None:
        for number in range(10**9):
            began = time.monotonic()
            if began > self.until:
                return
            request = kv.Set(0, 0, b"k", b"v" * 200) if number % 2 else kv.Get(b"k")
            assert self.raw.ask(request).specific in (0, 1)
            self.took.append(time.monotonic() - began)
            time.sleep(0.002)

    def percentile(self, share: float) -> float:
        return sorted(self.took)[int(share * (len(self.took) - 1))] * 1000


Attack = Callable[[Target, float, ExitStack], None]


def nothing(target: Target, until: float, stack: ExitStack) -> None:
    """Only the innocent client, for comparison."""


def silent_kv(target: Target, until: float, stack: ExitStack) -> None:
    """2,500 connections to the key-value port that say nothing."""
    _silent(target.kv_port, 2500, until, stack)


def silent_http(target: Target, until: float, stack: ExitStack) -> None:
    """600 connections to the management port that say nothing."""
    _silent(target.http_port, 600, until, stack)


def _silent(port: int, count: int, until: float, stack: ExitStack) -> None:
    for _ in range(count):
        if time.monotonic() > until:
            return
        stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))


def unfinished(target: Target, until: float, stack: ExitStack) -> None:
    """60 requests of 30 MiB that never end."""
    part = frame(Opcode.SET, extras=bytes(8), key=b"k", value=bytes(29 * MIB))[: 28 * MIB]
    for _ in range(60):
        if time.monotonic() > until:
            return
        raw = stack.enter_context(log_in(target.kv_port))
        raw.socket.settimeout(0.05)
        with suppress(OSError):
            raw.socket.sendall(part)


def unread(target: Target, until: float, stack: ExitStack) -> None:
    """100 clients that ask for 15 MiB and never read."""
    with log_in(target.kv_port) as raw:
        raw.ask(kv.Set(0, 0, b"big", bytes(15 * MIB)))
    for _ in range(100):
        if time.monotonic() > until:
            return
        raw = stack.enter_context(log_in(target.kv_port))
        raw.send(*[kv.Get(b"big")] * 50)


def guesses(target: Target, until: float, stack: ExitStack) -> None:
    """100 connections that guess passwords in the clear."""
    guessers = [stack.enter_context(Raw(target.kv_port)) for _ in range(100)]
    number = 0
    while time.monotonic() < until:
        for raw in guessers:
            number += 1
            with suppress(OSError):
                raw.send(SaslAuth(b"PLAIN", encode_plain(USER, f"guess {number}")))
        time.sleep(0.1)


def snappy_bombs(target: Target, until: float, stack: ExitStack) -> None:
    """Documents of 1.4 MB that inflate to 30 MiB."""
    bomb = bytes(cramjam.snappy.compress_raw(bytes(30 * MIB)))
    raw = stack.enter_context(log_in(target.kv_port))
    while time.monotonic() < until:
        raw.ask(frame(Opcode.SET, extras=bytes(8), key=b"bomb", value=bomb, datatype=2))
        raw.ask(kv.Get(b"bomb"))


def many_xattrs(target: Target, until: float, stack: ExitStack) -> None:
    """A document with 1.25 million extended attributes."""
    pairs = b"".join(struct.pack(">I", 9) + b"%06x\x001\0" % n for n in range(1_250_000))
    value = struct.pack(">I", len(pairs)) + pairs + b"{}"
    raw = stack.enter_context(log_in(target.kv_port))
    while time.monotonic() < until:
        raw.ask(frame(Opcode.SET, extras=bytes(8), key=b"x", value=value[: 19 * MIB], datatype=4))
        raw.ask(kv.Get(b"x"))


def manifests(target: Target, until: float, stack: ExitStack) -> None:
    """Manifests of 1,000 collections, one after the other."""
    raw = stack.enter_context(log_in(target.kv_port))
    uid = 1
    while time.monotonic() < until:
        uid += 1
        inside = ",".join(f'{{"name":"c{uid}_{n}","uid":"{uid * 1000 + n:x}"}}' for n in range(1000))
        default = '{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]}'
        text = f'{{"uid":"{uid:x}","scopes":[{default},{{"name":"s","uid":"8","collections":[{inside}]}}]}}'
        raw.ask(frame(Opcode.COLLECTIONS_SET_MANIFEST, value=text.encode()))


def flushes(target: Target, until: float, stack: ExitStack) -> None:
    """FLUSH, again and again."""
    raw = stack.enter_context(log_in(target.kv_port))
    while time.monotonic() < until:
        raw.ask(session.Flush())


def deep_json(target: Target, until: float, stack: ExitStack) -> None:
    """JSON of many levels in documents, statistics and on the management port."""
    raw = stack.enter_context(log_in(target.kv_port))
    while time.monotonic() < until:
        raw.ask(kv.Set(0, 0, b"deep", b"[" * 100_000))
        raw.ask(frame(Opcode.SUBDOC_GET, extras=b"\0\1\0", key=b"deep", value=b"a"))
        raw.ask(frame(Opcode.STAT, key=b"dcp", value=b"[" * 100_000, datatype=1))
        raw.ask(frame(Opcode.DCP_OPEN, extras=bytes(4) + b"\0\0\0\1", key=b"d", value=b"[" * 100_000, datatype=1))


def garbage(target: Target, until: float, stack: ExitStack) -> None:
    """Frames with any opcode and any body, over live sessions."""
    chance = random.Random(7)
    sent = 0
    while time.monotonic() < until:
        with log_in(target.kv_port) as raw, suppress(OSError, ConnectionError):
            for _ in range(200):
                body = chance.randbytes(chance.randrange(120))
                extras = chance.randrange(min(len(body), 40) + 1)
                key = chance.randrange(min(len(body) - extras, 20) + 1)
                datatype, vbucket, cas = chance.randrange(8) & 5, chance.randrange(70), chance.choice([0, 0, 1])
                opcode = chance.randrange(256)
                opcode = Opcode.NOOP if opcode in HARMFUL else opcode
                head = (0x80, opcode, key, extras, datatype, vbucket, len(body), sent, cas)
                raw.send(struct.pack(">BBHBBHIIQ", *head) + body)
                sent += 1
            raw.socket.settimeout(0.01)
            with suppress(TimeoutError):
                while raw.socket.recv(1 << 20):
                    pass


ATTACKS: list[Attack] = [
    nothing, silent_kv, silent_http, unfinished, unread, guesses, snappy_bombs, many_xattrs, manifests, flushes,
    deep_json, garbage,
]  # fmt: skip


def run(attack: Attack, seconds: float) -> str:
    """One attack on a fresh node: a line of the table."""
    with tempfile.TemporaryDirectory() as at, ExitStack() as stack:
        target = Target(Path(at) / "data")
        until = time.monotonic() + seconds
        innocent = Innocent(target.kv_port, until)
        innocent.start()
        thread = threading.Thread(target=_quietly, args=(attack, target, until, stack), daemon=True)
        thread.start()
        peak = 0
        while time.monotonic() < until:
            peak = max(peak, target.memory_mib())
            time.sleep(0.02)
        innocent.join(30)
        thread.join(30)
        stack.close()
        wrong = target.stop()
    figures = f"{innocent.percentile(0.5):8.1f} {innocent.percentile(0.99):8.1f} {max(innocent.took) * 1000:8.1f}"
    return f"{attack.__name__:<14} {len(innocent.took):>8,} {figures} {peak:>9,}  {wrong or 'ok'}"


def _quietly(attack: Attack, target: Target, until: float, stack: ExitStack) -> None:
    with suppress(OSError, ConnectionError, AssertionError):
        attack(target, until, stack)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 8.0
    chosen = sys.argv[2:]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    print("an innocent client: ms                     median      p99      max   RssAnon MiB  the node")
    for attack in ATTACKS:
        if not chosen or attack.__name__ in chosen:
            print(run(attack, seconds), flush=True)


if __name__ == "__main__":
    main()
