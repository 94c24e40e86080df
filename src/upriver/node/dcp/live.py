"""A bucket as its producers read it, and the turns of its live streams in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from upriver.model import VbucketState
from upriver.node import log
from upriver.protocol.producer.live import LiveStreams
from upriver.protocol.producer.machine import Producer
from upriver.protocol.producer.source import SourceVbucket
from upriver.store import Manifest, NewSnapshot, VBucket, follow

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.dcp.producer import ProducerRole

# Above this share of the memory quota no stream is opened (docs/protocol/stream-request.md#checks, step 21).
_BACKFILL_SHARE = 0.96


class StreamedBucket:
    """The bucket as the pure producer reads it: a ``SourceStore``."""

    def __init__(self, bucket: NodeBucket) -> None:
        self._bucket = bucket
        self._store = bucket.store
        self.vbuckets: int = bucket.store.vbuckets

    @property
    def manifest(self) -> Manifest:
        return self._store.manifest

    @property
    def waits_for_map(self) -> bool:
        return self._bucket.waits_for_map

    @property
    def under_pressure(self) -> bool:
        """Whether memory is short: writes and new streams are refused for now."""
        store, options = self._store, self._store.options
        return store.dirty_bytes > options.dirty_bytes or store.memory_bytes > _BACKFILL_SHARE * options.quota_bytes

    def vbucket(self, number: int) -> VBucket:
        return self._store.vbucket(number)

    def memory_floor(self, vbucket: SourceVbucket) -> int:
        assert isinstance(vbucket, VBucket)
        return vbucket.memory.floor

    def follow(
        self, vbucket: SourceVbucket, seqno: int, most_bytes: int, wake: Callable[[], None]
    ) -> tuple[bool, NewSnapshot | None]:
        assert isinstance(vbucket, VBucket)
        return follow(vbucket, seqno, most_bytes, wake)

    def acknowledged(self, vbucket: int, consumer: str, prepared_seqno: int) -> None:
        if self._bucket.on_seqno_acknowledged is not None:
            self._bucket.on_seqno_acknowledged(vbucket, consumer, prepared_seqno)

    def forget_acknowledged(self, vbucket: int, consumer: str) -> None:
        self._bucket.sync_writes.forget(vbucket, consumer)

    def hold_writers(self, vbucket: int, held: bool) -> None:
        if held:
            self._bucket.backed_up.add(vbucket)
        else:
            self._bucket.backed_up.discard(vbucket)

    def retire(self, vbucket: int, done: Callable[[Exception | None], None]) -> None:
        """Make a vbucket dead after a takeover; ``done`` is called once that is on disk.

        A member of a cluster does not wait for the disk: after a crash, the map decides which node is active.
        """
        bucket = self._bucket
        bucket.set_state(vbucket, VbucketState.DEAD, silent=True, durable=False)
        log.info("vbucket_handed_over", bucket=bucket.name, vbucket=vbucket)
        if bucket.member:
            done(None)
            return

        def flushed(future: asyncio.Future[None]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is not None:
                log.warning("takeover_failed", vbucket=vbucket, reason=error)
            done(error if error is None or isinstance(error, Exception) else RuntimeError(str(error)))

        bucket.on_disk().add_done_callback(flushed)


class DeferredCall:
    """Calls a function on the event loop soon: once, however often any thread asks for it before then.

    Create it in the loop's thread.
    """

    __slots__ = ("_function", "_is_scheduled", "_loop", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._function: Callable[[], None] | None = function
        self._is_scheduled = False

    def __call__(self) -> None:
        if self._is_scheduled or self._function is None:
            return
        self._is_scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._run)
        else:
            self._loop.call_soon_threadsafe(self._run)

    def cancel(self) -> None:
        """Never call the function again, and drop the reference to it."""
        self._function = None

    def _run(self) -> None:
        self._is_scheduled = False  # before the call: a request made during it needs another one
        if self._function is not None:
            self._function()


class LiveTurns:
    """The live streams of one bucket, and the connections that they are on."""

    def __init__(self, bucket: NodeBucket, loop: asyncio.AbstractEventLoop) -> None:
        self.store = StreamedBucket(bucket)
        self.streams = LiveStreams(self.store, DeferredCall(loop, self._turn))
        self.roles: dict[Producer, ProducerRole] = {}

    def _turn(self) -> None:
        for producer in self.streams.turn():
            if (role := self.roles.get(producer)) is not None:
                role.send_encoded()
