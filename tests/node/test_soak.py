"""The soak of ``soak.py``, short."""

from __future__ import annotations

from tests.node.soak import soak


def test_random_clients_leave_the_node_whole():
    assert soak(9.0) == []
