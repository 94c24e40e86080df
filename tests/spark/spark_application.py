"""A Spark application in processes of its own, which can be killed, wholly or one executor at a time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MASTER = os.environ.get("CHAOS_MASTER", "local-cluster[2,1,1024]")


class Application:
    """``chaos_driver.py``, running one query at a time. It outlives the queries, since its start takes so long."""

    def __init__(self, log: Path, master: str = MASTER) -> None:
        self._log, self._master = log, master
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Application:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def run(self, connection: str, folder: Path) -> None:
        """Run the query of this folder, from its checkpoint if it has one; the one before it ends."""
        self._say(f"{connection} {folder}")

    def stop_query(self) -> None:
        self._say("stop")

    def kill(self) -> None:
        """Kill the driver and all its processes at once."""
        if self._process is not None:
            kill_session(self._process)
            self._process = None

    def kill_an_executor(self, rng: random.Random) -> bool:
        """Kill an executor; False if there was none."""
        mine = members(self._process.pid) if self._process else []
        executors = [pid for pid in mine if "CoarseGrainedExecutorBackend" in _command(pid)]
        if executors:
            _kill(rng.choice(executors))
        return bool(executors)

    def assert_alive(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self.tail()

    def tail(self) -> str:
        return self._log.read_text()[-4000:]

    def _say(self, line: str) -> None:
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("done"):
                return
        raise AssertionError(self.tail())

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.spark.chaos_driver", self._master],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True,
                cwd=ROOT,
            )  # fmt: skip


def kill_session(process: subprocess.Popen[Any]) -> None:
    """``kill -9`` for a process that began a session, and for everything below it, until nothing is left.

    Python workers are in process groups of their own, and one that is forked meanwhile would outlive its parents.
    """
    while found := members(process.pid):
        for pid in found:
            _kill(pid)
        time.sleep(0.01)
    process.wait()


def members(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, mine, *_ = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(mine) == session and state != "Z":
                found.append(int(entry.name))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
