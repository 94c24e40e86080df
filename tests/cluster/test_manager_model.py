"""No order of crashes, silence, failovers and moves makes the manager lose what a majority had acknowledged.

Neither do old copies of its file, as long as anybody can be reached who knows better.
"""

from __future__ import annotations

import pytest

from tests.cluster.simulated_cluster import Simulation, one_after_the_other
from upriver.model import VbucketState

RUNS, STEPS = 1000, 120


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.cluster.manager.at_once", one_after_the_other)


def test_what_was_acknowledged_is_there_after_everything_that_can_happen() -> None:
    acknowledged = 0
    for seed in range(RUNS):
        simulation = Simulation(seed)
        simulation.run(STEPS)
        assert simulation.lost() == set(), f"seed {seed}: {simulation.said}"
        acknowledged += len(simulation.acknowledged)
    assert acknowledged > RUNS  # or nothing was put to the test


def test_an_old_copy_of_the_managers_state_never_makes_two_actives_of_a_vbucket() -> None:
    restored = forked = 0
    for seed in range(RUNS):
        simulation = Simulation(seed, copies_are_restored=True)
        simulation.run(STEPS)
        lost = simulation.lost()  # sees that one node leads, and no other
        assert not lost or simulation.forked, f"seed {seed}: {simulation.said}"
        restored += any("restore_a_copy" in said for said in simulation.said)
        forked += simulation.forked
    assert restored > RUNS // 4
    assert forked < restored // 4  # or the second promise was hardly put to the test


def test_a_node_that_is_active_although_its_map_says_otherwise_is_put_right() -> None:
    simulation = Simulation(1)
    follower = next(node for node in simulation.nodes if not node.leads and node.member)
    follower.state = VbucketState.ACTIVE
    simulation.heal()
    simulation.lost()  # sees that one node leads, and no other
