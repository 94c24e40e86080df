"""One node for the whole folder: starting a node takes longer than most tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client.client_world import VBUCKETS, provoke
from upriver.client.blocking import Database, connect
from upriver.testing import RunningNode, node


@pytest.fixture(scope="session")
def server() -> Iterator[RunningNode]:
    with node(vbuckets=VBUCKETS, enable_faults=True, lazy=True) as running:
        yield running


@pytest.fixture
def db(server: RunningNode) -> Iterator[Database]:
    with connect(server.connection_string) as database:
        yield database


@pytest.fixture
def fault(server: RunningNode) -> Callable[..., Any]:
    return lambda name, **arguments: provoke(server.http_port, name, **arguments)
