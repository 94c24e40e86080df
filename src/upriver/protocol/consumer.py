"""The consuming end of a DCP connection: told to Add Stream, it asks the producer for the stream and applies it.

Everything of ``protocol.md`` 2.3 and 15.1 to 15.3 except sockets and disks: bytes in, bytes out, and a ``ReplicaStore``
that takes what arrives. Documents are applied in runs of packed records, never one by one. The same three doors as
every machine: ``receive``, ``receive_eof``, ``data_to_send``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from upriver.errors import InvalidMessage, RemoteProtocolError, Status, StatusError
from upriver.model import SEQNO_MAX, FailoverLog, VbucketState
from upriver.protocol.consumer_apply import apply_event, apply_prepare
from upriver.protocol.consumer_streams import AckWindow, PassiveStream, Registry, Replica, ReplicaStore, StreamPhase
from upriver.wire.bulk_encode import pack_columns, rows_by_vbucket
from upriver.wire.bulk_streams import SlotState, StreamTable
from upriver.wire.columns import BulkDecoder, Columns
from upriver.wire.constants import Dialect, MarkerFlag, Opcode, UprVbucketState
from upriver.wire.dcp import (
    Abort,
    AddStream,
    AddStreamResponse,
    BufferAck,
    CloseStream,
    Commit,
    Control,
    DcpNoop,
    FailoverLogResponse,
    GetDcpFailoverLog,
    Prepare,
    RollbackResponse,
    SeqnoAcknowledged,
    SeqnoAdvanced,
    SetVbucketState,
    SnapshotMarker,
    SnapshotMarkerV20,
    SnapshotMarkerV22,
    StreamEnd,
    StreamRequest,
    marker_range,
)
from upriver.wire.events import SystemEvent
from upriver.wire.framing import Frame, cut_frame
from upriver.wire.keys import split_key
from upriver.wire.message import Context, Message, OtherResponse, Response, decode
from upriver.wire.upr import (
    UprFlush,
    UprRollbackResponse,
    UprSetVbucketState,
    UprSnapshotMarker,
    UprStreamEnd,
    UprStreamRequest,
)


class WrongRole(RemoteProtocolError):
    """A command for the other role, or from a stream that cannot go on: disconnect (1.6, 15.2)."""


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """How this node consumes."""

    window: int = 10 * 1024 * 1024
    consumer_name: str = ""  # set: durable writes are replicated, and acknowledged
    noop_interval_s: float = 1.0
    collections: bool = True
    datatypes: int = 7

    def controls(self) -> list[tuple[str, str]]:
        """What to ask of the producer, in the order of 15.1."""
        durable = [("enable_sync_writes", "true"), ("consumer_name", self.consumer_name)] if self.consumer_name else []
        return [
            ("enable_noop", "true"),
            ("set_noop_interval", f"{self.noop_interval_s:f}"),
            ("set_priority", "high"),
            ("supports_cursor_dropping_vulcan", "true"),
            ("supports_hifi_MFU", "true"),
            ("send_stream_end_on_client_close_stream", "true"),
            ("enable_expiry_opcode", "true"),
            *durable,
            ("include_deleted_user_xattrs", "true"),
            ("v7_dcp_status_codes", "true"),
            ("flatbuffers_system_events", "true"),
            ("max_marker_version", "2.2"),
            ("connection_buffer_size", str(self.window)),
        ]


@dataclass(slots=True)
class Foreign:
    """A frame that is not the consumer's business: a key-value command on the same connection."""

    frame: Frame


@dataclass(slots=True)
class StateSet:
    """A takeover moved the vbucket to ``state``."""

    vbucket: int
    state: VbucketState


@dataclass(slots=True)
class StreamClosed:
    vbucket: int
    status: int


ConsumerEvent = Foreign | StateSet | StreamClosed
Done = Callable[[int, int], None]  # vbucket, status of a 0xB3 handshake


