"""A node inside the test process, on its own event loop in its own thread, reached over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from upriver.node.options import NodeOptions
from upriver.node.server import Node, serve
from upriver.store import Durability, StoreOptions

T = TypeVar("T")
FAST_STORE = StoreOptions(durability=Durability.LAZY, flush_delay_s=0.01)


def eventually(look: Callable[[], T], within_s: float = 60.0) -> T:
    """Call ``look`` until it returns something true, and return that."""
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return seen


class NodeThread:
    """A running node; ``call`` runs a function on its loop."""

    def __init__(self, options: NodeOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.node: Node = asyncio.run_coroutine_threadsafe(serve(options), self._loop).result(120)

    @property
    def port(self) -> int:
        return self.node.kv_port

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def vbucket(self, number: int) -> Any:
        return self.node.buckets.get("default").store.vbucket(number)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.node.stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
