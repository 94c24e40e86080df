"""Nodes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.node_thread import FAST_STORE, NodeThread
from upriver.node.options import NodeOptions

MakeNode = Callable[..., NodeThread]


@pytest.fixture(scope="module")
def make_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeNode]:
    """Start nodes with any options; all are stopped after the module."""
    running: list[NodeThread] = []

    def make(**options: Any) -> NodeThread:
        data: Path = options.pop("data", None) or tmp_path_factory.mktemp("node") / "data"
        defaults = NodeOptions(data=data, kv_port=0, vbuckets=8, store=FAST_STORE)
        running.append(NodeThread(replace(defaults, **options)))
        return running[-1]

    yield make
    for each in running:
        each.stop()


@pytest.fixture(scope="module")
def node(make_node: MakeNode) -> NodeThread:
    """One node for the whole module: 8 active vbuckets, no login needed."""
    return make_node()
