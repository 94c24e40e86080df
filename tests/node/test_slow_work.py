"""Slow work runs in threads, so clients are served meanwhile: requests of others, and the node's own housekeeping."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.node.raw import ALL, frame, ready
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.store import bucket as store_bucket
from upriver.wire import Opcode
from upriver.wire.messages import cluster, kv, session

OK = Status.SUCCESS


@pytest.fixture(scope="module")
def flushable(make_node) -> NodeThread:  # type: ignore[no-untyped-def]
    return make_node(enable_flush=True)  # type: ignore[no-any-return]


def manifest(uid: int, count: int) -> bytes:
    inside = [{"name": f"c{n}", "uid": f"{n + 8:x}"} for n in range(count)]
    scope = {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}, *inside]}
    return json.dumps({"uid": f"{uid:x}", "scopes": [scope]}).encode()


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(frame(Opcode.COLLECTIONS_SET_MANIFEST, value=manifest(1, 1000)), id="a manifest"),
        pytest.param(frame(Opcode.FLUSH), id="flush"),
    ],
)
def test_others_are_served_while_a_request_waits_for_the_disk(flushable: NodeThread, request_bytes: bytes):
    store = flushable.node.buckets.get("default").store
    with ready(flushable.port, *ALL) as admin, ready(flushable.port, *ALL) as other:
        assert other.ask(kv.Set(key=b"\0there", value=b"v")).specific == OK
        with store._shared.commit_lock:  # as a long commit would hold it
            admin.send(request_bytes)
            assert other.ask(session.Noop()).specific == OK
            assert other.ask(kv.Set(key=b"\0k", value=b"v")).specific == OK
            assert other.ask(kv.Get(b"\0there")).value == b"v"
        assert admin.receive().specific == OK


def test_a_flushed_bucket_is_empty_and_takes_writes(flushable: NodeThread):
    with ready(flushable.port, *ALL) as raw:
        for vbucket in range(8):
            assert raw.ask(kv.Set(key=b"\0k", value=b"v", vbucket=vbucket)).specific == OK
        assert raw.ask(frame(Opcode.FLUSH)).specific == OK
        for vbucket in range(8):
            assert raw.ask(kv.Get(b"\0k", vbucket=vbucket)).specific == Status.KEY_ENOENT
            stored = raw.ask(kv.Set(key=b"\0k", value=b"w", vbucket=vbucket))
            assert stored.specific == OK
            seqno = int.from_bytes(stored.extras[8:], "big")
            assert raw.ask(cluster.SeqnoPersistence(seqno, vbucket=vbucket)).specific == OK


@contextmanager
def held_at(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[threading.Event]:
    """Hold background work at its next vbucket until the block ends; the event says that it has got there."""
    reached, released = threading.Event(), threading.Event()
    work: Callable[..., Any] = getattr(store_bucket, name)

    def held(*arguments: Any) -> Any:
        reached.set()
        assert released.wait(60)
        return work(*arguments)

    monkeypatch.setattr(store_bucket, name, held)
    try:
        yield reached
    finally:
        released.set()


@pytest.mark.parametrize(("work", "how"), [("expire_due", "expiry_pager_s"), ("compact", "maintain_s")])
def test_clients_are_served_while_the_node_expires_and_compacts(make_node, monkeypatch, work: str, how: str) -> None:
    monkeypatch.setattr(store_bucket, "wants_compaction", lambda vbucket: True)
    small: NodeThread = make_node(**{how: 0.01})  # its warm-up does the same work, and is not to be held
    with held_at(monkeypatch, work) as reached:
        assert reached.wait(60)
        with ready(small.port) as client:
            assert client.ask(kv.Set(key=b"k", value=b"v")).specific == Status.SUCCESS
            assert client.ask(kv.Get(b"k")).value == b"v"
