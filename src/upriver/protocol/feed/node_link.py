"""The reading end of one DCP connection: handshake, streams, flow control, noops; pure.

Documents never become objects here: they stay rows of the decoder's columns. The link reports runs of rows and the
control messages between them, in the order of arrival. The doors are ``received`` (after reading into ``buffer()``),
``receive_eof`` and ``data_to_send``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from upriver.errors import TEMPORARY, RemoteProtocolError, Status
from upriver.model import SEQNO_MAX, FailoverLog
from upriver.protocol.feed.positions import PositionTable
from upriver.protocol.flow import PREPARE_SURCHARGE
from upriver.protocol.session import Session
from upriver.wire.bulk.decode import BulkDecoder, Columns, Decoded
from upriver.wire.checks import Context
from upriver.wire.constants import Feature, Magic, Opcode, OsoFlag
from upriver.wire.framing import cut_frame
from upriver.wire.message import Message, OtherResponse, Response, decode
from upriver.wire.messages.cluster import GetClusterConfig
from upriver.wire.messages.dcp import (
    BufferAck,
    CloseStream,
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
from upriver.wire.messages.events import SystemEvent

ACK_AFTER_S = 5.0  # freed bytes are acknowledged after this time, however few (docs/protocol/flow.md#window)
_CONFIG_OPAQUE = 0xC0FF_EE00


@dataclass(slots=True)
class LinkReady:
    """The handshake is over; ``config`` is the cluster map's JSON."""

    config: bytes


@dataclass(slots=True)
class NewConfig:
    """The answer to ``ask_config``."""

    config: bytes


@dataclass(slots=True)
class RowsReceived:
    """Rows ``first`` to ``last`` (excluded) of ``columns``; if ``full``, take the columns before reading on."""

    columns: Columns
    first: int
    last: int
    bytes: int
    full: bool


@dataclass(slots=True)
class StreamOpened:
    vbucket: int
    log: FailoverLog


@dataclass(slots=True)
class RollbackAsked:
    """The producer wants us to go back to ``seqno`` or lower."""

    vbucket: int
    seqno: int


@dataclass(slots=True)
class StreamRefused:
    """A stream request was answered with another status; ``value`` is a cluster map for NOT_MY_VBUCKET."""

    vbucket: int
    status: int
    value: bytes


@dataclass(slots=True)
class StreamEnded:
    vbucket: int
    status: int


@dataclass(slots=True)
class CollectionEventReceived:
    """A collection or scope event."""

    vbucket: int
    message: SystemEvent


@dataclass(slots=True)
class SeqnoMoved:
    """The vbucket's seqno moved without a row: by SEQNO_ADVANCED, or at the end of an out-of-order snapshot."""

    vbucket: int
    seqno: int


LinkEvent = (
    LinkReady
    | NewConfig
    | RowsReceived
    | StreamOpened
    | RollbackAsked
    | StreamRefused
    | StreamEnded
    | CollectionEventReceived
    | SeqnoMoved
)
_MARKERS = (SnapshotMarker, SnapshotMarkerV20, SnapshotMarkerV22)


