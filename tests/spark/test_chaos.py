"""Exactly once under fire. One short run by default, because each takes minutes on two cores; ``UPRIVER_CHAOS=1`` makes
it three, and ``make chaos-spark`` has longer ones.
"""

from __future__ import annotations

import os

import pytest
from spark_chaos import Chaos

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1500)]

RUNS = {
    11: ["failover", "executor", "failover", "cut", "move", "failover"],
    22: ["failover", "crash", "failover", "driver", "failover"],
    33: ["node", "failover", "executor", "node", "failover"],
}


SEEDS = list(RUNS) if os.environ.get("UPRIVER_CHAOS") else [22]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_table_equals_the_cluster_after_kills_failovers_and_moves(seed, tmp_path):
    chaos = Chaos(seed, tmp_path, keys=100_000 if seed == 11 else 20_000)
    try:
        done = chaos.run(0, RUNS[seed])
    finally:
        chaos.kill_driver()
    assert done["rollbacks"] > 0
    assert done["documents"] > 10_000
