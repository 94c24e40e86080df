"""A vbucket and a micro-batch query in a few lines each, so that planning can be tried on thousands of histories.

The producer keeps everything it ever wrote and deduplicates only while it sends, so that a failover brings back
whatever had been hidden: as hostile as a real one can be.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from upriver.model import FailoverLog, Position
from upriver.protocol.history import Accept, History, decide
from upriver.spark.offsets import Offset
from upriver.spark.planning import Known, Range, View, look, plan, ranges


@dataclass(frozen=True)
class Write:
    seqno: int
    key: str
    value: int | None  # None: deleted
    checkpoint: int


class Producer:
    """One vbucket."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.writes: list[Write] = []
        self.log = FailoverLog.new(rng.getrandbits(48) | 1)
        self.checkpoint = 0
        self.values = 0

    @property
    def high(self) -> int:
        return self.writes[-1].seqno if self.writes else 0

    def write(self, keys: int = 4) -> None:
        self.values += 1
        value = None if self.rng.random() < 0.2 else self.values
        self.writes.append(Write(self.high + 1, f"k{self.rng.randrange(keys)}", value, self.checkpoint))
        if self.rng.random() < 0.2:
            self.checkpoint += 1

    def fail_over(self) -> None:
        """Lose a tail of history, sometimes none of it."""
        kept = self.rng.randint(0, self.high)
        self.writes = [w for w in self.writes if w.seqno <= kept]
        self.log = self.log.branch(self.rng.getrandbits(48) | 1, kept)
        self.checkpoint += 1

    def state(self) -> dict[str, int]:
        latest = {w.key: w.value for w in self.writes}
        return {key: value for key, value in latest.items() if value is not None}

    def stream(self, at: Position, end: int) -> list[tuple[int, list[Write]]] | None:
        """Snapshots (their end, their writes) until ``end`` is passed; None for a rollback."""
        if not isinstance(decide(History(self.log, self.high), at), Accept):
            return None
        ahead = [w for w in self.writes if w.seqno > at.seqno]
        if self.rng.random() < 0.5:  # from disk: one snapshot up to the high seqno
            groups = [ahead] if ahead else []
        else:  # from memory: a snapshot per checkpoint
            groups = [[w for w in ahead if w.checkpoint == c] for c in sorted({w.checkpoint for w in ahead})]
        snapshots = [(g[-1].seqno, sorted({w.key: w for w in g}.values(), key=lambda w: w.seqno)) for g in groups]
        reached = next((n for n, (last, _) in enumerate(snapshots) if last >= end), len(snapshots) - 1)
        return snapshots[: reached + 1]


@dataclass
class Table:
    """What a consumer of the rows holds: the changes, and a rollback forgets those above its seqno."""

    changes: list[tuple[int, str, int | None]] = field(default_factory=list)

    def apply(self, rows: list[tuple[str, int, str, int | None]]) -> None:
        for event, seqno, key, value in rows:
            if event == "rollback":
                self.changes = [c for c in self.changes if c[0] <= seqno]
            else:
                self.changes.append((seqno, key, value))

    def state(self) -> dict[str, int]:
        latest = {key: value for _, key, value in self.changes}
        return {key: value for key, value in latest.items() if value is not None}


class Query:
    """A query over one vbucket: plan, read, commit, crash, replay."""

    def __init__(self, producer: Producer, rng: random.Random, *, naive: bool = False) -> None:
        self.producer, self.rng, self.naive = producer, rng, naive
        self.table = Table()
        self.offset = Offset.earliest(1)
        self.known = Known()
        self.rollbacks = 0

    def view(self, *, quiet: bool = False) -> View:
        """What the driver sees, while the world goes on between its questions."""

        def ask(answer: Any) -> Any:
            if not quiet and self.rng.random() < 0.2:
                self.disturb()
            return {0: answer()}

        everything = quiet or self.rng.random() < 0.5
        read = (lambda: ask(lambda: self.producer.high), lambda vbs: ask(lambda: self.producer.log) if vbs else {})
        return look(self.offset, *read, everything=everything)

    def disturb(self) -> None:
        """The world goes on between any two steps."""
        for _ in range(self.rng.randrange(4)):
            self.producer.write()
        if self.rng.random() < 0.15:
            self.producer.fail_over()

    def step(self, *, quiet: bool = False, most: int | None = None) -> bool:
        """One trigger; false if there was nothing to do."""
        start, view = self.offset, self.view(quiet=quiet)
        self.known.observe(start, view)
        if self.naive:  # "I have everything up to where I stand"
            self.known.complete[0] = (start.places[0].vbuuid, start.places[0].seqno)
        end = plan(start, view, self.known, most=most)
        if end is start:
            return False
        attempts = 1 if quiet else self.rng.choice((1, 1, 1, 2))
        results = []
        for _ in range(attempts):
            todo = ranges(start, end, view, self.known)
            if not quiet:
                self.disturb()
            results.append(self.read(todo))
            if not quiet and self.rng.random() < 0.2:  # the driver dies and plans the same batch again
                self.known, view = Known(), self.view()
                end = Offset.from_json(end.to_json())
        kept = self.rng.randrange(len(results))
        self.known = Known()
        if len(results) == 1 and self.rng.random() < 0.7:
            self.known.complete.update(results[0][1])
        self.table.apply(results[kept][0])
        self.rollbacks += len(end.rollbacks)
        self.offset = Offset.from_json(end.to_json())
        return True

    def read(self, todo: list[Range]) -> tuple[list[tuple[str, int, str, int | None]], dict[int, tuple[int, int]]]:
        rows: list[tuple[str, int, str, int | None]] = []
        complete: dict[int, tuple[int, int]] = {}
        for one in todo:
            at = one.claim
            if one.rolled_back:
                rows.append(("rollback", at.seqno, "", None))
            snapshots = self.producer.stream(at, one.end)
            if snapshots is None or self.producer.log.uuid != one.vbuuid:
                continue
            claimed = at.snap_end if at.seqno != at.snap_start else at.seqno
            for last, writes in snapshots:
                rows.extend(("mutation", w.seqno, w.key, w.value) for w in writes if w.seqno <= one.end)
                if last == one.end and last >= claimed:
                    complete[0] = (one.vbuuid, last)
        return rows, complete
