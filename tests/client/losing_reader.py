"""Readers that die at a chosen step, and a node that loses history while they read."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.client.client_world import provoke
from upriver.client.blocking import Database, connect
from upriver.client.checkpoints import BucketCheckpoint, CheckpointStore, FileCheckpoint, SqliteCheckpoint
from upriver.errors import KeyNotFound

VBUCKETS, ROWS = 2, 3  # few and small, so that readers mostly die in the middle of a snapshot that has deduplicated


class Fate:
    """When a reader dies, and when the node loses history before that."""

    def __init__(self, http_port: int, die_at: tuple[str, int], lose_at: int, seed: int, most: int = 24) -> None:
        self.http_port, self.lose_at, self.most = http_port, lose_at, most
        self.die_after, self.left = die_at
        self.steps, self.chance = 0, random.Random(seed)

    def step(self, name: str) -> None:
        self.steps += 1
        if self.steps == self.lose_at:
            lose(self.http_port, self.chance, self.most)
        if name == self.die_after:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def lose(http_port: int, chance: random.Random, most: int = 24) -> None:
    provoke(http_port, "failover", vbucket=chance.randrange(VBUCKETS), lose=chance.randint(1, most))


def lose_ahead(http_port: int, chance: random.Random, high: dict[int, int], checkpoint: CheckpointStore) -> None:
    """As in the design document: what is lost lies beyond where the reader stands, inside a snapshot that it began."""
    seqnos = {vb: position.seqno for vb, position in (checkpoint.load() or {}).items()}
    begun = [vb for vb, seqno in seqnos.items() if 0 < seqno < high[vb]]
    if not begun:
        lose(http_port, chance)
        return
    vb = chance.choice(begun)
    provoke(http_port, "rollback", vbucket=vb, seqno=chance.randrange(seqnos[vb], high[vb]))


def write(db: Database, chance: random.Random, prefix: str) -> set[bytes]:
    """Documents that are written over and over, some of them deleted, so that snapshots deduplicate.

    Nobody writes them later: what a reader misses, it misses for ever. Each round is on disk before the next one, so
    that the node can go back to any seqno, also into the middle of what a reader got as one snapshot.
    """
    keys = [f"{prefix}:{n}".encode() for n in range(20)]
    for _ in range(4):
        chosen = chance.sample(keys, 16)
        db.set_many({key: b"%d" % chance.randrange(10**6) for key in chosen[:14]})
        for key in chosen[14:]:
            with suppress(KeyNotFound):
                db.delete(key)
        until_persisted(db)
    return set(keys)


def until_persisted(db: Database) -> None:
    seqnos, logs = db.high_seqnos(), db.failover_logs(range(VBUCKETS))
    while db.persisted_seqnos({vb: log.uuid for vb, log in logs.items()}) != seqnos:
        time.sleep(0.001)


def truth(db: Database, keys: set[bytes]) -> dict[bytes, bytes]:
    found = {}
    for key in keys:
        try:
            found[key] = db.get(key).value
        except KeyNotFound:
            continue
    return found


def begin_now(db: Database, checkpoint: CheckpointStore) -> None:
    """A fresh start: forget what earlier readers were told."""
    with db.changes(start="now") as feed:
        checkpoint.save(feed.positions())


class Store:
    """A checkpoint store outside the reader's table, and its connection."""

    def __init__(self, checkpoint: CheckpointStore, database: Database | None = None) -> None:
        self.checkpoint, self._database = checkpoint, database

    def close(self) -> None:
        if self._database:
            self._database.close()


def store_of(kind: str, connection: str, path: Path) -> Store:
    if kind == "file":
        return Store(FileCheckpoint(path.with_suffix(".json")))
    if kind == "sqlite":
        return Store(SqliteCheckpoint(path.with_suffix(".positions"), path.stem))
    database = connect(connection)
    return Store(BucketCheckpoint(database, path.stem), database)
