"""The official Couchbase Python SDK, unmodified, against a real node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from front_node import Served, serve

pytest.importorskip("couchbase", reason="the official SDK is not installed")
import sdk_scenarios

TIMEOUT_S = 120
NAMES = [scenario.__name__ for scenario in sdk_scenarios.SCENARIOS]
OTHERS = ["unknown collection", "wrong password"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("sdk") / "data", username="ann", password="secret") as served:
        buckets = "/pools/default/buckets/default/scopes"
        assert served.http(buckets, "POST", {"name": "shop"})[0] == 200
        assert served.http(f"{buckets}/shop/collections", "POST", {"name": "orders"})[0] == 200
        yield served


@pytest.fixture(scope="module")
def outcomes(node: Served) -> dict[str, str]:
    """How each scenario ended; those missing were not reached because the SDK's process died."""
    command = [sys.executable, str(Path(sdk_scenarios.__file__)), str(node.kv_port), node.username, node.password]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    found = {each["name"]: each["outcome"] for each in map(json.loads, done.stdout.splitlines())}
    return {"died": f"exit code {done.returncode}\n{done.stderr[-3000:]}", **found}


@pytest.mark.parametrize("name", [*NAMES, *(f"{name} in a named collection" for name in NAMES), *OTHERS])
def test_the_sdk_does_it_as_with_a_real_server(outcomes: dict[str, str], name: str) -> None:
    outcome = outcomes.get(name, f"not reached: {outcomes['died']}")
    assert outcome == "ok", outcome
