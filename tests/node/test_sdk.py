"""The official Couchbase Python SDK, unmodified, against a real node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.front_node import free_port, make_certificates, serve, tls_arguments

pytest.importorskip("couchbase", reason="the official SDK is not installed")
from tests.node import sdk_scenarios, sdk_transactions

TIMEOUT_S = 120
ROOT = Path(__file__).parents[2]
NAMES = [scenario.__name__ for scenario in sdk_scenarios.SCENARIOS]
TRANSACTIONS = [scenario.__name__ for scenario in sdk_transactions.SCENARIOS]
OTHERS = ["managers", "unknown bucket", "unknown collection", "wrong password", "over TLS"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each scenario ended; those missing were not reached because the SDK's process died."""
    at = tmp_path_factory.mktemp("sdk")
    tls_port = free_port()
    arguments = [*tls_arguments(make_certificates(at), tls_port), "--enable-flush"]
    with serve(at / "data", *arguments, username="ann", password="secret") as node:
        command = [sys.executable, "-m", "tests.node.sdk_scenarios", str(node.kv_port), "ann", "secret", str(tls_port)]
        command += [str(at / "ca.pem")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    found = {each["name"]: each["outcome"] for each in map(json.loads, done.stdout.splitlines())}
    return {"died": f"exit code {done.returncode}\n{done.stderr[-3000:]}", **found}


@pytest.mark.parametrize("name", [*NAMES, *(f"{name} in a named collection" for name in NAMES), *TRANSACTIONS, *OTHERS])
def test_the_sdk_does_it_as_with_a_real_server(outcomes: dict[str, str], name: str) -> None:
    outcome = outcomes.get(name, f"not reached: {outcomes['died']}")
    assert outcome == "ok", outcome
