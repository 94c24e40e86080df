"""Exactly once under fire, three times; ``make chaos-spark`` has longer runs, with any seed."""

from __future__ import annotations

import pytest
from spark_application import Application
from spark_chaos import Chaos

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = {
    11: ["failover", "executor", "failover", "move", "driver", "failover"],
    22: ["failover", "crash", "failover", "driver", "cut", "failover"],
    33: ["node", "failover", "executor", "node", "failover"],
}


@pytest.fixture(scope="module")
def application(tmp_path_factory):
    with Application(tmp_path_factory.mktemp("chaos") / "driver.log") as running:
        yield running


@pytest.mark.parametrize("seed", RUNS)
def test_the_table_equals_the_cluster_after_kills_failovers_and_moves(seed, tmp_path, application):
    done = Chaos(seed, tmp_path, application).run(0, RUNS[seed])
    assert done["rollbacks"] > 0
    assert done["documents"] > 90_000
