"""The scenario of the design document against a real node that loses history, with the reader killed at every step.

The reader keeps its table and its positions in one SQLite database and commits them together. Each of its lives is a
process of its own that kills itself at a step chosen by the seed: every kind of step kills somebody.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from client_world import provoke
from reader_table import Table

from upriver.client.blocking import Database, connect
from upriver.errors import HistoryLost, KeyNotFound
from upriver.model import FailoverLog
from upriver.protocol.feed import OnRollback
from upriver.testing import RunningNode, node

SEEDS, LIVES = range(20), 3
VBUCKETS, ROWS = 2, 3  # few and small, so that readers mostly die in the middle of a snapshot that has deduplicated
STEPS = ("given", "applied", "confirmed", "committed")  # what the reader has just done with a batch
UNDONE = "undone"  # or, under the policy "fail", with a rollback


@pytest.fixture(scope="module")
def server() -> Iterator[RunningNode]:
    """One of its own, with so few vbuckets that each has enough to lose."""
    with node(vbuckets=VBUCKETS, enable_faults=True, http_port=0, lazy=True) as running:
        yield running


def live(connection: str, path: Path, policy: OnRollback, step: Callable[[str], None]) -> None:
    """One life: read up to now, committing changes and positions together, and calling ``step`` all the time."""
    table = Table(path)
    with connect(connection) as db:
        while True:
            with db.feed(checkpoint=table.checkpoint, end="now", on_rollback=policy, rows=ROWS) as feed:
                try:
                    for batch in feed.batches():
                        step("given")
                        table.sql.execute("BEGIN")
                        table.apply(batch.to_pylist())
                        step("applied")
                        feed.confirm()
                        step("confirmed")
                        table.sql.execute("COMMIT")
                        step("committed")
                except HistoryLost as lost:
                    table.sql.execute("BEGIN")
                    table.forget(lost.vbucket, lost.to_seqno)
                    table.checkpoint.save(feed.positions().rolled_back(lost.vbucket, lost.to_seqno))
                    step(UNDONE)
                    table.sql.execute("COMMIT")
                else:
                    feed.confirm()
                    return


def begin_now(db: Database, path: Path) -> None:
    """Nothing of what earlier readers were told matters to this one."""
    with db.feed(start="now") as feed:
        Table(path).checkpoint.save(feed.positions())


class Fate:
    """When a life ends, and when the node loses history during it."""

    def __init__(self, http_port: int, die_at: tuple[str, int], lose_at: int, seed: int) -> None:
        self.http_port, self.lose_at = http_port, lose_at
        self.die_after, self.left = die_at
        self.steps, self.chance = 0, random.Random(seed)

    def step(self, name: str) -> None:
        self.steps += 1
        if self.steps == self.lose_at:
            lose(self.http_port, self.chance)
        if name == self.die_after:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def lose(http_port: int, chance: random.Random) -> None:
    provoke(http_port, "failover", vbucket=chance.randrange(VBUCKETS), lose=chance.randrange(1, 25))


def lose_ahead(http_port: int, chance: random.Random, high: dict[int, int], table: Table) -> None:
    """As in the design document: what is lost lies beyond where the reader stands, inside a snapshot that it began."""
    seqnos = {vb: position.seqno for vb, position in (table.checkpoint.load() or {}).items()}
    begun = [vb for vb, seqno in seqnos.items() if 0 < seqno < high[vb]]
    if not begun:
        lose(http_port, chance)
        return
    vb = chance.choice(begun)
    provoke(http_port, "rollback", vbucket=vb, seqno=chance.randrange(seqnos[vb], high[vb]))


def live_and_die(connection: str, path: Path, policy: OnRollback, fate: Fate) -> None:
    live(connection, path, policy, fate.step)


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


def forget_what_never_happened(table: Table, logs: dict[int, FailoverLog]) -> None:
    """Under ``rewind`` nobody told the table what to undo; the branch of each change does, if one asks the server."""
    for vb, seqno, branch in table.sql.execute("SELECT vb, seqno, vbuuid FROM changes").fetchall():
        last = logs[vb].last_seqno_of(branch & 2**64 - 1, 2**64 - 1)
        if last is None or seqno > last:
            table.sql.execute("DELETE FROM changes WHERE vb = ? AND seqno = ?", (vb, seqno))


@pytest.mark.parametrize("policy", list(OnRollback), ids=lambda policy: policy.value)
def test_no_document_is_missing_and_none_is_a_phantom(server: RunningNode, tmp_path: Path, policy: OnRollback) -> None:
    fork = multiprocessing.get_context("fork")
    steps = (*STEPS, UNDONE) if policy is OnRollback.FAIL else STEPS
    killed: Counter[str] = Counter()
    with connect(server.connection_string) as db:
        write(db, random.Random(0), "warm")
        live(server.connection_string, tmp_path / "warm.db", policy, lambda name: None)  # children inherit the kernels
        for seed in SEEDS:
            chance, path, prefix = random.Random(seed), tmp_path / f"{seed}.db", f"{policy.value}{seed}"
            keys: set[bytes] = set()
            begin_now(db, path)
            for generation in range(LIVES):
                keys |= write(db, chance, f"{prefix}:{generation}")
                name = steps[(seed * LIVES + generation) % len(steps)]
                die_at = name, 1 if name == UNDONE else chance.randrange(1, 6)
                fate = Fate(server.http_port, die_at, chance.randrange(1, 30), seed * 100 + generation)
                child = fork.Process(target=live_and_die, args=(server.connection_string, path, policy, fate))
                child.start()
                child.join(60)
                assert child.exitcode in (0, -signal.SIGKILL), f"seed {seed}: the reader ended with {child.exitcode}"
                killed[name] += child.exitcode == -signal.SIGKILL
                if chance.random() < 0.8:
                    lose_ahead(server.http_port, chance, db.high_seqnos(), Table(path))
            live(server.connection_string, path, policy, lambda name: None)
            table = Table(path)
            if policy is OnRollback.REWIND:
                forget_what_never_happened(table, db.failover_logs(range(VBUCKETS)))
            ours = {key: v for key, v in table.documents().items() if key.startswith(prefix.encode() + b":")}
            assert ours == truth(db, keys), f"seed {seed}"
    assert set(killed) == set(steps)
    assert all(killed.values()), killed
