"""A cluster under fire: random kills, pauses, cuts, failovers, moves and restarts while clients write and read.

``python tests/cluster/chaos.py --seed 7 --minutes 1`` prints what it did and what the checker found; the same seed
makes the same schedule again. The checker knows every write that was acknowledged, see ``chaos_checker``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.cluster.chaos_checker import Findings, check
from tests.cluster.chaos_clients import Reader, Writer
from tests.cluster.forked_nodes import ForkedNode, Nursery
from tests.cluster.unruly_proxy import ProxyLoop, UnrulyProxy
from upriver.cluster.local import LocalCluster, local_cluster
from upriver.cluster.manager import Manager, UnsafeFailover
from upriver.cluster.plan import Move
from upriver.errors import UpriverError
from upriver.testing import RunningNode

NODES, VBUCKETS, WRITERS = 3, 8, 3
PATIENCE_S = 0.7  # of the manager, with nodes that do not answer


@cache
def nursery() -> Nursery:
    """The nursery that all runs of this process share."""
    return Nursery()


class Chaos:
    """One run: a schedule that the seed decides, on a cluster of three processes with a proxy before each."""

    def __init__(
        self, seed: int, cluster: LocalCluster, proxies: list[UnrulyProxy], say: Callable[[str], None]
    ) -> None:
        self._seed = seed
        self.cluster, self.proxies, self.say = cluster, proxies, say
        self.began = time.monotonic()
        self.steps: list[str] = []
        self.random = random.Random(seed)

    def run(self, seconds: float) -> None:
        """Run steps for this long; each leaves the cluster able to work, though not at rest."""
        while time.monotonic() - self.began < seconds:
            self.random = random.Random(f"{self._seed}/{len(self.steps)}")  # independent of how earlier steps ended
            step = self.random.choice(STEPS)
            victim = self.random.randrange(NODES)
            self._pause_for(0.05, 0.3)
            self.steps.append(f"{step.__name__.lstrip('_')}({victim})")
            self.say(f"{time.monotonic() - self.began:5.1f} s  {self.steps[-1]}")
            step(self, victim)
            self.cluster.manager.watch()

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.calm()
        for node in self.cluster.nodes:
            if not node.is_running:
                node.start()
        self.cluster.sync(60.0)

    # ------------------------------------------------------------------------------------------ steps

    def _copies_are_complete(self) -> bool:
        """A copy may be lost only while there is another: a write that two nodes lose is lost for good."""
        try:
            self.cluster.sync(20.0)
        except UpriverError as error:
            self.say(f"         (not now: {error})")
            return False
        return True

    def crash_and_fail_over(self, victim: int) -> None:
        if self._copies_are_complete():
            self.cluster.nodes[victim].kill()
            self._fail_over(victim)
            self._pause_for(0.1, 0.5)
            self.cluster.nodes[victim].restart()

    def crash_and_come_back(self, victim: int) -> None:
        if self._copies_are_complete():
            self.cluster.nodes[victim].kill()
            self._pause_for(0.0, 0.2)
            self.cluster.nodes[victim].restart()

    def restart(self, victim: int) -> None:
        if self._copies_are_complete():
            self.cluster.nodes[victim].restart()

    def freeze(self, victim: int) -> None:
        self.cluster.nodes[victim].pause()
        self._pause_for(0.1, 0.8)
        self.cluster.nodes[victim].resume()

    def freeze_and_fail_over(self, victim: int) -> None:
        """The frozen node wakes up and still believes in its old map."""
        if self._copies_are_complete():
            self.cluster.nodes[victim].pause()
            self._fail_over(victim)
            self._pause_for(0.0, 0.3)
            self.cluster.nodes[victim].resume()
            self._pause_for(0.0, 0.3)

    def lag_crash_and_fail_over(self, victim: int) -> None:
        """The replicas receive nothing for a while, so writes that are not durable are lost with the node."""
        if self._copies_are_complete():
            source = self.cluster.nodes[victim].member
            for node in self.cluster.nodes:
                name = f"replication:{source}->{node.member}:default"
                self._fault(victim, "stall", {"name": name, "seconds": 20})
            self._pause_for(0.2, 0.8)
            self.cluster.nodes[victim].kill()
            self._fail_over(victim)
            self.cluster.nodes[victim].restart()

    def drop_streams(self, victim: int) -> None:
        """The node itself ends every stream, those of replicas and of readers."""
        self._fault(victim, "drop-connection", {})

    def cut(self, victim: int) -> None:
        """The network cuts every connection to the node, in the middle of any message."""
        self.proxies[victim].cut(self.random.choice((0, 500, 20_000)))
        self._pause_for(0.0, 0.3)

    def hold(self, victim: int) -> None:
        """Nothing reaches the node for a while; then everything does, or its connections break."""
        self.proxies[victim].hold(self.random.uniform(0.1, 0.8))
        cut = self.random.random() < 0.5
        self._pause_for(0.1, 0.8)
        if cut:
            self.proxies[victim].cut(0)

    def roughen(self, victim: int) -> None:
        """For a while, also during the next steps, everything to and from the node is late and in pieces."""
        most = self.random.choice((7, 100, 1500))
        self.proxies[victim].roughen(self.random.uniform(0.3, 1.5), self.random.uniform(0.0, 0.03), most)

    def _fault(self, victim: int, name: str, arguments: dict[str, object]) -> None:
        port = self.cluster.nodes[victim].process.http_port
        body = json.dumps(arguments).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/upriver/faults/{name}", body, headers)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            pass

    def move(self, victim: int) -> None:
        chosen = self.random.sample(range(VBUCKETS), self.random.randint(1, 3))
        owners = self.cluster.state.owners
        moves = [Move(vb, owners[vb][0], victim) for vb in chosen if owners[vb][0] not in (victim, -1)]
        if moves:
            self._try(lambda: self.cluster.manager.move_all(moves, timeout_s=10.0))

    def move_over_a_bad_wire(self, victim: int) -> None:
        self.roughen(victim)
        self.move(victim)
        self.proxies[victim].cut(20_000)
        self.move((victim + 1) % NODES)

    def rebalance(self, victim: int) -> None:
        self._try(self.cluster.rebalance)

    def _fail_over(self, victim: int) -> None:
        try:
            self.cluster.fail_over(victim)
        except UnsafeFailover as error:
            self.say(f"         (refused: {error})")

    def _try(self, command: Callable[[], object]) -> None:
        try:
            command()
        except UpriverError as error:
            self.say(f"         ({error})")

    def _pause_for(self, least: float, most: float) -> None:
        time.sleep(self.random.uniform(least, most))


STEPS = (
    Chaos.crash_and_fail_over, Chaos.crash_and_come_back, Chaos.restart, Chaos.freeze, Chaos.freeze_and_fail_over,
    Chaos.lag_crash_and_fail_over, Chaos.lag_crash_and_fail_over, Chaos.drop_streams, Chaos.cut, Chaos.hold,
    Chaos.roughen, Chaos.move, Chaos.move, Chaos.move_over_a_bad_wire, Chaos.rebalance,
)  # fmt: skip


@contextlib.contextmanager
def _cluster(seed: int, directory: Path) -> Iterator[tuple[LocalCluster, list[UnrulyProxy]]]:
    """Three nodes, which clients and the other nodes reach through a proxy."""
    loop = ProxyLoop()
    proxies = {f"node-{number}": UnrulyProxy(loop, f"{seed}/{number}") for number in range(NODES)}

    def start_process(data: Path, options: dict[str, Any], kv_port: int) -> RunningNode:
        proxy = proxies[data.name]
        options["advertised_kv_port"] = proxy.port
        forks = hasattr(os, "pidfd_open")  # elsewhere nodes take longer to start
        node = ForkedNode(nursery(), data, options, kv_port) if forks else RunningNode(data, options, kv_port)
        proxy.wire.target = node.kv_port
        return node

    options: dict[str, Any] = {
        "lazy": True, "enable_faults": True, "log_level": "info", "start_process": start_process
    }  # fmt: skip
    try:
        replicas = 2 if seed % 3 == 0 else 1
        with local_cluster(NODES, replicas, VBUCKETS, data=directory, **options) as cluster:
            cluster.manager = Manager(directory, timeout_s=PATIENCE_S)
            yield cluster, list(proxies.values())
    finally:
        loop.close()


def run(
    seed: int, seconds: float, say: Callable[[str], None] = lambda text: None, keep: Path | None = None
) -> Findings:
    """The whole run, from an empty cluster to the verdict; files and logs of a failed run are copied to ``keep``."""
    with tempfile.TemporaryDirectory(prefix="upriver-chaos-") as directory:
        with _cluster(seed, Path(directory)) as (cluster, proxies):
            writers = [Writer(cluster.connection_string, seed, number) for number in range(WRITERS)]
            readers = [Reader(cluster.connection_string), Reader(cluster.connection_string, stays_s=0.7)]
            chaos = Chaos(seed, cluster, proxies, say)
            for each in (*writers, *readers):
                each.start()
            try:
                chaos.run(seconds)
            finally:
                for writer in writers:
                    writer.stop()
            say("healing")
            chaos.heal()
            for reader in readers:
                reader.catch_up()
            state = cluster.state
        say("checking")
        findings = check(Path(directory), state, writers, readers, chaos.steps)
        if keep is not None and findings.problems:
            shutil.copytree(directory, keep / f"seed-{seed}", dirs_exist_ok=True)
        return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.25)
    parser.add_argument("--keep", type=Path, help="where files and logs of the nodes go if something is wrong")
    given = parser.parse_args()
    findings = run(given.seed, 60 * given.minutes, print, given.keep)
    print(json.dumps(findings.summary(), indent=2))
    for problem in findings.problems[:20]:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
