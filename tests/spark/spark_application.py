"""A Spark application in processes of its own, which can be killed, wholly or one executor at a time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
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
        """The driver with all that belongs to it, at once."""
        if self._process is not None:
            for pid in [self._process.pid, *descendants(self._process.pid)]:
                _kill(pid)
            self._process.wait()
            self._process = None

    def kill_an_executor(self, rng: random.Random) -> bool:
        """Whether there was one."""
        below = descendants(self._process.pid) if self._process else []
        executors = [pid for pid in below if "CoarseGrainedExecutorBackend" in _command(pid)]
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
                [sys.executable, str(HERE / "chaos_driver.py"), self._master],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True,
            )  # fmt: skip


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        todo += (below := children.get(todo.pop(), []))
        found += below
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
