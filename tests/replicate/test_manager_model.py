"""No order of crashes, silence, failovers and moves makes the manager lose what a majority had acknowledged."""

from __future__ import annotations

import pytest
from simulated_cluster import Simulation, one_after_the_other

RUNS, STEPS = 1000, 120


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.replicate.manager.at_once", one_after_the_other)


def test_what_was_acknowledged_is_there_after_everything_that_can_happen() -> None:
    acknowledged = 0
    for seed in range(RUNS):
        simulation = Simulation(seed)
        simulation.run(STEPS)
        assert simulation.lost() == set(), f"seed {seed}: {simulation.said}"
        acknowledged += len(simulation.acknowledged)
    assert acknowledged > RUNS  # or nothing was put to the test
