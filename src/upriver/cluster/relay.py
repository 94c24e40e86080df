"""Forwards bytes between a producer and a consumer, and sends its own requests to both.

Pure. Its own requests have opaques from 0xD0000000 on, which consumers' small counters never reach, and it does not
forward the answers to them. It notes seqnos, and reports STREAM_END and SET_VBUCKET_STATE as they pass. It never
answers in place of one of the two, not even noops, so that each notices when the other is dead.

See docs/protocol/consumer.md#third-party.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from upriver.errors import Status
from upriver.wire.bulk.scan import FrameScanner, SpanSplitter
from upriver.wire.checks import Context
from upriver.wire.framing import cut_frame
from upriver.wire.message import Message, Response, decode
from upriver.wire.messages.session import StatResponse

FIRST_OPAQUE = 0xD000_0000


class Side(Enum):
    PRODUCER = "producer"
    CONSUMER = "consumer"

    @property
    def other(self) -> Side:
        return Side.CONSUMER if self is Side.PRODUCER else Side.PRODUCER


@dataclass(slots=True)
class Answered:
    """A request of our own was answered; statistics come in several responses, up to the ``last``."""

    side: Side
    request: Message
    response: Response
    last: bool = True


@dataclass(slots=True)
class SeenMessage:
    """A message from ``side`` was forwarded that callers may need to know of: a stream end, or a step of a takeover."""

    side: Side
    message: Message


RelayEvent = Answered | SeenMessage


class Relay:
    """Both directions of one replication connection."""

    def __init__(self, context: Context = Context(collections=True)) -> None:  # noqa: B008
        self._context = context
        self._scanners = {side: FrameScanner(FIRST_OPAQUE) for side in Side}
        self._splitters = {side: SpanSplitter(self._scanners[side]) for side in Side}
        self._out: dict[Side, list[bytes | memoryview]] = {side: [] for side in Side}
        self._requests: dict[tuple[Side, int], Message] = {}
        self._next = FIRST_OPAQUE
        self.bytes_from = dict.fromkeys(Side, 0)

    def seqno(self, vbucket: int) -> int:
        """The last seqno that the producer sent for a vbucket."""
        return int(self._scanners[Side.PRODUCER].seqnos[vbucket])

    def request(self, side: Side, message: Message) -> None:
        """Send a request of our own to one side; an ``Answered`` event follows."""
        message.opaque = self._next  # type: ignore[misc]  # ours to fill in: frozen only to the type checker
        self._requests[side, self._next] = message
        self._next += 1
        self._out[side].append(message.encode())

    def receive(self, side: Side, data: bytes) -> Iterator[RelayEvent]:
        """Take bytes from one side; everything except answers to our own requests goes to the other."""
        self.bytes_from[side] += len(data)
        for interesting, span in self._splitters[side].receive(data):
            event = self._look(side, span) if interesting else None
            if not isinstance(event, Answered):
                self._out[side.other].append(span)
            if event is not None:
                yield event

    def take(self, side: Side) -> list[bytes | memoryview]:
        """The bytes to send to a side now."""
        taken, self._out[side] = self._out[side], []
        return taken

    def _look(self, side: Side, span: memoryview) -> RelayEvent | None:
        frame = cut_frame(span)
        if not frame.magic.is_response:
            return SeenMessage(side, decode(frame, self._context))
        request = self._requests.get((side, frame.opaque))
        if request is None:
            return None
        response = decode(frame, self._context)
        assert isinstance(response, Response)
        last = not isinstance(response, StatResponse) or response.status != Status.SUCCESS or not response.key
        if last:
            del self._requests[side, frame.opaque]
        return Answered(side, request, response, last)
