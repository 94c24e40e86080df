"""A node inside the test process, on its own event loop in its own thread, reached over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from upriver.node.buckets import NodeBucket
from upriver.node.options import NodeOptions
from upriver.node.server import Node, serve
from upriver.store import Durability, StoreOptions, VBucket

T = TypeVar("T")
FAST_STORE = StoreOptions(durability=Durability.LAZY, flush_delay_s=0.01)


def eventually(look: Callable[[], T], within_s: float = 60.0) -> T:
    """Call ``look`` until it returns something true, and return that."""
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not true within {within_s:g} s"
        time.sleep(0.01)
    return seen


class NodeThread:
    """A running node. ``call`` runs a function on its loop, where a test may touch the store."""

    def __init__(self, options: NodeOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.node: Node = asyncio.run_coroutine_threadsafe(serve(options), self._loop).result(120)

    @property
    def port(self) -> int:
        return self.node.kv_port

    @property
    def bucket(self) -> NodeBucket:
        return self.node.buckets.get("default")

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def vbucket(self, number: int) -> VBucket:
        return self.bucket.store.vbucket(number)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.node.stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
