"""Waiting until a seqno is on disk, for SEQNO_PERSISTENCE and durable writes.

The store reports from its flusher thread; everything else here runs on the loop.
"""

from __future__ import annotations

import asyncio
from functools import partial

from upriver.store import Bucket


class PersistenceWaits:
    """The futures of one bucket, by vbucket, each with the seqno that it waits for."""

    def __init__(self, store: Bucket, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._waiting: dict[int, dict[asyncio.Future[None], int]] = {}
        store.listeners.on_persisted = self._from_flusher

    def until(self, vbucket_id: int, seqno: int) -> asyncio.Future[None]:
        """A future that is done when ``seqno`` is on disk; cancel it to stop waiting."""
        vbucket = self._store.vbucket(vbucket_id)
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(vbucket_id, {})[future] = seqno
        future.add_done_callback(partial(self._forget, vbucket_id))
        # Checked after the future is registered: the flusher may have reported the seqno just before.
        if vbucket.persisted_seqno >= seqno:
            future.set_result(None)
        return future

    def cancel(self) -> None:
        """The bucket closes: cancel every future."""
        for waiting in list(self._waiting.values()):
            for future in list(waiting):
                future.cancel()

    def _forget(self, vbucket_id: int, future: asyncio.Future[None]) -> None:
        """Drop a future that is done or cancelled."""
        waiting = self._waiting.get(vbucket_id, {})
        waiting.pop(future, None)
        if not waiting:
            self._waiting.pop(vbucket_id, None)

    def _from_flusher(self, written: list[tuple[int, int]]) -> None:
        if self._waiting and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._persisted, written)

    def _persisted(self, written: list[tuple[int, int]]) -> None:
        for vbucket_id, seqno in written:
            for future, wanted in list(self._waiting.get(vbucket_id, {}).items()):
                if wanted <= seqno and not future.done():
                    future.set_result(None)
