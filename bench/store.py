"""Benchmark table ``store``: how fast one bucket of 1024 vbuckets writes, streams and opens, and its size.

Writes are timed until everything is durable. In brackets is the CPU per write in microseconds: the mean, and the median
over portions of 100,000 (some portions write key tables, and a neighbour on the same host can double a portion's CPU).
The backfill runs through the bulk encoder into DCP frames, on one core.
``python bench/store.py --documents 10000,100000,1000000`` (10000000 on request: it needs some 15 GB of disk).
``--repeat 3`` measures every row three times, in turn, and shows the median of each figure: on a shared host one run
says little. ``--detail`` adds where the CPU of every run went (the writing thread, the flusher, the system), and page
faults and bytes written.

Rows are compared with each other, so each is measured over many operations: a small row loads several buckets, and
overwrites or deletes its documents again and again (the clock stops while deleted ones are restored). Half a second of
work would mostly show the start-up of a process. The garbage collector has the same settings as in ``upriver serve``;
otherwise a pass over everything that numba has loaded would fall into some row.

A virtual machine that gives free memory back to its host pays several microseconds to get each page again. A small row
finds enough pages still in place, a large one does not and would show the machine's cost as ours. So ``Ballast`` holds
pages from before the clock starts and releases as many as the next documents need; ``--cold`` does without it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from upriver.errors import TemporaryFailure
from upriver.model import VbucketState, vbucket_of
from upriver.store import Bucket, Run, StoreOptions, VBucket
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, SendBuffer, Stop

VBUCKETS = 1024
CHUNK = 100_000  # documents that a loader holds at a time; no more than the smallest row has
MEASURED = 1_000_000  # overwrites and deletes of a row, and new documents of a small one
MOST_ROUNDS = 20
KEY_BYTES = 100  # of the store's memory for each document, beside itself
NEVER = 1 << 30
MIB = 1 << 20
Batches = list[tuple[int, list[bytes]]]


class Ballast:
    """A file that fills the page cache: pages cut off its end are free for the next user at once."""

    def __init__(self, file: Path, size: int, quota_bytes: int, phases: list[int]) -> None:
        """``phases`` are numbers of documents; each phase begins with a newly opened bucket, whose memory is empty."""
        self._on_disk = size + 150
        self._quota_bytes = self._memory_left = quota_bytes
        self._size = sum(self._needed(documents, quota_bytes) for documents in phases)
        self._file = file.open("wb")
        file.unlink()
        block = random.Random(0).randbytes(MIB)
        for _ in range(0, self._size, MIB):
            self._file.write(block)
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def _needed(self, documents: int, memory: int) -> int:
        return documents * self._on_disk + min(documents * (self._on_disk + KEY_BYTES), memory)

    def begin_phase(self) -> None:
        self._memory_left = self._quota_bytes

    def release(self, documents: int) -> None:
        """Release the pages that so many documents need, in the page cache and in the store's memory."""
        released = self._needed(documents, self._memory_left)
        self._memory_left -= released - documents * self._on_disk
        self._size = max(0, self._size - released)
        os.ftruncate(self._file.fileno(), self._size)


class Spent(NamedTuple):
    """What a portion of a phase used: seconds, then counts."""

    wall: float
    writer_user: float
    writer_system: float
    other_user: float  # the flusher
    other_system: float
    faults: float
    written: float  # bytes given to the system

    @classmethod
    def so_far(cls) -> Spent:
        here, all_ = resource.getrusage(resource.RUSAGE_THREAD), resource.getrusage(resource.RUSAGE_SELF)
        written = int(Path("/proc/self/io").read_text().split()[3]) if Path("/proc/self/io").exists() else 0
        return cls(
            time.perf_counter(), here.ru_utime, here.ru_stime, all_.ru_utime - here.ru_utime,
            all_.ru_stime - here.ru_stime, all_.ru_minflt, written,
        )  # fmt: skip

    def until(self, end: Spent) -> Spent:
        return Spent(*(b - a for a, b in zip(self, end, strict=True)))

    @property
    def cpu(self) -> float:
        return self.writer_user + self.writer_system + self.other_user + self.other_system


class Rate(NamedTuple):
    """Documents per second of wall clock, and microseconds of CPU for each, which is valid on a busy machine too."""

    documents: int
    portions: list[Spent]  # of equal size

    @property
    def spent(self) -> Spent:
        return Spent(*map(sum, zip(*self.portions, strict=True)))

    @property
    def cpu_us(self) -> float:
        return self.spent.cpu / self.documents * 1e6

    @property
    def usual_us(self) -> float:
        return statistics.median(portion.cpu for portion in self.portions) * len(self.portions) / self.documents * 1e6

    def __str__(self) -> str:
        usual = f", {self.usual_us:.2f}" if len(self.portions) > 1 else ""
        return f"{self.documents / self.spent.wall:,.0f} ({self.cpu_us:.2f}{usual})"

    def detail(self) -> list[str]:
        spent = self.spent
        times = [f"{seconds / self.documents * 1e6:.2f}" for seconds in spent[1:5]]
        faults, written = (count / self.documents for count in spent[5:])
        return [f"{self.documents:,}", *times, f"{faults:.3f}", f"{written:,.0f}"]


