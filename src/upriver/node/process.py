"""A node process, as the program that started it sees it: where it listens, and how to stop, kill and restart it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypedDict

from upriver.errors import UpriverError

_PASSWORD = "UPRIVER_PASSWORD"  # noqa: S105  # the variable's name
START_S = 600.0  # the first start on a machine compiles kernels, perhaps beside other work


class MemberOptions(TypedDict, total=False):
    """Options of ``upriver serve`` that the members of a cluster share, whatever its bucket."""

    host: str
    advertised_kv_port: int
    http_port: int
    tls_port: int
    certificate: Path | str
    private_key: Path | str
    client_ca: Path | str
    username: str
    password: str
    no_plain: bool
    default_bucket: str
    member: bool
    enable_faults: bool
    enable_flush: bool
    quota_mib: int
    lazy: bool
    log_level: str


class ServeOptions(MemberOptions, total=False):
    """Options of ``upriver serve``, except for its data directory and its KV port."""

    bucket: str
    vbuckets: int


class RunningNode:
    """A node process. ``restart`` keeps its data and its ports."""

    def __init__(self, data: Path, options: ServeOptions, kv_port: int = 0) -> None:
        self.data = data
        self._options = options
        self.kv_port = kv_port
        self.http_port = options.get("http_port", 0)
        self.log = data.parent / f"{data.name}.log"
        data.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def connection_string(self) -> str:
        return f"couchbase://127.0.0.1:{self.kv_port}"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, if the process ended by itself; None while it runs, and after ``stop`` or ``kill``."""
        return self._process.poll() if self._process is not None else None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise UpriverError("the node is not running")
        return self._process

    def start(self) -> None:
        """Start the process, and return once it serves."""
        command = [sys.executable, "-c", "from upriver.cli import main; main()", *self.arguments()]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdout=subprocess.PIPE, stderr=log, bufsize=0, env=self._environment()
            )
        self._wait_until_ready()

    def arguments(self) -> list[str]:
        """The command line of the node, without the password: everybody on the machine can read it."""
        ports = {"kv_port": self.kv_port, "http_port": self.http_port}
        found = ["serve", "--data", str(self.data)]
        for name, value in {**self._options, **ports}.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                found.append(flag)
            elif name != "password" and value is not False and value is not None:
                found += [flag, str(value)]
        return found

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != _PASSWORD}
        password = self._options.get("password")
        return {**inherited, _PASSWORD: password} if password else inherited

    def _wait_until_ready(self) -> None:
        self.kv_port = self._port_of("ready couchbase:")
        self.http_port = self._port_of("management http:")

    def _port_of(self, announcement: str) -> int:
        line = self._next_line()
        if not line.startswith(announcement):
            self.kill()
            raise UpriverError(f"the node did not start: {self.log.read_text()[-2000:]}")
        return int(line.rsplit(":", 1)[1])

    def _next_line(self) -> str:
        output = self._running().stdout
        assert output is not None
        deadline = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(timeout=1.0):
                    return output.readline().decode()
        return ""

    def stop(self) -> int:
        """SIGTERM, as an operator would; returns the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """SIGKILL: what is not on disk is lost."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._running(), None
        process.send_signal(number)
        code = process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()
        return code

    def restart(self, *, kill: bool = False) -> None:
        """Stop (or kill) it and start it again with the same data on the same ports."""
        if self._process is not None:
            _ = self.kill() if kill else self.stop()
        self.start()
