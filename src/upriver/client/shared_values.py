"""A JSON object that several processes change, one at a time: in a file, an SQLite database, or a document.

``update`` calls a function with the old value and stores what it returns. If it raises, or returns the old value
itself, nothing changes. It is called again if another process was quicker.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from upriver.client.checkpoints import read_file, write_file
from upriver.errors import CheckpointError, CorruptCheckpoint, KeyExists, KeyNotFound

if TYPE_CHECKING:
    from upriver.client.blocking import KeyValue

Value = dict[str, Any]
Step = Callable[[Value], Value]


class SharedValue(Protocol):
    """A JSON object that several processes change, one at a time; empty at first."""

    def update(self, step: Step) -> Value:
        """Replace the value by ``step(value)``; returns the new value."""


def _loaded(text: str | bytes, where: str) -> Value:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CorruptCheckpoint(f"{where} is not JSON ({error}); delete it to start the group again") from error
    if not isinstance(found, dict) or not _are_members(found.get("members", {})):
        raise CorruptCheckpoint(f"{where} is not a group of upriver; delete it to start the group again")
    return found


def _are_members(found: Any) -> bool:
    kinds: dict[str, tuple[type, ...]] = {"term": (str,), "beats": (int,), "ttl_s": (int, float), "held": (list,)}
    return isinstance(found, dict) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in kinds.items())
        for entry in found.values()
    )


class SharedFile:
    """A file on a file system that all members share; a lock on a second file guards it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def update(self, step: Step) -> Value:
        """Replace the value by ``step(value)``, under a lock; returns the new value."""
        try:
            lock = self.path.with_name(self.path.name + ".lock").open("w")
        except OSError as error:
            raise CheckpointError(f"cannot lock {self.path}: {error}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = read_file(self.path)
            old = {} if found is None else _loaded(found, str(self.path))
            if (new := step(old)) is not old:
                write_file(self.path, json.dumps(new))
            return new


class SharedRow:
    """A row of the table ``upriver_groups`` of an SQLite database."""

    def __init__(self, path: str | Path, name: str = "default") -> None:
        self._path, self.name = str(path), name
        self._do(lambda sql: sql.execute(_CREATE))

    def update(self, step: Step) -> Value:
        """Replace the value by ``step(value)``, under a lock; returns the new value."""
        new: Value = {}

        def replace(sql: sqlite3.Connection) -> None:
            nonlocal new
            sql.execute("BEGIN IMMEDIATE")
            row = sql.execute("SELECT value FROM upriver_groups WHERE name = ?", (self.name,)).fetchone()
            old = _loaded(row[0], f"group {self.name!r} in {self._path}") if row else {}
            if (new := step(old)) is not old:
                sql.execute("INSERT OR REPLACE INTO upriver_groups VALUES (?, ?)", (self.name, json.dumps(new)))
            sql.execute("COMMIT")

        self._do(replace)
        return new

    def _do(self, work: Callable[[sqlite3.Connection], Any]) -> None:
        try:
            with closing(sqlite3.connect(self._path, timeout=30, isolation_level=None)) as sql:
                work(sql)
        except sqlite3.OperationalError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise CorruptCheckpoint(f"{self._path}: {error}; delete the file to start again") from error


_CREATE = "CREATE TABLE IF NOT EXISTS upriver_groups (name TEXT PRIMARY KEY, value TEXT NOT NULL)"


class SharedDocument:
    """A document in a database or in one of its collections, changed with its CAS."""

    def __init__(self, documents: KeyValue, name: str = "default") -> None:
        self.key = f"_upriver:group:{name}"
        self._documents = documents

    def update(self, step: Step) -> Value:
        """Replace the value by ``step(value)``; returns the new value. ``step`` may be called again."""
        while True:
            try:
                found = self._documents.get(self.key)
                old, cas = _loaded(found.value, f"document {self.key!r}"), found.cas
            except KeyNotFound:
                old, cas = {}, 0
            if (new := step(old)) is old:
                return old
            try:
                self._write(json.dumps(new).encode(), cas)
            except (KeyExists, KeyNotFound):
                continue  # another process was quicker
            return new

    def _write(self, value: bytes, cas: int) -> None:
        if cas:
            self._documents.set(self.key, value, cas=cas)
        else:
            self._documents.add(self.key, value)
