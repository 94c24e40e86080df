"""One node for the whole folder: starting it costs more than most tests."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from upriver.client.blocking import Database, connect
from upriver.testing import RunningNode, node

VBUCKETS = 8


@pytest.fixture(scope="session")
def server() -> Iterator[RunningNode]:
    with node(vbuckets=VBUCKETS, enable_faults=True, http_port=0, lazy=True) as running:
        yield running


@pytest.fixture
def db(server: RunningNode) -> Iterator[Database]:
    with connect(server.connection_string) as database:
        yield database


@pytest.fixture
def fault(server: RunningNode) -> Callable[..., Any]:
    return lambda name, **arguments: provoke(server.http_port, name, **arguments)


def provoke(http_port: int, name: str, **arguments: Any) -> Any:
    """Make the node misbehave."""
    url = f"http://127.0.0.1:{http_port}/upriver/faults/{name}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(arguments).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())