@dataclass(slots=True)
class NodeLink:
    """One connection of a feed. ``window`` is the requested size of the flow-control window; 0 turns it off."""

    session: Session
    table: PositionTable
    window: int
    heard_at: float = 0.0  # when the last bytes came
    begun_at: float = 0.0  # when we began to connect
    decoder: BulkDecoder = field(default_factory=BulkDecoder)
    ready: bool = field(default=False, init=False)
    streams: dict[int, int] = field(default_factory=dict, init=False)  # vbucket -> opaque
    charged: int = field(default=0, init=False)  # bytes that the producer has counted against the window
    acknowledged: int = field(default=0, init=False)  # bytes that we have acknowledged
    _requests: dict[int, int] = field(default_factory=dict, init=False)  # opaque -> vbucket
    _upto: dict[int, int] = field(default_factory=dict, init=False)
    _gone: set[int] = field(default_factory=set, init=False)  # opaques of streams that we closed: data may still arrive
    _out: bytearray = field(default_factory=bytearray, init=False)
    _freed: int = field(default=0, init=False)
    _freed_since: float = field(default=0.0, init=False)
    _context: Context = field(default_factory=Context, init=False)

    def __post_init__(self) -> None:
        self._send_all(self.session.start())

    @property
    def idle(self) -> bool:
        """Whether the link is ready, with no stream and no partial message, so that another feed can use it."""
        return self.ready and not self.streams and not self.decoder.pending

    # ---------------------------------------------------------------------------------------------- doors

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
            yield from self._part(part)

    def receive_eof(self) -> None:
        self.decoder.receive_eof()

    # ---------------------------------------------------------------------------------------------- what we ask

    def open_stream(self, request: StreamRequest, upto: int = SEQNO_MAX) -> None:
        """Request a stream. ``request.opaque`` must be new; rows above ``upto`` are dropped."""
        self.streams[request.vbucket] = request.opaque
        self._requests[request.opaque] = request.vbucket
        self._upto[request.vbucket] = upto
        self.table.open(request.vbucket, request.opaque, upto)
        self._send(request)

    def close_stream(self, vbucket: int) -> None:
        """Close a stream; data that still arrives is counted and dropped."""
        if vbucket in self.streams:
            self._gone.add(self.streams[vbucket])
            self._forget(vbucket)
            self._send(CloseStream(vbucket=vbucket))

    def ask_config(self, known: tuple[int, int]) -> None:
        """Ask for the cluster map; servers that can compare revisions send an empty answer if ours is the newest."""
        if Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION in self.session.features:
            self._send(GetClusterConfig(*known, opaque=_CONFIG_OPAQUE))
        else:
            self._send(GetClusterConfig(opaque=_CONFIG_OPAQUE))

    def acknowledge(self, size: int) -> None:
        """Count bytes that the caller is done with; acknowledge them after a fifth of the window."""
        self._freed += size
        if self.window and self._freed >= self.window // 5:
            self.flush_acknowledgements()

    def flush_acknowledgements(self) -> None:
        """Acknowledge all freed bytes now."""
        if self.window and self._freed:
            self._send(BufferAck(self._freed))
            self.acknowledged += self._freed
            self._freed = 0

    def tick(self, now: float) -> None:
        """Acknowledge bytes that were freed some seconds ago, even if they are few."""
        if not self._freed:
            self._freed_since = now
        elif now - self._freed_since >= ACK_AFTER_S:
            self.flush_acknowledgements()
            self._freed_since = now

    # ---------------------------------------------------------------------------------------------- what comes

    def _part(self, part: Decoded) -> Iterator[LinkEvent]:
        """Report rows and controls in order. Only the total size of the rows is known; their shares add up to it."""
        self.charged += part.row_bytes
        at, given, rows = part.first, 0, part.last - part.first
        for control in part.controls:
            if control.row > at:
                share = part.row_bytes * (control.row - part.first) // rows - given
                yield self._rows(part.columns, at, control.row, share, False)
                at, given = control.row, given + share
            yield from self._control(control.frame)
        if part.last > at or part.full:
            yield self._rows(part.columns, at, part.last, part.row_bytes - given, part.full)

    def _rows(self, columns: Columns, first: int, last: int, size: int, full: bool) -> RowsReceived:
        at = first
        while (bad := self.table.advance(columns, at, last)) >= 0:
            if int(columns["opaque"][bad]) not in self._gone:
                vbucket, seqno = int(columns["vbucket"][bad]), int(columns["seqno"][bad])
                what = f"vbucket {vbucket}: seqno {seqno} is out of order, outside its snapshot, or of no stream"
                raise RemoteProtocolError(what, "by_seqno", 24)
            # Trailing data of a stream that we closed: charged, not read (docs/protocol/pitfalls.md#trailing-data)
            columns["event"][bad] = 0
            columns.dropped += 1
            at = bad + 1
        return RowsReceived(columns, first, last, size, full)

    def _control(self, data: memoryview) -> Iterator[LinkEvent]:
        frame = cut_frame(data)
        message = decode(frame, self._context)
        if isinstance(message, Response):
            yield from self._response(message)
        elif isinstance(message, DcpNoop):
            self._send(OtherResponse(Opcode.DCP_NOOP, opaque=message.opaque))
        elif frame.magic in (Magic.REQUEST, Magic.ALT_REQUEST):
            # A prepare is charged two bytes more than it is long (docs/protocol/flow.md#window).
            size = frame.size + (PREPARE_SURCHARGE if isinstance(message, Prepare) else 0)
            self.charged += size
            yield from self._stream_message(message)
            self.acknowledge(size)

    def _stream_message(self, message: Message) -> Iterator[LinkEvent]:
        vb = message.vbucket
        if self.streams.get(vb) != message.opaque:
            if message.opaque not in self._gone:
                raise RemoteProtocolError(f"vbucket {vb}: a message of no stream of ours", "opaque", 12)
            if isinstance(message, StreamEnd):
                self._gone.discard(message.opaque)
        elif isinstance(message, _MARKERS):
            start, end, _ = marker_range(message)
            self.table.begin_snapshot(vb, start, end)
        elif isinstance(message, StreamEnd):
            self._forget(vb)
            yield StreamEnded(vb, message.status)
        elif isinstance(message, SeqnoAdvanced | SystemEvent):
            yield from self._moved(vb, message)
        elif isinstance(message, OsoSnapshot):
            yield from self._oso(vb, message)
        else:
            raise RemoteProtocolError(f"vbucket {vb}: {type(message).__name__} was not asked for", "opcode", 1)

    def _moved(self, vb: int, message: SeqnoAdvanced | SystemEvent) -> Iterator[LinkEvent]:
        if not self.table.move(vb, message.by_seqno):
            what = f"vbucket {vb}: seqno {message.by_seqno} is out of order, or outside its snapshot"
            raise RemoteProtocolError(what, "by_seqno", 24)
        if isinstance(message, SystemEvent) and message.by_seqno <= self._upto[vb]:
            yield CollectionEventReceived(vb, message)
        else:
            yield SeqnoMoved(vb, message.by_seqno)

    def _oso(self, vb: int, message: OsoSnapshot) -> Iterator[LinkEvent]:
        if message.flags == OsoFlag.START:
            self.table.begin_out_of_order(vb)
        else:
            yield SeqnoMoved(vb, self.table.end_out_of_order(vb))

    def _response(self, response: Response) -> Iterator[LinkEvent]:
        if not self.session.done:
            yield from self._handshake(response)
        elif response.opaque == _CONFIG_OPAQUE:
            if response.status == Status.SUCCESS:
                yield NewConfig(getattr(response, "value", b""))
        elif (vb := self._requests.pop(response.opaque, None)) is not None:
            yield from self._stream_response(vb, response)

    def _handshake(self, response: Response) -> Iterator[LinkEvent]:
        self._send_all(self.session.receive(response))
        self._context = self.decoder.context = Context(collections=self.session.collections)
        if self.session.done:
            self.ready = True
            yield LinkReady(self.session.config or b"")

    def _stream_response(self, vb: int, response: Response) -> Iterator[LinkEvent]:
        if self.streams.get(vb) != response.opaque:
            return  # closed before it was opened
        if isinstance(response, FailoverLogResponse):
            yield StreamOpened(vb, FailoverLog(response.entries))
            return
        self._forget(vb)
        if isinstance(response, RollbackResponse):
            yield RollbackAsked(vb, response.seqno)
        else:
            yield StreamRefused(vb, response.status, getattr(response, "value", b""))

    def _forget(self, vb: int) -> None:
        del self.streams[vb]
        self.table.close(vb)

    def _send(self, message: Message) -> None:
        self._out += message.encode()

    def _send_all(self, messages: list[Message]) -> None:
        for message in messages:
            self._send(message)


def is_temporary(status: int) -> bool:
    """Whether a refusal may succeed later."""
    return status in TEMPORARY or status == Status.KEY_EEXISTS  # the previous stream is not closed yet
