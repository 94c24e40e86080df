"""Benchmark table ``spark``: reading a bucket through ``format("dcp")``, compared with the same rows in memory.

Run it with ``python bench/spark.py [--rows 400000] [--repeat 3] [--part throughput|batches|visible|growth]``. The
ceiling is a Python data source in the same session whose workers hold the same Arrow batches and only hand them over:
the most that Spark itself can take. The node runs on the same machine, so its work is included; CPU seconds are of all
processes together. Figures are the best of the repetitions after a warm-up.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import upriver.spark
from upriver.client.blocking import Database, connect
from upriver.testing import RunningNode, node

CORES = 2
TARGETS = {"noop": 0.7, "parquet": 0.9}
_held: dict[str, list[pa.RecordBatch]] = {}


# ---------------------------------------------------------------------------------------------- the ceiling


class InMemory(DataSource):
    """The same rows, pre-built: each worker reads its file once and then only yields its batches."""

    @classmethod
    def name(cls) -> str:
        return "inmemory"

    def schema(self) -> str:
        from upriver.spark.options import ReadOptions
        from upriver.spark.schema import ddl

        return ddl(ReadOptions.parse({"connection": "couchbase://127.0.0.1"}))

    def reader(self, schema: Any) -> InMemoryReader:
        return InMemoryReader(self.options["folder"])


class InMemoryReader(DataSourceReader):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(str(path)) for path in sorted(Path(self.folder).glob("*.arrow"))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from upriver.spark.reader.executor import freeze_imports

        if partition.value not in _held:
            with pa.OSFile(partition.value) as file:
                _held[partition.value] = pa.ipc.open_file(file).read_all().to_batches()
        yield from _held[partition.value]
        freeze_imports()


def keep_batches(database: Database, folder: Path) -> int:
    """The rows of the bucket as files, one for each task that ``dcp`` would make; their size in bytes."""
    highs = database.high_seqnos()
    size = 0
    for part in range(CORES):
        mine = {vb: high for vb, high in highs.items() if vb % CORES == part}
        feed = database.change_batches(vbuckets=mine, end=mine, rows=32_768)
        batches = pa.Table.from_batches(feed).combine_chunks().to_batches(32_768)
        with pa.OSFile(str(folder / f"{part}.arrow"), "wb") as file, pa.ipc.new_file(file, batches[0].schema) as out:
            for batch in batches:
                out.write_batch(batch)
                size += batch.nbytes
    return size


# ---------------------------------------------------------------------------------------------- sinks


def noop(frame: Any, folder: Path) -> None:
    frame.write.format("noop").mode("overwrite").save()


def parquet(frame: Any, folder: Path) -> None:
    frame.write.mode("overwrite").parquet(str(folder / "out"))


def count(frame: Any, folder: Path) -> None:
    frame.count()


SINKS = {"noop": noop, "parquet": parquet, "count": count}


def best(repeat: int, *actions: Any) -> list[float]:
    """The best time of each action, taken in turns so that a noisy moment hits all of them."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeat + 1):
        for action, taken in zip(actions, times, strict=True):
            began = time.perf_counter()
            action()
            taken.append(time.perf_counter() - began)
    return [min(taken[1:]) for taken in times]


def load(database: Database, rows: int, value_bytes: int, prefix: str = "doc") -> None:
    value = b'{"v":"' + b"x" * (value_bytes - 8) + b'"}'
    for first in range(0, rows, 10_000):
        keys = (f"{prefix}:{n:012d}".encode() for n in range(first, min(rows, first + 10_000)))
        database.set_many(dict.fromkeys(keys, value))


def dcp(spark: Any, running: RunningNode, **options: Any) -> Any:
    reader = spark.read.format("dcp").option("connection", running.connection_string)
    return reader.options(**{name: str(value) for name, value in options.items()}).load()


class Spent:
    """CPU seconds of the node, Spark's Python workers and its JVM while an action runs; the least of its runs."""

    def __init__(self, node_pid: int) -> None:
        self._node, self._runs = node_pid, []

    def around(self, action: Any) -> Any:
        def run() -> None:
            before = self._now()
            action()
            self._runs.append([_grown(*pair) for pair in zip(before, self._now(), strict=True)])

        return run

    def _now(self) -> list[dict[int, float]]:
        """CPU seconds by process: of the node, of Python workers, of the JVM."""
        mine = {pid: _read(Path(f"/proc/{pid}/cmdline")) for pid in _below(os.getpid())}
        python = [pid for pid, command in mine.items() if "pyspark.daemon" in command]
        jvm = [pid for pid, command in mine.items() if "java" in command.split("\0")[0]]
        return [{pid: _cpu_seconds(pid) for pid in pids} for pids in ([self._node], python, jvm)]

    def per_row(self, rows: int) -> list[float]:
        """Microseconds of node, Python and JVM, of the run that took least of all."""
        return [seconds / rows * 1e6 for seconds in min(self._runs, key=sum)]


