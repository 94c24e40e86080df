"""The producer side of one DCP connection: its streams, and the turns in which they fill the socket.

Each turn makes sends of at most 256 KiB, every stream that is ready putting in a run of its vbucket before the next
one's; then the loop serves the others. Idle streams cost nothing: the store wakes them, also from its flusher thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from upriver.errors import Status
from upriver.node import log
from upriver.node.dcp.producer_stream import Outcome, ProducerStream
from upriver.protocol.producer.controls import ProducerOptions
from upriver.wire import Opcode, OtherResponse
from upriver.wire.bulk.encode import SendBuffer
from upriver.wire.bulk.live import Followers, News
from upriver.wire.constants import StreamEndStatus
from upriver.wire.messages import dcp

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection

SEND_BYTES = 256 * 1024
TURN_S = 0.005  # many streams with little to say each take as long as few with much
MAX_BACKFILLS = 64  # that run at once on one connection (8.4)
_FORGIVEN = frozenset({Status.SUCCESS, Status.NOT_MY_VBUCKET, Status.DCP_STREAM_NOT_FOUND, Status.OPAQUE_NO_MATCH})
_FORGIVEN_BEFORE_V7 = frozenset({Status.KEY_ENOENT, Status.KEY_EEXISTS})
_UNANSWERED = frozenset({Opcode.DCP_SEQNO_ADVANCED, Opcode.DCP_OSO_SNAPSHOT})


class SendBuffers:
    """Send buffers that are free. A connection holds one only while the socket has not taken all of it."""

    def __init__(self) -> None:
        self._free: list[SendBuffer] = []

    def take(self) -> SendBuffer:
        return self._free.pop() if self._free else SendBuffer(SEND_BYTES)

    def give_back(self, buffer: SendBuffer) -> None:
        """One that grew for a large document is let go."""
        if buffer.room <= SEND_BYTES and len(self._free) < 8:
            buffer.clear()
            self._free.append(buffer)


class Producer:
    """What ``ClientConnection.dcp`` is after an OPEN as producer."""

    def __init__(self, conn: ClientConnection, bucket: NodeBucket, options: ProducerOptions) -> None:
        self.conn = conn
        self.bucket = bucket
        self.options = options
        self.streams: dict[tuple[int, int], ProducerStream] = {}
        self.takeovers: list[ProducerStream] = []
        self.created = time.time()
        self.total_bytes_sent = 0
        self.items_sent = 0
        self.noops_sent = 0
        self.stalled_until = 0.0  # a fault: nothing is sent before then, no noop either
        self.slow_bytes_per_s = 0  # a fault: no faster than this
        self._resume_at = 0.0
        self._ready: deque[ProducerStream] = deque()
        self._woken: deque[ProducerStream] = deque()  # also appended to by the flusher thread
        self._wake_scheduled = False
        self._thread = threading.get_ident()  # the loop's: a wake from there needs no detour
        self._backfills: set[ProducerStream] = set()
        self._waiting_backfills: dict[ProducerStream, None] = {}  # in order
        self._followers = Followers(0)  # the streams that the bucket's fan serves; made larger for the first one
        self._scheduled = False
        self._lent: SendBuffer | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def upr_expirations(self) -> bool:
        return self.conn.node.options.upr_expirations

    # ------------------------------------------------------------------------------------------ streams

    def add(self, stream: ProducerStream) -> None:
        self.streams[stream.vbucket_id, stream.stream_id] = stream
        if stream.takeover is not None:
            self.takeovers.append(stream)
        self.make_ready(stream)

    def wake_of(self, stream: ProducerStream) -> Callable[[], None]:
        """The callback for the store: cheap, and safe from any thread."""
        loop = self.conn.node.loop

        def wake() -> None:
            if threading.get_ident() == self._thread:
                self.make_ready(stream)
                return
            if stream.group is not None:
                self._followers.mute(stream.vbucket_id)  # it was ended: what comes now may be of another branch
            self._woken.append(stream)
            if not self._wake_scheduled and not self._closed:
                self._wake_scheduled = True
                loop.call_soon_threadsafe(self._take_woken)

        return wake

    def _take_woken(self) -> None:
        self._wake_scheduled = False  # first, so that whoever comes during the loop schedules another
        while self._woken:
            self.make_ready(self._woken.popleft())

    def make_ready(self, stream: ProducerStream) -> None:
        self.unfollow(stream)
        if not stream.queued and not self._closed:
            stream.queued = True
            self._ready.append(stream)
            self.schedule()

    def _follow(self, stream: ProducerStream) -> None:
        """Leave a stream that is up to date to the bucket's fan, if it is of the kind that can be."""
        encoder = stream.plain_encoder
        if encoder is None:
            return
        if not self._followers:
            self._followers = Followers(self.bucket.store.vbuckets)
        with stream.vbucket.shared.lock:  # who ends it meanwhile finds it here or there
            if self.bucket.fan.join(stream):
                self._followers.add(
                    stream.vbucket_id, encoder, stream.end_seqno, can_advance=stream.can_advance,
                    is_filtered=stream.filter.is_filtered, is_replica=stream.options.sync_replication,
                )  # fmt: skip

    def unfollow(self, stream: ProducerStream) -> None:
        """It goes its own way again, if it did not."""
        if stream.group is not None:
            self.settle(stream)
            self._followers.mute(stream.vbucket_id)
            self.bucket.fan.leave(stream)

    def settle(self, stream: ProducerStream) -> None:
        """Have the stream know what the fan did for it."""
        if stream.group is not None:
            stream.note(self._followers.progress(stream.vbucket_id), stream.group.position)

    def ending(self, stream: ProducerStream) -> None:
        """It only has its last frames to send; its place may be taken by a new stream."""
        key = stream.vbucket_id, stream.stream_id
        if self.streams.get(key) is stream:
            del self.streams[key]
        self._forget(stream)
        self._leave_backfills(stream)
        self.make_ready(stream)

    def close_stream(self, stream: ProducerStream) -> None:
        """The client does not want it any more (2.4)."""
        if self.options.end_on_close:
            stream.end(StreamEndStatus.CLOSED)
            return
        stream.drop()
        del self.streams[stream.vbucket_id, stream.stream_id]
        self._forget(stream)
        self._leave_backfills(stream)

    def _forget(self, stream: ProducerStream) -> None:
        if stream in self.takeovers:
            self.takeovers.remove(stream)

    def close(self) -> None:
        """The connection is gone."""
        if self._closed:
            return
        self._closed = True
        for stream in [*self.streams.values(), *self._ready]:
            stream.drop()
        self.streams.clear()
        self._ready.clear()
        self._backfills.clear()
        self._waiting_backfills.clear()
        self._woken.clear()
        self.takeovers.clear()
        if self.bucket.dcp_connections.get(self.name) is self.conn:
            del self.bucket.dcp_connections[self.name]

    # ------------------------------------------------------------------------------------------ turns

    def schedule(self) -> None:
        """Have a turn soon, if there is anything to send and somewhere to send it."""
        if not self._scheduled and self._ready and self.conn.can_write:
            self._scheduled = True
            self.conn.node.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._closed or not self.conn.can_write or self._must_wait():
            return
        try:
            self._send_slices()
        except Exception:
            self._fail()
            return
        if self.options.window.is_open:
            self.schedule()

    def _fail(self) -> None:
        log.failure("producer_failed", connection=self.conn.id, name=self.name)
        self.conn.abort("internal error")

    def _send_slices(self) -> None:
        self._return_buffer()
        deadline = time.monotonic() + TURN_S
        for _ in range(self.options.priority):
            buffer = self.conn.node.send_buffers.take()
            self._fill(buffer, deadline)
            self._send(buffer)
            if time.monotonic() > deadline or not self._can_go_on:
                break

    @property
    def _can_go_on(self) -> bool:
        return bool(self._ready) and self.options.window.is_open and self.conn.can_write and not self._resume_at

    def send_news(self, news: News) -> list[ProducerStream]:
        """What was just written, to the streams that have everything else; returns those that reached their end.

        Where there is no room for it now the streams go their own way, and send it when there is.
        """
        try:
            return self._send_news(news)
        except Exception:  # of ours; the other connections are not to miss anything for it
            self._fail()
            return []

    def _send_news(self, news: News) -> list[ProducerStream]:
        self._return_buffer()
        row, followers = 0, self._followers
        while row < len(news) and self._can_send:
            buffer = self.conn.node.send_buffers.take()
            row, records = followers.encode(news, row, buffer, self.options.window.room)
            self.items_sent += records
            self.options.window.charge(buffer.used)
            self._send(buffer)
        left_out, finished = followers.left_out(news, row)
        for vbucket in left_out + news.vbuckets[row:]:
            stream = self.streams.get((vbucket, 0))
            if stream is not None and stream.group is not None:
                self.make_ready(stream)
        return [self.streams[vbucket, 0] for vbucket in finished]

    @property
    def _can_send(self) -> bool:
        is_slowed = self.stalled_until or self.slow_bytes_per_s or self._resume_at
        return not self._closed and self.conn.can_write and self.options.window.is_open and not is_slowed

    def _send(self, buffer: SendBuffer) -> None:
        if buffer.used:
            self.total_bytes_sent += buffer.used
            if self.slow_bytes_per_s:
                self._resume_at = time.monotonic() + buffer.used / self.slow_bytes_per_s
            view = buffer.view()
            self.conn.transport.write(bytes(view) if self.conn.tls else view)  # TLS may keep what it has not encrypted
        if self.conn.can_write:
            self.conn.node.send_buffers.give_back(buffer)
        else:
            self._lent = buffer  # the transport still reads it

    def _return_buffer(self) -> None:
        if self._lent is not None:
            self.conn.node.send_buffers.give_back(self._lent)
            self._lent = None

    def _fill(self, buffer: SendBuffer, deadline: float) -> None:
        most = min(SEND_BYTES, self.slow_bytes_per_s // 10 or SEND_BYTES)
        while self._ready and buffer.used < most:
            stream = self._ready.popleft()
            stream.queued = False
            if self._must_queue_for_backfill(stream):
                continue
            before = stream.items_sent
            outcome = stream.fill(buffer, most)
            self.items_sent += stream.items_sent - before
            self._place(stream, outcome)
            if outcome in (Outcome.FULL, Outcome.WINDOW) or time.monotonic() > deadline:
                break

    def _place(self, stream: ProducerStream, outcome: Outcome) -> None:
        """Where a stream goes after its turn."""
        if outcome is Outcome.ENDED or (stream.ended and outcome is Outcome.IDLE):
            return
        if not stream.backfilling:
            self._leave_backfills(stream)
        else:
            self._backfills.add(stream)
        if stream.queued:
            return
        if outcome is Outcome.IDLE:
            self._follow(stream)
            return
        stream.queued = True
        stays = outcome in (Outcome.FULL, Outcome.WINDOW) or (self.options.sequential_backfill and stream.backfilling)
        if stays:
            self._ready.appendleft(stream)
        else:
            self._ready.append(stream)

    @property
    def _most_backfills(self) -> int:
        """Sequential order runs one backfill at a time, round robin a bounded number; the rest wait."""
        return 1 if self.options.sequential_backfill else MAX_BACKFILLS

    def _must_queue_for_backfill(self, stream: ProducerStream) -> bool:
        if stream.ended or stream in self._backfills or not stream.needs_backfill:
            return False
        if len(self._backfills) < self._most_backfills:
            return False
        stream.queued = True
        self._waiting_backfills[stream] = None
        return True

    def _leave_backfills(self, stream: ProducerStream) -> None:
        """It needs the disk no more, or never did; one that waits may have its place."""
        self._backfills.discard(stream)
        if not self._waiting_backfills:
            return
        if stream in self._waiting_backfills:  # it ends: nobody may wake it in the place of another
            del self._waiting_backfills[stream]
            stream.queued = False
        elif len(self._backfills) < self._most_backfills:
            waiting = next(iter(self._waiting_backfills))
            del self._waiting_backfills[waiting]
            waiting.queued = False
            self.make_ready(waiting)

    def _must_wait(self) -> bool:
        """Faults: a stalled connection sends nothing, a slow one only so much."""
        until = max(self.stalled_until, self._resume_at)
        if not until:
            return False
        left = until - time.monotonic()
        if left <= 0:
            self.stalled_until = self._resume_at = 0.0
            return False
        self.conn.node.loop.call_later(min(left, 1.0), self.schedule)
        return True

    # ------------------------------------------------------------------------------------------ the peer

    def acknowledged(self, count: int) -> None:
        self.options.window.acknowledge(count)
        self.schedule()

    def tick(self, now: float) -> None:
        """Ask for a sign of life if it is time; a noop is not subject to flow control."""
        timer = self.options.noop
        if timer.is_due(now) and self.conn.can_write and not self.stalled_until:
            self.noops_sent += 1
            self.conn.write(dcp.DcpNoop(opaque=timer.sent(now)).encode())
        for stream in self.takeovers:
            if stream.takeover is not None and not stream.ended:
                stream.takeover.tick(now, self.conn.node.options.limits.takeover_s)

    def on_response(self, response: OtherResponse) -> bool:
        """Whether the peer's answer can stand; False ends the connection."""
        opcode = response.to
        if opcode == Opcode.DCP_NOOP:
            return self.options.noop.answered(response.opaque)
        if opcode in _UNANSWERED or not Opcode.DCP_STREAM_END <= opcode <= Opcode.DCP_CACHE_TRANSFER_END:
            return False
        if response.status == Status.SUCCESS and opcode in (Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_SET_VBUCKET_STATE):
            self._confirmed(response)
        return self._is_forgiven(response)

    def _confirmed(self, response: OtherResponse) -> None:
        for stream in list(self.takeovers):
            if stream.takeover is not None and stream.opaque == response.opaque:
                stream.takeover.confirmed(response.to)
                self.make_ready(stream)

    def _is_forgiven(self, response: OtherResponse) -> bool:
        status = response.status
        if status in _FORGIVEN:
            return True
        if response.to == Opcode.DCP_STREAM_END and status == Status.KEY_ENOENT:
            return True
        commits = (Opcode.DCP_COMMIT, Opcode.DCP_ABORT)
        if status == Status.KEY_ENOENT and response.to in commits:
            return False
        return status in _FORGIVEN_BEFORE_V7 and not self.options.v7_status_codes
