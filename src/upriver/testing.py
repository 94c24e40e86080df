"""A real node for tests of things that talk DCP: a process of its own, on a free port, in a directory of its own.

>>> with node(vbuckets=4) as n:  # doctest: +SKIP
...     connect(n.connection_string)
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upriver.errors import UpriverError

_PASSWORD = "UPRIVER_PASSWORD"  # noqa: S105  # the variable's name
START_S = 600.0  # the first start on a machine compiles kernels, and may not have the machine to itself


class RunningNode:
    """A node process. ``restart`` keeps its data and its port."""

    def __init__(self, data: Path, options: dict[str, Any], kv_port: int = 0) -> None:
        self.data = data
        self._options = options
        self.kv_port = kv_port
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
        """How the process ended; None while it runs, and after it was told to end."""
        return self._process.poll() if self._process is not None else None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise UpriverError("the node is not running")
        return self._process

    def start(self) -> None:
        command = [sys.executable, "-c", "from upriver.cli import main; main()", "serve", "--data", str(self.data)]
        command += ["--kv-port", str(self.kv_port), *_arguments(self._options)]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdout=subprocess.PIPE, stderr=log, bufsize=0, env=_environment(self._options)
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        self.kv_port = self._port_of("ready couchbase:")
        if self._options.get("http_port") is not None:  # the same again after a restart
            self._options["http_port"] = self._port_of("management http:")

    @property
    def http_port(self) -> int:
        return int(self._options.get("http_port") or 0)

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
        """SIGKILL: what was not on disk is gone."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._running(), None
        process.send_signal(number)
        code = process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()
        return code

    def restart(self, *, kill: bool = False) -> None:
        """Stop (or kill) it and start it again with the same data on the same port."""
        if self._process is not None:
            _ = self.kill() if kill else self.stop()
        self.start()


@contextmanager
def node(*, data: Path | None = None, **options: Any) -> Iterator[RunningNode]:
    """A node with the options of ``upriver serve``, such as ``http_port=0`` or ``lazy=True``; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="upriver-") as temporary:
        running = RunningNode(data or Path(temporary) / "data", options)
        try:
            yield running
        finally:
            if running.running:
                running.stop()


def _environment(options: dict[str, Any]) -> dict[str, str]:
    """With the password, which everybody on the machine could read on a command line."""
    inherited = {name: value for name, value in os.environ.items() if name != _PASSWORD}
    return inherited | ({_PASSWORD: options["password"]} if options.get("password") else {})


def _arguments(options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        if name == "password":
            continue
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif value is not False and value is not None:
            found += [flag, str(value)]
    return found