def _grown(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def _below(pid: int) -> list[int]:
    children = [int(n) for task in Path(f"/proc/{pid}/task").glob("*/children") for n in _read(task).split()]
    return children + [deeper for child in children for deeper in _below(child)]


def _cpu_seconds(pid: int) -> float:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def throughput(spark: Any, rows: int, repeat: int, values: Iterable[int], into: Iterable[str]) -> None:
    print(f"{'':>54} {'':>7} {'CPU us/row, dcp':>21} {'ceiling':>13}")
    print(f"{'value':>6} {'into':>8} {'dcp krow/s':>11} {'MB/s':>6} {'ceiling krow/s':>15} {'ratio':>6} {'target':>7} "
          f"{'node':>6} {'Python':>6} {'JVM':>6} {'Python':>6} {'JVM':>6}")  # fmt: skip
    for value_bytes in values:
        total = rows * 256 // max(256, value_bytes // 2)
        with tempfile.TemporaryDirectory() as place, node(vbuckets=64, lazy=True) as running:
            folder = Path(place)
            with connect(running.connection_string, "default") as database:
                load(database, total, value_bytes)
            running.restart()  # what is read in bulk comes from disk, in large snapshots
            with connect(running.connection_string, "default") as database:
                size = keep_batches(database, folder)
            for name in into:
                sink = SINKS[name]
                ready = spark.read.format("inmemory").option("folder", place).load()
                spent = Spent(running.pid), Spent(running.pid)
                both = partial(sink, dcp(spark, running), folder), partial(sink, ready, folder)
                ours, ceiling = best(repeat, *map(Spent.around, spent, both))
                target = f"{TARGETS[name]:.1f}" if name in TARGETS else ""
                used = [spent[0].per_row(total), spent[1].per_row(total)[1:]]
                figures = " ".join(f"{one:>6.2f}" for part in used for one in part)
                print(f"{value_bytes:>6} {name:>8} {total / ours / 1e3:>11.0f} {size / ours / 1e6:>6.0f} "
                      f"{total / ceiling / 1e3:>15.0f} {ceiling / ours:>6.2f} {target:>7} {figures}",
                      flush=True)  # fmt: skip


# ---------------------------------------------------------------------------------------------- latency


class Timed:
    """A running query whose batches are timed by their progress."""

    def __init__(self, spark: Any, running: RunningNode, folder: Path, **options: Any) -> None:
        source = spark.readStream.format("dcp").option("connection", running.connection_string)
        source = source.options(pollMilliseconds="0", **{name: str(value) for name, value in options.items()})
        self.arrived: list[float] = []
        writer = source.load().writeStream.option("checkpointLocation", str(folder)).foreachBatch(self._take)
        self.query = writer.start()

    def _take(self, frame: Any, batch_id: int) -> None:
        now = time.time()
        newest = frame.selectExpr("count(*)", "collect_list(unix_micros(timestamp))").first()
        self.arrived += [time.time() - moment / 1e6 for moment in newest[1]] if newest[0] <= 20_000 else []
        self.last = now

    def stop(self) -> None:
        self.query.stop()


def batch_latency(spark: Any, rows: int = 100_000, batches: int = 6) -> None:
    """Spark never makes an empty batch; the smallest has one row, in one task whatever ``partitions`` says."""
    print(f"\n{'partitions':>10} {'1 row ms':>9} {'100 k rows ms':>14}   (median time of a micro-batch into noop)")
    with node(vbuckets=64, lazy=True) as running:
        with connect(running.connection_string, "default") as database:
            load(database, rows * batches, 256)
        running.restart()
        for partitions in (2, 8, 64):
            with connect(running.connection_string, "default") as db, tempfile.TemporaryDirectory() as place:
                small, large = _triggers(spark, running, db, Path(place), partitions, rows)
            print(f"{partitions:>10} {small:>9.0f} {large:>14.0f}", flush=True)


def _triggers(spark: Any, running: RunningNode, db: Database, place: Path, most: int, rows: int) -> tuple[float, float]:
    """First large batches from existing rows, one after the other; then small ones as rows are written."""
    source = spark.readStream.format("dcp").option("connection", running.connection_string)
    source = source.options(partitions=str(most), pollMilliseconds="0", maxRowsPerTrigger=str(rows))
    query = source.load().writeStream.format("noop").option("checkpointLocation", str(place)).start()
    query.processAllAvailable()
    large = _durations(query, rows * 9 // 10)
    for number in range(15):
        load(db, 1, 256, f"one{number}")
        query.processAllAvailable()
    small = _durations(query, 1)[len(large) :]
    query.stop()
    return statistics.median(small[3:]), statistics.median(large[2:])


def _durations(query: Any, rows: int) -> list[float]:
    return [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"] >= rows]


def visible_latency(spark: Any, seconds: float = 15.0, rate: int = 1000) -> None:
    with tempfile.TemporaryDirectory() as place, node(vbuckets=64, lazy=True) as running:
        with connect(running.connection_string, "default") as database:
            load(database, 1000, 256)
            timed = Timed(spark, running, Path(place))
            timed.query.processAllAvailable()
            _write_steadily(database, 5, rate)
            timed.arrived.clear()
            _write_steadily(database, seconds, rate)
            timed.query.processAllAvailable()
            timed.stop()
        found = sorted(timed.arrived)
    p50, p99 = found[len(found) // 2], found[len(found) * 99 // 100]
    print(f"\nwrite to visible at {rate} writes/s: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms ({len(found)} rows)")


def _write_steadily(database: Database, seconds: float, rate: int) -> None:
    began, written = time.perf_counter(), 0
    while (now := time.perf_counter() - began) < seconds:
        due = int(now * rate) - written
        if due > 0:
            database.set_many({f"live:{written + n}".encode(): b"x" * 256 for n in range(due)})
            written += due
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------- growth


def growth(spark: Any, rows: int) -> None:
    print(f"\n{'vbuckets':>8} {'rows':>9} {'krow/s':>8} {'us/row':>7} {'CPU us/row':>11} {'worker peak MiB':>16}")
    for vbuckets, total in ((64, rows), (256, rows), (1024, rows), (64, 10 * rows), (1024, 10 * rows)):
        with node(vbuckets=vbuckets, lazy=True) as running:
            with connect(running.connection_string, "default") as database:
                load(database, total, 256)
            running.restart()
            spent = Spent(running.pid)
            with Peak() as peak:
                (took,) = best(2, spent.around(partial(noop, dcp(spark, running), Path())))
        figures = f"{total / took / 1e3:>8.0f} {took / total * 1e6:>7.2f} {sum(spent.per_row(total)):>11.2f}"
        print(f"{vbuckets:>8} {total:>9} {figures} {peak.mib:>16.0f}", flush=True)


class Peak:
    """The largest Python worker of this session while the block runs, by resident memory."""

    mib = 0.0

    def __enter__(self) -> Peak:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and "pyspark.daemon" in _read(entry / "cmdline"):
                    resident = _read(entry / "statm").split()
                    if resident:
                        self.mib = max(self.mib, int(resident[1]) * resource.getpagesize() / 2**20)

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--part", choices=("throughput", "batches", "visible", "growth"), default=None)
    parser.add_argument("--into", choices=SINKS, nargs="*", default=list(SINKS), help="sinks, for throughput")
    parser.add_argument("--values", type=int, nargs="*", default=(256, 1024), help="bytes of a value, for throughput")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    spark = upriver.spark.session(f"local[{CORES}]", settings={"spark.driver.memory": "2g"})
    spark.sparkContext.setLogLevel("ERROR")
    sys.modules["spark"] = sys.modules[__name__]  # workers import this file by its name, not as __main__
    InMemory.__module__ = InMemoryReader.__module__ = "spark"
    spark.dataSource.register(InMemory)
    if given.part in (None, "throughput"):
        throughput(spark, given.rows, given.repeat, given.values, given.into)
    if given.part in (None, "batches"):
        batch_latency(spark)
    if given.part in (None, "visible"):
        visible_latency(spark)
    if given.part in (None, "growth"):
        growth(spark, given.rows // 4)
    spark.stop()


if __name__ == "__main__":
    main()
