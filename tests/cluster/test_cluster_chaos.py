"""Short runs of the chaos test; a seed that fails here replays with ``make chaos SEED=n``."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.chaos_checker import Findings, allowed
from tests.cluster.chaos_clients import Outcome, Write
from tests.cluster.cluster_chaos import run

SEEDS = range(1, int(os.environ.get("UPRIVER_CHAOS_SEEDS", "20")) + 1)
SECONDS = 4.0
AT_ONCE = 3  # of the time of a run much is spent waiting


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[int, Future[Findings]]]:
    """All of them, a few at a time, each in a process of its own that also starts its nodes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_ONCE, mp_context=context, initializer=_find_modules) as pool:
        yield {seed: pool.submit(run, seed, SECONDS) for seed in SEEDS}
        pool.shutdown(wait=True, cancel_futures=True)


def _find_modules() -> None:
    """The package of tests, which pytest finds without being asked."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_durable_is_lost_nothing_is_done_twice_and_everybody_ends_equal(
    runs: dict[int, Future[Findings]], seed: int
) -> None:
    findings = runs[seed].result(280)
    assert findings.problems == [], findings.steps
    assert findings.figures["documents"] > 10


def test_what_a_key_may_hold_is_its_last_durable_write_or_anything_after_it() -> None:
    done, unknown = Outcome.ACKNOWLEDGED, Outcome.UNKNOWN
    assert allowed([Write(b"1", 0, done), Write(b"2", 1, done)]) == {b"2"}
    assert allowed([Write(b"1", 1, done), Write(b"2", 0, done), Write(None, 3, unknown)]) == {b"1", b"2", None}
    assert allowed([Write(b"1", 0, done)]) == {b"1", None}