class Consumer:
    """One connection in the consuming role."""

    def __init__(self, store: ReplicaStore, registry: Registry, options: ConsumerOptions = ConsumerOptions()) -> None:  # noqa: B008
        self.store, self.registry, self.options = store, registry, options
        self.streams: dict[int, PassiveStream] = {}
        self.v7_statuses = False
        self.received_bytes = 0
        self._context = Context(collections=options.collections, datatypes=options.datatypes)
        self._decoder = BulkDecoder(self._context)
        self._table = StreamTable(65536)
        self._out = bytearray()
        self._opaque = 0
        self._acks = AckWindow(options.window)
        self._controls = deque(options.controls())
        self._control: tuple[int, str, str] | None = None
        self._asked: dict[int, PassiveStream] = {}
        self._waiting: deque[PassiveStream] = deque()
        self._done: dict[int, Done] = {}
        self._started = False
        self._closing: set[int] = set()  # opaques of our own CLOSE_STREAM requests
        self._prepared: list[tuple[int, int, int]] = []

    # ---------------------------------------------------------------------------------------------- the three doors

    def receive(self, data: bytes | bytearray | memoryview, now: float) -> Iterator[ConsumerEvent]:
        """Take bytes from the connection; ``WrongRole`` or ``FramingError`` means: disconnect."""
        for part in self._decoder.feed(data):
            row = part.first
            self._charge(part.row_bytes)
            for control in part.controls:
                self._rows(part.columns, row, control.row)
                row = control.row
                yield from self._frame(cut_frame(control.frame))
            self._rows(part.columns, row, part.last)
            self._decoder.clear()
        self.tick(now)

    def receive_eof(self) -> None:
        """The connection is gone: its streams are, too."""
        for stream in list(self.streams.values()):
            self._remove(stream)

    def data_to_send(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data

    def tick(self, now: float) -> None:
        """Acknowledge what has gathered."""
        if count := self._acks.due(now):
            self._send(BufferAck(count, opaque=self._next_opaque()))

    # ---------------------------------------------------------------------------------------------- adding streams

    def add_streams(self, vbuckets: list[int], done: Done, flags: int = 0) -> None:
        """Streams that nobody on this connection asked for: ``done`` is told when each handshake has ended.

        So come the older Add Stream 0xB3, and what a node consumes on its own account.
        """
        for vb in vbuckets:
            self._done[vb] = done
            self._add(PassiveStream(vb, flags, None))

    def _add_stream(self, request: AddStream) -> None:
        self._add(PassiveStream(request.vbucket, request.flags, request.opaque))

    def _add(self, stream: PassiveStream) -> None:
        status = self._refusal(stream.vbucket)
        if status is not None:
            self._answer(stream, status, bare=True)
            return
        self.streams[stream.vbucket] = stream
        if not self._started:
            self._started = True
            self._next_control()
        if self._control is not None:
            self._waiting.append(stream)  # negotiation first (15.1)
        else:
            self._ask(stream)

    def _refusal(self, vb: int) -> Status | None:
        try:
            replica = self.store.vbucket(vb)
        except StatusError as error:
            return error.status
        if replica.state == VbucketState.ACTIVE:
            return Status.NOT_MY_VBUCKET
        if not self.registry.claim(vb, self) or (vb in self.streams and self.streams[vb].is_live):
            return Status.KEY_EEXISTS
        return None

    def _next_control(self) -> None:
        if not self._controls:
            self._control = None
            while self._waiting:
                self._ask(self._waiting.popleft())
            return
        name, value = self._controls.popleft()
        self._control = (self._next_opaque(), name, value)
        self._send(Control(name.encode(), value.encode(), opaque=self._opaque))

    def _control_answered(self, response: Response) -> None:
        assert self._control is not None
        opaque, name, _ = self._control
        if response.opaque != opaque:
            raise WrongRole("the answer to a control has another opaque", "opaque", 12)
        if response.status == Status.SUCCESS:
            self.v7_statuses = self.v7_statuses or name == "v7_dcp_status_codes"
        elif name == "set_noop_interval" and "." in self._control[2]:
            whole = str(max(1, round(self.options.noop_interval_s)))
            self._controls.appendleft(("set_noop_interval", whole))
        elif name in ("set_noop_interval", "connection_buffer_size"):
            raise WrongRole(f"the producer refuses {name}", "status", 6)
        self._next_control()

    def _ask(self, stream: PassiveStream) -> None:
        """STREAM_REQ from where the replica stands (15.2, step 1)."""
        replica: Replica = self.store.vbucket(stream.vbucket)
        stream.opaque = stream.opaque or self._next_opaque()
        stream.phase = StreamPhase.ASKED
        self._asked[stream.opaque] = stream
        start = replica.high_seqno
        low, high = (start, start) if replica.snapshot_complete else replica.snapshot
        entries = replica.failover_log.entries
        uuid = entries[min(stream.skipped_branches, len(entries) - 1)].uuid if start else 0
        self._table.open(stream.vbucket, opaque=stream.opaque, seqno=start)
        vb, opaque = stream.vbucket, stream.opaque
        if stream.dialect is Dialect.UPR:
            seqno = entries[0].seqno
            older = UprStreamRequest(stream.flags & 1, 0, start, SEQNO_MAX, uuid, seqno, vbucket=vb, opaque=opaque)
            self._send(older)
            return
        value = f'{{"uid":"{replica.manifest_uid:x}"}}'.encode() if self.options.collections else b""
        low, high = min(low, start), max(high, start)
        request = StreamRequest(stream.flags, 0, start, SEQNO_MAX, uuid, low, high, value, vbucket=vb, opaque=opaque)
        self._send(request)

    def _stream_answered(self, response: Response) -> None:
        stream = self._asked.pop(response.opaque, None)
        if stream is None:
            raise WrongRole("the answer to a stream request that was never made", "opaque", 12)
        replica: Replica = self.store.vbucket(stream.vbucket)
        if isinstance(response, FailoverLogResponse):
            replica.replace_failover_log(response.entries)
            stream.phase = StreamPhase.LIVE
            self._answer(stream, Status.SUCCESS)
        elif isinstance(response, RollbackResponse | UprRollbackResponse):
            self._roll_back(stream, replica, response.seqno)
        elif response.status == Status.ROLLBACK:
            raise WrongRole("a rollback answer is eight bytes", "body length", 8)
        elif self._is_older_dialect(stream, response):
            stream.dialect = Dialect.UPR
            self._ask(stream)
        elif stream.dialect is Dialect.UPR and response.status == Status.KEY_ENOENT:
            self._roll_back(stream, replica, 0)
        else:
            self._answer(stream, response.status)
            self._remove(stream)

    def _is_older_dialect(self, stream: PassiveStream, response: Response) -> bool:
        """A producer that refuses the 48-byte request may know the 40-byte one (12.3)."""
        refused = response.status in (Status.EINVAL, Status.UNKNOWN_COMMAND)
        return refused and stream.dialect is Dialect.DCP and not self.v7_statuses

    def _roll_back(self, stream: PassiveStream, replica: Replica, seqno: int) -> None:
        """15.2, step 3: another branch at the same seqno may still fit; otherwise undo, and ask again."""
        log: FailoverLog = replica.failover_log
        skipped = stream.skipped_branches
        if seqno == 0 and skipped + 1 < len(log) and log.entries[skipped].seqno == replica.high_seqno:
            stream.skipped_branches += 1
        else:
            stream.skipped_branches = 0
            replica.rollback(seqno)
        self._ask(stream)

    def _answer(self, stream: PassiveStream, status: int, *, bare: bool = False) -> None:
        if stream.answer_opaque is None:
            if done := self._done.pop(stream.vbucket, None):
                done(stream.vbucket, status if status in _B3_STATUSES else Status.EINTERNAL)
        elif bare:
            self._send(OtherResponse(Opcode.DCP_ADD_STREAM, opaque=stream.answer_opaque, status=status))
        else:
            self._send(AddStreamResponse(stream.opaque, opaque=stream.answer_opaque, status=status))

    def _remove(self, stream: PassiveStream) -> None:
        self.streams.pop(stream.vbucket, None)
        self._asked.pop(stream.opaque, None)
        self._table.set_state(stream.vbucket, SlotState.CLOSED)
        self.registry.release(stream.vbucket, self)

    # ---------------------------------------------------------------------------------------------- what arrives

    def _rows(self, columns: Columns, first: int, last: int) -> None:
        """Documents: check them against their streams, answer the bad ones, store the good ones in runs."""
        at = first
        while at < last:
            bad = self._table.advance(columns, at, last)
            stop = last if bad < 0 else bad
            for vb, rows in rows_by_vbucket(columns, at, stop) if stop > at else ():
                self._store(vb, pack_columns(columns, rows).data, int(columns["opaque"][at]))
            if bad >= 0:
                self._refuse_row(columns, bad)
            at = stop + 1

    def _store(self, vb: int, run: Any, opaque: int) -> None:
        stream = self.streams[vb]
        if stream.phase is StreamPhase.DEAD:
            return
        replica: Replica = self.store.vbucket(vb)
        seqno = self._table.seqno(vb)
        if stream.dialect is Dialect.UPR:
            # A bare marker says nothing about its range: each run is as far as we can see, so it is the snapshot.
            replica.begin_snapshot(replica.high_seqno + 1, seqno, MarkerFlag.MEMORY)
        try:
            replica.apply_records(run)
        except StatusError as error:
            self._error(Opcode.DCP_MUTATION, opaque, error.status)
            return
        self._reached(stream, seqno)

    def _refuse_row(self, columns: Columns, row: int) -> None:
        vb, opaque = int(columns["vbucket"][row]), int(columns["opaque"][row])
        status = self._stream_status(vb, opaque)
        if status is None:
            status = Status.ERANGE  # in the stream, so its seqno must be at fault
        if status is not Status.SUCCESS:
            self._error(int(columns["event"][row]), opaque, status)

    def _stream_status(self, vb: int, opaque: int) -> Status | None:
        """None if a message with this opaque belongs to a live stream; SUCCESS if it is to be swallowed (15.3)."""
        stream = self.streams.get(vb)
        if stream is None:
            return Status.DCP_STREAM_NOT_FOUND if self.v7_statuses else Status.KEY_ENOENT
        if stream.opaque != opaque:
            return Status.OPAQUE_NO_MATCH if self.v7_statuses else Status.KEY_EEXISTS
        return Status.SUCCESS if stream.phase is StreamPhase.DEAD else None

    def _frame(self, frame: Frame) -> Iterator[ConsumerEvent]:
        if frame.magic.is_response:
            self._response(decode(frame, self._context))
            return
        if frame.opcode not in _OURS:
            yield Foreign(frame)
            return
        try:
            message = decode(frame, self._frame_context(frame))
        except InvalidMessage as error:
            self._error(frame.opcode, frame.opaque, error.status)
            return
        yield from self._request(message, frame)

    def _frame_context(self, frame: Frame) -> Context:
        """A number can mean two things: the stream knows its dialect."""
        stream = self.streams.get(frame.specific)
        if stream is not None and stream.dialect is Dialect.UPR:
            return Context(Dialect.UPR, self._context.collections, self._context.datatypes)
        return self._context

    def _response(self, message: Message) -> None:
        assert isinstance(message, Response)
        opcode = message.to if isinstance(message, OtherResponse) else message.opcode
        if opcode == Opcode.DCP_CONTROL and self._control is not None:
            self._control_answered(message)
        elif opcode == Opcode.DCP_STREAM_REQ:
            self._stream_answered(message)
        elif opcode == Opcode.DCP_CLOSE_STREAM and message.opaque in self._closing:
            self._closing.discard(message.opaque)
        elif opcode != Opcode.DCP_BUFFER_ACK:
            raise WrongRole(f"a response to 0x{opcode:02x} was not expected", "opcode", 1)

    def _request(self, message: Message, frame: Frame) -> Iterator[ConsumerEvent]:
        if isinstance(message, AddStream):
            self._add_stream(message)
        elif isinstance(message, CloseStream):
            self._close_stream(message)
        elif isinstance(message, DcpNoop):
            self._send(OtherResponse(Opcode.DCP_NOOP, opaque=message.opaque))
        elif isinstance(message, GetDcpFailoverLog | StreamRequest | UprStreamRequest | Control | BufferAck):
            raise WrongRole(f"{type(message).__name__} is for producers", "opcode", 1)
        else:
            self._charge(frame.size + (2 if isinstance(message, Prepare) else 0))
            yield from self._stream_message(message)

    def _close_stream(self, request: CloseStream) -> None:
        stream = self.streams.get(request.vbucket)
        status = Status.SUCCESS
        if stream is None or not stream.is_live:
            status = Status.DCP_STREAM_NOT_FOUND if self.v7_statuses else Status.KEY_ENOENT
        else:
            stream.phase = StreamPhase.DEAD
            self.registry.release(stream.vbucket, self)
            self._table.set_state(stream.vbucket, SlotState.IGNORED)
        self._send(OtherResponse(Opcode.DCP_CLOSE_STREAM, opaque=request.opaque, status=status))

    def _stream_message(self, message: Message) -> Iterator[ConsumerEvent]:
        vb = message.vbucket
        status = self._stream_status(vb, message.opaque)
        if isinstance(message, StreamEnd | UprStreamEnd):
            if status is None or status is Status.SUCCESS:
                self._remove(self.streams[vb])
                yield StreamClosed(vb, message.status)
            return  # one with a stale opaque is ignored silently
        if status is not None:
            if status is not Status.SUCCESS:
                self._error(message.opcode, message.opaque, status)
            return
        try:
            yield from self._apply(self.streams[vb], message)
        except StatusError as error:
            self._error(message.opcode, message.opaque, error.status)

    def _apply(self, stream: PassiveStream, message: Message) -> Iterator[ConsumerEvent]:
        replica: Replica = self.store.vbucket(stream.vbucket)
        if isinstance(message, SnapshotMarker | SnapshotMarkerV20 | SnapshotMarkerV22):
            self._marker(stream, replica, *marker_range(message))
        elif isinstance(message, UprSnapshotMarker):
            self._table.snapshot(stream.vbucket, replica.high_seqno, SEQNO_MAX)
        elif isinstance(message, SetVbucketState | UprSetVbucketState):
            yield self._set_state(message)
        elif isinstance(message, UprFlush):
            replica.rollback(0)
            self._table.open(stream.vbucket, opaque=stream.opaque)
        else:
            self._apply_item(stream, replica, message)

    def _apply_item(self, stream: PassiveStream, replica: Replica, message: Message) -> None:
        vb = stream.vbucket
        if isinstance(message, SeqnoAdvanced):
            replica.advance(message.by_seqno)
            seqno = message.by_seqno
        elif isinstance(message, SystemEvent):
            seqno = apply_event(replica, message)
        elif isinstance(message, Prepare):
            seqno = apply_prepare(replica, message, self.options.collections)
            self._prepared.append((vb, seqno, message.durability_level))
        elif isinstance(message, Commit):
            cid, key = self._key(message.key)
            replica.commit_replica(key, cid, message.prepared_seqno, message.commit_seqno)
            seqno = message.commit_seqno
        elif isinstance(message, Abort):
            cid, key = self._key(message.key)
            replica.abort_replica(key, cid, message.prepared_seqno, message.abort_seqno)
            seqno = message.abort_seqno
        else:
            raise StatusError.of(Status.NOT_SUPPORTED, type(message).__name__)
        self._table.seqno_advanced(vb, seqno)
        self._reached(stream, seqno)

    def _key(self, wire_key: bytes) -> tuple[int, bytes]:
        return split_key(wire_key) if self.options.collections else (0, wire_key)

    def _marker(self, stream: PassiveStream, replica: Replica, start: int, end: int, flags: int) -> None:
        replica.begin_snapshot(start, end, flags)
        self._table.snapshot(stream.vbucket, start, end)
        stream.snapshot_end = end
        stream.ack_marker = bool(flags & MarkerFlag.ACK)

    def _reached(self, stream: PassiveStream, seqno: int) -> None:
        if stream.ack_marker and seqno >= stream.snapshot_end:
            stream.ack_marker = False
            self._send(OtherResponse(Opcode.DCP_SNAPSHOT_MARKER, opaque=stream.opaque))

    def _set_state(self, message: SetVbucketState | UprSetVbucketState) -> StateSet:
        if isinstance(message, UprSetVbucketState):
            state = VbucketState[UprVbucketState(message.state).name]
        else:
            state = VbucketState(message.state)
        self.store.set_state(message.vbucket, state, takeover=True)
        self._send(OtherResponse(Opcode.DCP_SET_VBUCKET_STATE, opaque=message.opaque))
        return StateSet(message.vbucket, state)

    def drop_stream(self, vb: int) -> None:
        """Stop consuming a vbucket, on our own account: the producer is told to close."""
        stream = self.streams.get(vb)
        if stream is None or not stream.is_live:
            return
        live = stream.phase is StreamPhase.LIVE
        self._remove(stream)
        self._table.set_state(vb, SlotState.IGNORED)
        if live:
            self._closing.add(self._next_opaque())
            self._send(CloseStream(vbucket=vb, opaque=self._opaque))

    def take_prepared(self) -> list[tuple[int, int, int]]:
        """Vbucket, seqno and level of the prepares that came in since the last call."""
        prepared, self._prepared = self._prepared, []
        return prepared

    def acknowledge_prepares(self, vb: int, prepared_seqno: int) -> None:
        """Every prepare up to this seqno is durable here (2.15)."""
        stream = self.streams.get(vb)
        if stream is not None and stream.phase is StreamPhase.LIVE:
            self._send(SeqnoAcknowledged(prepared_seqno, vbucket=vb, opaque=stream.opaque))

    # ---------------------------------------------------------------------------------------------- bytes out

    def _next_opaque(self) -> int:
        self._opaque += 1
        return self._opaque

    def _charge(self, count: int) -> None:
        self.received_bytes += count
        self._acks.add(count)

    def _error(self, opcode: int, opaque: int, status: int) -> None:
        self._send(OtherResponse(opcode, opaque=opaque, status=status))

    def _send(self, message: Message) -> None:
        self._out += message.encode()


_B3_STATUSES = frozenset({Status.SUCCESS, Status.KEY_EEXISTS, Status.EINVAL, Status.NOT_MY_VBUCKET})
_OURS = frozenset(range(Opcode.DCP_ADD_STREAM, Opcode.DCP_CACHE_TRANSFER_END + 1))
