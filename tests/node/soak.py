"""Random key-value and DCP clients against one node: they connect, write, stream, close and die.

Run ``python tests/node/soak.py SECONDS``; exits with 1 if a stream's content differs from the store, the log has an
error, or the node's anonymous memory keeps growing. CI runs it for some seconds through ``test_soak.py``.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from raw import ALL, Raw, frame, ready

from upriver import testing
from upriver.wire import Magic, Opcode, dcp, decode, events, kv
from upriver.wire.constants import StreamFlag

VBUCKETS = 16
KEYS = 200


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


class Soak:
    """Threads of clients, all with their own random numbers; ``counts`` says what they did."""

    def __init__(self, port: int, until: float, seed: int = 1) -> None:
        self.port = port
        self.until = until
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self) -> None:
        kinds = [self.write] * 2 + [self.follow] * 3 + [self.misbehave] * 2
        threads = [threading.Thread(target=self._guard, args=(kind, n)) for n, kind in enumerate(kinds)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guard(self, kind, number: int) -> None:  # type: ignore[no-untyped-def]
        chance = random.Random(self.seed * 1000 + number)
        while time.monotonic() < self.until:
            try:
                kind(chance)
                self.counts[kind.__name__] += 1
            except AssertionError as error:
                self.failures.append(f"{kind.__name__}: {error}")
                return

    def write(self, chance: random.Random) -> None:
        """Pipelined sets, deletes and counters, every answer checked for order."""
        with ready(self.port, *ALL) as raw:
            for _ in range(20):
                batch = [self._operation(chance, opaque) for opaque in range(chance.randrange(1, 200))]
                raw.send(*batch)
                assert [raw.receive().opaque for _ in batch] == list(range(len(batch))), "answers out of order"

    def _operation(self, chance: random.Random, opaque: int) -> bytes:
        key, vbucket = b"\0key-%d" % chance.randrange(KEYS), chance.randrange(VBUCKETS)
        if chance.random() < 0.2:
            return kv.Delete(key, vbucket=vbucket, opaque=opaque).frame().encode()
        value = chance.randbytes(chance.choice((10, 200, 3000)))
        return kv.Set(key=key, value=value, vbucket=vbucket, opaque=opaque).frame().encode()

    def follow(self, chance: random.Random) -> None:
        """Stream some vbuckets up to now, in small or large windows; seqnos must rise and every stream must end."""
        with ready(self.port, *ALL) as raw:
            self._open(raw, chance)
            vbuckets = chance.sample(range(VBUCKETS), chance.randrange(1, 6))
            for vbucket in vbuckets:
                raw.send(dcp.StreamRequest(vbucket=vbucket, flags=StreamFlag.TO_LATEST))
            self._read_streams(raw, len(vbuckets))

    def _open(self, raw: Raw, chance: random.Random) -> None:
        raw.ask(dcp.Open(0, 1, b"soak-%d" % chance.getrandbits(40)))
        raw.ask(dcp.Control(b"enable_noop", b"true"))
        raw.ask(dcp.Control(b"connection_buffer_size", b"%d" % chance.choice((1000, 50_000, 10**7))))

    def _read_streams(self, raw: Raw, streams: int) -> None:
        last: Counter[int] = Counter()
        while streams:
            got = raw.receive()
            if got.magic.is_response:
                assert got.specific == 0, f"stream refused with {got.specific:#x}"
                continue
            if got.opcode == Opcode.DCP_NOOP:
                raw.send(frame(Opcode.DCP_NOOP, magic=Magic.RESPONSE, opaque=got.opaque))
                continue
            raw.send(dcp.BufferAck(got.size))
            message = decode(got, raw.context)
            streams -= isinstance(message, dcp.StreamEnd)
            if isinstance(message, dcp.Mutation | dcp.Deletion | events.SystemEvent):
                assert message.by_seqno > last[message.vbucket], "seqnos went backwards"
                last[message.vbucket] = message.by_seqno

    def misbehave(self, chance: random.Random) -> None:
        """Open streams and vanish, never acknowledge, or send garbage."""
        raw = ready(self.port, *ALL)
        self._open(raw, chance)
        for vbucket in range(VBUCKETS):
            raw.send(dcp.StreamRequest(vbucket=vbucket))
        if chance.random() < 0.3:
            raw.socket.sendall(chance.randbytes(100))
        time.sleep(chance.random() * 0.05)
        if chance.random() < 0.5:
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.socket.close()


def contents_by_stream(port: int) -> dict[int, dict[bytes, bytes]]:
    """Every vbucket's documents as a stream tells them."""
    found: dict[int, dict[bytes, bytes]] = {vbucket: {} for vbucket in range(VBUCKETS)}
    with ready(port, *ALL) as raw:
        raw.ask(dcp.Open(0, 1, b"soak-final"))
        raw.ask(dcp.Control(b"enable_noop", b"true"))
        for vbucket in range(VBUCKETS):
            raw.send(dcp.StreamRequest(vbucket=vbucket, flags=StreamFlag.TO_LATEST))
        open_streams = VBUCKETS
        while open_streams:
            got = raw.receive()
            if got.magic.is_response:
                continue
            message = decode(got, raw.context)
            open_streams -= isinstance(message, dcp.StreamEnd)
            if isinstance(message, dcp.Mutation):
                found[message.vbucket][message.key] = message.value
            elif isinstance(message, dcp.Deletion):
                found[message.vbucket].pop(message.key, None)
    return found


def contents_by_key(port: int) -> dict[int, dict[bytes, bytes]]:
    """Every vbucket's documents as GETs tell them."""
    found: dict[int, dict[bytes, bytes]] = {vbucket: {} for vbucket in range(VBUCKETS)}
    with ready(port, *ALL) as raw:
        for vbucket in range(VBUCKETS):
            for number in range(KEYS):
                key = b"\0key-%d" % number
                got = raw.ask(kv.Get(key, vbucket=vbucket))
                if got.specific == 0:
                    found[vbucket][key] = got.value
    return found


def soak(seconds: float) -> list[str]:
    """What went wrong; empty is good."""
    with testing.node(vbuckets=VBUCKETS, lazy=True, quota_mib=64) as node:
        Soak(node.kv_port, time.monotonic() + seconds / 3, seed=1).run()
        before = anonymous_bytes(node.pid)
        runner = Soak(node.kv_port, time.monotonic() + seconds * 2 / 3, seed=2)
        runner.run()
        grown = anonymous_bytes(node.pid) - before
        problems = list(runner.failures)
        if contents_by_stream(node.kv_port) != contents_by_key(node.kv_port):
            problems.append("a stream's content is not the store's")
        if grown > 48 << 20:
            problems.append(f"anonymous memory grew by {grown >> 20} MiB")
        text = node.log.read_text()
        if "ERROR" in text or "Traceback" in text:
            problems.append(f"errors in the log: {text[-2000:]}")
        print(dict(runner.counts), f"memory {before >> 20} MiB, grown by {grown >> 10} KiB")
    return problems


if __name__ == "__main__":
    found = soak(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
    print("\n".join(found) or "nothing went wrong")
    sys.exit(bool(found))
