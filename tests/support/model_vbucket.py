"""A model of one vbucket: it keeps every write, deduplicates only while it sends, and loses its tail in a failover.

A failover therefore brings back every write that deduplication had hidden: as hostile as a real server can be.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from upriver.model import Claim, FailoverLog
from upriver.protocol.history import Accept, Decision, History, decide

K = TypeVar("K")
V = TypeVar("V")


class Write(NamedTuple, Generic[K, V]):
    seqno: int
    key: K
    value: V | None  # None: deleted
    checkpoint: int = 0


def latest(writes: Iterable[Write[K, V]]) -> list[Write[K, V]]:
    """The last write of each key, in the order of their seqnos."""
    return sorted({write.key: write for write in writes}.values(), key=lambda write: write.seqno)


class ModelVbucket(Generic[K, V]):
    """The writes of one vbucket and its failover log."""

    def __init__(self, vbuuid: int = 1) -> None:
        self.writes: list[Write[K, V]] = []
        self.log = FailoverLog.new(vbuuid)

    @property
    def high(self) -> int:
        return self.writes[-1].seqno if self.writes else 0

    def state(self) -> dict[K, V]:
        """The documents that exist."""
        return {write.key: write.value for write in latest(self.writes) if write.value is not None}

    def decide(self, claim: Claim) -> Decision:
        """What the vbucket answers to a stream request."""
        return decide(History(self.log, self.high), claim)

    def branch(self, vbuuid: int, kept: int) -> None:
        """Fail over: forget everything above the seqno ``kept``, and continue under a new vbuuid."""
        self.writes = [write for write in self.writes if write.seqno <= kept]
        self.log = self.log.branch(vbuuid, kept)


class RandomVbucket(ModelVbucket[str, int]):
    """Writes, fails over and cuts its snapshots at random."""

    def __init__(self, rng: random.Random, keys: int = 4) -> None:
        super().__init__(rng.getrandbits(48) | 1)
        self.rng, self.keys = rng, keys
        self.checkpoint = 0
        self.values = 0

    def write(self) -> None:
        self.values += 1
        value = None if self.rng.random() < 0.2 else self.values
        self.writes.append(Write(self.high + 1, f"k{self.rng.randrange(self.keys)}", value, self.checkpoint))
        if self.rng.random() < 0.2:
            self.checkpoint += 1

    def fail_over(self) -> None:
        """Lose a tail of history, sometimes an empty one."""
        kept = self.rng.randint(0, self.high)
        self.branch(self.rng.getrandbits(48) | 1, kept)
        self.checkpoint += 1

    def stream(self, claim: Claim, end: int) -> list[tuple[int, list[Write[str, int]]]] | None:
        """Snapshots (their end, their writes) until ``end`` is passed; None for a rollback."""
        if not isinstance(self.decide(claim), Accept):
            return None
        ahead = [w for w in self.writes if w.seqno > claim.seqno]
        if self.rng.random() < 0.5:  # from disk: one snapshot up to the high seqno
            groups = [ahead] if ahead else []
        else:  # from memory: a snapshot per checkpoint
            groups = [[w for w in ahead if w.checkpoint == c] for c in sorted({w.checkpoint for w in ahead})]
        snapshots = [(group[-1].seqno, latest(group)) for group in groups]
        reached = next((n for n, (last, _) in enumerate(snapshots) if last >= end), len(snapshots) - 1)
        return snapshots[: reached + 1]


@dataclass
class ModelTable:
    """What a consumer of the rows holds; a rollback removes the changes above its seqno."""

    changes: list[tuple[int, str, int | None]] = field(default_factory=list)

    def apply(self, rows: list[tuple[str, int, str, int | None]]) -> None:
        for event, seqno, key, value in rows:
            if event == "rollback":
                self.changes = [c for c in self.changes if c[0] <= seqno]
            else:
                self.changes.append((seqno, key, value))

    def state(self) -> dict[str, int]:
        latest_values = {key: value for _, key, value in self.changes}
        return {key: value for key, value in latest_values.items() if value is not None}
