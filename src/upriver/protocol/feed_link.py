"""The reading end of one DCP connection: handshake, streams, flow control, noops; pure.

Documents never become objects here: they stay rows of the decoder's columns, and the link reports runs of them
between the control messages, in the order of arrival. Three doors as everywhere: ``received`` (after reading into
``buffer()``), ``receive_eof`` and ``data_to_send``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from upriver.errors import RemoteProtocolError, Status
from upriver.model import FailoverLog
from upriver.protocol.session import Session
from upriver.protocol.standing import Standing
from upriver.wire.columns import BulkDecoder, Columns, Control
from upriver.wire.constants import Magic, Opcode, OsoFlag, StreamEndStatus
from upriver.wire.dcp import (
    BufferAck,
    CloseStream,
    Commit,
    DcpNoop,
    FailoverLogResponse,
    OsoSnapshot,
    Prepare,
    RollbackResponse,
    SeqnoAdvanced,
    SnapshotMarker,
    SnapshotMarkerV20,
    SnapshotMarkerV22,
    StreamEnd,
    StreamRequest,
    marker_range,
)
from upriver.wire.events import SystemEvent
from upriver.wire.framing import cut_frame
from upriver.wire.message import Context, Message, OtherResponse, Response, decode


@dataclass(slots=True)
class Ready:
    """The handshake is over; ``config`` is the cluster map's JSON."""

    config: bytes


@dataclass(slots=True)
class Rows:
    """Documents ``first`` to ``last`` (excluded) of ``columns``; ``full`` columns must be taken before going on."""

    columns: Columns
    first: int
    last: int
    bytes: int
    full: bool


@dataclass(slots=True)
class Opened:
    vbucket: int
    log: FailoverLog


@dataclass(slots=True)
class RolledBack:
    """The producer wants us to go back to ``seqno`` or lower."""

    vbucket: int
    seqno: int


@dataclass(slots=True)
class Refused:
    """A stream request was answered with another status; ``value`` is a cluster map for NOT_MY_VBUCKET."""

    vbucket: int
    status: int
    value: bytes


@dataclass(slots=True)
class Ended:
    vbucket: int
    status: int


@dataclass(slots=True)
class Event:
    """A collection or scope event."""

    vbucket: int
    message: SystemEvent


@dataclass(slots=True)
class Moved:
    """The vbucket's seqno moved without a row: a marker's promise was kept, or an out-of-order snapshot ended."""

    vbucket: int
    seqno: int


LinkEvent = Ready | Rows | Opened | RolledBack | Refused | Ended | Event | Moved
_MARKERS = (SnapshotMarker, SnapshotMarkerV20, SnapshotMarkerV22)


