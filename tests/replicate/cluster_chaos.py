"""A cluster under fire: random kills, pauses, cuts, failovers, moves and restarts while clients write and read.

``python tests/replicate/chaos.py --seed 7 --minutes 1`` prints what it did and what the checker found; the same seed
makes the same schedule again. The checker knows every write that was acknowledged, see ``chaos_checker``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from chaos_checker import Findings, check
from chaos_clients import Reader, Writer

from upriver.errors import UpriverError
from upriver.replicate.local import LocalCluster, local_cluster
from upriver.replicate.manager import Manager, UnsafeFailover
from upriver.replicate.plan import Move

NODES, VBUCKETS, WRITERS = 3, 8, 3


class Chaos:
    """One run: a schedule that the seed decides, on a cluster of three processes."""

    def __init__(self, seed: int, cluster: LocalCluster, say: Callable[[str], None]) -> None:
        self.random = random.Random(seed)
        self.cluster = cluster
        self.say = say
        self.began = time.monotonic()
        self.steps: list[str] = []

    def run(self, seconds: float) -> None:
        """Go on for so long; every step leaves the cluster able to work, though not at rest."""
        while time.monotonic() - self.began < seconds:
            step = self.random.choice(STEPS)
            victim = self.random.randrange(NODES)
            time.sleep(self.random.uniform(0.1, 0.6))
            self.steps.append(f"{step.__name__.lstrip('_')}({victim})")
            self.say(f"{time.monotonic() - self.began:5.1f} s  {self.steps[-1]}")
            step(self, victim)
            self.cluster.manager.watch()

    def heal(self) -> None:
        for node in self.cluster.nodes:
            if not node.is_running:
                node.start()
        self.cluster.sync(60.0)

    # ------------------------------------------------------------------------------------------ steps

    def _copies_are_complete(self) -> bool:
        """A copy may be taken away only while there is another: what two nodes forget, nobody knows any more."""
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
            self._pause_for(0.2, 1.0)
            self.cluster.nodes[victim].restart()

    def crash_and_come_back(self, victim: int) -> None:
        if self._copies_are_complete():
            self.cluster.nodes[victim].kill()
            self._pause_for(0.0, 0.3)
            self.cluster.nodes[victim].restart()

    def restart(self, victim: int) -> None:
        if self._copies_are_complete():
            self.cluster.nodes[victim].restart()

    def freeze(self, victim: int) -> None:
        self.cluster.nodes[victim].pause()
        self._pause_for(0.2, 1.5)
        self.cluster.nodes[victim].resume()

    def freeze_and_fail_over(self, victim: int) -> None:
        """The frozen node wakes up and still believes in its old map."""
        if self._copies_are_complete():
            self.cluster.nodes[victim].pause()
            self._fail_over(victim)
            self._pause_for(0.0, 0.5)
            self.cluster.nodes[victim].resume()
            self._pause_for(0.0, 0.3)

    def lag_crash_and_fail_over(self, victim: int) -> None:
        """The replicas hear nothing for a while, so that what is not durable dies with the node: history is lost."""
        if self._copies_are_complete():
            source = self.cluster.nodes[victim].member
            for node in self.cluster.nodes:
                name = f"replication:{source}->{node.member}:default"
                self._fault(victim, "stall", {"name": name, "seconds": 20})
            self._pause_for(0.5, 1.5)
            self.cluster.nodes[victim].kill()
            self._fail_over(victim)
            self.cluster.nodes[victim].restart()

    def cut(self, victim: int) -> None:
        """Every stream of the node is cut, those of replicas and of readers."""
        self._fault(victim, "drop-connection", {})

    def _fault(self, victim: int, name: str, arguments: dict[str, object]) -> None:
        port = self.cluster.nodes[victim].process.http_port
        body = json.dumps(arguments).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/upriver/faults/{name}", body, headers)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            pass

    def move(self, victim: int) -> None:
        vb = self.random.randrange(VBUCKETS)
        source = self.cluster.state.owners[vb][0]
        if source not in (victim, -1):
            self._try(lambda: self.cluster.manager.move_all([Move(vb, source, victim)], timeout_s=10.0))

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
    Chaos.lag_crash_and_fail_over, Chaos.lag_crash_and_fail_over, Chaos.cut, Chaos.move, Chaos.move, Chaos.rebalance,
)  # fmt: skip


def run(seed: int, seconds: float, say: Callable[[str], None] = lambda text: None) -> Findings:
    """The whole run, from an empty cluster to the verdict."""
    with tempfile.TemporaryDirectory(prefix="upriver-chaos-") as directory:
        with local_cluster(
            NODES, 1, VBUCKETS, data=Path(directory), lazy=True, enable_faults=True
        ) as cluster:
            cluster.manager = Manager(Path(directory), timeout_s=2.0)
            writers = [Writer(cluster.connection_string, seed, number) for number in range(WRITERS)]
            reader = Reader(cluster.connection_string)
            chaos = Chaos(seed, cluster, say)
            for each in (*writers, reader):
                each.start()
            try:
                chaos.run(seconds)
            finally:
                for writer in writers:
                    writer.stop()
            say("healing")
            chaos.heal()
            reader.catch_up()
            state = cluster.state
        return check(Path(directory), state, writers, reader, chaos.steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.25)
    given = parser.parse_args()
    findings = run(given.seed, 60 * given.minutes, print)
    print(json.dumps(findings.summary(), indent=2))
    for problem in findings.problems[:20]:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
