"""A careful reader: keeps a log of changes in SQLite, committed together with the position."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from upriver.client._feed.blocking_feed import ChangeFeed
from upriver.client.checkpoints import SqliteCheckpoint

_DOCUMENTS = ("mutation", "deletion", "expiration")


class Table:
    """A log by vbucket and seqno; documents are computed from it."""

    def __init__(self, path: Path) -> None:
        self.sql = sqlite3.connect(path, isolation_level=None)
        self.sql.execute("PRAGMA synchronous = OFF")  # only processes die here, not the machine
        self.sql.execute("CREATE TABLE IF NOT EXISTS changes (vb, seqno, vbuuid, key, value, PRIMARY KEY (vb, seqno))")
        self.checkpoint = SqliteCheckpoint(connection=self.sql)
        self.rollbacks: list[tuple[int, int]] = []

    def take(self, batch: Any, feed: ChangeFeed) -> None:
        """Apply a batch and save the position, both or neither."""
        self.sql.execute("BEGIN")
        self.apply(batch.to_pylist())
        feed.confirm()
        self.sql.execute("COMMIT")

    def apply(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["event"] == "rollback":
                self.rollbacks.append((row["vbucket"], row["seqno"]))
                self.forget(row["vbucket"], row["seqno"])
            elif row["event"] in _DOCUMENTS:
                values = row["vbucket"], row["seqno"], row["vbuuid"], row["key"], row["value"]
                self.sql.execute("INSERT OR REPLACE INTO changes VALUES (?, ?, ?, ?, ?)", values)

    def forget(self, vb: int, above: int) -> None:
        self.sql.execute("DELETE FROM changes WHERE vb = ? AND seqno > ?", (vb, above))

    def forget_everything(self) -> None:
        self.sql.execute("DELETE FROM changes")

    def documents(self) -> dict[bytes, bytes]:
        rows = self.sql.execute("SELECT key, value FROM changes ORDER BY vb, seqno").fetchall()
        return {key: value for key, value in dict(rows).items() if value is not None}
