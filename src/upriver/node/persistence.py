"""Those who wait for the disk: SEQNO_PERSISTENCE, durable writes, and waking streams when the flusher has written.

The store calls from its flusher thread; everything here runs on the loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from upriver.store import Bucket


class PersistenceWaits:
    """Futures by vbucket and seqno, of one bucket."""

    def __init__(self, store: Bucket, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._waiting: defaultdict[int, list[tuple[int, asyncio.Future[None]]]] = defaultdict(list)
        store.on_persisted = self._from_flusher

    def until(self, vbucket_id: int, seqno: int) -> asyncio.Future[None]:
        """A future that is done when ``seqno`` is on disk."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[vbucket_id].append((seqno, future))
        # Looked at only now: had the flusher passed by before, its call found nobody waiting.
        if self._store.vbucket(vbucket_id).persisted_seqno >= seqno:
            future.set_result(None)
            self._waiting[vbucket_id].remove((seqno, future))
        return future

    def cancel(self) -> None:
        """The bucket closes: nobody waits any longer."""
        for waiting in self._waiting.values():
            for _, future in waiting:
                future.cancel()
        self._waiting.clear()

    def _from_flusher(self, written: list[tuple[int, int]]) -> None:
        if self._waiting and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._persisted, written)

    def _persisted(self, written: list[tuple[int, int]]) -> None:
        for vbucket_id, seqno in written:
            waiting = self._waiting.pop(vbucket_id, None)
            if waiting:
                self._release(vbucket_id, seqno, waiting)

    def _release(self, vbucket_id: int, seqno: int, waiting: list[tuple[int, asyncio.Future[None]]]) -> None:
        for wanted, future in waiting:
            if future.done():
                continue
            if wanted <= seqno:
                future.set_result(None)
            else:
                self._waiting[vbucket_id].append((wanted, future))
