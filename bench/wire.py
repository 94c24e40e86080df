"""Benchmark table ``wire``: objects, bulk decode and bulk encode, compared with a memcpy of the same bytes.

Run it with ``python bench/wire.py [--mib 64] [--repeat 15]``. Every figure is CPU time of one thread, and the
best of the repetitions, which take turns so that a noisy neighbour affects all contenders alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from upriver.records.batches import wire_batch
from upriver.wire import Context, FrameSplitter, decode
from upriver.wire.bulk.decode import BulkDecoder, ColumnSizes
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, SendBuffer, Stop
from upriver.wire.packed import pack

SIZES = (64, 256, 1024, 16 * 1024)
CHUNK = 2 << 20
CONTEXT = Context(collections=True)
OBJECT_MESSAGES = 20_000
TARGETS = {256: 0.5, 1024: 0.8, 16 * 1024: 0.8}


@dataclass
class Corpus:
    """The same documents twice: as the store has them, and as frames."""

    value_bytes: int
    messages: int
    run: bytes
    frames: np.ndarray


def corpus(value_bytes: int, total: int) -> Corpus:
    """Mutations with 18-byte keys in the default collection and incompressible values."""
    value = os.urandom(value_bytes)
    messages = total // (24 + 31 + 19 + value_bytes)
    run = b"".join(
        pack(0, b"\0user::%012d" % n, value, seqno=n, rev_seqno=1, cas=n << 16, flags=0x02000006, datatype=1)
        for n in range(1, messages + 1)
    )
    out = SendBuffer(total + (1 << 20))
    PackedEncoder(FrameOptions(opaque=1)).encode(run, out)
    return Corpus(value_bytes, messages, run, np.frombuffer(bytes(out.view()), np.uint8))


def run_memcpy(data: Corpus, target: np.ndarray) -> None:
    for at in range(0, len(data.frames), CHUNK):
        part = data.frames[at : at + CHUNK]
        target[: len(part)] = part


def run_whole_memcpy(data: Corpus, target: np.ndarray) -> None:
    target[:] = data.frames


def run_decode(data: Corpus, decoder: BulkDecoder) -> None:
    rows, view = 0, data.frames.data
    for at in range(0, len(view), CHUNK):
        for _ in decoder.feed(view[at : at + CHUNK]):
            pass
        rows += wire_batch(decoder.columns).num_rows
        decoder.clear()
    assert rows == data.messages


def run_encode(data: Corpus, encoder: PackedEncoder, out: SendBuffer) -> None:
    offset, sent, stop = 0, 0, Stop.FULL
    while stop is Stop.FULL:
        done = encoder.encode(data.run, out, offset=offset)
        offset, stop, sent = done.next_offset, done.stop, sent + out.used
        out.clear()
    assert sent == len(data.frames)


def run_objects(data: Corpus) -> int:
    """Split and decode a prefix; the whole corpus would take minutes."""
    splitter, done = FrameSplitter(), 0
    size = len(data.frames) * min(1, OBJECT_MESSAGES / data.messages)
    for at in range(0, int(size), 64 * 1024):
        for frame in splitter.receive(data.frames[at : at + 64 * 1024].data):
            decode(frame, CONTEXT)
            done += 1
    return done


def best(repeat: int, *contenders: Callable[[], object]) -> list[float]:
    times = [float("inf")] * len(contenders)
    for _ in range(repeat):
        for n, contender in enumerate(contenders):
            start = time.thread_time()
            contender()
            times[n] = min(times[n], time.thread_time() - start)
    return times


def measure(value_bytes: int, total: int, repeat: int) -> list[tuple[str, float, float]]:
    """(name, messages/s, bytes/s) of every contender at one size."""
    data = corpus(value_bytes, total)
    size = len(data.frames)
    target = np.zeros(CHUNK, np.uint8)
    decoder = BulkDecoder(CONTEXT, ColumnSizes(rows=32_768, key_bytes=1 << 20, value_bytes=4 << 20))
    encoder, out = PackedEncoder(FrameOptions(opaque=1)), SendBuffer(CHUNK)
    elsewhere = np.zeros(size, np.uint8)
    copied, whole, decoded, encoded = best(
        repeat,
        lambda: run_memcpy(data, target),
        lambda: run_whole_memcpy(data, elsewhere),
        lambda: run_decode(data, decoder),
        lambda: run_encode(data, encoder, out),
    )
    start = time.thread_time()
    objects = run_objects(data)
    each = (time.thread_time() - start) / objects
    times = {"memcpy": copied, "memcpy at once": whole, "bulk decode to Arrow": decoded, "bulk encode": encoded}
    bulk = [(name, data.messages / t, size / t) for name, t in times.items()]
    return [("object decode", 1 / each, size / data.messages / each), *bulk]


def throughput_table(total: int, repeat: int) -> Table:
    table = Table(title="wire", caption=CAPTION.format(mib=total >> 20, repeat=repeat), caption_justify="left")
    for name, justify in (("value", "right"), ("what", "left"), ("M messages/s", "right"), ("GB/s", "right"),
                          ("of memcpy", "right"), ("x objects", "right"), ("target", "left")):  # fmt: skip
        table.add_column(name, justify=justify)
    for value_bytes in SIZES:
        found = measure(value_bytes, total, repeat)
        rates = {name: rate for name, rate, _ in found}
        for name, rate, speed in found:
            ratio, times = rate / rates["memcpy"], rate / rates["object decode"]
            table.add_row(
                f"{value_bytes} B", name, f"{rate / 1e6:.3f}", f"{speed / 1e9:.2f}", f"{ratio:.2f}",
                f"{times:.0f}", verdict(name, value_bytes, ratio, times),
            )  # fmt: skip
        table.add_section()
    return table


def verdict(name: str, value_bytes: int, ratio: float, times: float) -> str:
    if not name.startswith("bulk"):
        return ""
    wanted = TARGETS.get(value_bytes, 0)
    fast_enough = times >= 50 or value_bytes > 1024  # memcpy itself is not 50 times faster than objects of 16 KiB
    met = ratio >= wanted and fast_enough
    return ("met: " if met else "MISSED: ") + (f"{wanted} of memcpy" if wanted else "50x")


CAPTION = (
    "Mutations with 18-byte keys; {mib} MiB of frames, CPU time, best of {repeat}. memcpy copies the same frames in "
    "the same 2 MiB chunks into one reused buffer, as the decoder writes reused columns and the encoder a reused "
    "send buffer: all read each source byte once, from memory. 'memcpy at once' copies them to as much other memory, "
    "as a program without chunks would. Targets are against the faster one; '50x' the object path, up to 1 KiB."
)

FIRST_CALL = """
import sys, time
start = time.perf_counter()
from upriver.wire import Context, dcp, packed
if sys.argv[1] == "decode":
    from upriver.wire.bulk.decode import BulkDecoder
    list(BulkDecoder().feed(dcp.DcpMutation(1, 1, key=b"k").encode()))
else:
    from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, SendBuffer
    PackedEncoder(FrameOptions()).encode(packed.pack(0, b"\\0k", seqno=1), SendBuffer())
print(time.perf_counter() - start, time.process_time())
"""


def first_call(what: str, cache: str) -> tuple[float, float]:
    """Seconds from a fresh interpreter to the first result, imports included: by the clock, and of CPU."""
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, what], env=environment, capture_output=True, text=True, check=True
    )
    clock, cpu = done.stdout.split()
    return float(clock), float(cpu)


def first_call_table() -> Table:
    table = Table(title="wire: first call in a fresh process, imports included")
    for name in ("what", "kernel cache cold", "warm"):
        table.add_column(name, justify="right")
    for what in ("decode", "encode"):
        with tempfile.TemporaryDirectory() as cache:
            cold = first_call(what, cache)
            warm = min(first_call(what, cache) for _ in range(3))
        table.add_row(what, *(f"{clock:.2f} s ({cpu:.2f} s CPU)" for clock, cpu in (cold, warm)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    console = Console()
    console.print(throughput_table(options.mib << 20, options.repeat))
    console.print(first_call_table())


if __name__ == "__main__":
    main()
