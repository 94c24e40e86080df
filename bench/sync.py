"""Benchmark table ``sync``: the cost of keeping tables equal to a bucket as they grow.

Run it with ``python bench/sync.py [load] [steady] [lag] [repair] [--rows 1000000] [--full]``. ``--full`` adds 10 M
rows. It is compared with a plain delta-rs MERGE per batch, and with Spark writing the same rows to Parquet without a
source. CPU is that of the working process and its children, so it is valid on a busy machine; rows/s is wall clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from rich.console import Console
from rich.table import Table

from upriver import testing
from upriver.errors import TemporaryFailure
from upriver.lake import read
from upriver.lake.apply.policy import TableOptions
from upriver.lake.apply.upkeep import fold_log, fold_tail
from upriver.lake.change_log import write_log
from upriver.lake.layout import Lake
from upriver.lake.tables import Tables
from upriver.model import VbucketState, vbucket_of
from upriver.records.schema import CHANGES
from upriver.store import Bucket, StoreOptions

VBUCKETS = 64
LAG_S = 30.0
SPREAD = 500_000  # distinct keys: with fewer, deduplication would leave little to send
NAME = "_default._default"
console = Console(width=120)


# ---------------------------------------------------------------------------------------------- documents


def document(number: int, size: int, version: int = 0) -> bytes:
    """JSON of about ``size`` bytes, half of it hard to compress."""
    fields = b'{"id":%d,"name":"user %d","total":%d.25,"city":"city %d","active":true,"version":%d,"note":"' % (
        number,
        number,
        number % 9973,
        number % 997,
        version,
    )
    room = max(size - len(fields) - 2, 0)
    noise = b"%x" % ((number * 0x9E3779B97F4A7C15 + version * 0xC2B2AE3D27D4EB4F) % (1 << 256))
    return fields + (noise * (room // 64 + 1))[: room // 2] + b"z" * (room - room // 2) + b'"}'


def key(number: int) -> bytes:
    return b"user::%010d" % number


def fill(data: Path, rows: int, size: int) -> None:
    """A node's data directory with documents in it, written through the store."""
    keys: dict[int, list[int]] = {vbucket: [] for vbucket in range(VBUCKETS)}
    for number in range(rows):
        keys[vbucket_of(key(number), VBUCKETS)].append(number)
    with Bucket.open(data / "default", name="default", vbuckets=VBUCKETS, options=StoreOptions()) as bucket:
        for vbucket, numbers in keys.items():
            bucket.set_state(vbucket, VbucketState.ACTIVE)
            for first in range(0, len(numbers), 5000):
                some = numbers[first : first + 5000]
                _set(bucket, vbucket, [key(n) for n in some], [document(n, size) for n in some])
        bucket.flush()


def _set(bucket: Any, vbucket: int, keys: list[bytes], values: list[bytes]) -> None:
    while True:
        try:
            bucket.vbucket(vbucket).bulk.set_many(keys, values)
        except TemporaryFailure:
            bucket.wait_for_room(10)
        else:
            return


@contextlib.contextmanager
def filled_node(rows: int, size: int) -> Iterator[testing.RunningNode]:
    with tempfile.TemporaryDirectory(prefix="upriver-bench-") as folder:
        data = Path(folder) / "data"
        fill(data, rows, size)
        options: dict[str, Any] = {"vbuckets": VBUCKETS, "lazy": True}
        with testing.node(data=data, quota_mib=1024, **options) as node:
            yield node


# ---------------------------------------------------------------------------------------------- first load


def load(cases: list[tuple[int, int]]) -> None:
    table = Table("documents", "bytes", "rows/s", "MB/s", "seconds", "Spark to Parquet, no source", title="first load")
    for rows, size in cases:
        with filled_node(rows, size) as node, tempfile.TemporaryDirectory() as folder:
            batches, seconds = run_sync(node.connection_string, folder, "--once")
        done = sum(batch["rows"] for batch in batches)
        ceiling = parquet_ceiling(rows, size)
        table.add_row(
            f"{rows:,}",
            str(size),
            f"{done / seconds:,.0f}",
            f"{done * size / seconds / 1e6:.0f}",
            f"{seconds:.1f}",
            f"{ceiling:,.0f} rows/s",
        )
        assert done == rows
    console.print(table)


