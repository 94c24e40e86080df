"""The consuming end of a DCP connection: on Add Stream it asks the producer for the stream and applies it.

Implements docs/protocol/messages.md#add-stream and docs/protocol/consumer.md without sockets and disks: bytes in, bytes
out, and a ``ReplicaStore`` for what arrives. Documents are applied in runs of packed records. Besides the doors of
every machine (``receive``, ``receive_eof``, ``data_to_send``) there is ``wake``, for when time has passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from upriver.errors import InvalidMessage, Status, StatusError
from upriver.model import SEQNO_MAX, Datatype, VbucketState
from upriver.protocol.consumer.negotiation import ConsumerOptions
from upriver.protocol.consumer.records import ReceivedRows, Rows, apply_message, usual_marker
from upriver.protocol.consumer.setup import StreamSetup
from upriver.protocol.consumer.streams import PassiveStream, Registry, ReplicaStore, ReplicaVbucket, StreamPhase
from upriver.protocol.roles import Foreign, WrongRole
from upriver.wire.bulk.decode import BulkDecoder, Columns
from upriver.wire.bulk.encode import rows_by_vbucket
from upriver.wire.bulk.row_checks import CHECKED, BrokenValue, SlotState, ValueChecker
from upriver.wire.checks import Context
from upriver.wire.constants import Dialect, MarkerFlag, Opcode, RequestFrameId, UprVbucketState
from upriver.wire.framing import HEADER_SIZE, Frame, cut_frame
from upriver.wire.message import Message, OtherResponse, Response, decode
from upriver.wire.messages.dcp import (
    AddStream,
    BufferAck,
    CloseStream,
    DcpControl,
    DcpNoop,
    GetDcpFailoverLog,
    Prepare,
    SeqnoAcknowledged,
    SetVbucketState,
    SnapshotMarker,
    SnapshotMarkerV20,
    SnapshotMarkerV22,
    StreamEnd,
    StreamRequest,
    marker_range,
)
from upriver.wire.messages.upr import (
    UprFlush,
    UprSetVbucketState,
    UprSnapshotMarker,
    UprStreamEnd,
    UprStreamRequest,
)


@dataclass(slots=True)
class StateSet:
    """A takeover moved the vbucket to ``state``."""

    vbucket: int
    state: VbucketState


@dataclass(slots=True)
class StreamClosed:
    """The producer ended a stream."""

    vbucket: int
    status: int


ConsumerEvent = Foreign | StateSet | StreamClosed


class Consumer(StreamSetup):
    """One connection in the consuming role."""

    def __init__(self, store: ReplicaStore, registry: Registry, options: ConsumerOptions = ConsumerOptions()) -> None:  # noqa: B008
        super().__init__(store, registry, options)
        self.backoffs = 0  # how often memory pressure has delayed an acknowledgement
        self._context = Context(collections=options.collections, datatypes=options.datatypes, check_values=True)
        self._upr_context = Context(Dialect.UPR, options.collections, options.datatypes)
        self._decoder = BulkDecoder(replace(self._context, check_values=False))  # values are checked in bulk
        self._received = ReceivedRows()
        self._values = ValueChecker()
        self._expects_xattrs = False

    # ---------------------------------------------------------------------------------------------- the doors

    def receive(self, data: bytes | bytearray | memoryview, now: float) -> Iterator[ConsumerEvent]:
        """Take bytes from the connection; on ``WrongRole`` or ``FramingError``, disconnect."""
        for part in self._decoder.feed(data):
            row = part.first
            self._charge(part.row_bytes)
            self._received.use(part.columns)
            datatypes = self._received.datatypes(part.first, part.last)
            if datatypes & _XATTR:
                self._expect_xattrs()
            plain = not datatypes & CHECKED and self._received.first_stream_id(part.first, part.last) == part.last
            take = self._rows if plain else self._checked_rows
            for control in part.controls:
                if row < control.row:
                    take(part.columns, row, control.row)
                    row = control.row
                if not self._take_marker(control.frame):
                    yield from self._frame(cut_frame(control.frame))
            take(part.columns, row, part.last)
            self._decoder.clear()
        self.wake(now)

    def receive_eof(self) -> None:
        """The connection is gone; end all its streams, and answer the handshakes that wait."""
        for stream in list(self.streams.values()):
            if stream.done is not None and stream.phase in (StreamPhase.WAITING, StreamPhase.ASKED):
                self._answer(stream, Status.EINTERNAL)
            self._remove(stream)

    def data_to_send(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data

    def wake(self, now: float) -> None:
        """Acknowledge received bytes if it is time. While memory is short, the producer has to wait.

        See docs/protocol/consumer.md#receiving.
        """
        if not self.negotiation.flow_control:
            return
        if self._acks.gathered and self.store.under_pressure:
            self.backoffs += 1
        elif count := self._acks.due(now):
            self._send(BufferAck(count, opaque=self._next_opaque()))

    # ---------------------------------------------------------------------------------------------- documents

    def _checked_rows(self, columns: Columns, first: int, last: int) -> None:
        """Take documents of which some are compressed or have xattrs; refuse values that cannot be read.

        See docs/protocol/messages.md#checks.
        """
        while (broken := self._first_broken(columns, first, last)) is not None:
            self._rows(columns, first, broken.row)
            self._refuse_broken(columns, broken)
            first = broken.row + 1
        self._rows(columns, first, last)

    def _first_broken(self, columns: Columns, first: int, last: int) -> BrokenValue | None:
        with_id = self._received.first_stream_id(first, last)
        found = self._values.first_broken(columns, first, with_id)
        return found or (BrokenValue(with_id, _stream_id_refused()) if with_id < last else None)

    def _refuse_broken(self, columns: Columns, broken: BrokenValue) -> None:
        vb, opaque = self._received.vbucket(broken.row), int(columns["opaque"][broken.row])
        found = self._stream_status(vb, opaque)
        if found is None:
            self._break(self.streams[vb])
        if found is not Status.SUCCESS:
            self._error(int(columns["event"][broken.row]), opaque, broken.error.status)

    def _rows(self, columns: Columns, first: int, last: int) -> None:
        """Check documents against their streams; refuse the bad ones, and store the good ones in runs."""
        at = first
        while at < last:
            bad = self._table.advance(columns, at, last)
            stop = last if bad < 0 else bad
            if stop == at + 1:
                self._store(self._received.vbucket(at), columns, at)
            elif stop > at:
                for vb, rows in rows_by_vbucket(columns, at, stop):
                    self._store(vb, columns, rows)
            if bad >= 0:
                self._refuse_row(columns, bad)
            at = stop + 1

    def _store(self, vb: int, columns: Columns, rows: Rows | int) -> None:
        """Store rows of one vbucket, or a single row."""
        stream = self.streams.get(vb)
        if stream is None or stream.phase is not StreamPhase.LIVE:
            return  # closed by us; the producer does not know yet
        seqno = self._table.seqno(vb)
        try:
            replica = self.store.vbucket(vb)
            if stream.dialect is Dialect.UPR:
                self._widen_snapshot(stream, replica, seqno)
            pack = self._received.pack_one if isinstance(rows, int) else self._received.pack
            replica.replication.apply_records(pack(columns, rows, replica))  # type: ignore[arg-type]
        except StatusError as error:
            self._break(stream)
            self._refuse_rows(columns, np.atleast_1d(np.asarray(rows, np.int64)), vb, error.status)
            return
        self._reached(stream, seqno)

    def _expect_xattrs(self) -> None:
        if not self._expects_xattrs:
            self._expects_xattrs = True
            self.store.expect_xattrs()

    def _break(self, stream: PassiveStream) -> None:
        """Refuse the rest of a stream: if it were stored, the refused change would be missing for ever.

        The producer ends the connection when it gets the error; until then everything is refused.
        """
        stream.broken = True
        self._table.snapshot(stream.vbucket, 0, -1)

    def _broken_status(self, stream: PassiveStream) -> Status:
        """NOT_MY_VBUCKET, which a producer forgives, if the vbucket is no replica; else ERANGE, so it reconnects."""
        refusal = self._vbucket_refusal(stream.vbucket)
        if refusal is None and self.store.vbucket(stream.vbucket).state == VbucketState.DEAD:
            refusal = Status.NOT_MY_VBUCKET
        return refusal or Status.ERANGE

    def _refuse_rows(self, columns: Columns, rows: Rows, vb: int, status: Status) -> None:
        """Answer each row that was not stored with an error; rows up to the high seqno were stored."""
        try:
            high = self.store.vbucket(vb).high_seqno
        except StatusError:
            high = 0
        for row in rows[columns["seqno"][rows] > high].tolist():
            self._error(int(columns["event"][row]), int(columns["opaque"][row]), status)

    def _refuse_row(self, columns: Columns, row: int) -> None:
        vb, opaque = int(columns["vbucket"][row]), int(columns["opaque"][row])
        status = self._stream_status(vb, opaque)
        if status is None:  # the opaque is right, so its seqno is wrong, or a change before it was refused
            stream = self.streams[vb]
            status = self._broken_status(stream) if stream.broken else Status.ERANGE
            if int(columns["seqno"][row]) > self._table.seqno(vb):
                self._break(stream)
        if status is not Status.SUCCESS:
            self._error(int(columns["event"][row]), opaque, status)

    def _widen_snapshot(self, stream: PassiveStream, replica: ReplicaVbucket, seqno: int) -> None:
        """A UPR marker has no range: assume that the snapshot ends one seqno after the last change received."""
        replica.replication.begin_snapshot(stream.snapshot_start, seqno + 1, MarkerFlag.MEMORY)

    def _stream_status(self, vb: int, opaque: int) -> Status | None:
        """None if a message with this opaque belongs to a live stream; SUCCESS if it must be ignored silently.

        See docs/protocol/consumer.md#receiving.
        """
        stream = self.streams.get(vb)
        if stream is None:
            return Status.SUCCESS if self._table.state(vb) is SlotState.IGNORED else self._not_found
        if stream.opaque != opaque:
            return Status.OPAQUE_NO_MATCH if self.negotiation.v7_statuses else Status.KEY_EEXISTS
        return Status.SUCCESS if stream.phase is StreamPhase.DEAD else None

    # ---------------------------------------------------------------------------------------------- single messages

    def _frame(self, frame: Frame) -> Iterator[ConsumerEvent]:
        if frame.magic.is_response:
            self._response(decode(frame, self._context))
            return
        if frame.opcode not in _DCP_OPCODES:
            yield Foreign(frame)
            return
        if frame.opcode in _CHARGED:
            self._charge(frame.size + (2 if frame.opcode == Opcode.DCP_PREPARE else 0))
        try:
            message = decode(frame, self._frame_context(frame))
            if any(info.id == RequestFrameId.STREAM_ID for info in message.frame_infos):
                raise _stream_id_refused()
        except InvalidMessage as error:
            self._malformed(frame, error)
            return
        yield from self._request(message)

    def _malformed(self, frame: Frame, error: InvalidMessage) -> None:
        stream = self.streams.get(frame.specific)
        if stream is not None and stream.opaque == frame.opaque and frame.opcode in _ITEMS:
            self._break(stream)
        self._error(frame.opcode, frame.opaque, error.status)

    def _frame_context(self, frame: Frame) -> Context:
        """The dialect of the frame's stream: some opcodes have another layout in UPR."""
        stream = self.streams.get(frame.specific)
        return self._upr_context if stream is not None and stream.dialect is Dialect.UPR else self._context

    def _response(self, message: Message) -> None:
        assert isinstance(message, Response)
        opcode = message.to if isinstance(message, OtherResponse) else message.opcode
        if opcode == Opcode.DCP_CONTROL:
            self.negotiation.answered(message.opaque, message.status)
            self._next_control()
        elif opcode == Opcode.DCP_STREAM_REQ:
            self._stream_answered(message)
        elif opcode == Opcode.DCP_CLOSE_STREAM and message.opaque in self._closing:
            self._closing.discard(message.opaque)
        elif opcode not in (Opcode.DCP_BUFFER_ACK, Opcode.DCP_SEQNO_ACKNOWLEDGED):
            raise WrongRole(f"a response to 0x{opcode:02x} was not expected", "opcode", 1)

    def _request(self, message: Message) -> Iterator[ConsumerEvent]:
        if isinstance(message, AddStream):
            self._add(PassiveStream(message.vbucket, message.flags, message.opaque))
        elif isinstance(message, CloseStream):
            self._close_stream(message)
        elif isinstance(message, DcpNoop):
            self._send(OtherResponse(Opcode.DCP_NOOP, opaque=message.opaque))
        elif isinstance(message, _FOR_PRODUCERS):
            raise WrongRole(f"{type(message).__name__} is for producers", "opcode", 1)
        else:
            yield from self._stream_message(message)

    def _stream_message(self, message: Message) -> Iterator[ConsumerEvent]:
        vb = message.vbucket
        status = self._stream_status(vb, message.opaque)
        if isinstance(message, StreamEnd | UprStreamEnd):
            if vb in self.streams and status in (None, Status.SUCCESS):
                self._end(self.streams[vb], message.status)
                yield StreamClosed(vb, message.status)
            return  # a stream end with a stale opaque is ignored silently
        if status is not None:
            if status is not Status.SUCCESS:
                self._error(message.opcode, message.opaque, status)
            return
        try:
            yield from self._apply(self.streams[vb], message)
        except StatusError as error:
            if message.opcode in _ITEMS and _seqno_of(message) > self._table.seqno(vb):
                self._break(self.streams[vb])
            self._error(message.opcode, message.opaque, error.status)

    def _end(self, stream: PassiveStream, status: int) -> None:
        if stream.dialect is Dialect.UPR and stream.phase is StreamPhase.LIVE and status == Status.SUCCESS:
            self._upr_snapshot_is_complete(self.store.vbucket(stream.vbucket))
        self._remove(stream)

    def _apply(self, stream: PassiveStream, message: Message) -> Iterator[ConsumerEvent]:
        if stream.broken:
            raise StatusError.of(self._broken_status(stream), "an earlier change was refused")
        replica = self.store.vbucket(stream.vbucket)
        if isinstance(message, SnapshotMarker | SnapshotMarkerV20 | SnapshotMarkerV22):
            self._marker(stream, *marker_range(message), getattr(message, "purge_seqno", 0))
        elif isinstance(message, UprSnapshotMarker):
            self._upr_snapshot_is_complete(replica)
            stream.snapshot_start = replica.high_seqno
            self._table.snapshot(stream.vbucket, replica.high_seqno, SEQNO_MAX)
        elif isinstance(message, SetVbucketState | UprSetVbucketState):
            yield self._set_state(stream, message)
        elif isinstance(message, UprFlush):
            replica.rollback(0)
            stream.snapshot_start = 0
            self._table.open(stream.vbucket, opaque=stream.opaque)
        else:
            self._apply_item(stream, replica, message)

    @staticmethod
    def _upr_snapshot_is_complete(replica: ReplicaVbucket) -> None:
        """Note that a UPR snapshot is complete; only the next marker or the stream end says so."""
        if replica.state in (VbucketState.REPLICA, VbucketState.PENDING):
            replica.replication.begin_snapshot(replica.high_seqno, replica.high_seqno, MarkerFlag.MEMORY)

    def _apply_item(self, stream: PassiveStream, replica: ReplicaVbucket, message: Message) -> None:
        if stream.dialect is Dialect.UPR:
            self._widen_snapshot(stream, replica, getattr(message, "by_seqno", 0))
        if message.datatype & Datatype.XATTR:
            self._expect_xattrs()
        seqno = apply_message(replica, message, self.options.collections)
        if isinstance(message, Prepare):
            stream.prepared_seqno = seqno
            stream.prepared_level = max(stream.prepared_level, message.durability_level)
        self._table.seqno_advanced(stream.vbucket, seqno)
        self._reached(stream, seqno)

    def _take_marker(self, frame: memoryview) -> bool:
        """Take a usual marker without decoding it into a message; False if it must be decoded."""
        found = usual_marker(frame)
        if found is None:
            return False
        stream = self.streams.get(found.vbucket)
        if stream is None or stream.opaque != found.opaque or stream.phase is not StreamPhase.LIVE:
            return False
        if stream.dialect is not Dialect.DCP or stream.broken:
            return False
        self._charge(len(frame))
        try:
            self._marker(stream, found.start, found.end, found.flags, found.purge_seqno)
        except StatusError as error:
            self._error(Opcode.DCP_SNAPSHOT_MARKER, found.opaque, error.status)
        return True

    def _marker(self, stream: PassiveStream, start: int, end: int, flags: int, purge_seqno: int = 0) -> None:
        self.store.vbucket(stream.vbucket).replication.begin_snapshot(start, end, flags, purge_seqno)
        self._table.snapshot(stream.vbucket, start, end)
        stream.snapshot_start, stream.snapshot_end = start, end
        stream.ack_marker = bool(flags & _ACK)

    def _reached(self, stream: PassiveStream, seqno: int) -> None:
        """At the end of a snapshot, where the vbucket is consistent, confirm prepares and the marker."""
        if seqno < stream.snapshot_end:
            return
        if stream.prepared_seqno:
            self._prepared.append((stream.vbucket, stream.prepared_seqno, stream.prepared_level))
            stream.prepared_seqno = stream.prepared_level = 0
        if stream.ack_marker:
            stream.ack_marker = False
            self._send(OtherResponse(Opcode.DCP_SNAPSHOT_MARKER, opaque=stream.opaque))

    def _set_state(self, stream: PassiveStream, message: SetVbucketState | UprSetVbucketState) -> StateSet:
        if isinstance(message, UprSetVbucketState):
            self._upr_snapshot_is_complete(self.store.vbucket(stream.vbucket))
            state = VbucketState[UprVbucketState(message.state).name]
        else:
            state = VbucketState(message.state)
        self.store.set_state(message.vbucket, state, takeover=True)
        if isinstance(message, SetVbucketState):  # UPR has no answer to it
            self._send(OtherResponse(Opcode.DCP_SET_VBUCKET_STATE, opaque=message.opaque))
        return StateSet(message.vbucket, state)

    # ---------------------------------------------------------------------------------------------- durable writes

    def take_prepared(self) -> list[tuple[int, int, int]]:
        """(vbucket, seqno, level) of prepares whose snapshots were completed since the last call."""
        prepared, self._prepared = self._prepared, []
        return prepared

    def acknowledge_prepares(self, vb: int, prepared_seqno: int) -> None:
        """Tell the producer that every prepare up to this seqno is durable (docs/protocol/messages.md#durable)."""
        stream = self.streams.get(vb)
        if stream is not None and stream.phase is StreamPhase.LIVE and self.negotiation.sync_writes:
            self._send(SeqnoAcknowledged(prepared_seqno, vbucket=vb, opaque=stream.opaque))


