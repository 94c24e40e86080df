"""What a change costs does not depend on how large the table is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.lake.apply.policy import MergePolicy, cut, frontier, hold, ranges_of, superseded, worth_merging
from upriver.lake.files import DataFile, _groups_of_rows


def rewritten(rows: int, batch_rows: int, batches: int, *, fold: int = 10**9) -> tuple[list[int], int]:
    """Rows of ``current`` rewritten in each batch, and the most rows that the tail had, in a model made of file names.

    So many files of the tail are made one.
    """
    policy = MergePolicy()
    parts = cut(0, 1023, -(-rows // policy.target_rows))
    current = [DataFile(f"{part.lo}", part.lo, part.hi, 0, 0, rows // len(parts)) for part in parts]
    tail: list[DataFile] = []
    written, longest = [], 0
    for batch in range(1, batches + 1):
        ranges = ranges_of(current, 1024, 0, policy)
        fresh = [batch_rows * part.width // 1024 for part in ranges]
        chosen = worth_merging(ranges, tail, fresh, policy)
        current = [
            DataFile(p.path, p.lo, p.hi, 0, batch if (p.lo, p.hi) in chosen else p.last_batch, p.rows) for p in current
        ]
        written.append(sum(file.rows for file in current if (file.lo, file.hi) in chosen))
        tail.append(DataFile(str(batch), 0, 1023, batch, batch, batch_rows))
        done = superseded(tail, frontier(current, 1024))
        tail = [file for file in tail if file not in done]
        loose = [file for file in tail if file.first_batch == file.last_batch]
        if len(loose) >= fold:
            one = DataFile("f", 0, 1023, loose[0].first_batch, batch, sum(file.rows for file in loose))
            tail = [*(file for file in tail if file not in loose), one]
        longest = max(longest, sum(file.rows for file in tail))
    return written, longest


def rewritten_per_change(rows: int, batch_rows: int, batches: int) -> float:
    return sum(rewritten(rows, batch_rows, batches)[0]) / (batch_rows * batches)


def test_rewriting_per_change_stays_flat_from_a_hundred_thousand_rows_to_ten_million() -> None:
    costs = [rewritten_per_change(rows, rows // 100, 400) for rows in (100_000, 1_000_000, 10_000_000)]
    assert max(costs) <= 1.25 * min(costs), costs
    assert max(costs) < 2 / MergePolicy().share


def test_the_cost_is_spread_evenly_over_batches() -> None:
    written, longest = rewritten(10_000_000, 5_000, 1_200)
    assert max(written) < 2 * MergePolicy().target_rows  # never more than one part of the table
    assert sum(written[:600]) == pytest.approx(sum(written[600:]), rel=0.1)
    assert longest < 0.5 * 10_000_000


def test_folding_the_tail_is_paid_for_by_rewriting_less() -> None:
    (plain, _), (folding, longest) = (rewritten(10_000_000, 5_000, 1_200, fold=fan) for fan in (10**9, 32))
    assert sum(folding) + 1_200 * 5_000 == pytest.approx(sum(plain), rel=0.1)
    assert longest < 0.6 * 10_000_000


@given(st.integers(0, 200_000), st.lists(st.integers(0, 200_000)), st.sampled_from(["tail", "current"]))
def test_row_groups_hold_every_row_once_and_none_is_tiny(rows: int, edges: list[int], table: str) -> None:
    edges = sorted(edge for edge in edges if edge <= rows)
    groups = _groups_of_rows(f"lake/{table}/name", rows, edges)
    assert [start for start, _ in groups] == [0, *(end for _, end in groups)][:-1]
    assert groups[-1][1] == rows
    assert all(end - start >= 1_024 for start, end in groups[:-1])


@pytest.mark.parametrize("vbuckets", [1, 7, 64, 1024])
def test_cuts_cover_every_vbucket_once(vbuckets: int) -> None:
    for parts in (1, 2, random.randrange(1, 2000)):
        found = [vb for part in cut(0, vbuckets - 1, parts) for vb in range(part.lo, part.hi + 1)]
        assert found == list(range(vbuckets))


def test_vbuckets_without_a_file_are_ranges_too() -> None:
    have = [DataFile("b", 4, 7, 0, 3, rows=10), DataFile("a", 10, 11, 0, 2, rows=5)]
    found = [(part.lo, part.hi, part.merged) for part in ranges_of(have, 16, 0, MergePolicy())]
    assert found == [(0, 3, -1), (4, 7, 3), (8, 9, -1), (10, 11, 2), (12, 15, -1)]


def test_a_large_load_holds_the_tables_back_but_not_for_ever() -> None:
    policy = MergePolicy()
    assert hold(1_000_000, 0, lag=9_000_000, policy=policy)
    assert not hold(2_000_000, 0, lag=8_000_000, policy=policy)
    assert hold(1_000_000, 2_000_000, lag=7_000_000, policy=policy)
    assert not hold(1_000_000, 9_000_000, lag=100, policy=policy)
