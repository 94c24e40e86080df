"""The scenario of the design document against a real node that loses history, with the reader killed at every step.

The reader keeps its table and its positions in one SQLite database and commits them together. Each of its lives is a
process of its own that kills itself at a step chosen by the seed: every kind of step kills somebody.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.client.losing_reader import ROWS, VBUCKETS, Fate, begin_now, lose, lose_ahead, store_of, truth, write
from tests.client.reader_table import Table
from upriver.client.blocking import connect
from upriver.errors import HistoryLost
from upriver.model import FailoverLog, OnRollback
from upriver.testing import RunningNode, node

SEEDS, LIVES = range(20), 3
STEPS = ("given", "applied", "confirmed", "committed")  # what the reader has just done with a batch
UNDONE = "undone"  # or, under the policy "fail", with a rollback


@pytest.fixture(scope="module")
def server() -> Iterator[RunningNode]:
    """A separate node with few vbuckets, so that each has enough history to lose."""
    with node(vbuckets=VBUCKETS, enable_faults=True, lazy=True) as running:
        yield running


def live(connection: str, path: Path, policy: OnRollback, step: Callable[[str], None]) -> None:
    """Read up to now once, committing changes and positions together, and calling ``step`` at every step."""
    table = Table(path)
    with connect(connection) as db:
        while True:
            with db.change_batches(checkpoint=table.checkpoint, end="now", on_rollback=policy, rows=ROWS) as feed:
                try:
                    for batch in feed:
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


def live_and_die(connection: str, path: Path, policy: OnRollback, fate: Fate) -> None:
    live(connection, path, policy, fate.step)


def forget_what_never_happened(table: Table, logs: dict[int, FailoverLog]) -> None:
    """With ``rewind`` the table is not told what to undo; the branches of changes and the failover logs tell."""
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
            begin_now(db, Table(path).checkpoint)
            for generation in range(LIVES):
                keys |= write(db, chance, f"{prefix}:{generation}")
                name = steps[(seed * LIVES + generation) % len(steps)]
                die_at = name, 1 if name == UNDONE else chance.randrange(1, 6)
                fate = Fate(server.http_port, die_at, chance.randrange(1, 30), seed * 100 + generation)
                arguments = server.connection_string, path, policy, fate
                child = fork.Process(target=live_and_die, args=arguments, daemon=True)
                child.start()
                child.join(60)
                assert child.exitcode in (0, -signal.SIGKILL), f"seed {seed}: the reader ended with {child.exitcode}"
                killed[name] += child.exitcode == -signal.SIGKILL
                if chance.random() < 0.8:
                    lose_ahead(server.http_port, chance, db.high_seqnos(), Table(path).checkpoint)
            live(server.connection_string, path, policy, lambda name: None)
            table = Table(path)
            if policy is OnRollback.REWIND:
                forget_what_never_happened(table, db.failover_logs(range(VBUCKETS)))
            ours = {key: v for key, v in table.documents().items() if key.startswith(prefix.encode() + b":")}
            assert ours == truth(db, keys), f"seed {seed}"
    assert set(killed) == set(steps)
    assert all(killed.values()), killed


def live_and_save_after(connection: str, path: Path, kind: str, step: Callable[[str], None]) -> None:
    """A reader that saves its position after its data: it may have more than the position says, never less."""
    table, database, store = Table(path), connect(connection), store_of(kind, connection, path)
    if store.checkpoint.load() is None:
        table.forget_everything()  # nobody can tell any more what of it has happened
    with database as db, closing(store), db.change_batches(checkpoint=store.checkpoint, end="now", rows=ROWS) as feed:
        for batch in feed:
            step("given")
            table.sql.execute("BEGIN")
            table.apply(batch.to_pylist())
            step("applied")
            table.sql.execute("COMMIT")
            step("committed")
            feed.confirm()
            step("confirmed")


@pytest.mark.parametrize("kind", ["file", "sqlite", "bucket"])
def test_a_reader_that_saves_after_its_data_can_die_in_between(server: RunningNode, tmp_path: Path, kind: str) -> None:
    """Checkpoints in the bucket are lost with the tail of history; an older one is restored."""
    fork, connection = multiprocessing.get_context("fork"), server.connection_string
    with connect(connection) as db:
        for seed in range(6):
            chance, path, prefix = random.Random(seed), tmp_path / f"{seed}.db", f"{kind}{seed}"
            keys: set[bytes] = set()
            with closing(store_of(kind, connection, path)) as store:
                begin_now(db, store.checkpoint)
            for generation in range(LIVES):
                keys |= write(db, chance, f"{prefix}:{generation}")
                die_at = STEPS[(seed * LIVES + generation) % len(STEPS)], chance.randrange(1, 6)
                fate = Fate(server.http_port, die_at, chance.randrange(1, 30), seed, most=10)
                arguments = connection, path, kind, fate.step
                child = fork.Process(target=live_and_save_after, args=arguments, daemon=True)
                child.start()
                child.join(60)
                assert child.exitcode in (0, -signal.SIGKILL), f"seed {seed}: the reader ended with {child.exitcode}"
                lose(server.http_port, chance, most=10)
            live_and_save_after(connection, path, kind, lambda name: None)
            ours = {k: v for k, v in Table(path).documents().items() if k.startswith(prefix.encode() + b":")}
            assert ours == truth(db, keys), f"seed {seed}"
