"""Live streams: streams that have everything written so far are served together, across all connections of a bucket.

New changes of a vbucket are looked up once for all its live streams, and encoded once for all live streams of a
connection. Live is a state of a stream; all live streams of a vbucket share one position. A stream leaves the state
and reads on alone when it cannot be served this way: at a system event, with a full window or socket, or when there
is more than a little to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from upriver.protocol.producer.source import SourceStore, SourceVbucket
from upriver.wire.bulk.live import LiveBatch, LiveSnapshot
from upriver.wire.constants import MarkerFlag
from upriver.wire.packed import NewSnapshot

if TYPE_CHECKING:
    from upriver.protocol.producer.machine import Producer
    from upriver.protocol.producer.stream import ProducerStream

LIVE_BYTES = 64 * 1024  # of one vbucket; to send more than that, a stream leaves the live state
BATCH_BYTES = 160 * 1024  # over all vbuckets: the frames of a batch fit into one send
BATCH_VBUCKETS = 512
_MEMORY = int(MarkerFlag.MEMORY)
_FIRST_MEMORY = int(MarkerFlag.MEMORY | MarkerFlag.CHECKPOINT)


class LiveVbucket:
    """The live streams of one vbucket, and the position that they share."""

    __slots__ = ("_all", "origin", "position", "streams", "vbucket")

    def __init__(self, live: LiveStreams, vbucket: SourceVbucket, position: int) -> None:
        self._all = live
        self.vbucket = vbucket
        self.position = position  # everything up to this seqno was sent, or filtered out
        self.origin = 0  # the start of the last snapshot sent to live streams; 0: none yet
        self.streams: dict[ProducerStream, None] = {}

    def wake(self) -> None:
        """Called by the store, once and in any thread, when there is something new."""
        self._all.woken(self)

    def leave(self, stream: ProducerStream) -> None:
        self.streams.pop(stream, None)
        if not self.streams:
            self._all.forget(self)


class LiveStreams:
    """The live streams of one bucket. ``notify`` is called, in any thread, when ``turn`` has work to do."""

    def __init__(self, store: SourceStore, notify: Callable[[], None]) -> None:
        self._store = store
        self._notify = notify
        self._vbuckets: dict[int, LiveVbucket] = {}
        self._woken: deque[LiveVbucket] = deque()  # also appended to by the store's threads

    def join(self, stream: ProducerStream) -> LiveVbucket | None:
        """Make the stream a live one if it has everything; None if it cannot be one now."""
        vbucket, source = stream.vbucket, stream.source
        found = self._vbuckets.get(vbucket.id)
        if found is not None and (found.position != source.position or found.vbucket is not vbucket):
            return None  # the others are behind it, or belong to a vbucket that no longer exists
        found = found or LiveVbucket(self, vbucket, source.position)
        if source.hand_over(found.wake) is None:
            return None
        self._vbuckets[vbucket.id] = found
        found.streams[stream] = None
        return found

    def forget(self, empty: LiveVbucket) -> None:
        empty.vbucket.stop_waiting(empty.wake)
        if self._vbuckets.get(empty.vbucket.id) is empty:
            del self._vbuckets[empty.vbucket.id]

    def woken(self, vbucket: LiveVbucket) -> None:
        """Queue a vbucket that has something new; may be called in any thread."""
        self._woken.append(vbucket)
        self._notify()

    def turn(self) -> list[Producer]:
        """Encode new changes, up to one batch; returns the producers that have something to send."""
        served: list[tuple[LiveVbucket, NewSnapshot]] = []
        size = 0
        for _ in range(min(len(self._woken), BATCH_VBUCKETS)):
            vbucket = self._woken.popleft()
            if vbucket.streams and (live := self._look_up(vbucket)) is not None:
                served.append((vbucket, live))
                size += live.size
                if size > BATCH_BYTES:
                    break
        if self._woken:
            self._notify()
        return self._serve(served) if served else []

    def _look_up(self, live: LiveVbucket) -> NewSnapshot | None:
        """New changes that can be served together; if they cannot, the streams read on alone."""
        simple, found = self._store.follow(live.vbucket, live.position, LIVE_BYTES, live.wake)
        if simple:
            return found
        for stream in list(live.streams):
            stream.producer.make_ready(stream)
        return None

    @staticmethod
    def _serve(served: list[tuple[LiveVbucket, NewSnapshot]]) -> list[Producer]:
        batch = LiveBatch([
            LiveSnapshot(
                live.vbucket.id, new.first, new.last, new.first if new.begins_checkpoint else 0,
                _FIRST_MEMORY if new.begins_checkpoint else _MEMORY, new.address, new.size,
            )
            for live, new in served
        ])  # fmt: skip
        producers = {stream.producer: None for live, _ in served for stream in live.streams}
        finished: list[ProducerStream] = []
        for producer in producers:
            finished += producer.encode_live(batch)
        for live, new in served:
            live.origin, live.position = new.first, new.last
        for stream in finished:
            stream.producer.make_ready(stream)
        return [producer for producer in producers if producer.has_encoded]
