"""The manager's file: the newest state of the cluster, written whole, by one manager at a time.

Every state is on a branch, and a branch belongs to one process. As soon as the process finds something in the file that
it has not written itself (another manager's state, or a restored copy), it begins a new branch. So two managers never
write different states under one version (``Version``).
"""

from __future__ import annotations

import fcntl
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upriver.cluster.plan import ClusterState
from upriver.errors import ConfigError
from upriver.files import replace_file

STATE_FILE = "cluster.json"


class StateFile:
    """``cluster.json`` in a directory, and the lock beside it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / STATE_FILE
        self._mutex = threading.RLock()
        self._held = 0
        self.forget()

    def forget(self) -> None:
        """Start as a new process would, without a branch."""
        self._branch = self._written = ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock, so that no other manager in this process or another changes anything meanwhile."""
        with self._mutex:
            if self._held:
                yield
                return
            with self.locked():
                self._held += 1
                try:
                    yield
                finally:
                    self._held -= 1

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self) -> str:
        """The text of the file; empty if there is none."""
        try:
            return self.path.read_text()
        except FileNotFoundError:
            return ""

    def write(self, text: str) -> None:
        replace_file(self.path, text)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def load(self) -> ClusterState:
        text = self.read()
        if not text:
            raise ConfigError(f"no cluster in {self.path.parent}: run `upriver cluster start` first")
        try:
            return ClusterState.from_json(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"{self.path} is damaged: {error}") from error

    def save(self, state: ClusterState) -> ClusterState:
        """Write a state and return it as written: a new revision is on this process's branch."""
        found = self.read()
        before = self.load() if found else None
        is_ours = found == self._written
        if before is None or before.lineage.version != state.lineage.version:
            if not is_ours or before is None or before.branch != self._branch:
                self._branch = secrets.token_hex(8)
            state, is_ours = state.on_branch(self._branch, before), True
        text = json.dumps(state.to_json())
        self.write(text)
        self._written = text if is_ours else ""
        return state
