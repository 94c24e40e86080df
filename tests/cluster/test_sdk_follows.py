"""The official Couchbase SDK, unmodified, follows failovers and moves of a cluster, with durable writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from upriver.cluster import local_cluster

pytest.importorskip("couchbase", reason="the official SDK is not installed")


def test_the_sdk_follows_a_failover_and_a_rebalance() -> None:
    with local_cluster(3, 1, 16, lazy=True, username="ann", password="secret") as cluster:
        script = str(Path(__file__).with_name("sdk_follows.py"))
        process = subprocess.Popen(
            [sys.executable, script, cluster.connection_string], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "phase 0 done\n", process.stderr.read()
            cluster.sync()
            cluster.nodes[1].kill()
            cluster.fail_over(1)
            cluster.sync()
            print("go on", file=process.stdin, flush=True)
            assert process.stdout.readline() == "phase 1 done\n", process.stderr.read()
            cluster.nodes[1].restart()
            assert cluster.rebalance() > 0
            cluster.sync()
            print("go on", file=process.stdin, flush=True)
            assert process.stdout.readline() == "phase 2 done\n", process.stderr.read()
            print("stop", file=process.stdin, flush=True)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
