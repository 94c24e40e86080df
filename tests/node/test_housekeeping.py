"""What a node does by itself, beside its clients: they do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.node.raw import ready
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.store import bucket as store_bucket
from upriver.wire.messages import kv


@contextmanager
def held_at(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[threading.Event]:
    """Background work stops at its next vbucket until the block ends; the event says that it is there."""
    reached, go_on = threading.Event(), threading.Event()
    work: Callable[..., Any] = getattr(store_bucket, name)

    def held(*arguments: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return work(*arguments)

    monkeypatch.setattr(store_bucket, name, held)
    try:
        yield reached
    finally:
        go_on.set()


@pytest.mark.parametrize(("work", "how"), [("expire_due", "expiry_pager_s"), ("compact", "maintain_s")])
def test_clients_are_served_while_the_node_expires_and_compacts(make_node, monkeypatch, work: str, how: str) -> None:
    monkeypatch.setattr(store_bucket, "wants_compaction", lambda vbucket: True)
    with held_at(monkeypatch, work) as reached:
        small: NodeThread = make_node(**{how: 0.01})
        assert reached.wait(60)
        with ready(small.port) as client:
            assert client.ask(kv.Set(key=b"k", value=b"v")).specific == Status.SUCCESS
            assert client.ask(kv.Get(b"k")).value == b"v"
