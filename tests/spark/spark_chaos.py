"""Exactly once, with everything against it.

A writer mutates, deletes and expires documents while a streaming query reads them on two executor processes.
Meanwhile executors, the driver and nodes are killed with SIGKILL, nodes and single vbuckets fail over and lose
history, and vbuckets move between nodes. At the end the table made of the rows must equal the cluster's own, key by
key. With ``CHAOS_MASTER=local[2,4]`` it needs less of a machine, but has no executors to kill.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.spark.spark_application import Application
from tests.spark.spark_world import PATIENCE_S, ClusterWorld, fold, wait_until
from upriver.client.blocking import Database, connect
from upriver.cluster.local import local_cluster
from upriver.errors import UpriverError
from upriver.protocol.offsets import Offset

COLUMNS = ["event", "vbucket", "seqno", "epoch", "key", "value"]


class Writes(threading.Thread):
    """Keeps changing documents until it is told to stop; trouble with the node is waited out."""

    def __init__(self, connection: str, seed: int, keys: int) -> None:
        super().__init__(daemon=True)
        self.rng, self.keys, self.connection, self.count = random.Random(seed), keys, connection, 0
        self.expiring: set[bytes] = set()
        self.ended = threading.Event()
        self.turn = threading.Lock()  # its holder is the only writer

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                with connect(self.connection, "default", request_timeout_s=5.0) as db:
                    while not self.ended.is_set():
                        with self.turn:
                            self._some(db)
                        time.sleep(0.05 + self.rng.random() * 0.2)
            except (UpriverError, OSError):
                time.sleep(0.2)

    def _some(self, db: Database) -> None:
        rng, value = self.rng, f"v{self.count}"
        db.set_many({b"c%d" % rng.randrange(self.keys): value.encode() for _ in range(rng.randint(1, 600))})
        for _ in range(rng.randrange(4)):
            key = b"c%d" % rng.randrange(self.keys)
            if rng.random() < 0.5:
                self.expiring.add(key)
                db.set(key, b"short", expiry=1)
            else:
                try:
                    db.delete(key)
                except UpriverError:
                    continue
        self.count += 1


class Chaos:
    """One run against a cluster of its own, by an application that may have served others before."""

    def __init__(
        self, seed: int, folder: Path, application: Application, *, keys: int = 100_000, vbuckets: int = 16,
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.seed, self.folder, self.keys, self.vbuckets, self.say = seed, folder, keys, vbuckets, say
        self.application = application
        self.done: dict[str, int] = {}
        # What breaks depends on the seed and the plan alone, however many executors or batches there happened to be.
        self.breaks, self.chance = random.Random(seed), random.Random(seed)
        self.spared = set(range(vbuckets))  # vbuckets that never failed over by themselves

    def run(self, seconds: float, plan: list[str] | None = None) -> dict[str, int]:
        """Break things for so long (or in this order), then compare; what was done, by name."""
        options = {"vbuckets": self.vbuckets, "data": self.folder / "data", "enable_faults": True, "lazy": True}
        with local_cluster(nodes=2, replicas=1, **options) as self.cluster, ClusterWorld(self.cluster) as self.world:
            self.world.put(self.keys, "c", "first")
            self._wait_for_all_disks()
            self.writes = Writes(self.world.connection_string, self.seed, self.keys)
            self.writes.start()
            try:
                self.start_query()
                self._break_things(seconds, plan)
            finally:
                self.writes.ended.set()
                self.writes.join()
            self._settle()
            self._take_back_what_was_delivered()
            self._settle()
            self.done |= {"writes": self.writes.count, "spared": len(self.spared)}
            self.application.stop_query()
            self._compare()
        return self.done

    def _break_things(self, seconds: float, plan: list[str] | None) -> None:
        actions = {"executor": self.kill_executor, "driver": self.kill_driver, "crash": self.crash_node,
                   "node": self.lose_node, "move": self.move, "failover": self.fail_over, "cut": self.cut}  # fmt: skip
        weights = {"executor": 2, "driver": 1, "crash": 2, "node": 2, "move": 2, "failover": 6, "cut": 2}
        deadline, planned = time.monotonic() + seconds, list(plan or [])
        while planned if plan else time.monotonic() < deadline:
            self._let_it_run(self.chance.uniform(0.1, 1.0))
            name = planned.pop(0) if plan else self.breaks.choices(list(weights), list(weights.values()))[0]
            self.say(f"{time.strftime('%X')} {name} after {self._batches()} batches")
            actions[name]()
            self.done[name] = self.done.get(name, 0) + 1
        time.sleep(self.chance.uniform(0.1, 1.0))

    def _let_it_run(self, seconds: float) -> None:
        """Wait for some seconds and for another batch, but not for a query that is stuck on purpose."""
        before, patience = self._batches(), time.monotonic() + 10
        time.sleep(seconds)
        while self._batches() == before and time.monotonic() < patience:
            time.sleep(0.1)

    # ---------------------------------------------------------------------------------------------- what breaks

    def start_query(self) -> None:
        """Run the query, and wait until it has done something."""
        before = self._batches()
        self.application.run(self.world.connection_string, self.folder)
        self._wait_for_the_query(lambda: self._batches() > before)

    def kill_driver(self) -> None:
        self.application.kill()
        self.start_query()

    def kill_executor(self) -> None:
        self.application.kill_an_executor(self.chance)

    def crash_node(self) -> None:
        """A node dies and comes back with what was on its disk."""
        one = self.breaks.choice(self.cluster.nodes)
        one.kill()
        one.restart()

    def lose_node(self) -> None:
        """A node dies, the other's replicas take over with what they have; then it comes back empty.

        Replicas must be complete first, so that they lack only the last writes. What an unfinished one would lose is
        unknown.
        """
        number = self.breaks.randrange(len(self.cluster.nodes))
        with self.writes.turn:
            self._wait_for_all_disks()
        time.sleep(self.chance.uniform(0, 0.5))
        self.cluster.nodes[number].kill()
        self.cluster.fail_over(number, force=True)
        time.sleep(self.chance.uniform(0, 1))
        self.cluster.nodes[number].restart()
        self.move()

    def move(self) -> None:
        """Vbuckets change places, with takeover, while they are read and written."""
        self.done["vbuckets moved"] = self.done.get("vbuckets moved", 0) + self.cluster.rebalance()

    def fail_over(self) -> None:
        for vb in self.breaks.sample(range(self.vbuckets), self.breaks.randint(1, 4)):
            self._fail_over(vb, self.breaks.choice((0, 1, 5, 50, 500, 5000)))

    def _fail_over(self, vbucket: int, lose: int) -> None:
        self.spared.discard(vbucket)
        self.world.fault("failover", vbucket=vbucket, lose=lose)

    def cut(self) -> None:
        self.world.fault("drop-connection")

    # ---------------------------------------------------------------------------------------------- the end

    def _batches(self) -> int:
        rows = self.folder / "rows"
        return sum((folder / "_SUCCESS").exists() for folder in rows.iterdir()) if rows.exists() else 0

    def _settle(self) -> None:
        """Let everything that is due expire, touch every vbucket, and wait until the query has seen it."""
        time.sleep(2)
        for key in self.writes.expiring:  # expiry is lazy: nothing may expire between reading and comparing
            try:
                self.world.db.get(key)
            except UpriverError:
                continue
        for vb in range(self.vbuckets):
            self.world.db.set(self.world.key_of(vb, "last"), b"last")
        self._wait_for_the_query(self._caught_up)

    def _take_back_what_was_delivered(self) -> None:
        """One failover that must be a rollback: a query that was slow may not have read yet what the others lost."""
        self._fail_over(self.breaks.randrange(self.vbuckets), lose=50)

    def _wait_for_all_disks(self) -> None:
        """Wait until actives and replicas have persisted everything; only without a writer."""

        def persisted() -> bool:
            branches = {vb: log.uuid for vb, log in self.world.db.failover_logs(range(self.vbuckets)).items()}
            return self.world.db.persisted_seqnos(branches) == self.world.db.high_seqnos()

        wait_until(persisted)

    def _wait_for_the_query(self, true: Callable[[], bool]) -> None:
        patience = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < patience, self.application.tail()
            self.application.assert_alive()
            time.sleep(0.1)

    def _caught_up(self) -> bool:
        """Whether the checkpoint has committed the newest branch of every vbucket up to its high seqno."""
        checkpoint = self.folder / "checkpoint"
        done = max((int(file.name) for file in (checkpoint / "commits").glob("[0-9]*")), default=None)
        if done is None:
            return False
        offset = Offset.from_json(json.loads((checkpoint / "offsets" / str(done)).read_text().splitlines()[-1]))
        logs, highs = self.world.db.failover_logs(range(self.vbuckets)), self.world.db.high_seqnos()
        return all((at.vbuuid, at.seqno) == (logs[vb].uuid, highs[vb]) for vb, at in enumerate(offset.positions))

    def _compare(self) -> None:
        rows: list[dict[str, Any]] = []
        for folder in sorted((self.folder / "rows").iterdir()):
            for file in sorted(folder.glob("*.parquet")):
                rows += pq.read_table(file, columns=COLUMNS).to_pylist()
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


def _assert_epochs_grow(rows: list[dict[str, Any]]) -> None:
    """(epoch, seqno) never goes back within a vbucket: so a reader may compare just these."""
    last: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row["event"] != "rollback":
            at = row["epoch"], row["seqno"]
            assert at > last.get(row["vbucket"], (-1, -1)), (row, last[row["vbucket"]])
            last[row["vbucket"]] = at
