"""The data directory of a node belongs to one process at a time, which must be able to write there.

The process that holds the lock file owns everything in the directory. The lock ends with the process, even in a crash.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from upriver.errors import DirectoryInUse, UpriverError

LOCK = "upriver.lock"


class DataDirectory:
    """A data directory that this process holds, from ``claim`` to ``release``."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, path: Path) -> DataDirectory:
        """Take the directory, creating it if need be; raises if another process has it or it is not writable."""
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
    """Write this process's id for a second process to show; this also proves that the disk is writable."""
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    number = lock.read(20)
    return f" (process {number})" if number.isdigit() else ""


def _unwritable(path: Path, error: OSError) -> UpriverError:
    return UpriverError(f"cannot write to the data directory {path}: {error.strerror or error}; see --data")
