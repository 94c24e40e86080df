"""The data directory of a node: one process at a time, and only where it can write.

The process that holds the lock file owns everything below it. The lock ends with the process, also after a crash.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from upriver.errors import DirectoryInUse, UpriverError

LOCK = "upriver.lock"


class DataDirectory:
    """Made by ``claim``; ``release`` lets the next process have it."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, path: Path) -> DataDirectory:
        """Make the directory if need be and take it; raises if another process has it or it cannot be written."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / LOCK).open("a+")
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sign(lock)
        except BlockingIOError as error:
            holder = _holder(lock)
            lock.close()
            raise DirectoryInUse(f"{path} is in use by another node{holder}; stop it, or change --data") from error
        except OSError as error:
            lock.close()
            raise _unwritable(path, error) from error
        return cls(path, lock)

    def release(self) -> None:
        self._lock.close()


def _sign(lock: IO[str]) -> None:
    """Write our process id, for the message of a second process; that also shows that the disk is writable."""
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    number = lock.read(20)
    return f" (process {number})" if number.isdigit() else ""


def _unwritable(path: Path, error: OSError) -> UpriverError:
    return UpriverError(f"cannot write to the data directory {path}: {error.strerror or error}; see --data")
