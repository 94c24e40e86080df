"""A producer without a socket: a real store, the pure machine, and a reader that keeps what it was sent."""

from __future__ import annotations

from collections.abc import Callable

from upriver.protocol.flow import PREPARE_SURCHARGE
from upriver.protocol.producer.controls import ProducerOptions, apply_control
from upriver.protocol.producer.live import LiveStreams
from upriver.protocol.producer.machine import Producer, ProducerMemory
from upriver.protocol.producer.source import SourceVbucket
from upriver.store import Bucket, Manifest, NewSnapshot, VBucket, follow
from upriver.wire import FrameSplitter, Opcode
from upriver.wire.framing import Frame
from upriver.wire.message import Message
from upriver.wire.messages import dcp


class SourceBucket:
    """A bucket that fits ``SourceStore``, without a node and without durable writes."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.vbuckets: int = bucket.vbuckets
        self.waits_for_map = self.under_pressure = False
        self.held: set[int] = set()

    @property
    def manifest(self) -> Manifest:
        return self.bucket.manifest

    def vbucket(self, number: int) -> VBucket:
        return self.bucket.vbucket(number)

    def memory_floor(self, vbucket: SourceVbucket) -> int:
        return self.bucket.vbucket(vbucket.id).memory.floor

    def follow(
        self, vbucket: SourceVbucket, seqno: int, most_bytes: int, wake: Callable[[], None]
    ) -> tuple[bool, NewSnapshot | None]:
        assert isinstance(vbucket, VBucket)
        return follow(vbucket, seqno, most_bytes, wake)

    def acknowledged(self, vbucket: int, consumer: str, prepared_seqno: int) -> None: ...

    def forget_acknowledged(self, vbucket: int, consumer: str) -> None: ...

    def hold_writers(self, vbucket: int, held: bool) -> None:
        (self.held.add if held else self.held.discard)(vbucket)

    def retire(self, vbucket: int, done: Callable[[Exception | None], None]) -> None:
        done(None)


class Streamed:
    """A bucket, its live streams, and the connections that read it; one turn at a time."""

    def __init__(self, bucket: Bucket) -> None:
        self.store = SourceBucket(bucket)
        self.live = LiveStreams(self.store, self._woken)
        self.memory = ProducerMemory()
        self.links: list[Link] = []
        self._is_due = False

    def _woken(self) -> None:
        self._is_due = True

    def turn(self) -> None:
        """Run until no connection can send anything."""
        while self._is_due or any(link.can_send and link.is_due for link in self.links):
            self._is_due = False
            self.live.turn()
            for link in self.links:
                link.turn()


class Link:
    """One connection to a producer, and the bytes that came over it."""

    def __init__(self, streamed: Streamed, name: bytes, collections: bool = True, **controls: str) -> None:
        self.options = ProducerOptions.opened(dcp.Open(0, 1, name), collections=collections, snappy=False, now=0.0)
        for key, value in {"enable_noop": "true", **controls}.items():
            apply_control(self.options, key.encode(), value.encode())
        self.can_send = True  # the socket takes something
        self.sent = bytearray()
        self._woken = False
        self._splitter = FrameSplitter()
        self.producer = Producer(
            streamed.store, streamed.live, self.options, streamed.memory, self._notified, lambda: self.can_send
        )
        self.producer.use_options(self.options)
        streamed.links.append(self)

    def _notified(self) -> None:
        self._woken = True

    @property
    def is_due(self) -> bool:
        return self._woken or self.producer.is_ready

    def turn(self) -> None:
        """Send what is ready, as a node's shell does."""
        self._woken = False
        self.producer.wake(0.0)
        while self.can_send and self.producer.is_ready:
            self.sent += self.producer.data_to_send()
        self.producer.sent()

    def ask(self, *requests: Message) -> None:
        """Send requests, byte by byte as they are on the wire."""
        for request in requests:
            for _ in self.producer.receive(request.encode(), 0.0):
                pass

    def frames(self) -> list[Frame]:
        """The requests received since the last call; all responses must be successes."""
        data, self.sent = bytes(self.sent), bytearray()
        frames = list(self._splitter.receive(data))
        assert all(frame.specific == 0 for frame in frames if frame.magic.is_response), frames
        return [frame for frame in frames if not frame.magic.is_response]


def charged(frame: Frame) -> int:
    """The bytes that a frame is charged against the flow-control window."""
    return frame.size + (PREPARE_SURCHARGE if frame.opcode == Opcode.DCP_PREPARE else 0)