class Row(NamedTuple):
    """One line of the table."""

    documents: int
    size: int
    new: Rate
    overwrite: Rate
    delete: Rate
    scanned: Rate
    scanned_mb: float
    open_s: float
    bytes_each: float


def typical(rows: list[Row]) -> Row:
    """The median of each figure; for rates, by CPU."""
    middle = len(rows) // 2
    return Row(*(sorted(figures, key=_by_cpu)[middle] for figures in zip(*rows, strict=True)))


def _by_cpu(figure: Rate | float) -> float:
    return figure.cpu_us if isinstance(figure, Rate) else figure


def by_vbucket(numbers: list[int]) -> Batches:
    """Keys of these document numbers, grouped as a loader that knows the cluster map would."""
    groups: dict[int, list[bytes]] = {}
    for number in numbers:
        key = b"document:%012d" % number
        groups.setdefault(vbucket_of(key, VBUCKETS), []).append(key)
    return list(groups.items())


def chunks(numbers: range | list[int]) -> Iterator[Batches]:
    for at in range(0, len(numbers), CHUNK):
        yield by_vbucket(list(numbers[at : at + CHUNK]))


def patiently(bucket: Bucket, vb: VBucket, keys: list[bytes], value: bytes | None) -> None:
    while True:
        try:
            if value is None:
                vb.bulk.delete_many(keys)
            else:
                vb.bulk.set_many(keys, [value] * len(keys), datatype=0)
        except TemporaryFailure:
            bucket.wait_for_room()
        else:
            return


def write(bucket: Bucket, numbers: range | list[int], value: bytes | None, ballast: Ballast | None) -> Iterator[Spent]:
    """Write portion by portion until all is durable; making the keys does not count."""
    for batches in chunks(numbers):
        if ballast is not None:
            ballast.release(min(CHUNK, len(numbers)))
        begin = Spent.so_far()
        for vbucket, keys in batches:
            patiently(bucket, bucket.vbucket(vbucket), keys, value)
        bucket.flush()
        yield begin.until(Spent.so_far())


def scan(bucket: Bucket) -> tuple[Rate, float]:
    """Stream every vbucket from disk into frames: records, and megabytes of frames a second."""
    records = size = 0
    out = SendBuffer(MIB)
    begin = Spent.so_far()
    for vb in bucket.existing():
        encoder = PackedEncoder(FrameOptions(opaque=1, vbucket=vb.id))
        source = vb.stream(0, vb.high_seqno)
        while (event := source.poll()) is not None:
            if isinstance(event, Run):
                sent, written = encode(encoder, event, out)
                records += sent
                size += written
    spent = begin.until(Spent.so_far())
    return Rate(records, [spent]), size / spent.wall / 1e6


def encode(encoder: PackedEncoder, run: Run, out: SendBuffer) -> tuple[int, int]:
    records = size = at = 0
    while True:
        done = encoder.encode(run.data, out, offset=at, after=run.after, upto=run.upto)
        records += done.records_sent
        size += done.bytes_written
        at = done.next_offset
        out.clear()
        if done.stop is not Stop.FULL:
            return records, size


def warm_up(folder: Path) -> None:
    """Load every kernel, so that the smallest row does not pay for it."""
    measure(folder, 10_000, 64, StoreOptions(), cold=True, rounds=1)
    with Bucket.open(folder, name="bench", vbuckets=VBUCKETS) as bucket:
        for value in (bytes(256), None):  # long runs have a separate kernel
            patiently(bucket, bucket.vbucket(0), [b"%d" % number for number in range(1000)], value)
    shutil.rmtree(folder)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], NEVER)


