"""The central property: a reader that trusts its position ends with every document of the source.

The model producer keeps every write and deduplicates only while it sends, from disk or from memory, so a failover
restores everything that was hidden: it is as hostile as a real one can be. The reader uses only
``protocol/position.py``. It is cut, saved and restored between any two steps. It reads like the client (marker by
marker) or like Spark (up to a seqno, without knowing its snapshot).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.model_vbucket import ModelTable, RandomVbucket
from upriver.client.positions import Positions
from upriver.model import SEQNO_MAX, Claim
from upriver.protocol.history import Accept, RollbackTo
from upriver.protocol.offsets import Offset
from upriver.protocol.position import POINTS_KEPT, Position


class Reader:
    """A table, and the position that it has. ``mistake``: "claim" claims too much, "target" goes to R itself."""

    def __init__(self, producer: RandomVbucket, rng: random.Random, mistake: str = "") -> None:
        self.producer, self.rng, self.mistake = producer, rng, mistake
        self.table, self.position = ModelTable(), Position()

    def connect(self) -> None:
        """Ask, and roll back, until the producer accepts."""
        for _ in range(40):
            decision = self.producer.decide(self._claim())
            if isinstance(decision, Accept):
                self.position = self.position.resume()._replace(vbuuid=self.producer.log.uuid)
                return
            assert isinstance(decision, RollbackTo)
            self._roll_back(decision.seqno)
        raise AssertionError("asked in vain")

    def _claim(self) -> Claim:
        at = self.position.claim
        return Claim(at.vbuuid, at.seqno, at.seqno, at.seqno) if self.mistake == "claim" else at

    def _roll_back(self, to: int) -> None:
        target = to if self.mistake == "target" else self.position.rollback_target(to)
        assert target < self.position.seqno
        self.position = self.position.rolled_back(target)
        self.table.apply([("rollback", target, "", None)])

    def follow(self, rows: int) -> None:
        """As the client: markers, and up to so many rows in runs, then the connection is gone."""
        self.connect()
        claim = self._claim()
        previous = claim.seqno
        for end, writes in self.producer.stream(claim, SEQNO_MAX) or []:
            first = previous == claim.seqno
            self.position = self.position.begin_snapshot(claim.snap_start if first else previous + 1, end)
            taken = writes[:rows]
            rows -= len(taken)
            if taken:
                self.table.apply([("mutation", write.seqno, write.key, write.value) for write in taken])
                self.position = self.position.read(taken[-1].seqno, end)
            if len(taken) < len(writes):
                return
            previous = end

    def read_up_to(self, step: int) -> None:
        """As Spark: a range that was planned before; the high seqno of later covers every snapshot that came."""
        self.connect()
        end = min(self.producer.high, self.position.seqno + step)
        snapshots = self.producer.stream(self._claim(), end) or []
        wanted = [write for _, writes in snapshots for write in writes if write.seqno <= end]
        self.table.apply([("mutation", write.seqno, write.key, write.value) for write in wanted])
        covered = max((last for last, _ in snapshots), default=end)
        known = self.rng.choice((covered, self.producer.high, SEQNO_MAX))
        self.position = self.position.read(end, known)

    def save_and_restore(self) -> None:
        """As a checkpoint of the client, or as an offset, which does not keep the snapshot."""
        if self.rng.random() < 0.5:
            self.position = Positions.from_json(Positions({0: self.position}).to_json())[0]
        else:
            self.position = Offset.from_json(Offset((self.position,)).to_json()).positions[0]


def run(seed: int, mistake: str = "") -> Reader:
    """A short history; a long one would overwrite what was lost."""
    rng = random.Random(seed)
    reader = Reader(RandomVbucket(rng, keys=rng.choice((4, 20))), rng, mistake)
    for _ in range(rng.randrange(3, 15)):
        for _ in range(rng.randrange(rng.choice((5, 20)))):
            reader.producer.write()
        if rng.random() < 0.3:
            reader.producer.fail_over()
        rng.choice((reader.follow, reader.read_up_to))(rng.randrange(1, 8))
        if rng.random() < 0.3:
            reader.save_and_restore()
    reader.follow(10_000)
    return reader


@settings(max_examples=examples(1500), deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_the_reader_ends_with_the_documents_of_the_source(seed: int) -> None:
    reader = run(seed)
    assert reader.table.state() == reader.producer.state()
    assert reader.position.checked().seqno == reader.producer.high
    assert len(reader.position.points) < POINTS_KEPT


@pytest.mark.parametrize("mistake", ["claim", "target"])
def test_a_reader_that_breaks_one_rule_loses_documents(mistake: str) -> None:
    """Shows that the test above can fail: the same histories, with a false claim, or a rollback to R itself."""
    wrong = [seed for seed in range(300) if (reader := run(seed, mistake)).table.state() != reader.producer.state()]
    assert wrong


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**32))
def test_a_reader_was_consistent_at_every_point_that_it_keeps(seed: int) -> None:
    """What it held up to a point is the state of the source there, as long as the source has that history."""
    reader = run(seed)
    for point in reader.position.consistent_points:
        held = {key: value for at, key, value in reader.table.changes if at <= point}
        there = {write.key: write.value for write in reader.producer.writes if write.seqno <= point}
        assert {k: v for k, v in held.items() if v is not None} == {k: v for k, v in there.items() if v is not None}
