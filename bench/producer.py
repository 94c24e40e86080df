"""Benchmark table ``producer``: how fast a node streams, from disk and live, and how that affects KV clients.

Run it with ``python bench/producer.py [--quick]``. The node is a separate process. Its peers are ``sink.c``, compiled
with ``cc`` if there is one, else a Python client that only counts. CPU is the node's user and system time, so the
figure per million mutations is valid on a busy machine too; mutations/s is wall clock.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from upriver import testing
from upriver.errors import TemporaryFailure
from upriver.store import Bucket, StoreOptions

HERE = Path(__file__).parent
TARGET_BACKFILL = 2_000_000  # mutations/s on one core at 256 B
TARGET_SETS = 40_000
TARGET_P99_US = 20_000
BATCH = 20_000
KEY = b"user::%012d"


@dataclass
class Result:
    """One row of the table."""

    phase: str
    vbuckets: int
    value_bytes: int
    consumers: int
    mutations: int
    wire_bytes: int
    wall_s: float
    cpu_s: float

    def cells(self) -> list[str]:
        return [
            self.phase, str(self.vbuckets), str(self.value_bytes), str(self.consumers),
            f"{self.mutations / self.wall_s / 1e6:.2f}", f"{self.wire_bytes / self.wall_s / 1e6:.0f}",
            f"{self.cpu_s / self.mutations * 1e6:.2f}", f"{self.mutations / self.cpu_s / 1e6:.2f}",
        ]  # fmt: skip


@dataclass
class LiveFigures:
    """What the writer and the slowest follower saw; times in microseconds."""

    vbuckets: int
    value_bytes: int
    consumers: int
    rate: int
    sets_per_s: float
    p50_us: int
    p99_us: int

    def cells(self) -> list[str]:
        return [
            str(self.vbuckets), str(self.value_bytes), str(self.consumers), f"{self.rate:,}" if self.rate else "all",
            f"{self.sets_per_s:,.0f}", f"{self.p50_us / 1000:.1f}", f"{self.p99_us / 1000:.1f}",
        ]  # fmt: skip


def build_sink(folder: Path) -> list[str]:
    """The command that starts a peer."""
    compiler = shutil.which("cc")
    if compiler is None:
        return [sys.executable, str(HERE / "peers" / "sink.py")]
    subprocess.run([compiler, "-O2", "-o", str(folder / "sink"), str(HERE / "sink.c")], check=True)
    return [str(folder / "sink")]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(data: Path, vbuckets: int, documents: int, value_bytes: int) -> int:
    """Fill the stopped node's bucket; returns how many documents there are."""
    each = documents // vbuckets
    value = os.urandom(value_bytes)
    with Bucket.open(data / "default", name="default", vbuckets=vbuckets, options=StoreOptions()) as bucket:
        for vbucket in bucket.existing():
            for first in range(0, each, BATCH):
                keys = [KEY % number for number in range(first, min(first + BATCH, each))]
                write(bucket, vbucket.id, keys, value)
    return each * vbuckets


def write(bucket: Bucket, vbucket: int, keys: list[bytes], value: bytes) -> None:
    while True:
        try:
            bucket.vbucket(vbucket).bulk.set_many(keys, [value] * len(keys))
        except TemporaryFailure:
            bucket.wait_for_room()
        else:
            return


