"""What a change costs does not depend on how large the table is."""

from __future__ import annotations

import random

import pytest

from upriver.spark.tables.pieces import Piece
from upriver.spark.tables.policy import Policy, covered, cut, frontier, hold, ranges_of, worth_merging


def rewritten_per_change(rows: int, batch_rows: int, batches: int) -> float:
    """Rows of ``current`` rewritten per change, in a model of the table made of file names alone."""
    policy = Policy()
    parts = cut(0, 1023, -(-rows // policy.target_rows))
    current = [Piece(f"{part.lo}", part.lo, part.hi, 0, 0, rows // len(parts)) for part in parts]
    tail: list[Piece] = []
    written = 0
    for batch in range(1, batches + 1):
        ranges = ranges_of(current, 1024, 0, policy)
        fresh = [batch_rows * part.width // 1024 for part in ranges]
        chosen = worth_merging(ranges, tail, fresh, policy)
        current = [
            Piece(p.path, p.lo, p.hi, 0, batch if (p.lo, p.hi) in chosen else p.last, p.rows) for p in current
        ]
        written += sum(piece.rows for piece in current if (piece.lo, piece.hi) in chosen)
        tail.append(Piece(str(batch), 0, 1023, batch, batch, batch_rows))
        merged = frontier(ranges_of(current, 1024, 0, policy), 1024)
        tail = [piece for piece in tail if not covered(piece, merged)]
    return written / (batch_rows * batches)


def test_rewriting_per_change_stays_flat_from_a_hundred_thousand_rows_to_ten_million() -> None:
    costs = [rewritten_per_change(rows, rows // 100, 400) for rows in (100_000, 1_000_000, 10_000_000)]
    assert max(costs) <= 1.25 * min(costs), costs
    assert max(costs) < 2 / Policy().share


@pytest.mark.parametrize("vbuckets", [1, 7, 64, 1024])
def test_cuts_cover_every_vbucket_once(vbuckets: int) -> None:
    for parts in (1, 2, random.randrange(1, 2000)):
        found = [vb for part in cut(0, vbuckets - 1, parts) for vb in range(part.lo, part.hi + 1)]
        assert found == list(range(vbuckets))


def test_vbuckets_without_a_file_are_ranges_too() -> None:
    have = [Piece("b", 4, 7, 0, 3, rows=10), Piece("a", 10, 11, 0, 2, rows=5)]
    found = [(part.lo, part.hi, part.merged) for part in ranges_of(have, 16, 0, Policy())]
    assert found == [(0, 3, -1), (4, 7, 3), (8, 9, -1), (10, 11, 2), (12, 15, -1)]


def test_a_large_load_waits_for_its_log_but_not_for_ever() -> None:
    policy = Policy()
    assert hold(1_000_000, 0, lag=9_000_000, policy=policy)
    assert not hold(2_000_000, 0, lag=8_000_000, policy=policy)
    assert hold(1_000_000, 2_000_000, lag=7_000_000, policy=policy)
    assert not hold(1_000_000, 9_000_000, lag=100, policy=policy)
