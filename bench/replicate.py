"""Benchmark table ``replicate``: how fast one node feeds another, directly or through the third party, and a move.

Rates are wall clock, from the first stream until the target has everything; CPU is what each process used per document,
which is valid on a busy machine too. The move hands every vbucket to another node while clients write.
``python bench/replicate.py --full`` moves 1024 vbuckets with a million documents under 5,000 writes a second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from load.steady import Outcome, write_steadily
from upriver.client.blocking import connect
from upriver.client.options import ConnectOptions
from upriver.cluster.local import LocalCluster, local_cluster
from upriver.cluster.manager import Manager
from upriver.cluster.plan import Move, with_replicas
from upriver.cluster.third_party import ThirdParty
from upriver.net.aio import run
from upriver.testing import node

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CHUNK = 20_000


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
        run(third.run(_ignore, once=True, every_s=0.1))
        spent = time.monotonic() - began
        third.close()
        return Result(spent, {name: cpu_s(pid) - before[name] for name, pid in pids.items()})


def _ignore(progress: object) -> None:
    return


# ---------------------------------------------------------------------------------------------- the move


class Moving(NamedTuple):
    seconds: float
    moved: int
    cpu: dict[str, float]
    calm: Outcome
    during: Outcome


def move(size: Size) -> Moving:
    """Move every vbucket to the other of two nodes, and report what the writer saw."""
    with (
        tempfile.TemporaryDirectory() as directory,
        local_cluster(2, 0, size.moved_vbuckets, data=Path(directory)) as cluster,
    ):
        load(cluster.connection_string, size.moved_documents, 256)
        calm, _ = _under_load(cluster, size, lambda: time.sleep(5.0))
        pids = {f"node {n}": each.process.pid for n, each in enumerate(cluster.nodes)} | {"manager": os.getpid()}
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        during, seconds = _under_load(cluster, size, lambda: _move_all(cluster.manager))
        cpu = {name: cpu_s(pid) - before[name] for name, pid in pids.items()} | {"writer": during.cpu_s}
        return Moving(seconds, size.moved_vbuckets, cpu, calm, during)


def _move_all(manager: Manager) -> None:
    """Swap the owners: each half of the vbuckets goes to the other node."""
    owners = manager.state.owners
    manager.move_all([Move(vb, chain[0], 1 - chain[0]) for vb, chain in enumerate(owners)])


def _under_load(cluster: LocalCluster, size: Size, work: Callable[[], None]) -> tuple[Outcome, float]:
    ours, theirs = multiprocessing.Pipe()
    arguments = (cluster.connection_string, size.writes_per_s, b"w:", theirs)
    process = multiprocessing.Process(target=write_steadily, args=arguments, daemon=True)
    process.start()
    time.sleep(2.0)
    began = time.monotonic()
    try:
        work()
    finally:
        ours.send("stop")
    spent = time.monotonic() - began
    outcome: Outcome = ours.recv()
    process.join(30)
    return outcome, spent


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
    what = f"{size.moved_vbuckets} vbuckets with {size.moved_documents:,} documents"
    title = f"move: {what}, {size.writes_per_s:,} writes/s due"
    table = Table("", "seconds", "vbuckets/s", "writes/s", "late: median", "99 %", "longest", "refused", title=title)
    result = move(size)
    pace = f"{result.seconds:.1f}", f"{result.moved / result.seconds:.0f}"
    rows = {"nothing moves": (result.calm, "", ""), "moving": (result.during, *pace)}
    for name, (seen, seconds, rate) in rows.items():
        late = [f"{1000 * each:.1f} ms" for each in (seen.median_s, seen.p99_s, seen.longest_s)]
        table.add_row(name, seconds, rate, f"{seen.written / seen.seconds:,.0f}", *late, str(seen.refused))
    console.print(table)
    console.print("CPU seconds while moving: " + ", ".join(f"{who} {spent:.1f}" for who, spent in result.cpu.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="1024 vbuckets, 1,000,000 documents, 5,000 writes/s")
    parser.add_argument("--documents", type=int, help="how many to replicate")
    parser.add_argument("--only", choices=("rate", "move"), help="one table only")
    given = parser.parse_args()
    size = FULL if given.full else Size()
    if given.documents:
        size = size._replace(documents=given.documents)
    console = Console(width=120)
    if given.only != "move":
        show(console, size)
    if given.only != "rate":
        show_move(console, size)


if __name__ == "__main__":
    main()
