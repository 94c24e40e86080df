"""``kill -9`` of the sync at any instant, of the node too, while documents, types and history change."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time

import orjson
import pytest
from deltalake import DeltaTable

from tests.spark.sync.lakes import LakeWorld, kill
from upriver.errors import ConfigError

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class DocumentWriter(threading.Thread):
    """Writes, deletes and changes types until it is told to stop."""

    def __init__(self, lake: LakeWorld, seed: int) -> None:
        super().__init__(daemon=True)
        self.lake, self.random, self.stop = lake, random.Random(seed), threading.Event()
        self.turn = threading.Lock()  # its holder is the only client of the node
        self.error: BaseException | None = None

    def run(self) -> None:
        from upriver.client.blocking import connect

        try:
            with connect(self.lake.world.node.connection_string) as db:
                while not self.stop.is_set():
                    with self.turn:
                        self._write(db)
                    time.sleep(0.02)
        except BaseException as error:
            self.error = error

    def _write(self, db) -> None:
        from upriver.errors import KeyNotFound

        choose = self.random
        made = {f"k{choose.randrange(500)}".encode(): self._document() for _ in range(20)}
        db.set_many(made)
        with contextlib.suppress(KeyNotFound):
            db.delete(f"k{choose.randrange(500)}")
        if choose.random() < 0.05:
            self.lake.world.fault("failover", vbucket=choose.randrange(4), lose=choose.randrange(15))

    def _document(self) -> bytes:
        choose = self.random
        document: dict[str, object] = {"n": choose.randrange(100), f"f{choose.randrange(8)}": True}
        if choose.random() < 0.1:
            document["n"] = choose.choice([0.5, "text", 2**60, None])
        if choose.random() < 0.3:
            document["deep"] = {"a": [1, None]}
        return orjson.dumps(document)


def caught_up(lake: LakeWorld, process: subprocess.Popen[bytes]) -> None:
    """Wait until a sync has everything that the node has; no one writes meanwhile."""
    lake.world.put(1, f"sentinel{time.time_ns()}-")
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(ConfigError):  # no tables yet
            if lake.fresh() == lake.truth():
                return
        time.sleep(1.0)
    pytest.fail(f"the sync did not catch up; it ended with {process.poll()}")


def test_both_tables_equal_the_node_after_every_kill(lake: LakeWorld) -> None:
    """Documents, types and history change all the time; kills come at instants that the seeds choose."""
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "1,2,3").split(",")]
    lake.world.put(300)
    for seed in seeds:
        writer = DocumentWriter(lake, seed)
        writer.start()
        process = lake.start("--every", "200ms", "--json")
        try:
            assert process.stdout is not None
            process.stdout.readline()  # one batch is through
            with writer.turn:
                caught_up(lake, process)
                lake.assert_equal()
            time.sleep(random.Random(seed).uniform(0.0, 3.0))
        finally:
            kill(process)
            writer.stop.set()
            writer.join(timeout=30)
        assert writer.error is None
    process = lake.start("--once", "--json")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    lake.assert_equal()
    identity = ["batch", "vbucket", "seqno", "epoch", "event"]
    changes = DeltaTable(f"{lake.lake}/changes/_default._default").to_pyarrow_table(columns=identity)
    assert changes.num_rows == changes.group_by(identity).aggregate([]).num_rows  # no batch is there twice
