"""Exactly once, with everything against it.

A writer mutates, deletes and expires documents while a streaming query reads them on two executor processes.
Meanwhile executors, the driver and nodes are killed with SIGKILL, nodes and single vbuckets fail over and lose
history, and vbuckets move between nodes. At the end the table made of the rows must equal the cluster's own, key by
key. With ``CHAOS_MASTER=local[2,4]`` it needs less of a machine, but has no executors to kill.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
from spark_world import ClusterWorld, fold

from upriver.errors import UpriverError
from upriver.replicate.local import local_cluster

MASTER = os.environ.get("CHAOS_MASTER", "local-cluster[2,1,1024]")
HERE = Path(__file__).parent


class Writes(threading.Thread):
    """Keeps changing documents until it is told to stop; trouble with the node is waited out."""

    def __init__(self, connection: str, seed: int, keys: int, vbuckets: int) -> None:
        super().__init__(daemon=True)
        self.rng, self.keys, self.vbuckets = random.Random(seed), keys, vbuckets
        self.connection, self.count, self.paused = connection, 0, threading.Event()
        self.ended = threading.Event()

    def run(self) -> None:
        from upriver.client.blocking import connect

        while not self.ended.is_set():
            try:
                with connect(self.connection, "default", request_timeout_s=5.0) as db:
                    while not self.ended.is_set():
                        self._some(db)
            except (UpriverError, OSError):
                time.sleep(0.2)

    def _some(self, db) -> None:
        rng, value = self.rng, f"v{self.count}"
        db.set_many({b"c%d" % rng.randrange(self.keys): value.encode() for _ in range(rng.randint(1, 600))})
        for _ in range(rng.randrange(4)):
            key = b"c%d" % rng.randrange(self.keys)
            if rng.random() < 0.5:
                db.set(key, b"short", expiry=1)
            else:
                try:
                    db.delete(key)
                except UpriverError:
                    continue
        self.count += 1
        time.sleep(0.05 + rng.random() * 0.2)


class Chaos:
    """One run."""

    def __init__(self, seed: int, folder: Path, *, keys: int = 100_000, vbuckets: int = 16, say=print) -> None:
        self.rng, self.seed, self.folder, self.keys, self.vbuckets, self.say = (
            random.Random(seed), seed, folder, keys, vbuckets, say)  # fmt: skip
        self.driver: subprocess.Popen | None = None
        self.done: dict[str, int] = {}

    def run(self, seconds: float, plan: list[str] | None = None) -> dict[str, int]:
        """Break things for so long (or in this order), then compare; what was done, by name."""
        options = {"vbuckets": self.vbuckets, "data": self.folder / "data", "enable_faults": True, "lazy": True}
        with local_cluster(nodes=2, replicas=1, **options) as self.cluster, ClusterWorld(self.cluster) as self.world:
            self.world.put(self.keys, "c", "first")
            writes = Writes(self.world.connection_string, self.seed, self.keys, self.vbuckets)
            writes.start()
            try:
                self.start_driver("ever")
                self._break_things(seconds, plan)
            finally:
                writes.ended.set()
                writes.join()
                self.kill_driver()
            self.done["writes"] = writes.count
            self._expire_all()
            self.start_driver("now")
            assert self.driver is not None
            assert self.driver.wait(600) == 0, (self.folder / "driver.log").read_text()[-4000:]
            self._compare()
        return self.done

    def _break_things(self, seconds: float, plan: list[str] | None) -> None:
        actions = {"executor": self.kill_executor, "driver": self.restart_driver, "crash": self.crash_node,
                   "node": self.lose_node, "move": self.move, "failover": self.fail_over, "cut": self.cut}  # fmt: skip
        weights = {"executor": 2, "driver": 1, "crash": 2, "node": 2, "move": 2, "failover": 6, "cut": 2}
        deadline, planned = time.monotonic() + seconds, list(plan or [])
        while planned if plan else time.monotonic() < deadline:
            self._let_it_run(self.rng.uniform(0.2, 2.0))
            name = planned.pop(0) if plan else self.rng.choices(list(weights), list(weights.values()))[0]
            self.say(f"{name} after {self._batches()} batches")
            actions[name]()
            self.done[name] = self.done.get(name, 0) + 1
        time.sleep(self.rng.uniform(0.5, 2))

    def _let_it_run(self, seconds: float) -> None:
        """Wait so long, and until another batch is done, but do not wait for a query that is stuck on purpose."""
        before, patience = self._batches(), time.monotonic() + 10
        time.sleep(seconds)
        while self._batches() == before and time.monotonic() < patience:
            time.sleep(0.1)

    # ---------------------------------------------------------------------------------------------- what breaks

    def start_driver(self, trigger: str) -> None:
        log = (self.folder / "driver.log").open("a")
        command = [sys.executable, str(HERE / "chaos_driver.py"), self.world.connection_string, str(self.folder)]
        self.driver = subprocess.Popen(
            [*command, trigger, MASTER], stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True)
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            if line.startswith("started"):
                break
        before, patience = self._batches(), time.monotonic() + 180
        while trigger == "ever" and self._batches() == before and time.monotonic() < patience:
            assert self.driver.poll() is None, (self.folder / "driver.log").read_text()[-4000:]
            time.sleep(0.2)

    def kill_driver(self) -> None:
        """The driver with all that belongs to it, at once."""
        if self.driver is not None:
            for pid in [self.driver.pid, *_descendants(self.driver.pid)]:
                _kill(pid)
            self.driver.wait()
            self.driver = None

    def restart_driver(self) -> None:
        self.kill_driver()
        self.start_driver("ever")

    def kill_executor(self) -> None:
        assert self.driver is not None
        executors = [pid for pid in _descendants(self.driver.pid) if "CoarseGrainedExecutorBackend" in _command(pid)]
        if executors:
            _kill(self.rng.choice(executors))

    def crash_node(self) -> None:
        """A node dies and comes back with what was on its disk."""
        one = self.rng.choice(self.cluster.nodes)
        one.kill()
        one.restart()

    def lose_node(self) -> None:
        """A node dies, the other's replicas take over with what they have got; then it comes back, empty-handed."""
        number = self.rng.randrange(len(self.cluster.nodes))
        self.cluster.nodes[number].kill()
        self.cluster.fail_over(number, force=True)
        time.sleep(self.rng.uniform(0, 1))
        self.cluster.nodes[number].restart()
        self.move()

    def move(self) -> None:
        """Vbuckets change places, with takeover, while they are read and written."""
        self.done["vbuckets moved"] = self.done.get("vbuckets moved", 0) + self.cluster.rebalance()

    def fail_over(self) -> None:
        for vb in self.rng.sample(range(self.vbuckets), self.rng.randint(1, 4)):
            self.world.fault("failover", vbucket=vb, lose=self.rng.choice((0, 1, 5, 50, 500, 5000)))

    def cut(self) -> None:
        self.world.fault("drop-connection")

    # ---------------------------------------------------------------------------------------------- the end

    def _batches(self) -> int:
        rows = self.folder / "rows"
        return sum((folder / "_SUCCESS").exists() for folder in rows.iterdir()) if rows.exists() else 0

    def _expire_all(self) -> None:
        """Expiry is lazy: touch what is due, so that nothing expires between reading and comparing."""
        time.sleep(2)
        for key, value in self.world.state().items():
            if value == b"short":
                try:
                    self.world.db.get(key)
                except UpriverError:
                    continue

    def _compare(self) -> None:
        rows = []
        for folder in sorted((self.folder / "rows").iterdir()):
            for file in sorted(folder.glob("*.parquet")):
                rows += pq.read_table(file, columns=["event", "vbucket", "seqno", "epoch", "key", "value"]).to_pylist()
        expected, found = self.world.state(), fold(rows)
        self.done |= {"rows": len(rows), "rollbacks": sum(row["event"] == "rollback" for row in rows),
                      "documents": len(expected)}  # fmt: skip
        missing = [key for key in expected if key not in found]
        phantoms = [key for key in found if key not in expected]
        wrong = [key for key in expected if key in found and found[key] != expected[key]]
        assert missing + phantoms + wrong == [], (
            f"seed {self.seed}: {len(missing)} missing {missing[:3]}, {len(phantoms)} phantoms {phantoms[:3]}, "
            f"{len(wrong)} wrong {wrong[:3]}"
        )
        _assert_epochs_grow(rows)


def _assert_epochs_grow(rows) -> None:
    """(epoch, seqno) never goes back within a vbucket: later rows win also for those who only compare these."""
    last: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row["event"] != "rollback":
            at = row["epoch"], row["seqno"]
            assert at > last.get(row["vbucket"], (-1, -1)), (row, last[row["vbucket"]])
            last[row["vbucket"]] = at


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        todo += (children := parents.get(todo.pop(), []))
        found += children
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