def run_sync(connection: str, lake: str, *arguments: str) -> tuple[list[dict[str, Any]], float]:
    """Batches of one run, and the seconds from the start of the first batch to the end of the run."""
    command = [sys.executable, "-c", "from upriver.cli import main; main()", "sync", connection, "--to", lake, "--json"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    lines, ended = [], 0.0
    for line in process.stdout:
        lines.append(json.loads(line))
        ended = time.time()
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    batches = [line for line in lines if line["type"] == "batch" and line["rows"]]
    return batches, ended - (batches[0]["at"] - batches[0]["total_s"])


def parquet_ceiling(rows: int, size: int) -> float:
    """Rows/s of Spark writing rows of the same columns and size that it makes up itself."""
    import upriver.spark

    spark = upriver.spark.session("local[*]")
    try:
        made = spark.range(0, rows, 1, os.cpu_count()).selectExpr(
            "cast(concat('user::', id) as binary) as key",
            "cast(id % 64 as int) as vbucket",
            "id as seqno",
            "0 as epoch",
            "id * 7 as cas",
            "current_timestamp() as timestamp",
            f"cast(rpad(concat(hex(id * 2654435761), md5(cast(id as string))), {size}, 'z') as binary) as value",
        )
        with tempfile.TemporaryDirectory() as folder:
            made.limit(1000).write.parquet(f"{folder}/warm")
            started = time.monotonic()
            made.write.parquet(f"{folder}/rows")
            return rows / (time.monotonic() - started)
    finally:
        spark.stop()


# ---------------------------------------------------------------------------------------------- steady state


class Changes:
    """Synthetic batches of the change feed, so that only the tables are measured."""

    def __init__(self, size: int) -> None:
        self.size, self.seqno, self.version = size, 0, 0
        self.random = np.random.default_rng(1)

    def batch(self, numbers: Any) -> pa.RecordBatch:
        count = len(numbers)
        seqnos = np.arange(self.seqno + 1, self.seqno + count + 1)
        self.seqno += count
        self.version += 1
        plain = numbers.tolist()
        one = np.ones(count, np.int64)
        columns: dict[str, Any] = {
            "event": pa.repeat(pa.scalar("mutation"), count),
            "vbucket": numbers % VBUCKETS,
            "seqno": seqnos,
            "epoch": one * 0,
            "vbuuid": one,
            "rev_seqno": one,
            "cas": seqnos + 10**18,
            "timestamp": pa.array(seqnos + 10**15, pa.timestamp("us", tz="UTC")),
            "scope": pa.repeat(pa.scalar("_default"), count),
            "collection": pa.repeat(pa.scalar("_default"), count),
            "collection_id": one * 0,
            "key": [key(number) for number in plain],
            "value": [document(number, self.size, self.version) for number in plain],
            "datatype": one,
            "flags": one * 0,
            "expiry": one * 0,
            "delete_time": one * 0,
            "xattrs": None,
            "snapshot_start": seqnos,
            "snapshot_end": seqnos,
        }
        arrays = [
            pa.nulls(count, field.type)
            if columns[field.name] is None
            else pa.array(columns[field.name]).cast(field.type)
            for field in CHANGES
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=CHANGES)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def disk_bytes() -> int:
    """Bytes that this process has written, whoever counted them."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar"):
            return int(line.split()[1])
    return 0


class Steady:
    """A table of some size, and the cost of applying batches of random changes."""

    def __init__(self, root: Path, rows: int, changed: int) -> None:
        self.root, self.rows, self.changed = str(root), rows, changed
        self.changes, self.number = Changes(256), 0
        self.spent: list[float] = []
        self.clock: list[float] = []
        self.written = 0
        self.tables = Tables(Lake(self.root), "bench", TableOptions(vbuckets=VBUCKETS))
        self.load()

    def load(self) -> None:
        for first in range(0, self.rows, 250_000):
            numbers = np.arange(first, min(first + 250_000, self.rows))
            self.apply(numbers, lag=self.rows - int(numbers[-1]) - 1)
        collection = self.tables.collection(NAME)  # work left over from the load must not count for the changes
        collection.advance(self.number - 1, force=True)

    def apply(self, numbers: Any, lag: int = 0) -> None:
        batch = self.changes.batch(numbers)
        self.tables.apply(self.number, write_log([batch], self.root, self.number), lag=lag)
        self.number += 1

    def step(self) -> None:
        batch = self.changes.batch(self.changes.random.integers(0, self.rows, self.changed))
        collection = self.tables.collection(NAME)
        started, began, before = cpu_s(), time.monotonic(), disk_bytes()
        self.tables.apply(self.number, write_log([batch], self.root, self.number))
        fold_tail(collection)
        fold_log(collection)
        self.spent.append(cpu_s() - started)
        self.clock.append(time.monotonic() - began)
        self.written += disk_bytes() - before
        self.number += 1

    def report(self) -> list[str]:
        started = time.monotonic()
        assert read(self.root, NAME).num_rows == self.rows
        fresh = time.monotonic() - started
        changes, clock = len(self.spent) * self.changed, sorted(self.clock)
        return [
            f"{sum(self.spent) / changes * 1e6:.1f}",
            f"{statistics.mean(self.spent) * 1000:.0f}",
            f"{statistics.mean(clock) * 1000:.0f}",
            f"{statistics.median(clock) * 1000:.0f}",
            f"{clock[int(len(clock) * 0.95)] * 1000:.0f}",
            f"{self.written / changes:.0f}",
            f"{fresh:.1f}",
        ]


def steady(sizes: list[int], changed: int, merge_up_to: int, batches: int) -> None:
    """All sizes take turns, batch by batch, so that a busy machine affects all of them alike."""
    table = Table(
        "rows",
        "CPU us/change",
        "CPU ms/batch",
        "ms/batch",
        "median",
        "p95",
        "B/change",
        "read fresh s",
        "MERGE per batch: CPU ms",
        "B/change",
        title=f"steady state, {batches} batches of {changed:,} changes, 256 B",
    )
    with tempfile.TemporaryDirectory(prefix="upriver-bench-") as folder:
        subjects = [Steady(Path(folder) / str(rows), rows, changed) for rows in sizes]
        for _ in range(batches):
            for subject in subjects:
                subject.step()
        for subject in subjects:
            merge = _merge(subject.rows, changed) if subject.rows <= merge_up_to else ("-", "-")
            table.add_row(f"{subject.rows:,}", *subject.report(), *merge)
    console.print(table)


def _merge(rows: int, changed: int) -> tuple[str, str]:
    """The obvious way: MERGE every batch into one table by key."""
    with tempfile.TemporaryDirectory(prefix="upriver-bench-") as root:
        changes = Changes(256)
        names = ["key", "vbucket", "seqno", "epoch", "cas", "value"]
        for first in range(0, rows, 250_000):
            numbers = np.arange(first, min(first + 250_000, rows))
            write_deltalake(root, pa.table(changes.batch(numbers)).select(names), mode="append")
        spent, before = [], disk_bytes()
        for _ in range(3):
            source = pa.table(changes.batch(np.unique(changes.random.integers(0, rows, changed)))).select(names)
            started = cpu_s()
            merge = DeltaTable(root).merge(source, "t.key = s.key", source_alias="s", target_alias="t")
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
            spent.append(cpu_s() - started)
        written = disk_bytes() - before
    return f"{statistics.median(spent) * 1000:.0f}", f"{written / 3 / changed:,.0f}"


# ---------------------------------------------------------------------------------------------- lag and repair


def following(node: testing.RunningNode, seconds: float, during: Callable[[float], None]) -> list[dict[str, Any]]:
    """The batches, without the first ones, of a sync that follows a node while something happens to it."""
    with tempfile.TemporaryDirectory() as lake:
        command = [sys.executable, "-c", "from upriver.cli import main; main()", "sync", node.connection_string]
        process = subprocess.Popen(
            [*command, "--to", lake, "--json", "--every", "200ms"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout
        process.stdout.readline()
        until = time.time() + seconds
        threading.Timer(seconds, process.terminate).start()
        during(until)
        lines = [json.loads(line) for line in process.stdout]
        process.wait()
    return [line for line in lines if line["type"] == "batch" and line["rows"]][2:]


def lag(rates: list[int]) -> None:
    table = Table(
        "writes/s asked",
        "written/s",
        "seconds behind",
        "p95",
        "changes behind",
        "p95",
        "batch s",
        "of it reading",
        "changes/batch",
        title=f"lag while following, {LAG_S} s",
    )
    for rate in rates:
        with filled_node(10_000, 256) as node:
            written = [0]
            batches = following(node, LAG_S, lambda until, n=node, w=written, r=rate: _write(n, r, until, w))
        median = {name: statistics.median(batch[name] for batch in batches) for name in ("total_s", "read_s", "rows")}
        table.add_row(
            f"{rate:,}",
            f"{written[0] / LAG_S:,.0f}",
            *_middle_and_p95([batch["behind_s"] for batch in batches], ".2f"),
            *_middle_and_p95([batch["lag"] or 0 for batch in batches], ",.0f"),
            f"{median['total_s']:.2f}",
            f"{median['read_s']:.2f}",
            f"{median['rows']:,.0f}",
        )
    console.print(table)


def _middle_and_p95(values: list[float], form: str) -> tuple[str, str]:
    return format(statistics.median(values), form), format(sorted(values)[int(len(values) * 0.95)], form)


def _write(node: testing.RunningNode, rate: int, until: float, written: list[int]) -> None:
    from upriver.client.blocking import connect

    with connect(node.connection_string) as db:
        started = time.time()
        while time.time() < until:
            due = int((time.time() - started) * rate) - written[0]
            numbers = range(written[0], written[0] + min(due, 5000))
            if due > 0:
                db.set_many({key(n % SPREAD): document(n % SPREAD, 256, n) for n in numbers})
                written[0] += len(numbers)
            time.sleep(0.01)


def repair(sizes: list[int]) -> None:
    table = Table(
        "rows",
        "rows of the vbucket",
        "lost changes",
        "repair, CPU ms",
        "bytes written",
        "plain batch, CPU ms",
        title="one vbucket rolls back",
    )
    for rows in sizes:
        with tempfile.TemporaryDirectory(prefix="upriver-bench-") as root:
            plain, repaired, written = _repair(root, rows)
        table.add_row(
            f"{rows:,}", f"{rows // VBUCKETS:,}", "100", f"{repaired * 1000:.0f}", f"{written:,}", f"{plain * 1000:.0f}"
        )
    console.print(table)


def _repair(root: str, rows: int) -> tuple[float, float, int]:
    """CPU seconds of a batch of a hundred changes, and of the batch that rolls them back."""
    changes = Changes(256)
    tables = Tables(Lake(root), "bench", TableOptions(vbuckets=VBUCKETS))
    for number, first in enumerate(range(0, rows, 50_000)):
        tables.apply(number, write_log([changes.batch(np.arange(first, first + 50_000))], root, number))
    good, number = changes.seqno, rows // 50_000
    started = cpu_s()
    tables.apply(number, write_log([changes.batch(np.arange(100) * VBUCKETS + 3)], root, number))
    plain = cpu_s() - started
    rollback = {"event": "rollback", "vbucket": 3, "seqno": good, "epoch": 1, "vbuuid": 1}
    batch = pa.RecordBatch.from_pylist([dict.fromkeys(CHANGES.names) | rollback], schema=CHANGES)
    started = cpu_s()
    steps = tables.apply(number + 1, write_log([batch], root, number + 1))
    assert steps[0].repaired == 100
    return plain, cpu_s() - started, steps[0].bytes_written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["load", "steady", "lag", "repair", []])
    parser.add_argument("--full", action="store_true", help="10 M rows, too")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--batches", type=int, default=570, help="of the steady state; so many rewrite each part of 10 M rows once"
    )
    parser.add_argument("--sizes", type=int, nargs="*", help="table sizes for the steady state")
    given = parser.parse_args()
    parts = given.parts or ["load", "steady", "lag", "repair"]
    large = [10_000_000] if given.full else []
    if "steady" in parts:
        steady(
            given.sizes or [given.rows // 10, given.rows, *large], 5_000, merge_up_to=1_000_000, batches=given.batches
        )
    if "load" in parts:
        load([(rows, size) for rows in (given.rows, *large) for size in (256, 1024)])
    if "lag" in parts:
        lag([1_000, 5_000, 20_000])
    if "repair" in parts:
        repair([given.rows // 10, given.rows])


if __name__ == "__main__":
    main()
