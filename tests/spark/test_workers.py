"""What a Python worker of Spark keeps between tasks; without Spark, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading

import upriver.testing
from tests.spark.spark_world import World
from upriver.client.blocking import connect
from upriver.spark.options import ReadOptions
from upriver.spark.reader.driver import Driver
from upriver.spark.reader.executor import TaskReader

TASKS = """
import gc, sys
from upriver.spark.reader import pool
from upriver.spark.reader.driver import Driver
from upriver.spark.options import ReadOptions
from upriver.spark.reader.pool import POOL
from upriver.spark.reader.executor import TaskReader
pool.IDLE_S = 1e6  # however long a task takes here
options = ReadOptions.parse({"connection": sys.argv[1]})
for _ in range(3):
    tasks = Driver(options).batch_tasks()
    rows = sum(batch.num_rows for task in tasks for batch in TaskReader(task, options).batches())
    gc.collect()
    kept = [one for links in POOL._links.values() for one in links]
    print(rows, len(gc.get_objects()) < 30_000, len(kept), kept[0].pipe.sock.getsockname()[1])
"""


def test_a_worker_keeps_its_connection_and_spares_the_collector_what_it_imported(world: World):
    """Spark collects garbage after every task; with the compiler in sight that takes longer than the task."""
    world.put(500)
    command = [sys.executable, "-c", TASKS, world.connection_string]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout.split("\n")[:3]
    assert len(set(said)) == 1, said
    rows, spared, connections, _ = said[0].split()
    assert (rows, spared, connections) == ("500", "True", "1")


def test_a_task_that_begins_while_no_node_answers_waits_for_one() -> None:
    with upriver.testing.node(vbuckets=4) as node:
        with connect(node.connection_string) as db:
            db.set_many({b"k%d" % n: b"{}" for n in range(20)})
        options = ReadOptions.parse({"connection": node.connection_string, "timeoutseconds": "600"})
        tasks = Driver(options).batch_tasks()
        node.stop()  # in order: with history lost, the end that was planned would never come
        back = threading.Timer(0.5, node.start)
        back.start()
        try:
            assert sum(batch.num_rows for task in tasks for batch in TaskReader(task, options).batches()) == 20
        finally:
            back.join()