@dataclass(slots=True)
class FeedLink:
    """One connection of a feed. ``window`` is the flow-control buffer that was asked for."""

    session: Session
    standing: Standing
    window: int
    decoder: BulkDecoder = field(init=False)
    ready: bool = field(default=False, init=False)
    streams: dict[int, int] = field(default_factory=dict, init=False)  # vbucket -> opaque
    _opaque: int = field(default=0, init=False)
    _requests: dict[int, int] = field(default_factory=dict, init=False)  # opaque -> vbucket
    _out: bytearray = field(default_factory=bytearray, init=False)
    _unacknowledged: int = field(default=0, init=False)
    _context: Context = field(default_factory=Context, init=False)

    def __post_init__(self) -> None:
        self.decoder = BulkDecoder(collections=False)
        self._send_all(self.session.start())

    def data_to_send(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data

    def buffer(self) -> memoryview:
        """Where the socket's next bytes go."""
        return self.decoder.buffer()

    def received(self, size: int) -> Iterator[LinkEvent]:
        """Decode ``size`` bytes that were read into ``buffer()``; iterate to the end before reading again."""
        for part in self.decoder.received(size):
            yield from self._part(part.columns, part.first, part.last, part.controls, part.row_bytes, part.full)

    def receive_eof(self) -> None:
        self.decoder.receive_eof()

    def open_stream(self, request: StreamRequest) -> None:
        self._opaque += 1
        request.opaque = self._opaque  # type: ignore[misc]  # ours to fill in: frozen only to the type checker
        self.streams[request.vbucket] = self._opaque
        self._requests[self._opaque] = request.vbucket
        self.standing.open(request.vbucket, self._opaque, request.end_seqno)
        self._send(request)

    def close_stream(self, vbucket: int) -> None:
        if self.streams.pop(vbucket, None) is not None:
            self.standing.close(vbucket)
            self._send(CloseStream(vbucket=vbucket))

    def acknowledge(self, size: int) -> None:
        """The caller is done with so many bytes; tell the producer once a fifth of the window has gathered."""
        self._unacknowledged += size
        if self.window and self._unacknowledged >= self.window // 5:
            self._send(BufferAck(self._unacknowledged))
            self._unacknowledged = 0

    def _part(
        self, columns: Columns, first: int, last: int, controls: list[Control], charged: int, full: bool
    ) -> Iterator[LinkEvent]:
        row = first
        per_row = charged / (last - first) if last > first else 0.0
        given = 0
        for control in controls:
            if control.row > row:
                size = round(per_row * (control.row - row))
                given += size
                yield self._rows(columns, row, control.row, size, False)
                row = control.row
            yield from self._control(control.frame)
        if last > row or full:
            yield self._rows(columns, row, last, charged - given, full)

    def _rows(self, columns: Columns, first: int, last: int, size: int, full: bool) -> Rows:
        bad = self.standing.advance(columns, first, last)
        if bad >= 0:
            vbucket, seqno = int(columns["vbucket"][bad]), int(columns["seqno"][bad])
            what = f"vbucket {vbucket}: seqno {seqno} is out of order, or outside its snapshot"
            raise RemoteProtocolError(what, "by_seqno", 24)
        return Rows(columns, first, last, size, full)

    def _control(self, data: memoryview) -> Iterator[LinkEvent]:
        frame = cut_frame(data)
        message = decode(frame, self._context)
        if isinstance(message, Response):
            yield from self._response(message)
            return
        if isinstance(message, DcpNoop):
            self._send(OtherResponse(Opcode.DCP_NOOP, opaque=message.opaque))
            return
        yield from self._stream_message(message)
        if frame.magic in (Magic.REQUEST, Magic.ALT_REQUEST):
            # A prepare is charged two bytes more than it is long (protocol.md 8.1).
            self.acknowledge(frame.size + (2 if isinstance(message, Prepare) else 0))

    def _stream_message(self, message: Message) -> Iterator[LinkEvent]:
        vb = message.vbucket
        if self.streams.get(vb) != message.opaque:
            return  # trailing data of a stream that we closed: charged, not read (trap 44)
        if isinstance(message, _MARKERS):
            start, end, _ = marker_range(message)
            self.standing.begin_snapshot(vb, start, end)
        elif isinstance(message, StreamEnd):
            del self.streams[vb]
            self.standing.close(vb)
            yield Ended(vb, message.status)
        elif isinstance(message, SeqnoAdvanced):
            self.standing.move(vb, message.by_seqno)
            yield Moved(vb, message.by_seqno)
        elif isinstance(message, SystemEvent):
            self.standing.move(vb, message.by_seqno)
            yield Event(vb, message)
        elif isinstance(message, OsoSnapshot):
            yield from self._oso(vb, message)
        elif isinstance(message, Prepare | Commit):
            raise RemoteProtocolError("durability messages were not asked for", "opcode", 1)

    def _oso(self, vb: int, message: OsoSnapshot) -> Iterator[LinkEvent]:
        if message.flags == OsoFlag.START:
            self.standing.begin_out_of_order(vb)
        else:
            yield Moved(vb, self.standing.end_out_of_order(vb))

    def _response(self, response: Response) -> Iterator[LinkEvent]:
        if not self.session.done:
            self._send_all(self.session.receive(response))
            self.decoder.collections = self.session.collections
            self._context = Context(collections=self.session.collections)
            if self.session.done:
                self.ready = True
                yield Ready(self.session.config or b"")
            return
        vb = self._requests.pop(response.opaque, None)
        if vb is None:
            return  # the answer to a close or an acknowledgement that went wrong: nothing to do
        if isinstance(response, FailoverLogResponse):
            yield Opened(vb, FailoverLog(response.entries))
            return
        self.streams.pop(vb, None)
        self.standing.close(vb)
        if isinstance(response, RollbackResponse):
            yield RolledBack(vb, response.seqno)
        else:
            yield Refused(vb, response.status, getattr(response, "value", b""))

    def _send(self, message: Message) -> None:
        self._out += message.encode()

    def _send_all(self, messages: list[Message]) -> None:
        for message in messages:
            self._send(message)


def is_temporary(status: int) -> bool:
    """A refusal that a later try may not meet."""
    return status in (Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM, Status.NOT_INITIALIZED)


def ends_well(status: int) -> bool:
    return status == StreamEndStatus.OK
