"""TCP streams of a capture, read as conversations: which frames each connection carried, in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from upriver.cli.capture import CaptureEvent, Flow
from upriver.wire.constants import Magic
from upriver.wire.inspect.conversation import CapturedConversation, DumpReader
from upriver.wire.inspect.dump import FrameDump


class Excerpt(NamedTuple):
    """Something to print: a frame, or a remark about a connection (``lost`` bytes, or ``skipped`` and why)."""

    dump: FrameDump | None
    flow: Flow | None = None
    time: float = 0.0
    lost: int = 0
    skipped: str = ""


class Follower:
    """Gives every connection a conversation and every direction a reader."""

    def __init__(self, conversation: Callable[[], CapturedConversation]) -> None:
        self._new = conversation
        self._conversations: dict[frozenset[tuple[str, int]], CapturedConversation] = {}
        self._readers: dict[Flow, DumpReader] = {}
        self._foreign: set[Flow] = set()
        self._last = 0.0

    def take(self, event: CaptureEvent) -> Iterator[Excerpt]:
        """What one event of the capture shows."""
        self._last = event.time
        reader = self._reader(event)
        if event.flow in self._foreign:
            return
        if event.lost:
            reader.gap()
            yield Excerpt(None, event.flow, event.time, lost=event.lost)
        if event.data and self._is_foreign(event, reader):
            self._foreign.add(event.flow)
            yield Excerpt(None, event.flow, event.time, skipped="it does not begin with a frame of this protocol")
        elif event.data:
            yield from (Excerpt(dump, event.flow, event.time) for dump in reader.receive(event.data))

    def end(self) -> Iterator[Excerpt]:
        """Frames that the capture did not see the end of."""
        for flow, reader in self._readers.items():
            if flow not in self._foreign:
                yield from (Excerpt(dump, flow, self._last) for dump in reader.receive_eof())

    def _reader(self, event: CaptureEvent) -> DumpReader:
        flow = event.flow
        if event.fresh or flow.connection not in self._conversations:
            self._conversations[flow.connection] = self._new()
        if event.opened or flow not in self._readers:
            self._foreign.discard(flow)
            self._readers[flow] = DumpReader(self._conversations[flow.connection])
            if not event.opened and not event.from_start:
                self._readers[flow].gap()  # the capture began in the middle: look for a frame's start
        return self._readers[flow]

    def _is_foreign(self, event: CaptureEvent, reader: DumpReader) -> bool:
        untouched = reader.pristine and event.from_start
        return untouched and event.data[0] not in Magic._value2member_map_
