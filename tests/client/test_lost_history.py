"""The scenario of the design document against a real node that loses history, with the reader killed at any step.

The reader keeps its table and its positions in one SQLite database and commits them together. Each of its lives is a
process of its own that kills itself at a step chosen by the seed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_world import VBUCKETS, provoke

from upriver.client.blocking import Database, connect
from upriver.client.checkpoints import SqliteCheckpoint
from upriver.errors import HistoryLost, KeyNotFound
from upriver.protocol.feed import OnRollback
from upriver.testing import RunningNode

SEEDS = range(20)
LIVES = 3


class Table:
    """What a reader makes of the changes: a log by vbucket and seqno, from which documents follow."""

    def __init__(self, path: Path) -> None:
        self.sql = sqlite3.connect(path, isolation_level=None)
        self.sql.execute("CREATE TABLE IF NOT EXISTS changes (vb, seqno, key, value, PRIMARY KEY (vb, seqno))")
        self.checkpoint = SqliteCheckpoint(connection=self.sql)

    def apply(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["event"] == "rollback":
                self.forget(row["vbucket"], row["seqno"])
            elif row["event"] in ("mutation", "deletion", "expiration"):
                values = row["vbucket"], row["seqno"], row["key"], row["value"]
                self.sql.execute("INSERT OR REPLACE INTO changes VALUES (?, ?, ?, ?)", values)

    def forget(self, vb: int, above: int) -> None:
        self.sql.execute("DELETE FROM changes WHERE vb = ? AND seqno > ?", (vb, above))

    def documents(self) -> dict[bytes, bytes]:
        rows = self.sql.execute("SELECT key, value FROM changes ORDER BY vb, seqno").fetchall()
        return {key: value for key, value in dict(rows).items() if value is not None}


def live(connection: str, path: Path, policy: OnRollback, step: Callable[[], None]) -> None:
    """One life: read up to now, committing changes and positions together, and calling ``step`` all the time."""
    table = Table(path)
    with connect(connection) as db:
        while True:
            with db.feed(checkpoint=table.checkpoint, end="now", on_rollback=policy, rows=25) as feed:
                try:
                    for batch in feed.batches():
                        step()
                        table.sql.execute("BEGIN")
                        table.apply(batch.to_pylist())
                        step()
                        feed.confirm()
                        step()
                        table.sql.execute("COMMIT")
                except HistoryLost as lost:
                    table.sql.execute("BEGIN")
                    table.forget(lost.vbucket, lost.to_seqno)
                    table.checkpoint.save(feed.positions().rolled_back(lost.vbucket, lost.to_seqno))
                    step()
                    table.sql.execute("COMMIT")
                else:
                    feed.confirm()
                    return


def live_and_die(
    connection: str, http_port: int, path: Path, policy: OnRollback, die_at: int, lose_at: int, seed: int
) -> None:
    """A life that ends at step ``die_at``, and during which the node loses history at step ``lose_at``."""
    steps = 0
    chance = random.Random(seed)

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == lose_at:
            provoke(http_port, "failover", vbucket=chance.randrange(VBUCKETS), lose=chance.randrange(1, 12))
        if steps == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    live(connection, path, policy, step)


def write(db: Database, chance: random.Random, prefix: str, count: int, generation: int) -> set[bytes]:
    """Documents that are written over and over, some of them deleted, so that snapshots deduplicate."""
    keys = set()
    for n in range(count):
        key = f"{prefix}:{chance.randrange(30)}".encode()
        keys.add(key)
        db.set(key, f"{generation}:{n}".encode())
        if chance.random() < 0.1:
            db.delete(key)
    return keys


def truth(db: Database, keys: set[bytes]) -> dict[bytes, bytes]:
    found = {}
    for key in keys:
        try:
            found[key] = db.get(key).value
        except KeyNotFound:
            continue
    return found


@pytest.mark.parametrize("policy", list(OnRollback), ids=lambda policy: policy.value)
def test_no_document_is_missing_and_none_is_a_phantom(
    server: RunningNode, db: Database, tmp_path: Path, policy: OnRollback
) -> None:
    fork = multiprocessing.get_context("fork")
    for seed in SEEDS:
        chance, path = random.Random(seed), tmp_path / f"{seed}.db"
        prefix = f"{policy.value}{seed}"
        keys: set[bytes] = set()
        for generation in range(LIVES):
            keys |= write(db, chance, prefix, 60, generation)
            die_at, lose_at = chance.randrange(1, 12), chance.randrange(1, 16)
            arguments = (server.connection_string, server.http_port, path, policy, die_at, lose_at)
            child = fork.Process(target=live_and_die, args=(*arguments, seed * 100 + generation))
            child.start()
            child.join(60)
            assert child.exitcode in (0, -signal.SIGKILL), f"seed {seed}: the reader ended with {child.exitcode}"
            if chance.random() < 0.5:
                provoke(server.http_port, "failover", vbucket=chance.randrange(VBUCKETS), lose=chance.randrange(12))
        live(server.connection_string, path, policy, lambda: None)
        read, there = Table(path).documents(), truth(db, keys)
        ours = {key: value for key, value in read.items() if key.startswith(prefix.encode() + b":")}
        if policy is OnRollback.REWIND:  # the caller said that changes which were undone do not matter to it
            seen = set(Table(path).sql.execute("SELECT key, value FROM changes"))
            assert set(there.items()) <= seen, f"seed {seed}"
        else:
            assert ours == there, f"seed {seed}"
