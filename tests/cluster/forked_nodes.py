"""Nodes that start at once: forked from a process that has everything imported and compiled already.

They are processes of their own like any node, to be killed and stopped as such; only the first second of their lives
is left out, which a test that starts hundreds of them would otherwise spend on nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from upriver.errors import UpriverError
from upriver.testing import RunningNode, ServeOptions

_PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]


class Nursery:
    """The process that nodes are forked from. It and its nodes end when this process does."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.cluster.forked_nodes", str(theirs.fileno())]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process that forks has no other threads
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
        theirs.close()
        self._lock = threading.Lock()

    def fork(self, arguments: list[str], output: int, log: int) -> int:
        """A new process that runs ``upriver`` with these arguments; its pid."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(arguments).encode()], [output, log])
            answer = self._socket.recv(64)
        if not answer:
            raise UpriverError("the process that nodes are forked from has died")
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)


class ForkedProcess:
    """The part of ``Popen`` that a ``RunningNode`` needs, for a process that is not our child."""

    def __init__(self, pid: int, stdout: BinaryIO) -> None:
        self.pid, self.stdout = pid, stdout
        self._signal: int | None = None
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None while it runs. Only its parent gets the exit code, so 0 stands for any except a signal of ours."""
        if not select.select([self._handle], [], [], 0)[0]:
            return None
        return -self._signal if self._signal == signal.SIGKILL else 0

    def send_signal(self, number: int) -> None:
        self._signal = number
        signal.pidfd_send_signal(self._handle, number)

    def wait(self, timeout: float) -> int:
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"node {self.pid}", timeout)
        code = self.poll()
        os.close(self._handle)
        return code or 0


class ForkedNode(RunningNode):
    """A node that is forked from a nursery."""

    def __init__(self, nursery: Nursery, data: Path, options: ServeOptions, kv_port: int = 0) -> None:
        self._nursery = nursery
        super().__init__(data, options, kv_port)

    def start(self) -> None:
        ours, theirs = os.pipe()
        with self.log.open("a") as log:
            pid = self._nursery.fork(self.arguments(), theirs, log.fileno())
        os.close(theirs)
        self._process = ForkedProcess(pid, os.fdopen(ours, "rb", buffering=0))  # type: ignore[assignment]
        self._wait_until_ready()


def _serve_forks(requests: socket.socket) -> None:
    """Import everything that a node imports, then fork on request."""
    import_module("uvloop")
    import_module("upriver.cli.admin.serve")
    import_module("upriver.node.server")
    from upriver.cli import cli
    from upriver.node import warmup

    warmup.warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        message, handles, _, _ = socket.recv_fds(requests, 1 << 16, 2)
        if not message:
            os._exit(0)
        if (pid := os.fork()) == 0:
            requests.close()
            _run(cli, json.loads(message), *handles)
        for handle in handles:
            os.close(handle)
        requests.send(str(pid).encode())


def _run(cli: Any, arguments: list[str], output: int, log: int) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(log, 2)
        cli.main(arguments, prog_name="upriver", standalone_mode=False)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
