"""The ``replicate`` table: how fast one node feeds another, directly and through the third party, and how a move goes.

Rates are by the clock, from the first stream until the target has everything; CPU is what each process used for one
document, which does not mind neighbours. The move hands every vbucket to another node while writers go on.
``python bench/replicate.py --full`` moves 1024 vbuckets with a million documents under 5,000 writes a second.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from upriver.client.blocking import connect
from upriver.client.options import ConnectOptions
from upriver.replicate.local import LocalCluster, local_cluster
from upriver.replicate.manager import Manager
from upriver.replicate.plan import Move, with_replicas
from upriver.replicate.third_party import Progress, ThirdParty
from upriver.testing import node

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CHUNK = 20_000
CALL = 10  # documents that a writer sends in one go


class Size(NamedTuple):
    """What is replicated and moved."""

    documents: int = 200_000
    value_bytes: int = 256
    vbuckets: int = 128
    moved_vbuckets: int = 128
    moved_documents: int = 100_000
    writes_per_s: int = 2_000


FULL = Size(1_000_000, 256, 1024, 1024, 1_000_000, 5_000)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def load(connection: str, documents: int, value_bytes: int) -> None:
    value = b'{"pad":"' + b"x" * (value_bytes - 10) + b'"}'
    with connect(connection) as database:
        for at in range(0, documents, CHUNK):
            upto = min(documents, at + CHUNK)
            database.set_many({b"document:%012d" % number: value for number in range(at, upto)})


class Result(NamedTuple):
    seconds: float
    cpu: dict[str, float]


def direct(size: Size) -> Result:
    """A second member joins, and replicates everything that the first has."""
    with local_cluster(1, 0, size.vbuckets) as cluster:
        load(cluster.connection_string, size.documents, size.value_bytes)
        cluster.add()
        pids = {"source": cluster.nodes[0].process.pid, "target": cluster.nodes[1].process.pid}
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        began = time.monotonic()
        manager = cluster.manager
        manager._commit(with_replicas(replace(manager.state, replicas=1), [0, 1]))
        manager.sync(600.0)
        spent = time.monotonic() - began
        return Result(spent, {name: cpu_s(pid) - before[name] for name, pid in pids.items()})


def through_third_party(size: Size) -> Result:
    with node(vbuckets=size.vbuckets) as source, node(vbuckets=size.vbuckets) as target:
        load(source.connection_string, size.documents, size.value_bytes)
        ends = [ConnectOptions.parse(each.connection_string) for each in (source, target)]
        third = ThirdParty(ends[0], ends[1], demote=True)
        pids = {"source": source.pid, "target": target.pid, "third party": os.getpid()}
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        began = time.monotonic()
        asyncio.run(third.run(_ignore, once=True, every_s=0.1))
        spent = time.monotonic() - began
        third.close()
        return Result(spent, {name: cpu_s(pid) - before[name] for name, pid in pids.items()})


def _ignore(progress: Progress) -> None:
    return


# ---------------------------------------------------------------------------------------------- the move


def write_on(connection: str, number: int, per_s: float, told: Connection) -> None:
    """Write at a steady pace until told to stop; then say how many, and how long the longest call took."""
    longest, count, value = 0.0, 0, b'{"pad":"' + b"y" * 200 + b'"}'
    with connect(connection) as database:
        began = time.monotonic()
        while not told.poll():
            wait = began + count / per_s - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            asked = time.monotonic()
            database.set_many({b"w%d:%d" % (number, (count + n) % 100_000): value for n in range(CALL)})
            longest = max(longest, time.monotonic() - asked)
            count += CALL
    told.send((count, time.monotonic() - began, longest))


class Moving(NamedTuple):
    seconds: float
    moved: int
    writes_per_s: float
    longest_s: float
    longest_before_s: float


def move(size: Size) -> Moving:
    """Everything that the first node has goes to the second, and the writers are asked how that was."""
    with tempfile.TemporaryDirectory() as directory, local_cluster(
        2, 0, size.moved_vbuckets, data=Path(directory)
    ) as cluster:
        load(cluster.connection_string, size.moved_documents, 256)
        calm, _ = _under_load(cluster, size, lambda: time.sleep(3.0))
        outcome, seconds = _under_load(cluster, size, lambda: _move_all(cluster.manager))
        moved = size.moved_vbuckets
        return Moving(seconds, moved, outcome[0], outcome[1], calm[1])


def _move_all(manager: Manager) -> None:
    """There and back, so that every vbucket moves once: the first half over, the second half the other way."""
    owners = manager.state.owners
    manager.move_all([Move(vb, chain[0], 1 - chain[0]) for vb, chain in enumerate(owners)])


def _under_load(cluster: LocalCluster, size: Size, work: object) -> tuple[tuple[float, float], float]:
    writers = []
    for number in range(2):
        ours, theirs = multiprocessing.Pipe()
        arguments = (cluster.connection_string, number, size.writes_per_s / 2, theirs)
        process = multiprocessing.Process(target=write_on, args=arguments, daemon=True)
        process.start()
        writers.append((process, ours))
    time.sleep(2.0)
    began = time.monotonic()
    work()  # type: ignore[operator]
    spent = time.monotonic() - began
    rate = longest = 0.0
    for process, told in writers:
        told.send("stop")
        count, seconds, slowest = told.recv()
        process.join(30)
        rate += count / seconds
        longest = max(longest, slowest)
    return (rate, longest), spent


# ---------------------------------------------------------------------------------------------- the tables


def show(console: Console, size: Size) -> None:
    title = f"replicate: {size.documents:,} documents of {size.value_bytes} bytes, {size.vbuckets} vbuckets"
    table = Table("way", "seconds", "documents/s", "MB/s", "CPU us per document", title=title)
    for name, measure in (("node to node", direct), ("through the third party", through_third_party)):
        result = measure(size)
        rate = size.documents / result.seconds
        cpu = ", ".join(f"{who} {1e6 * spent / size.documents:.1f}" for who, spent in result.cpu.items())
        mb = rate * size.value_bytes / 1e6
        table.add_row(name, f"{result.seconds:.2f}", f"{rate:,.0f}", f"{mb:,.0f}", cpu)
    console.print(table)


def show_move(console: Console, size: Size) -> None:
    title = f"move: {size.moved_vbuckets} vbuckets with {size.moved_documents:,} documents under writes"
    table = Table("seconds", "vbuckets/s", "writes/s", "longest pause", "longest without a move", title=title)
    result = move(size)
    table.add_row(
        f"{result.seconds:.1f}", f"{result.moved / result.seconds:.0f}", f"{result.writes_per_s:,.0f}",
        f"{1000 * result.longest_s:.0f} ms", f"{1000 * result.longest_before_s:.0f} ms",
    )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="1024 vbuckets, 1,000,000 documents, 5,000 writes/s")
    parser.add_argument("--documents", type=int, help="how many to replicate")
    given = parser.parse_args()
    size = FULL if given.full else Size()
    if given.documents:
        size = size._replace(documents=given.documents)
    console = Console(width=120)
    show(console, size)
    show_move(console, size)


if __name__ == "__main__":
    main()