def measure(folder: Path, documents: int, size: int, options: StoreOptions, cold: bool, rounds: int = 0) -> Row:
    rounds = rounds or max(1, min(MEASURED // documents, MOST_ROUNDS))
    value = random.Random(size).randbytes(size)
    some = random.Random(1).sample(range(documents), min(documents, MEASURED))
    phases = [documents] * rounds + [(3 * rounds - 1) * len(some)]
    ballast = None if cold else Ballast(folder.with_name("ballast"), size, options.quota_bytes, phases)
    new, bytes_each = load(folder, documents, value, options, ballast, rounds)
    begin = time.perf_counter()
    bucket = Bucket.open(folder, name="bench", vbuckets=VBUCKETS, options=options)
    open_s = time.perf_counter() - begin
    with bucket:
        scan(bucket)  # the file comes into the page cache, the kernels into memory
        scanned, scanned_mb = scan(bucket)
        if ballast is not None:
            ballast.begin_phase()
        overwrite: list[Spent] = []
        delete: list[Spent] = []
        for _ in range(rounds):
            overwrite += write(bucket, some, value[::-1], ballast)
        for left in reversed(range(rounds)):
            delete += write(bucket, some, None, ballast)
            if left:
                list(write(bucket, some, value, ballast))
    changed = len(some) * rounds
    rates = Rate(documents * rounds, new), Rate(changed, overwrite), Rate(changed, delete)
    return Row(documents, size, *rates, scanned, scanned_mb, open_s, bytes_each)


def load(
    folder: Path, documents: int, value: bytes, options: StoreOptions, ballast: Ballast | None, rounds: int
) -> tuple[list[Spent], float]:
    """Write new documents into one new bucket after the other and keep the last; also its bytes per document."""
    new: list[Spent] = []
    for _ in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        with Bucket.open(folder, name="bench", vbuckets=VBUCKETS, options=options) as bucket:
            bucket.create_all()
            if ballast is not None:
                ballast.begin_phase()
            new += write(bucket, range(documents), value, ballast)
            bytes_each = bucket.disk_bytes / documents
    return new, bytes_each


def one_by_one(folder: Path, options: StoreOptions, documents: int = 50_000) -> tuple[float, float]:
    """(set, get) calls a second, one document each, as the node's front end makes them."""
    keys = [b"document:%012d" % number for number in range(documents)]
    value = bytes(256)
    with Bucket.open(folder, name="bench", vbuckets=VBUCKETS, options=options) as bucket:
        vbuckets = [bucket.set_state(number, VbucketState.ACTIVE) for number in range(64)]
        begin = time.perf_counter()
        for index, key in enumerate(keys):
            vbuckets[index & 63].documents.set(key, value)
        writing = time.perf_counter() - begin
        bucket.flush()
        begin = time.perf_counter()
        for index, key in enumerate(keys):
            vbuckets[index & 63].documents.get(key)
        return documents / writing, documents / (time.perf_counter() - begin)


def show(rows: list[Row], singles: tuple[float, float]) -> None:
    table = Table(title="store", caption=f"one by one at 256 B: {singles[0]:,.0f} sets/s, {singles[1]:,.0f} gets/s")
    heads = "documents|value|new/s (us)|overwrites/s (us)|deletes/s (us)|backfill/s (us)|MB/s|open s|disk B/doc"
    for head in heads.split("|"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.documents:,}", f"{row.size}", str(row.new), str(row.overwrite), str(row.delete),
            str(row.scanned), f"{row.scanned_mb:,.0f}", f"{row.open_s:.3f}", f"{row.bytes_each:,.0f}",
        )  # fmt: skip
    Console(width=160).print(table)


def show_detail(rows: list[Row]) -> None:
    table = Table(title="store: microseconds of CPU for each document, and what the system was asked for")
    heads = "documents|value|phase|measured|writer|its system|flusher|its system|faults|B written"
    for head in heads.split("|"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        for phase in ("new", "overwrite", "delete", "scanned"):
            table.add_row(f"{row.documents:,}", f"{row.size}", phase, *getattr(row, phase).detail())
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", default="10000,100000,1000000")
    parser.add_argument("--sizes", default="64,256,1024")
    parser.add_argument("--quota-mb", type=int, default=1024)
    parser.add_argument(
        "--cold", action="store_true", help="without ballast: fresh memory costs what it costs on this machine"
    )
    parser.add_argument("--repeat", type=int, default=1, help="how often to measure every row")
    parser.add_argument("--detail", action="store_true", help="which thread the CPU went to, and page faults")
    parser.add_argument("--folder", type=Path, default=None, help="where the files go (a temporary directory)")
    chosen = parser.parse_args()
    options = StoreOptions(quota_bytes=chosen.quota_mb * MIB)
    rows: dict[tuple[int, int], list[Row]] = {}
    top = Path(tempfile.mkdtemp(dir=chosen.folder))
    try:
        warm_up(top / "warm")
        singles = one_by_one(top / "single", options)
        counts, sizes = (list(map(int, text.split(","))) for text in (chosen.documents, chosen.sizes))
        for _, documents, size in itertools.product(range(chosen.repeat), counts, sizes):
            row = measure(top / "bucket", documents, size, options, chosen.cold)
            rows.setdefault((documents, size), []).append(row)
            shutil.rmtree(top / "bucket")
    finally:
        shutil.rmtree(top)
    shown = [typical(measured) for measured in rows.values()]
    show(shown, singles)
    if chosen.detail:
        show_detail(list(itertools.chain.from_iterable(rows.values())))


if __name__ == "__main__":
    main()
