"""Servers of Spark's own, in processes that end with the test: a standalone cluster, Spark Connect."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyspark

from tests.spark.spark_application import kill_session
from tests.spark.spark_world import wait_until

HOME = Path(pyspark.__file__).parent


@contextlib.contextmanager
def connect_server(env: Mapping[str, str], log: Path) -> Iterator[str]:
    """A server of Spark Connect, by its address; clients try again until it answers."""
    port = free_port()
    command = ["spark-submit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master",
               "local[2]", "--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.ui.enabled=false",
               "spark-internal"]  # fmt: skip
    with server(command, env, log) as process:
        wait_until(lambda: listens(port, process, log))
        yield f"sc://127.0.0.1:{port}"


@contextlib.contextmanager
def standalone_cluster(env: Mapping[str, str], log: Path) -> Iterator[str]:
    """A master and a worker, by the master's address."""
    port = free_port()
    here = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    address = f"spark://127.0.0.1:{port}"
    rest = ["--cores", "1", "--memory", "1g", "--webui-port", "0", address]
    with server(["spark-class", "org.apache.spark.deploy.master.Master", *here], env, log) as master:
        wait_until(lambda: listens(port, master, log))
        with server(["spark-class", "org.apache.spark.deploy.worker.Worker", *rest], env, log):
            yield address


@contextlib.contextmanager
def server(command: list[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One of Spark's scripts and what it starts; told to end, and if that takes too long, made to."""
    with log.open("ab") as out:
        arguments = [str(HOME / "bin" / command[0]), *command[1:]]
        process = subprocess.Popen(arguments, env=dict(env), stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)
        kill_session(process)


def listens(port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A free port outside the system's ephemeral range, so that it is still free when a JVM has started."""
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, max(handed_out, 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
