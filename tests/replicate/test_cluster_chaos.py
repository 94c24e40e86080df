"""Short runs of the chaos test; a seed that fails here replays with ``make chaos SEED=n``."""

from __future__ import annotations

import pytest
from chaos_checker import allowed
from chaos_clients import Outcome, Write
from cluster_chaos import run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [6, 7, 11])
def test_nothing_durable_is_lost_nothing_is_done_twice_and_everybody_ends_equal(seed: int) -> None:
    findings = run(seed, 8.0)
    assert findings.problems == [], findings.steps
    assert findings.figures["documents"] > 50


def test_what_a_key_may_hold_is_its_last_durable_write_or_anything_after_it() -> None:
    done, unknown = Outcome.ACKNOWLEDGED, Outcome.UNKNOWN
    assert allowed([Write(b"1", 0, done), Write(b"2", 1, done)]) == {b"2"}
    assert allowed([Write(b"1", 1, done), Write(b"2", 0, done), Write(None, 3, unknown)]) == {b"1", b"2", None}
    assert allowed([Write(b"1", 0, done)]) == {b"1", None}
