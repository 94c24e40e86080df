"""What is written to a bucket, to everybody who follows it: the way of streams that are up to date.

A stream that has everything hands its vbucket over to the fan of its bucket. What is new is then looked up once for
all who follow a vbucket, and encoded once for all streams of a connection. As soon as it is not that simple (a system
event, a full socket or window, more than a little) the stream is taken back and goes the way of all others.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from upriver.store import Live, live_after
from upriver.wire.bulk.live import New, News
from upriver.wire.constants import MarkerFlag

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from upriver.node.dcp.producer_stream import ProducerStream
    from upriver.store import VBucket

LIVE_BYTES = 64 * 1024  # of one vbucket; more is sent in turns
MOST_AT_ONCE = 512  # vbuckets, before the loop serves others
_MEMORY = int(MarkerFlag.MEMORY)
_FIRST_MEMORY = int(MarkerFlag.MEMORY | MarkerFlag.CHECKPOINT)


class Group:
    """The streams that follow one vbucket, all with everything up to ``position``."""

    __slots__ = ("_fan", "members", "origin", "position", "vbucket")

    def __init__(self, fan: LiveFan, vbucket: VBucket, position: int) -> None:
        self._fan = fan
        self.vbucket = vbucket
        self.position = position
        self.origin = 0  # where the last snapshot began that they were sent here
        self.members: dict[ProducerStream, None] = {}

    def wake(self) -> None:
        """The store's call: there is something new. It comes once, in any thread."""
        self._fan.woken(self)

    def served(self, live: Live) -> None:
        self.origin, self.position = live.first, live.last


class LiveFan:
    """One for each bucket; everything but ``woken`` happens in the loop's thread."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._woken: deque[Group] = deque()
        self._scheduled = False
        self._loop: AbstractEventLoop
        self._thread = 0

    def join(self, stream: ProducerStream) -> bool:
        """Take the stream in, if it is up to date; the caller holds the store's lock."""
        vbucket = stream.vbucket
        group = self._groups.get(vbucket.id)
        if group is not None and (group.position != stream.source.position or group.vbucket is not vbucket):
            return False  # the others are about to get what it has already, or to learn that their vbucket is gone
        position = stream.source.hand_over()
        if position is None:
            return False
        if group is None:
            group = self._new_group(stream, position)
        group.members[stream] = None
        stream.group = group
        return True

    def _new_group(self, stream: ProducerStream, position: int) -> Group:
        self._loop, self._thread = stream.producer.conn.node.loop, threading.get_ident()
        vbucket = stream.vbucket
        group = self._groups[vbucket.id] = Group(self, vbucket, position)
        vbucket.wait(group.wake)
        return group

    def leave(self, stream: ProducerStream) -> None:
        """Give the stream back its own way, from where it is now."""
        group, stream.group = stream.group, None
        if group is None:
            return
        group.members.pop(stream, None)
        if not group.members:
            group.vbucket.stop_waiting(group.wake)
            if self._groups.get(group.vbucket.id) is group:
                del self._groups[group.vbucket.id]
        stream.source.take_back(group.origin, group.position)

    def woken(self, group: Group) -> None:
        self._woken.append(group)
        if not self._scheduled:
            self._scheduled = True
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._turn)
            else:
                self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        self._scheduled = False  # first, so that whoever comes from now on schedules another
        served: list[tuple[Group, Live]] = []
        for _ in range(min(len(self._woken), MOST_AT_ONCE)):
            group = self._woken.popleft()
            if group.members:
                live = self._look_up(group)
                if live is not None:
                    served.append((group, live))
        if served:
            self._serve(served)
        if self._woken and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _look_up(self, group: Group) -> Live | None:
        """What is new; if that is nothing for a fan its streams see to it themselves."""
        vbucket = group.vbucket
        with vbucket.shared.lock:
            live = live_after(vbucket, group.position)
            if (live is not None and live.size <= LIVE_BYTES) or vbucket.high_seqno == group.position:
                vbucket.wait(group.wake)
                return live
        for stream in list(group.members):
            stream.producer.make_ready(stream)
        return None

    def _serve(self, served: list[tuple[Group, Live]]) -> None:
        news = News([
            New(
                group.vbucket.id, live.first, live.last, live.first if live.begins_checkpoint else 0,
                _FIRST_MEMORY if live.begins_checkpoint else _MEMORY, live.address, live.size,
            )
            for group, live in served
        ])  # fmt: skip
        finished: list[ProducerStream] = []
        for producer in {stream.producer: None for group, _ in served for stream in group.members}:
            finished += producer.send_news(news)
        for group, live in served:
            group.served(live)
        for stream in finished:
            stream.producer.make_ready(stream)
