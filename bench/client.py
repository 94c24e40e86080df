"""Benchmark table ``client``: the cost of reading a change feed, compared with only draining the socket.

Run it with ``python bench/client.py [--repeat 3] [--no-soak]``. A C program (``sender.c``, compiled with cc) sends
64 vbuckets x 16,384 encoded mutations as fast as the socket takes them; each contender is a separate process,
and its CPU time is user and system time of that process. Figures are the best of the repetitions after a warm-up. A
last table has ten times as many mutations on one connection, and shows that memory does not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

STREAMS, PER_STREAM = 64, 16_384
RUN = 64  # consecutive mutations of one vbucket
SIZES = (256, 1024)
CONTENDERS = ("raw drain", "arrow", "blocking arrow", "objects")
TARGETS_US = {256: 0.25, 1024: 0.5}
MANIFEST = '{"uid":"0","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]}]}'


# ---------------------------------------------------------------------------------------------- the data


def message_type(value_bytes: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("magic", "u1"), ("opcode", "u1"), ("key_length", ">u2"), ("extras_length", "u1"), ("datatype", "u1"),
            ("vbucket", ">u2"), ("body", ">u4"), ("opaque", ">u4"), ("cas", ">u8"), ("seqno", ">u8"), ("rev", ">u8"),
            ("rest", "V15"), ("prefix", "u1"), ("key", "S18"), ("value", f"V{value_bytes}"),
        ]
    )  # fmt: skip


def write_corpus(path: Path, value_bytes: int) -> int:
    """Markers, mutations in runs, stream ends; the size in bytes. Opaques are those that the client will choose."""
    kind = message_type(value_bytes)
    value = np.frombuffer(os.urandom(value_bytes), f"V{value_bytes}")
    with path.open("wb") as file:
        for vb in range(STREAMS):
            file.write(_head(0x56, vb, 20) + (0).to_bytes(8, "big") + PER_STREAM.to_bytes(8, "big") + b"\0\0\0\1")
        for first in range(1, PER_STREAM + 1, RUN):
            for vb in range(STREAMS):
                rows = np.zeros(RUN, kind)
                seqnos = np.arange(first, first + RUN, dtype=np.uint64)
                rows["magic"], rows["opcode"], rows["key_length"], rows["extras_length"] = 0x80, 0x57, 19, 31
                rows["datatype"], rows["vbucket"], rows["body"], rows["opaque"] = 1, vb, kind.itemsize - 24, vb + 1
                rows["cas"], rows["seqno"], rows["rev"], rows["value"] = seqnos << 16, seqnos, 1, value
                rows["key"] = [b"user::%04d%08d" % (vb, n) for n in seqnos]
                file.write(rows.tobytes())
        for vb in range(STREAMS):
            file.write(_head(0x55, vb, 4) + b"\0\0\0\0")
    return path.stat().st_size


def _head(opcode: int, vb: int, extras: int) -> bytes:
    sizes = extras.to_bytes(1, "big") + b"\0" + vb.to_bytes(2, "big") + extras.to_bytes(4, "big")
    return bytes([0x80, opcode, 0, 0]) + sizes + (vb + 1).to_bytes(4, "big") + bytes(8)


@contextmanager
def sender(binary: Path, corpus: Path, rounds: int = 1) -> Iterator[int]:
    """The C program, serving a corpus; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    nodes = [{"thisNode": True, "hostname": "127.0.0.1", "services": {"kv": port}}]
    server_map = {"serverList": [f"127.0.0.1:{port}"], "vBucketMap": [[0]] * STREAMS}
    config = json.dumps({"rev": 1, "name": "default", "nodesExt": nodes, "vBucketServerMap": server_map})
    environment = {**os.environ, "PORT": str(port), "PER_STREAM": str(PER_STREAM)}
    command = [str(binary), str(corpus), config, MANIFEST, str(STREAMS), str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------- the contenders


def raw_drain(port: int, total: int, rounds: int) -> int:
    """Only drain the socket."""
    buffer, left = memoryview(bytearray(1 << 20)), total
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"R")
        while left > 0 and (got := sock.recv_into(buffer)):
            left -= got
    return STREAMS * PER_STREAM * rounds


def _request(rounds: int) -> dict[str, Any]:
    return {"end": dict.fromkeys(range(STREAMS), PER_STREAM * rounds)}


def blocking_arrow(port: int, total: int, rounds: int) -> int:
    import upriver

    with upriver.connect(f"couchbase://127.0.0.1:{port}") as db:
        return sum(batch.num_rows for batch in db.change_batches(**_request(rounds)))


