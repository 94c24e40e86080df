"""Random key-value and DCP clients against one node: they connect, write, stream, close, misbehave and die.

Run ``python tests/node/soak.py SECONDS``; exits with 1 if a client saw an error, a survivor's content differs
from the store, the log has an error, connections or streams are left over, or the node's anonymous memory keeps
growing. It prints its progress every minute. CI runs it for some seconds through ``test_soak.py``.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.node.raw import ALL, Raw, ready
from tests.node.soak_clients import BAD, KEYS, KINDS, LONGEST_LIFE_S, VBUCKETS
from tests.node.soak_survivor import Contents, Survivor
from upriver import testing
from upriver.wire.messages import cluster, kv, session

QUOTA_MIB = 64
MOST_GROWTH = 32 << 20
LONG_S = 600.0  # in a shorter run, the caches are still filling up to the quota
SAMPLE_S = 1.0
CATCH_UP_S = 300.0
Life = Callable[[int, random.Random], None]


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


class Soak:
    """Threads of clients, each with its own random numbers; ``lives`` counts what they did."""

    def __init__(self, node: testing.RunningNode, seconds: float) -> None:
        self.node = node
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.lives: Counter[str] = Counter()
        self.problems: list[str] = []
        self.memory: list[tuple[float, int]] = []
        self.survivors = [
            Survivor(node.kv_port, 1, lives_s=0),
            Survivor(node.kv_port, 2, lives_s=2, controls={"connection_buffer_size": b"20000"}),
            Survivor(node.kv_port, 3, lives_s=5, controls={"force_value_compression": b"true"}),
        ]

    def run(self) -> None:
        kinds = [kind for kind, copies in KINDS for _ in range(copies)]
        threads = [threading.Thread(target=self._live, args=(kind, n)) for n, kind in enumerate(kinds)]
        for thread in [*self.survivors, *threads]:
            thread.start()
        self._watch()
        for thread in threads:
            thread.join()

    def _live(self, kind: Life, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < self.until:
            try:
                kind(self.node.kv_port, chance)
            except Exception as error:
                if not (kind in BAD and isinstance(error, OSError)):
                    self.problems.append(f"{kind.__name__}: {error!r}\n{traceback.format_exc(limit=-3)}")
                    print(self.problems[-1], flush=True)
                    return
            self.lives[kind.__name__] += 1

    def _watch(self) -> None:
        told = 0.0
        while (now := time.monotonic()) < self.until:
            self.memory.append((now, anonymous_bytes(self.node.pid)))
            if now - told >= 60:
                told = now
                print(self.progress(), flush=True)
            time.sleep(min(SAMPLE_S, max(0.0, self.until - now)))

    def progress(self) -> str:
        spent = int(time.monotonic() - self.began)
        changes = sum(each.changes for each in self.survivors)
        return (
            f"{spent:5d} s, memory {self.memory[-1][1] >> 20} MiB, {sum(self.lives.values())} lives, "
            f"{changes} changes to survivors with {sum(each.reconnects for each in self.survivors)} reconnects, "
            f"{len(self.problems)} problems"
        )

    # ------------------------------------------------------------------------------------------ the end

    def check(self) -> None:
        """Check everything that must be true once the clients are gone."""
        self._check_contents()
        self._check_memory()
        self._check_left_over()
        text = self.node.log.read_text()
        if "ERROR" in text or "Traceback" in text:
            self.problems.append(f"errors in the log: {text[-2000:]}")

    def _check_contents(self) -> None:
        time.sleep(LONGEST_LIFE_S + 1)
        contents_by_key(self.node.kv_port)  # a read turns expired documents into tombstones
        goal = high_seqnos(self.node.kv_port)
        for survivor in self.survivors:
            survivor.finish_at = goal
        wanted = contents_by_key(self.node.kv_port)
        for survivor in self.survivors:
            survivor.join(CATCH_UP_S)
            if survivor.failure or survivor.is_alive():
                self.problems.append(survivor.failure or f"survivor {survivor.seed} did not catch up")
            elif survivor.contents != wanted:
                self.problems.append(f"survivor {survivor.seed} has other contents than the store")

    def _check_memory(self) -> None:
        """Compare the last fifth of the time with the second; in the first, caches fill."""
        fifth = max(1, len(self.memory) // 5)
        before = median(size for _, size in self.memory[fifth : 2 * fifth] or self.memory)
        grown = median(size for _, size in self.memory[-fifth:]) - before
        print(f"anonymous memory: {before / 2**20:.1f} MiB in the second fifth, {grown / 2**20:+.1f} MiB in the last")
        is_long = self.until - self.began >= LONG_S
        if grown > (MOST_GROWTH if is_long else QUOTA_MIB << 20):
            self.problems.append(f"anonymous memory grew by {grown / 2**20:.1f} MiB")

    def _check_left_over(self) -> None:
        with ready(self.node.kv_port, *ALL) as raw:
            for _ in range(600):
                found = statistics(raw)
                left = int(found["curr_connections"]) - 1, int(found["upriver_streams"]), int(found["ep_dcp_count"])
                if not any(left):
                    return
                time.sleep(0.1)
        self.problems.append(f"left over: {left[0]} connections, {left[1]} streams, {left[2]} names")


def statistics(raw: Raw) -> dict[str, str]:
    raw.send(session.Stat())
    found: dict[str, str] = {}
    while (got := raw.receive()).key:
        found[got.key.decode()] = got.value.decode()
    return found


def high_seqnos(port: int) -> dict[int, int]:
    with ready(port, *ALL) as raw:
        value = raw.ask(cluster.GetAllVbSeqnos()).value
    pairs = [value[at : at + 10] for at in range(0, len(value), 10)]
    return {int.from_bytes(pair[:2], "big"): int.from_bytes(pair[2:], "big") for pair in pairs}


def contents_by_key(port: int) -> Contents:
    """Every vbucket's documents, read with GETs."""
    found: Contents = {vbucket: {} for vbucket in range(VBUCKETS)}
    keys = [b"\0%s-%d" % (kind, number) for kind in (b"key", b"count") for number in range(KEYS)]
    with ready(port, *ALL) as raw:
        for vbucket in range(VBUCKETS):
            raw.send(*[kv.Get(key, vbucket=vbucket) for key in keys])
            for key in keys:
                got = raw.receive()
                if got.specific == 0:
                    found[vbucket][key] = got.value
    return found


def soak(seconds: float) -> list[str]:
    """Run the soak; returns what went wrong."""
    with testing.node(vbuckets=VBUCKETS, lazy=True, quota_mib=QUOTA_MIB) as node:
        run = Soak(node, seconds)
        run.run()
        print(run.progress())
        run.check()
        print(dict(run.lives))
    return run.problems


if __name__ == "__main__":
    found = soak(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
    print("\n".join(found) or "nothing went wrong")
    sys.exit(bool(found))