def _stream_id_refused() -> InvalidMessage:
    return InvalidMessage("a consumer's streams have no stream-ids", "framing extras", HEADER_SIZE)


def _seqno_of(message: Message) -> int:
    return max(getattr(message, name, 0) for name in ("by_seqno", "commit_seqno", "abort_seqno"))


_ITEMS = frozenset(
    {
        Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION, Opcode.DCP_PREPARE, Opcode.DCP_COMMIT,
        Opcode.DCP_ABORT, Opcode.DCP_SYSTEM_EVENT, Opcode.DCP_SEQNO_ADVANCED,
    }
)  # fmt: skip
_FOR_PRODUCERS = (GetDcpFailoverLog, StreamRequest, UprStreamRequest, DcpControl, BufferAck, SeqnoAcknowledged)
_DCP_OPCODES = frozenset(range(Opcode.DCP_ADD_STREAM, Opcode.DCP_CACHE_TRANSFER_END + 1))
_UNCHARGED = (Opcode.DCP_NOOP, Opcode.DCP_BUFFER_ACK, Opcode.DCP_CONTROL)
_CHARGED = frozenset(range(Opcode.DCP_STREAM_END, Opcode.DCP_CACHE_TRANSFER_END + 1)) - {*_UNCHARGED}
_ACK = int(MarkerFlag.ACK)
_XATTR = int(Datatype.XATTR)