def stream(sink: list[str], port: int, name: str, vbuckets: int, count: int) -> subprocess.Popen[str]:
    command = [*sink, "stream", str(port), name, str(vbuckets), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def backfill(node: testing.RunningNode, sink: list[str], vbuckets: int, size: int, count: int, peers: int) -> Result:
    cpu, began = cpu_seconds(node.pid), time.monotonic()
    sinks = [stream(sink, node.kv_port, f"bench-{n}", vbuckets, count) for n in range(peers)]
    outputs = [each.communicate()[0].split() for each in sinks]
    wall = time.monotonic() - began
    total = sum(int(words[1]) for words in outputs)
    return Result(
        "backfill", vbuckets, size, peers, total, sum(int(words[2]) for words in outputs), wall,
        cpu_seconds(node.pid) - cpu,
    )  # fmt: skip


def live(
    sink: list[str], vbuckets: int, size: int, sets: int, peers: int = 1, rate: int = 0
) -> tuple[Result, LiveFigures]:
    """One client sets as fast as it is answered, or at ``rate``, while streams follow all vbuckets."""
    with testing.node(vbuckets=vbuckets, lazy=True, quota_mib=1024) as node:
        followers = [follow(sink, node.kv_port, f"follower-{n}", vbuckets, sets) for n in range(peers)]
        cpu = cpu_seconds(node.pid)
        writer = [*sink, "write", str(node.kv_port), str(vbuckets), str(sets), str(size), "256", str(rate)]
        answered, seconds = subprocess.run(writer, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        outputs = [each.communicate()[0].split() for each in followers]
        used = cpu_seconds(node.pid) - cpu
    wire, wall = sum(int(words[1]) for words in outputs), max(float(words[2]) for words in outputs)
    result = Result("live", vbuckets, size, peers, int(answered) * peers, wire, wall, used)
    p50, p99 = (max(int(words[place]) for words in outputs) for place in (3, 4))
    return result, LiveFigures(vbuckets, size, peers, rate, int(answered) / float(seconds), p50, p99)


def follow(sink: list[str], port: int, name: str, vbuckets: int, sets: int) -> subprocess.Popen[str]:
    """A stream that is open when this returns."""
    command = [*sink, "stream", str(port), name, str(vbuckets), str(sets), "latency"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    follower.stdout.readline()
    return follower


def backfills(sink: list[str], documents: int, sizes: list[int], vbuckets: list[int]) -> list[Result]:
    results = []
    for size in sizes:
        for count in vbuckets:
            with testing.node(vbuckets=count, lazy=True) as node:
                node.stop()
                loaded = load(node.data, count, documents * 256 // size if size > 256 else documents, size)
                node.start()
                backfill(node, sink, count, size, loaded, 1)  # once for the page cache
                results += [backfill(node, sink, count, size, loaded, peers) for peers in (1, 4, 16)]
    return results


def lives(sink: list[str], sets: int, sizes: list[int], vbuckets: list[int]) -> list[tuple[Result, LiveFigures]]:
    """Every combination as fast as it goes, and the target's rate over one and over all vbuckets."""
    found = [live(sink, count, size, sets, peers) for size in sizes for count in vbuckets for peers in (1, 4, 16)]
    return [*found, *(live(sink, count, 256, sets, rate=TARGET_SETS) for count in (vbuckets[0], vbuckets[-1]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--sets", type=int, default=200_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the documents, 256 B only")
    parser.add_argument("--only", choices=("backfill", "live"), help="half of the table")
    options = parser.parse_args()
    scale = 10 if options.quick else 1
    sizes, vbuckets = [256] if options.quick else [256, 1024], [1, 64, 1024]
    console = Console()
    table = Table("phase", "vbuckets", "bytes", "consumers", "M/s", "MB/s", "CPU s per M", "M/s per core",
                  title="producer")  # fmt: skip
    figures = Table("vbuckets", "bytes", "consumers", "asked/s", "sets/s", "p50 ms", "p99 ms", title="live delivery")
    with tempfile.TemporaryDirectory() as folder:
        sink = build_sink(Path(folder))
        if options.only != "live":
            for result in backfills(sink, options.documents // scale, sizes, vbuckets):
                table.add_row(*result.cells())
        if options.only != "backfill":
            for result, seen in lives(sink, options.sets // scale, sizes, vbuckets):
                table.add_row(*result.cells())
                figures.add_row(*seen.cells())
    console.print(table, figures)
    console.print(
        f"targets at 256 B: backfill {TARGET_BACKFILL / 1e6:.0f} M/s per core; {TARGET_SETS:,} sets/s with a follower, "
        f"p99 delivery under {TARGET_P99_US // 1000} ms"
    )


if __name__ == "__main__":
    main()
