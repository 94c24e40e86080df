"""Live streams: those that have everything written so far are served together, over all connections of a bucket.

What is new in a vbucket is looked up once for all its live streams, and encoded once for all live streams of a
connection. Live is a state of a stream: its place is then the place of its vbucket's live streams. As soon as that does
not fit (a system event, a full window or socket, more than a little) the stream leaves the state and reads on alone.
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

LIVE_BYTES = 64 * 1024  # of one vbucket; a stream sends more than that alone
BATCH_BYTES = 160 * 1024  # over all vbuckets: the frames of a batch fit into one send
BATCH_VBUCKETS = 512
_MEMORY = int(MarkerFlag.MEMORY)
_FIRST_MEMORY = int(MarkerFlag.MEMORY | MarkerFlag.CHECKPOINT)


class LiveVbucket:
    """The live streams of one vbucket, and the place where all of them are."""

    __slots__ = ("_all", "origin", "position", "streams", "vbucket")

    def __init__(self, live: LiveStreams, vbucket: SourceVbucket, position: int) -> None:
        self._all = live
        self.vbucket = vbucket
        self.position = position  # the last seqno that they were sent, or that was none of theirs
        self.origin = 0  # where the last snapshot began that they were sent as live streams; 0: none yet
        self.streams: dict[ProducerStream, None] = {}

    def wake(self) -> None:
        """The store's call: there is something new. It comes once, in any thread."""
        self._all.woken(self)

    def leave(self, stream: ProducerStream) -> None:
        self.streams.pop(stream, None)
        if not self.streams:
            self._all.forget(self)


class LiveStreams:
    """The live streams of one bucket. ``notify`` is called, in any thread, when it is time for ``turn``."""

    def __init__(self, store: SourceStore, notify: Callable[[], None]) -> None:
        self._store = store
        self._notify = notify
        self._vbuckets: dict[int, LiveVbucket] = {}
        self._woken: deque[LiveVbucket] = deque()  # also appended to by the store's threads

    def join(self, stream: ProducerStream) -> LiveVbucket | None:
        """Where the stream goes on as a live one, if it has everything."""
        vbucket, source = stream.vbucket, stream.source
        found = self._vbuckets.get(vbucket.id)
        if found is not None and (found.position != source.position or found.vbucket is not vbucket):
            return None  # the others are about to get what it has already, or to learn that their vbucket is gone
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
        """There is something new; may be called in any thread."""
        self._woken.append(vbucket)
        self._notify()

    def turn(self) -> list[Producer]:
        """Encode what is new, or the first part of much; returns the producers that have to send some of it."""
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
        """What is new; if it is not of the simple kind, its streams see to it themselves."""
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
