"""The periodic work of a node: close silent connections, send noops to DCP peers, expire, compact."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from upriver.errors import UpriverError
from upriver.node import log

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection
    from upriver.node.server import Node

_TICK_S = 0.1  # the shortest noop interval that a client may ask for
_TICKS_PER_LOOK = 5  # connections without DCP are checked once in so many ticks
_REST = 4  # a pause takes this many times as long as the work before it


class Housekeeping:
    """The periodic work of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            self._node.loop.create_task(self._watch_connections()),
            self._node.loop.create_task(self._maintain()),
            self._node.loop.create_task(self._expire()),
        ]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch_connections(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if tick % _TICKS_PER_LOOK == 0:
                self._node.memory.close_slow()
                self._node.refresh_rights()
            for conn in list(self._node.connections):
                if conn.dcp is not None or tick % _TICKS_PER_LOOK == 0:
                    self._watch(conn, now)

    def _watch(self, conn: ClientConnection, now: float) -> None:
        try:
            if conn.dcp is not None and not conn.closed:
                conn.dcp.tick(now)
            reason = self._overdue(conn, now)
        except Exception:
            log.failure("watch_failed", connection=conn.id)
            reason = "internal error"
        if reason:
            conn.abort(reason)

    def _overdue(self, conn: ClientConnection, now: float) -> str:
        """Why a connection must be closed, or an empty string."""
        limits = self._node.options.limits
        if not conn.has_spoken and now - conn.created > limits.silent_s:
            return "said nothing"
        if not conn.authenticated and now - conn.created > limits.handshake_s:
            return "not authenticated in time"
        allowed = limits.idle_s if conn.dcp is None else limits.dcp_idle_s
        if now - conn.last_received > allowed:
            return "silent for too long"
        if conn.can_write:
            return ""
        conn.note_progress(now)
        if conn.closed and now - conn.last_progress > limits.handshake_s:
            return "does not take its last answers"
        return "does not read" if now - conn.last_progress > allowed else ""

    async def _maintain(self) -> None:
        """Compact a few vbuckets at a time, with pauses in which others have the disk."""
        every = pause = self._node.options.maintain_s
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            left = [await self._in_thread(bucket, bucket.store.maintain) for bucket in self._node.buckets]
            pause = min(every, _REST * (time.monotonic() - began)) if any(left) else every

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._node.options.expiry_pager_s)
            for bucket in self._node.buckets:
                await self._in_thread(bucket, bucket.store.run_expiry_pager)

    async def _in_thread(self, bucket: NodeBucket, work: Callable[[], int]) -> int:
        """Run work that may take long in a thread, so that clients are served meanwhile."""
        try:
            return await self._node.loop.run_in_executor(None, work)
        except UpriverError as error:
            log.warning("housekeeping_failed", work=work.__name__, bucket=bucket.name, reason=error)
        except Exception:
            log.failure("housekeeping_failed", work=work.__name__, bucket=bucket.name)
        return 0