def arrow(port: int, total: int, rounds: int) -> int:
    import uvloop

    import upriver

    async def read() -> int:
        rows = 0
        async with upriver.aio.connect(f"couchbase://127.0.0.1:{port}") as db:
            async for batch in db.change_batches(**_request(rounds)):
                rows += batch.num_rows
        return rows

    return uvloop.run(read())


def objects(port: int, total: int, rounds: int) -> int:
    import uvloop

    import upriver

    async def read() -> int:
        rows = 0
        async with upriver.aio.connect(f"couchbase://127.0.0.1:{port}") as db:
            async for _ in db.changes(**_request(rounds)):
                rows += 1
        return rows

    return uvloop.run(read())


def plain_asyncio_arrow(port: int, total: int, rounds: int) -> int:
    import upriver

    async def read() -> int:
        async with upriver.aio.connect(f"couchbase://127.0.0.1:{port}") as db:
            return sum([batch.num_rows async for batch in db.change_batches(**_request(rounds))])

    return asyncio.run(read())


RUNNERS = {
    "raw drain": raw_drain, "arrow": arrow, "blocking arrow": blocking_arrow, "objects": objects,
    "asyncio arrow": plain_asyncio_arrow,
}  # fmt: skip


class Memory:
    """Resident memory of this process while something runs, looked at ten times a second."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.1):
            self.samples.append(resident_mib())

    def highest(self, part: int, parts: int) -> float:
        """Of one part of the time."""
        count = len(self.samples)
        return max(self.samples[count * part // parts : count * (part + 1) // parts], default=resident_mib())


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def contend(name: str, port: int, total: int, rounds: int, repeat: int) -> None:
    """In a process of its own: warm up, then measure; prints JSON."""
    results = []
    memory = Memory()
    for turn in range(repeat + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        with memory if rounds > 1 else nullcontext():
            rows = RUNNERS[name](port, total, rounds)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert rows == STREAMS * PER_STREAM * rounds, rows
        if turn or not repeat:
            results.append((wall, cpu))
    wall, cpu = min(w for w, _ in results), min(c for _, c in results)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    quarters = [memory.highest(part, 4) for part in range(4)]
    print(json.dumps({"rows": rows, "wall": wall, "cpu": cpu, "rss": rss, "quarters": quarters}))


# ---------------------------------------------------------------------------------------------- the table


def measure(binary: Path, size: int, repeat: int, names: tuple[str, ...], rounds: int = 1) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"client: {size} B values, {STREAMS} x {PER_STREAM * rounds:,}, one connection"
    soaking = ("MiB in each quarter",) if rounds > 1 else ()
    columns = "contender", "M mutations/s", "MB/s", "us CPU each", "of raw drain", "peak MiB", *soaking
    table = Table(*columns, title=title)
    with tempfile.TemporaryDirectory() as temporary:
        corpus = Path(temporary) / "corpus"
        ends = STREAMS * 28
        total = (write_corpus(corpus, size) - ends) * rounds + ends
        with sender(binary, corpus, rounds) as port:
            raw = 0.0
            for name in names:
                command = [sys.executable, __file__, "--contender", name, "--port", str(port), "--repeat", str(repeat)]
                command += ["--total", str(total), "--rounds", str(rounds)]
                found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                rate = found["rows"] / found["wall"] / 1e6
                raw = raw or rate
                cost = found["cpu"] / found["rows"] * 1e6
                speed = total / found["wall"] / 1e6
                figures = f"{rate:.2f}", f"{speed:,.0f}", f"{cost:.3f}", f"{rate / raw:.2f}", f"{found['rss']:.0f}"
                memory = (", ".join(f"{mib:.0f}" for mib in found["quarters"]),) if soaking else ()
                table.add_row(name, *figures, *memory)
    target = f"target for arrow: {TARGETS_US[size]} us CPU each, at least 0.50 of the raw drain"
    Console(width=120).print(table, "target: memory as flat in the last quarter as in the first" if soaking else target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-soak", action="store_true", help="without the 10 million mutations that show memory")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS))
    for hidden in ("--contender", "--port", "--total", "--rounds"):
        parser.add_argument(hidden, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        contend(given.contender, int(given.port), int(given.total), int(given.rounds), given.repeat)
        return
    with tempfile.TemporaryDirectory() as temporary:
        binary = Path(temporary) / "sender"
        source = Path(__file__).with_name("sender.c")
        subprocess.run(["cc", "-O2", "-o", str(binary), str(source)], check=True)
        for size in given.sizes:
            measure(binary, size, given.repeat, tuple(given.contenders))
        if not given.no_soak:
            measure(binary, 256, 0, tuple(given.contenders), rounds=10)


if __name__ == "__main__":
    main()
