"""Checkpoints: positions kept between two runs of a reader, in a file, an SQLite database or a bucket.

A store keeps one value per name. Saving replaces it atomically, so a crash leaves the old or the new value. A damaged
checkpoint raises ``CorruptCheckpoint``; after ``delete()``, a reader begins at the beginning.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from upriver.client.positions import Positions
from upriver.errors import CheckpointError, CorruptCheckpoint, KeyNotFound
from upriver.files import replace_file

if TYPE_CHECKING:
    from upriver.client.blocking import KeyValue


class CheckpointStore(Protocol):
    """What a feed needs from a store; any class with these methods will do."""

    def load(self) -> Positions | None:
        """The saved positions; None if there are none."""

    def save(self, positions: Positions) -> None:
        """Replace the saved positions atomically: a crash leaves the old or the new ones."""

    def delete(self) -> None:
        """Forget the positions: the next reader begins at the beginning."""


def parse(text: str | bytes, where: str) -> Positions:
    """The positions in a checkpoint's JSON."""
    try:
        return Positions.from_json(json.loads(text))
    except (ValueError, UnicodeDecodeError) as error:
        what = f"{where} is not readable as a checkpoint ({error}); delete it to read everything from the beginning"
        raise CorruptCheckpoint(what) from error
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{where}: {error}") from error


def read_file(path: Path) -> bytes | None:
    """The content of a file; None if there is no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def write_file(path: Path, text: str) -> None:
    """Replace the content of a file."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise CheckpointError(f"cannot save {path}: {error}") from error


class FileCheckpoint:
    """One JSON file, replaced atomically and synced to disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def load(self) -> Positions | None:
        """The saved positions; None if there is no file."""
        found = read_file(self.path)
        return None if found is None else parse(found, str(self.path))

    def save(self, positions: Positions, beside: Mapping[str, object] | None = None) -> None:
        """Replace the file; ``beside`` is stored in the same JSON object, for other readers of the file."""
        write_file(self.path, json.dumps({**positions.to_json(), **(beside or {})}, separators=(",", ":")))

    def delete(self) -> None:
        """Forget the positions: the next reader begins at the beginning."""
        self.path.unlink(missing_ok=True)


class SqliteCheckpoint:
    """A row of the table ``upriver_checkpoints`` of an SQLite database.

    With ``connection``, saving is part of the caller's transactions: commit the positions together with the results of
    the changes, and neither gets ahead of the other.
    """

    def __init__(
        self, path: str | Path = "", name: str = "default", connection: sqlite3.Connection | None = None
    ) -> None:
        self.name = name
        self._path, self._connection = str(path), connection
        self._do("CREATE TABLE IF NOT EXISTS upriver_checkpoints (name TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def load(self) -> Positions | None:
        """The saved positions; None if there are none."""
        rows = self._do("SELECT value FROM upriver_checkpoints WHERE name = ?", self.name)
        return parse(rows[0][0], f"checkpoint {self.name!r} in {self._path or 'SQLite'}") if rows else None

    def save(self, positions: Positions) -> None:
        """Replace the row, in the caller's transaction if it gave a connection."""
        value = json.dumps(positions.to_json(), separators=(",", ":"))
        self._do("INSERT OR REPLACE INTO upriver_checkpoints VALUES (?, ?)", self.name, value)

    def delete(self) -> None:
        """Forget the positions: the next reader begins at the beginning."""
        self._do("DELETE FROM upriver_checkpoints WHERE name = ?", self.name)

    def _do(self, statement: str, *values: str) -> list[Any]:
        try:
            if self._connection is not None:
                return self._connection.execute(statement, values).fetchall()
            with closing(sqlite3.connect(self._path, timeout=30)) as own, own:
                return own.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise CorruptCheckpoint(f"{self._path}: {error}; delete the file to start again") from error


class BucketCheckpoint:
    """A document of a bucket, in the default collection or in another one: ``BucketCheckpoint(db.collection("a.b"))``.

    It may be the bucket that the feed reads. Then the feed also yields the checkpoints as changes, and the reader
    should not save again because of them. The database must be a blocking one, even for asyncio feeds; use it for
    nothing else there.
    """

    def __init__(self, documents: KeyValue, name: str = "default") -> None:
        self.key = f"_upriver:checkpoint:{name}"
        self._documents = documents

    def load(self) -> Positions | None:
        """The saved positions; None if there are none."""
        try:
            found = self._documents.get(self.key)
        except KeyNotFound:
            return None
        return parse(found.value, f"document {self.key!r}")

    def save(self, positions: Positions) -> None:
        """Replace the document."""
        self._documents.set(self.key, json.dumps(positions.to_json(), separators=(",", ":")).encode())

    def delete(self) -> None:
        """Forget the positions: the next reader begins at the beginning."""
        with suppress(KeyNotFound):
            self._documents.delete(self.key)
