"""``upriver demo``: the whole pipeline on this machine, with a node killed in the middle of it.

Every step is one that a user would run: nodes are processes, the sync is `upriver sync`, the check `upriver verify`.
The demo stops everything that it starts.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from upriver.errors import UpriverError
from upriver.lake.report import counted

if TYPE_CHECKING:
    from rich.console import Console

    from upriver.client.blocking import Database
    from upriver.node.process import RunningNode

VBUCKETS = 128
STEPS = itertools.count(1)
CITIES = ("Lisbon", "Kyoto", "Nairobi", "Oslo", "Quito", "Toronto", "Vienna", "Wellington")
STATES = ("new", "paid", "shipped", "delivered", "returned")
MODELS = ("thermostat", "camera", "lock", "speaker", "meter")
SHARES = {"users": 0.3, "orders": 0.5, "devices": 0.2}


@click.command()
@click.option("--documents", "count", default=200_000, show_default=True, help="How many to load.")
@click.option("--directory", type=click.Path(path_type=Path), default=Path(".demo"), show_default=True)
def demo(count: int, directory: Path) -> None:
    """Load a cluster, sync it into tables, lose a node and its history, and check that the tables are right."""
    from rich.console import Console

    console = Console(highlight=False)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    started = time.monotonic()
    with ExitStack() as stack:
        _Demo(console, directory, stack).run(count)
    console.print(f"\nDone in [bold]{time.monotonic() - started:.0f} s[/bold]. Report: {directory / 'report.html'}")


class _Demo:
    """The steps, and what they share."""

    def __init__(self, console: Console, directory: Path, stack: ExitStack) -> None:
        self.console, self.directory, self.stack = console, directory, stack

    def say(self, text: str) -> None:
        self.console.print(f"[bold cyan]{next(STEPS)}[/bold cyan] {text}")

    def run(self, count: int) -> None:
        self.start_cluster()
        self.load(count)
        self.start_sync(count)
        self.write_on()
        self.lose_history()
        self.wait_for_repair()
        self.verify()
        self.query()

    def start_cluster(self) -> None:
        from upriver.cluster.manager import Manager
        from upriver.cluster.plan import Member
        from upriver.node.process import RunningNode, ServeOptions

        options: ServeOptions = {"vbuckets": VBUCKETS, "member": True, "enable_faults": True}
        self.nodes: list[RunningNode] = []
        for name in ("a", "b"):
            node = RunningNode(self.directory / f"node-{name}", options)
            self.stack.callback(_stop, node)
            self.nodes.append(node)
        self.manager = Manager(self.directory)
        members = [Member("127.0.0.1", node.kv_port, node.http_port) for node in self.nodes]
        self.manager.create("default", members, VBUCKETS, replicas=1)
        self.connection = "couchbase://" + ",".join(str(member) for member in members)
        self.say(f"2 nodes, {VBUCKETS} vbuckets, 1 replica: {self.connection}")

    def load(self, count: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        from upriver.client._requests.connections import converse
        from upriver.cluster.collections import answering
        from upriver.wire.messages.cluster import SetManifest

        started = time.monotonic()
        columns = (TextColumn("  loading {task.description}"), BarColumn(), MofNCompleteColumn())
        shown = self.console.is_terminal
        with self._database() as db, Progress(*columns, console=self.console, transient=True, disable=not shown) as bar:
            with (
                answering(self.manager.answer_proposals),
                closing(converse(db.topology.nodes[0], db.options)) as connection,
            ):
                connection.ask([SetManifest(manifest())])  # any node will do: it asks the manager, which tells all
            for name, share in SHARES.items():
                total = int(count * share)
                task = bar.add_task(name, total=total)
                for chunk in _chunks(documents(name, total), 5000):
                    db.collection(f"shop.{name}").set_many(chunk)
                    bar.advance(task, len(chunk))
        spent = time.monotonic() - started
        self.say(f"loaded {count:,} documents (users, orders, devices) in {spent:.1f} s, {count / spent:,.0f}/s")

    def start_sync(self, count: int) -> None:
        self.sync = SyncProcess(self.connection, self.directory)
        self.stack.callback(self.sync.stop)
        self.say(f"upriver sync {self.connection} --to {self.sync.lake}")
        with self.console.status("  starting Spark ..."):
            self.sync.wait_for(lambda: self.sync.rows >= count, 170.0)
        speed = max((batch["rows"] / batch["total_s"] for batch in self.sync.batches), default=0.0)
        batches = counted(len(self.sync.batches), "batch", "batches")
        self.say(f"{self.sync.rows:,} rows are in the tables after {batches}, {speed:,.0f} rows/s at best")

    def write_on(self) -> None:
        self.writer = BusyWriter(self.connection)
        self.stack.callback(self.writer.stop)
        before = self.sync.rows
        self.sync.wait_for(lambda: self.sync.rows > before + 1000, 60.0)
        self.say(f"writes go on; {self.sync.rows - before:,} more changes have arrived")

    def lose_history(self) -> None:
        """Node a stops replicating, so the writes that it acknowledges from now on are lost when it dies."""
        a, b = self.nodes
        name = f"replication:127.0.0.1:{a.kv_port}->127.0.0.1:{b.kv_port}:default"
        subprocess.run(  # noqa: S603
            _upriver("fault", "stall", a.connection_string, "--name", name, "--seconds", "60"),
            check=True, capture_output=True,
        )  # fmt: skip
        before = self.sync.rows
        self.sync.wait_for(lambda: self.sync.rows > before + 1500, 60.0)
        self.writer.pause()
        ahead = self._ahead()
        a.kill()
        self.say(f"node a is dead (kill -9); {ahead:,} changes that the tables have were never replicated")
        self.manager.fail_over("0")
        self.say("failover: node b is promoted and starts new branches of history; writes go on")
        self.writer.resume()

    def _ahead(self) -> int:
        from upriver.model import VbucketState

        reports = self.manager.reports()
        lost = 0
        for vb, row in reports[0].items():
            if row.state == VbucketState.ACTIVE:
                lost += row.high_seqno - reports[1][vb].high_seqno
        return lost

    def wait_for_repair(self) -> None:
        started = time.monotonic()
        self.sync.wait_for(lambda: self.sync.rollbacks > 0, 90.0)
        after = self.sync.rows
        self.sync.wait_for(lambda: self.sync.rows > after + 500, 60.0)
        spent = time.monotonic() - started
        rolled = counted(self.sync.rollbacks, "vbucket")
        self.say(f"{rolled} rolled back; the tables repaired themselves in {spent:.1f} s")
        self.writer.stop()

    def verify(self) -> None:
        from rich.table import Table

        self.sync.drain()
        command = ["verify", self.connection, "--to", str(self.sync.lake), "--strict", "--json"]
        done = subprocess.run(_upriver(*command), capture_output=True, text=True, check=False)  # noqa: S603
        shown = ("collection", "bucket_rows", "table_rows", "missing", "extra", "different")
        table = Table(*shown, title="upriver verify")
        for row in map(json.loads, done.stdout.splitlines()):
            cells = (row.get(name) for name in shown)
            table.add_row(*(str(len(cell) if isinstance(cell, list) else cell) for cell in cells))
        self.console.print(table)
        if done.returncode:
            raise UpriverError(f"the tables differ from the bucket: {done.stderr.strip() or done.stdout.strip()}")
        self.say("tables and bucket compared document by document: [bold green]0 differences[/bold green]")

    def query(self) -> None:
        import pyarrow as pa
        from deltalake import DeltaTable, QueryBuilder
        from rich.table import Table

        path = self.sync.lake / "current" / "shop.orders"
        self.sync.wait_for(self._current_is_fresh, 60.0)  # within --max-staleness
        sql = (
            "select city, count(*) as orders, round(sum(total)) as revenue from orders "
            "where status <> 'returned' group by city order by revenue desc limit 5"
        )
        found = pa.table(QueryBuilder().register("orders", DeltaTable(str(path))).execute(sql).read_all())
        self.say(f"what any Delta reader sees in {path}:")
        table = Table(*found.schema.names)
        for row in found.to_pylist():
            table.add_row(row["city"], f"{row['orders']:,}", f"{row['revenue']:,.0f}")
        self.console.print(table)
        self.sync.stop()

    def _current_is_fresh(self) -> bool:
        """Whether `current` alone has everything that the fresh view has."""
        from deltalake import DeltaTable

        from upriver.lake import read

        columns = ["_key", "_epoch", "_seqno"]
        current = DeltaTable(str(self.sync.lake / "current" / "shop.orders")).to_pyarrow_table(columns=columns)
        fresh = read(str(self.sync.lake), "shop.orders").select(columns)
        time.sleep(0.5)
        return bool(current.sort_by("_key").equals(fresh.sort_by("_key")))

    @contextmanager
    def _database(self) -> Iterator[Database]:
        from upriver import connect

        with connect(self.connection) as db:
            yield db


class SyncProcess:
    """An `upriver sync --json` process, and what it has reported so far."""

    def __init__(self, connection: str, directory: Path) -> None:
        self.lake = directory / "lake"
        self.batches: list[dict[str, Any]] = []
        self.rows = self.rollbacks = 0
        self._log = directory / "sync.log"
        arguments = ["sync", connection, "--to", str(self.lake), "--every", "1s", "--max-staleness", "5s", "--json"]
        arguments += ["--report", str(directory / "report.html")]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(  # noqa: S603
                _upriver(*arguments), stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if said["type"] == "batch":
                self.batches.append(said)
                self.rows += said["rows"]
                self.rollbacks += said["rollbacks"]

    def wait_for(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if self._process.poll() is not None or time.monotonic() > deadline:
                what = "ended" if self._process.poll() is not None else f"did not get there in {timeout_s:.0f} s"
                raise UpriverError(f"the sync {what}:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def drain(self) -> None:
        """Wait until no change has arrived for four seconds."""
        quiet = time.monotonic()
        seen = self.rows
        while time.monotonic() - quiet < 4.0:
            if self.rows != seen:
                seen, quiet = self.rows, time.monotonic()
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)
            self._reader.join(5)


class BusyWriter:
    """A thread that keeps writing, and connects again after a failover."""

    def __init__(self, connection: str) -> None:
        self._connection = connection
        self._paused, self._stop = threading.Event(), threading.Event()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rng = random.Random(11)
        fresh = documents("orders", 10**9, seed=12)
        while not self._stop.is_set():
            try:
                self._write_some(rng, fresh)
            except (UpriverError, OSError):
                time.sleep(0.2)  # the cluster is changing; connect again

    def _write_some(self, rng: random.Random, fresh: Iterator[tuple[bytes, bytes]]) -> None:
        from upriver import connect

        with connect(self._connection) as db:
            while not self._stop.is_set():
                if self._paused.is_set():
                    self._idle.set()
                    time.sleep(0.02)
                    continue
                self._idle.clear()
                keys = [f"order::{rng.randint(0, 120_000)}".encode() for _ in range(100)]
                db.collection("shop.orders").set_many({key: next(fresh)[1] for key in keys})
                time.sleep(0.05)

    def pause(self) -> None:
        self._paused.set()
        self._idle.wait(10)

    def resume(self) -> None:
        self._paused.clear()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20)


def _stop(node: RunningNode) -> None:
    if node.running:
        node.stop()


def _upriver(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "upriver", *arguments]


def _chunks(pairs: Iterator[tuple[bytes, bytes]], size: int) -> Iterator[dict[bytes, bytes]]:
    while chunk := dict(itertools.islice(pairs, size)):
        yield chunk


# ---------------------------------------------------------------------------------------------- documents


def user(number: int, rng: random.Random) -> dict[str, object]:
    return {
        "name": f"user {number}",
        "email": f"user{number}@example.com",
        "city": rng.choice(CITIES),
        "age": rng.randint(18, 90),
        "tags": rng.sample(("vip", "newsletter", "beta", "b2b"), rng.randint(0, 2)),
        "address": {"street": f"{rng.randint(1, 99)} High Street", "zip": f"{rng.randint(10000, 99999)}"},
    }


def order(number: int, rng: random.Random) -> dict[str, object]:
    return {
        "user": f"user::{rng.randint(0, 60_000)}",
        "status": rng.choice(STATES),
        "total": round(rng.uniform(5, 500), 2),
        "items": rng.randint(1, 9),
        "city": rng.choice(CITIES),
        "note": "" if rng.random() < 0.9 else "please ring twice",
    }


def device(number: int, rng: random.Random) -> dict[str, object]:
    reading: float | int = round(rng.uniform(-5, 35), 1) if rng.random() < 0.8 else rng.randint(0, 30)
    return {"model": rng.choice(MODELS), "reading": reading, "online": rng.random() < 0.95, "firmware": "2.1"}


_MAKERS = {"users": user, "orders": order, "devices": device}


def documents(collection: str, count: int, seed: int = 7) -> Iterator[tuple[bytes, bytes]]:
    """Keys and JSON of the first ``count`` documents of a collection: made up, and the same in every run."""
    rng = random.Random(f"{seed}{collection}")
    make = _MAKERS[collection]
    for number in range(count):
        yield f"{collection[:-1]}::{number}".encode(), orjson.dumps(make(number, rng))


def manifest(uid: int = 2) -> bytes:
    """A scope ``shop`` with the three collections."""
    collections = [{"name": name, "uid": f"{8 + n:x}"} for n, name in enumerate(SHARES)]
    scopes = [
        {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
        {"name": "shop", "uid": "8", "collections": collections},
    ]
    return orjson.dumps({"uid": f"{uid:x}", "scopes": scopes})
