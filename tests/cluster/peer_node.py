"""A node in this process, on its own loop in its own thread, whose store the test may reach into."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from upriver.node.options import NodeOptions
from upriver.node.server import Node, serve
from upriver.store import Durability, StoreOptions

T = TypeVar("T")
FAST = StoreOptions(durability=Durability.LAZY, flush_delay_s=0.005)


class PeerNode:
    """``call`` runs a function on the node's loop, which is where the store may be touched."""

    def __init__(self, data: Path, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        made = NodeOptions(data=data, kv_port=0, store=FAST, **options)
        self.node: Node = asyncio.run_coroutine_threadsafe(serve(made), self._loop).result(120)

    @property
    def bucket(self) -> Any:
        return self.node.buckets.get("default")

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.node.stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
