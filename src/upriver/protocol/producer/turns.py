"""Which stream of a producer sends next, and how many of them read from disk at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from upriver.protocol.producer.stream import TurnEnd

if TYPE_CHECKING:
    from upriver.protocol.producer.stream import ProducerStream

MAX_BACKFILLS = 64  # backfills at once on one connection (docs/protocol/flow.md#backfill)


class Turns:
    """The streams that have something to send, in order; some wait until they may begin a backfill."""

    def __init__(self) -> None:
        self.sequential = False  # one backfill after the other, instead of several in turns
        self._ready: deque[ProducerStream] = deque()
        self._backfills: set[ProducerStream] = set()
        self._waiting: dict[ProducerStream, None] = {}  # in order

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[ProducerStream]:
        return iter(list(self._ready))

    def add(self, stream: ProducerStream) -> None:
        if not stream.queued:
            stream.queued = True
            self._ready.append(stream)

    def next(self) -> ProducerStream | None:
        """The stream that sends now; None if the next one has to wait for its backfill."""
        stream = self._ready.popleft()
        if not self._must_wait(stream):
            stream.queued = False
            return stream
        self._waiting[stream] = None
        return None

    def done(self, stream: ProducerStream, end: TurnEnd) -> None:
        """A stream's turn is over; queue it again if it has more to send."""
        if end is TurnEnd.ENDED:
            return
        if stream.backfilling:
            self._backfills.add(stream)
        else:
            self.leave_backfills(stream)
        if stream.queued or end is TurnEnd.IDLE:
            return
        stream.queued = True
        if end in (TurnEnd.FULL, TurnEnd.WINDOW) or (self.sequential and stream.backfilling):
            self._ready.appendleft(stream)
        else:
            self._ready.append(stream)

    def leave_backfills(self, stream: ProducerStream) -> None:
        """The stream does not read from disk (any more); a stream that waits for a backfill may begin."""
        self._backfills.discard(stream)
        if not self._waiting:
            return
        if stream in self._waiting:  # it has ended while waiting: it must not take the place of another
            del self._waiting[stream]
            stream.queued = False
        elif len(self._backfills) < self._most_backfills:
            waiting = next(iter(self._waiting))
            del self._waiting[waiting]
            waiting.queued = False
            self.add(waiting)

    def clear(self) -> None:
        self._ready.clear()
        self._backfills.clear()
        self._waiting.clear()

    @property
    def _most_backfills(self) -> int:
        return 1 if self.sequential else MAX_BACKFILLS

    def _must_wait(self, stream: ProducerStream) -> bool:
        if stream.ended or stream in self._backfills or not stream.needs_backfill:
            return False
        return len(self._backfills) >= self._most_backfills
