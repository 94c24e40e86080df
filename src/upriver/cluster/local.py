"""A cluster of processes on this machine, for demos, tests and ``upriver cluster start``.

>>> with local_cluster(nodes=2, replicas=1, vbuckets=16) as cluster:  # doctest: +SKIP
...     connect(cluster.connection_string)
...     cluster.nodes[0].kill()
...     cluster.fail_over(0)
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from upriver.cluster.collections import answering
from upriver.cluster.manager import STATE_FILE, Manager
from upriver.cluster.plan import ClusterState, Member
from upriver.errors import ConfigError
from upriver.node.process import MemberOptions, RunningNode, ServeOptions

StartProcess = Callable[[Path, ServeOptions, int], RunningNode]


class LocalNode:
    """One process of the cluster, which keeps its data and ports over restarts."""

    def __init__(self, cluster: LocalCluster, data: Path, options: ServeOptions, kv_port: int = 0) -> None:
        self._cluster = cluster
        self._options: ServeOptions = {**options, "member": True}
        self.process = cluster.start_process(data, self._options, kv_port)
        self.is_running = True

    @property
    def member(self) -> Member:
        kv_port = self._options.get("advertised_kv_port") or self.process.kv_port
        return Member("127.0.0.1", kv_port, self.process.http_port)

    def kill(self) -> None:
        """SIGKILL: everything that was not on disk is lost."""
        self.is_running = False
        self.process.kill()

    def stop(self) -> None:
        """SIGTERM, as an operator would."""
        self.is_running = False
        self.process.stop()

    def pause(self) -> None:
        """SIGSTOP: alive, connected, and silent."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Start the process, again if it runs, and give it the current map."""
        self.start()
        self._cluster.manager.watch()

    def start(self) -> None:
        if self.is_running:
            self.stop()
        self.process.start()
        self.is_running = True

    def forget(self) -> None:
        """Note that the process has died."""
        self.is_running = False
        self.process.kill()

    @property
    def has_died(self) -> bool:
        """Whether the process ended without being told to."""
        return self.is_running and self.process.exit_code is not None


class LocalCluster:
    """The nodes, and the manager that owns their map. ``start_process`` starts a node in a directory."""

    def __init__(
        self, directory: Path, *, start_process: StartProcess = RunningNode, **options: Unpack[MemberOptions]
    ) -> None:
        self.directory = directory
        self.start_process = start_process
        self._shared = options
        self._options: ServeOptions
        self.manager = Manager(directory, options.get("username", ""), options.get("password", ""))
        self.nodes: list[LocalNode] = []

    def create(self, nodes: int, replicas: int, vbuckets: int, bucket: str) -> None:
        """Start the nodes and make a cluster of them."""
        if replicas >= nodes:
            raise ConfigError(f"{replicas} replicas need at least {replicas + 1} nodes, not {nodes}")
        self._options = {**self._shared, "vbuckets": vbuckets, "bucket": bucket}
        with ThreadPoolExecutor(nodes) as pool:  # each takes a second or two to start
            paths = [self._data(number) for number in range(nodes)]
            self.nodes += pool.map(lambda path: LocalNode(self, path, self._options), paths)
        self.manager.create(bucket, [node.member for node in self.nodes], vbuckets, replicas)

    def resume(self) -> None:
        """Start the nodes of a cluster that was here before."""
        state = self.manager.state
        self._options = {**self._shared, "vbuckets": len(state.owners), "bucket": state.bucket}
        for number, member in enumerate(state.members):
            options: ServeOptions = {**self._options, "http_port": member.mgmt}
            self.nodes.append(LocalNode(self, self._data(number), options, member.kv))
        self.manager.watch()

    def _data(self, number: int) -> Path:
        return self.directory / f"node-{number}"

    def start_node(self) -> LocalNode:
        """Start one more process; ``add`` makes it a member."""
        node = LocalNode(self, self._data(len(self.nodes)), self._options)
        self.nodes.append(node)
        return node

    @property
    def state(self) -> ClusterState:
        return self.manager.state

    @property
    def connection_string(self) -> str:
        return "couchbase://" + ",".join(str(member) for member in self.state.members)

    def add(self) -> LocalNode:
        """Start a node and make it a member; ``rebalance`` gives it something to do."""
        node = self.start_node()
        self.manager.add(node.member)
        return node

    def fail_over(self, number: int, *, force: bool = False) -> None:
        """Promote the replicas of a node."""
        self.manager.fail_over(str(number), force=force)

    def rebalance(self) -> int:
        """Spread the vbuckets evenly over the nodes that answer; how many moved."""
        return self.manager.rebalance()

    def sync(self, timeout_s: float = 60.0) -> None:
        """Wait until every replica has everything."""
        self.manager.sync(timeout_s)

    def close(self) -> None:
        for node in self.nodes:
            if node.is_running:
                node.resume()  # a paused process gets no SIGTERM
                node.stop()


@contextmanager
def local_cluster(
    nodes: int = 2, replicas: int = 1, vbuckets: int = 64, *, bucket: str = "default", data: Path | None = None,
    start_process: StartProcess = RunningNode, **options: Unpack[MemberOptions],
) -> Iterator[LocalCluster]:  # fmt: skip
    """A cluster of ``upriver serve`` processes with these options (such as ``lazy=True``); stopped at the end.

    A ``data`` directory that has a cluster in it already is started again as it was.
    """
    with tempfile.TemporaryDirectory(prefix="upriver-") as temporary:
        cluster = LocalCluster(data or Path(temporary), start_process=start_process, **options)
        try:
            if (cluster.directory / STATE_FILE).exists():
                cluster.resume()
            else:
                cluster.create(nodes, replicas, vbuckets, bucket)
            with answering(lambda: cluster.manager.answer_proposals()):  # a test may give it another manager
                yield cluster
        finally:
            cluster.close()
