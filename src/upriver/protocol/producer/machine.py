"""The producing end of a DCP connection: its streams, and the bytes that they send.

Pure: requests go in, frames come out, and a ``SourceStore`` has the history. Besides the doors of every machine
(``receive``, ``receive_eof``, ``data_to_send``) there is ``wake``, for when time has passed or the store has something
new. A node, which has decoded the requests already, passes them to ``handle`` instead of ``receive``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from upriver.errors import InvalidMessage, Status, StatusError
from upriver.protocol.producer import requests
from upriver.protocol.producer.controls import ProducerOptions
from upriver.protocol.producer.live import LiveStreams
from upriver.protocol.producer.source import SourceStore
from upriver.protocol.producer.stream import ProducerStream, TurnEnd
from upriver.protocol.producer.turns import Turns
from upriver.protocol.roles import Foreign, WrongRole
from upriver.wire.bulk.encode import SendBuffer
from upriver.wire.bulk.live import LiveBatch, LiveTable
from upriver.wire.bulk.shape import ScratchMemory
from upriver.wire.checks import Context
from upriver.wire.constants import Opcode, StreamEndStatus
from upriver.wire.framing import Frame, FrameSplitter
from upriver.wire.message import Message, OtherResponse, decode
from upriver.wire.messages.dcp import DcpNoop

SEND_BYTES = 256 * 1024  # the size of one send, unless a single document is larger
_MOST_FREE = 8


class ProducerMemory:
    """Free send buffers and the encoders' scratch memory, shared by all producers of one thread.

    A producer holds a buffer only while it is filled and sent.
    """

    def __init__(self) -> None:
        self._free: list[SendBuffer] = []
        self._scratch: ScratchMemory | None = None

    def take(self) -> SendBuffer:
        return self._free.pop() if self._free else SendBuffer(SEND_BYTES)

    def give_back(self, buffer: SendBuffer) -> None:
        """Keep the buffer for later, unless it grew for a large document."""
        if buffer.room <= SEND_BYTES and len(self._free) < _MOST_FREE:
            buffer.clear()
            self._free.append(buffer)

    def scratch(self) -> ScratchMemory:
        """Scratch memory, made when the first stream needs it; on most nodes none ever does."""
        if self._scratch is None:
            self._scratch = ScratchMemory()
        return self._scratch


MOST_TURNS = 64  # per call of ``data_to_send``: many streams with little to send must not take too long
_FORGIVEN = frozenset({Status.SUCCESS, Status.NOT_MY_VBUCKET, Status.DCP_STREAM_NOT_FOUND, Status.OPAQUE_NO_MATCH})
_FORGIVEN_BEFORE_V7 = frozenset({Status.KEY_ENOENT, Status.KEY_EEXISTS})
_UNANSWERED = frozenset({Opcode.DCP_SEQNO_ADVANCED, Opcode.DCP_OSO_SNAPSHOT})
_COMMANDS = range(Opcode.DCP_OPEN, Opcode.DCP_CACHE_TRANSFER_END + 1)


@dataclass(frozen=True, slots=True)
class ProducerLimits:
    """Limits that the node sets for a connection."""

    max_streams: int = 16_384
    takeover_s: float = 60.0  # after this time, a takeover that has not caught up makes writers wait
    upr_expirations: bool = False  # send expirations to UPR readers
    ignores_pressure: bool = False  # the reader copies the data: open its streams even when memory is short


@dataclass(slots=True)
class StreamGranted:
    """A stream request was granted with these values."""

    vbucket: int
    stream_id: int
    start: int
    end: int
    flags: int


@dataclass(slots=True)
class StreamDropped:
    """The client closed a stream."""

    vbucket: int
    stream_id: int


@dataclass(slots=True)
class BackfillFailed:
    """The disk could not be read; only this stream ends."""

    vbucket: int
    error: Exception


StreamChange = StreamGranted | StreamDropped | BackfillFailed
ProducerEvent = Foreign | StreamChange


def _nothing() -> None:
    pass


def _always() -> bool:
    return True


class Producer:
    """One connection in the producing role.

    ``notify`` is called, in any thread, when ``wake`` and then ``data_to_send`` have work to do; everything else runs
    in one thread. ``can_send`` says whether the peer takes bytes now; if not, nothing is encoded ahead for it.
    """

    def __init__(
        self, store: SourceStore, live: LiveStreams, options: ProducerOptions, memory: ProducerMemory,
        notify: Callable[[], None] = _nothing, can_send: Callable[[], bool] = _always,
        limits: ProducerLimits = ProducerLimits(),  # noqa: B008
    ) -> None:  # fmt: skip
        self.store, self.live, self.options, self.memory, self.limits = store, live, options, memory, limits
        self.streams: dict[tuple[int, int], ProducerStream] = {}  # by vbucket and stream-id
        self.live_table = LiveTable(0)  # the live streams; gets its real size with the first one
        self.bytes_sent = 0
        self.items_sent = 0
        self._notify, self._can_send = notify, can_send
        self._takeovers: list[ProducerStream] = []
        self._turns = Turns()
        self._woken: deque[ProducerStream] = deque()  # also appended to by the store's threads
        self._changes: list[StreamChange] = []
        self._is_closed = False
        self._splitter = FrameSplitter()
        self._context = Context(collections=options.collections, check_values=True)
        self._failure: Exception | None = None
        self._answers = bytearray()
        self._encoded: SendBuffer | None = None  # by a live turn; ``data_to_send`` has not returned it yet
        self._lent: SendBuffer | None = None  # returned by ``data_to_send``; the sender may still read it

    # ---------------------------------------------------------------------------------------------- the doors

    def receive(self, data: bytes | bytearray | memoryview, now: float) -> Iterator[ProducerEvent]:
        """Take bytes from the connection; on ``WrongRole`` or ``FramingError``, disconnect."""
        for frame in self._splitter.receive(data):
            if frame.magic.is_response:
                if not self.answered(OtherResponse.from_frame(frame, self._context)):
                    raise WrongRole(f"a response to 0x{frame.opcode:02x} that answers nothing", "opcode", 1)
            elif frame.opcode in _COMMANDS:
                self._answer(frame, now)
            else:
                yield Foreign(frame)
            yield from self.changes()

    def receive_eof(self) -> None:
        """The connection is gone; end all its streams."""
        if self._is_closed:
            return
        self._is_closed = True
        for stream in [*self.streams.values(), *self._turns]:
            stream.drop()
        self.streams.clear()
        self._turns.clear()
        self._woken.clear()
        self._takeovers.clear()
        self._changes.clear()
        self._notify, self._can_send = _nothing, _always  # break the reference cycle, so that memory is freed now

    def data_to_send(self, most: int = SEND_BYTES) -> bytes | memoryview:
        """The next bytes, about ``most`` of them; valid until this or ``sent`` is called.

        It may return nothing after looking at many streams: call it again while ``is_ready``.
        """
        self.sent()
        if self._failure is not None:
            raise self._failure
        buffer, self._encoded = self._encoded, None
        if buffer is None:
            if self._answers:
                answers = bytes(self._answers)
                self._answers.clear()
                return answers
            if not self.is_ready:
                return b""
            buffer = self.memory.take()
            self._fill(buffer, min(most, SEND_BYTES))
        self._lent = buffer
        self.bytes_sent += buffer.used
        return buffer.view()

    def wake(self, now: float) -> None:
        """Time has passed, or the store has called: queue woken streams, and do what is due."""
        while self._woken:
            stream = self._woken.popleft()
            stream.is_woken = False
            self._queue(stream)
        timer = self.options.noop
        if timer.due_at <= now and not self._is_closed:  # not subject to flow control
            self._answers += DcpNoop(opaque=timer.sent(now)).encode()
        for stream in self._takeovers:
            if stream.takeover is not None:
                stream.takeover.wake(now)

    @property
    def wake_at(self) -> float:
        """When ``wake`` has to be called because of time alone; infinite if never."""
        takeovers = (stream.takeover.wake_at for stream in self._takeovers if stream.takeover is not None)
        return min(self.options.noop.due_at, *takeovers) if self._takeovers else self.options.noop.due_at

    @property
    def is_ready(self) -> bool:
        """Whether ``data_to_send`` has work to do."""
        if self._answers or self.has_encoded:
            return True
        return len(self._turns) > 0 and self.options.window.is_open

    @property
    def has_encoded(self) -> bool:
        """Whether a live turn has left bytes or an error for ``data_to_send``."""
        return self._encoded is not None or self._failure is not None

    def sent(self) -> None:
        """The bytes that ``data_to_send`` returned last have been sent; reuse their memory."""
        if self._lent is not None:
            self.memory.give_back(self._lent)
            self._lent = None

    def changes(self) -> list[StreamChange]:
        """What happened to streams since the last call."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    # ---------------------------------------------------------------------------------------------- requests

    def handle(self, request: Message, now: float) -> requests.RequestAnswer | None:
        """Carry out a request; returns the answer, if there is one.

        A ``StatusError`` has the status to refuse it with; on ``WrongRole``, disconnect.
        """
        handler = requests.HANDLERS.get(type(request))
        if handler is None:
            raise WrongRole(f"command 0x{request.opcode:02x} to a producer", "opcode", 1)
        return handler(self, request, now)

    def _answer(self, frame: Frame, now: float) -> None:
        try:
            answer = self.handle(decode(frame, self._context), now)
        except (StatusError, InvalidMessage) as error:
            answer = requests.RequestAnswer(error.status)
        if answer is not None:
            status, extras, value = answer
            self._answers += OtherResponse(
                frame.opcode, extras, value=value, opaque=frame.opaque, status=status
            ).encode()

    def answered(self, response: OtherResponse) -> bool:
        """Take the peer's answer to something we sent; if this returns False, disconnect."""
        opcode = response.to
        if opcode == Opcode.DCP_NOOP:
            return self.options.noop.answered(response.opaque)
        if opcode in _UNANSWERED or not Opcode.DCP_STREAM_END <= opcode <= Opcode.DCP_CACHE_TRANSFER_END:
            return False
        if response.status == Status.SUCCESS and opcode in (Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_SET_VBUCKET_STATE):
            self._confirmed(response)
        return self._is_forgiven(response)

    def _confirmed(self, response: OtherResponse) -> None:
        for stream in list(self._takeovers):
            if stream.takeover is not None and stream.opaque == response.opaque:
                stream.takeover.confirmed(response.to)
                self.make_ready(stream)

    def _is_forgiven(self, response: OtherResponse) -> bool:
        status = response.status
        if status in _FORGIVEN:
            return True
        if response.to == Opcode.DCP_STREAM_END and status == Status.KEY_ENOENT:
            return True
        if status == Status.KEY_ENOENT and response.to in (Opcode.DCP_COMMIT, Opcode.DCP_ABORT):
            return False
        return status in _FORGIVEN_BEFORE_V7 and not self.options.v7_status_codes

    # ---------------------------------------------------------------------------------------------- streams

    def add(self, stream: ProducerStream) -> None:
        key = stream.vbucket_id, stream.stream_id
        self.streams[key] = stream
        if stream.takeover is not None:
            self._takeovers.append(stream)
        self._changes.append(StreamGranted(*key, stream.start_seqno, stream.end_seqno, stream.flags))
        self.make_ready(stream)

    def wake_of(self, stream: ProducerStream) -> Callable[[], None]:
        """The callback for the store; cheap, and safe to call in any thread."""

        def wake() -> None:
            stream.is_woken = True  # set first: ``go_live`` checks it last, so one of the two notices the other
            if stream.live is not None:
                self.live_table.mute(stream.vbucket_id)  # it has ended: new changes may be of another branch
            self._woken.append(stream)
            self._notify()

        return wake

    def make_ready(self, stream: ProducerStream) -> None:
        """The stream may have something to send outside the live state."""
        self._queue(stream)
        self._notify()

    def _queue(self, stream: ProducerStream) -> None:
        stream.leave_live()
        if not self._is_closed:
            self._turns.add(stream)

    def use_options(self, options: ProducerOptions) -> None:
        """Set the options for new streams; existing ones keep those they were created with."""
        self.options = options
        self._turns.sequential = options.sequential_backfill

    def close_stream(self, stream: ProducerStream) -> None:
        """Close a stream at the client's request (docs/protocol/messages.md#close-stream)."""
        self._changes.append(StreamDropped(stream.vbucket_id, stream.stream_id))
        if self.options.end_on_close:
            stream.end(StreamEndStatus.CLOSED)
            return
        stream.drop()
        self._forget(stream)

    def ending(self, stream: ProducerStream) -> None:
        """Only the stream's last frames are left to send; a new stream may take its key."""
        self._forget(stream)
        self.make_ready(stream)

    def _forget(self, stream: ProducerStream) -> None:
        key = stream.vbucket_id, stream.stream_id
        if self.streams.get(key) is stream:
            del self.streams[key]
        if stream in self._takeovers:
            self._takeovers.remove(stream)
        self._turns.leave_backfills(stream)

    def report_failure(self, stream: ProducerStream, error: Exception) -> None:
        self._changes.append(BackfillFailed(stream.vbucket_id, error))

    # ---------------------------------------------------------------------------------------------- sending

    def _fill(self, buffer: SendBuffer, most: int) -> None:
        turns = self._turns
        for _ in range(MOST_TURNS):
            if not turns or buffer.used >= most:
                return
            stream = turns.next()
            if stream is None:
                continue
            before = stream.items_sent
            end = stream.fill(buffer, most)
            self.items_sent += stream.items_sent - before
            turns.done(stream, end)
            if end is TurnEnd.IDLE and not stream.queued and not stream.ended:
                stream.go_live()
            elif end is TurnEnd.FULL or end is TurnEnd.WINDOW:
                return

    def encode_live(self, batch: LiveBatch) -> list[ProducerStream]:
        """Encode new changes for the live streams; returns the streams that have reached their end.

        Streams for which there is no room now leave the live state and send the changes later.
        """
        try:
            return self._encode_live(batch)
        except Exception as error:  # ``data_to_send`` raises it; other connections must not be affected
            self._failure = error
            return []

    def _encode_live(self, batch: LiveBatch) -> list[ProducerStream]:
        row, table, window = 0, self.live_table, self.options.window
        if self._encoded is None and window.is_open and self._can_send():
            buffer = self.memory.take()
            row, records = table.encode(batch, 0, buffer, window.room)
            self.items_sent += records
            window.charge(buffer.used)
            if buffer.used:
                self._encoded = buffer
            else:
                self.memory.give_back(buffer)
        left_out, finished = table.left_out(batch, row)
        for vbucket in left_out + batch.vbuckets[row:]:
            stream = self.streams.get((vbucket, 0))
            if stream is not None:
                self.make_ready(stream)
        return [self.streams[vbucket, 0] for vbucket in finished]
