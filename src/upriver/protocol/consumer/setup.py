"""How a consumer opens and ends its streams: negotiation, stream requests, rollbacks, answers.

The base class of ``Consumer`` (docs/protocol/messages.md and docs/protocol/consumer.md).
"""

from __future__ import annotations

from collections import deque

from upriver.errors import Status, StatusError
from upriver.model import SEQNO_MAX, FailoverLog, VbucketState
from upriver.protocol.consumer.negotiation import ConsumerOptions, Negotiation
from upriver.protocol.consumer.streams import AckWindow, Done, PassiveStream, Registry, ReplicaStore, StreamPhase
from upriver.protocol.roles import WrongRole
from upriver.wire.bulk.row_checks import SlotState, StreamTable
from upriver.wire.constants import Dialect, Opcode
from upriver.wire.message import Message, OtherResponse, Response
from upriver.wire.messages.dcp import (
    AddStreamResponse,
    CloseStream,
    DcpControl,
    FailoverLogResponse,
    RollbackResponse,
    StreamRequest,
)
from upriver.wire.messages.upr import UprRollbackResponse, UprStreamRequest

_ANY_LEVEL = 3  # the level of prepares from an earlier connection is not known: assume the highest


class StreamSetup:
    """The streams of one consumer connection, and the bytes to send."""

    def __init__(self, store: ReplicaStore, registry: Registry, options: ConsumerOptions) -> None:
        self.store, self.registry, self.options = store, registry, options
        self.streams: dict[int, PassiveStream] = {}
        self.received_bytes = 0
        self.negotiation = Negotiation(options)
        self._table = StreamTable(65536)
        self._out = bytearray()
        self._opaque = 0
        self._acks = AckWindow(options.window)
        self._asked: dict[int, PassiveStream] = {}
        self._waiting: deque[PassiveStream] = deque()
        self._dialect = Dialect.DCP  # of the peer, until it shows otherwise
        self._closing: set[int] = set()  # opaques of our own CLOSE_STREAM requests
        self._prepared: list[tuple[int, int, int]] = []

    # ---------------------------------------------------------------------------------------------- adding streams

    def add_streams(self, vbuckets: list[int], done: Done, flags: int = 0) -> None:
        """Open streams without an ADD_STREAM; ``done`` is called when each handshake has ended.

        For the older Add Stream 0xB3, and for streams that the node opens itself.
        """
        for vb in vbuckets:
            self._add(PassiveStream(vb, flags, done=done))

    def _add(self, stream: PassiveStream) -> None:
        status = self._refusal(stream.vbucket)
        if status is not None:
            self._answer(stream, status, bare=True)
            return
        stream.dialect = self._dialect
        self.streams[stream.vbucket] = stream
        if not self.negotiation.started:
            self._next_control()
        if self.negotiation.is_done:
            self._ask(stream)
        else:
            self._waiting.append(stream)  # negotiation first (docs/protocol/consumer.md#negotiation)

    def _refusal(self, vb: int) -> Status | None:
        live = vb in self.streams and self.streams[vb].is_live
        status = self._vbucket_refusal(vb)
        if status is None and (live or not self.registry.claim(vb, self)):
            return Status.KEY_EEXISTS
        return status

    def _vbucket_refusal(self, vb: int) -> Status | None:
        try:
            active = self.store.vbucket(vb).state == VbucketState.ACTIVE
        except StatusError as error:
            return error.status
        return Status.NOT_MY_VBUCKET if active else None

    def _next_control(self) -> None:
        control = self.negotiation.next(self._next_opaque())
        if control is not None:
            self._send(DcpControl(control[0].encode(), control[1].encode(), opaque=self._opaque))
            return
        while self._waiting:
            self._start_waiting(self._waiting.popleft())

    def _start_waiting(self, stream: PassiveStream) -> None:
        """Start a queued ADD_STREAM; if it can no longer run, answer with a zero opaque.

        See docs/protocol/messages.md#add-stream.
        """
        status = self._vbucket_refusal(stream.vbucket) if stream.is_live else Status.KEY_ENOENT
        if status is None:
            self._ask(stream)
        else:
            self._answer(stream, status)
            if self.streams.get(stream.vbucket) is stream:
                self._remove(stream)

    def _ask(self, stream: PassiveStream) -> None:
        """Send STREAM_REQ from the replica's position (docs/protocol/consumer.md#streams, step 1)."""
        replica = self.store.vbucket(stream.vbucket)
        stream.opaque = stream.opaque or self._next_opaque()
        stream.phase = StreamPhase.ASKED
        self._asked[stream.opaque] = stream
        start = replica.high_seqno
        entries = replica.failover_log.entries
        uuid = entries[min(stream.skipped_branches, len(entries) - 1)].uuid if start else 0
        self._table.open(stream.vbucket, opaque=stream.opaque, seqno=start)
        vb, opaque = stream.vbucket, stream.opaque
        if stream.dialect is Dialect.UPR:
            span = start, SEQNO_MAX
            self._send(UprStreamRequest(stream.flags & 1, 0, *span, uuid, entries[0].seqno, vbucket=vb, opaque=opaque))
            return
        low, high = (start, start) if replica.snapshot_complete else replica.snapshot
        value = f'{{"uid":"{replica.manifest_uid:x}"}}'.encode() if self.options.collections else b""
        span = min(low, start), max(high, start)
        self._send(StreamRequest(stream.flags, 0, start, SEQNO_MAX, uuid, *span, value, vbucket=vb, opaque=opaque))

    def _stream_answered(self, response: Response) -> None:
        stream = self._asked.pop(response.opaque, None)
        if stream is None:
            raise WrongRole("an answer to a stream request that was never made", "opaque", 12)
        if not stream.is_live:
            self._answered_too_late(stream, response)
            return
        try:
            self._take_answer(stream, response)
        except StatusError as error:  # the vbucket is gone, or no longer a replica
            self._answer(stream, error.status)
            self._remove(stream)

    def _take_answer(self, stream: PassiveStream, response: Response) -> None:
        if isinstance(response, FailoverLogResponse):
            self._begin(stream, response)
        elif isinstance(response, RollbackResponse | UprRollbackResponse):
            self._roll_back(stream, response.seqno)
        elif response.status == Status.ROLLBACK:
            raise WrongRole("a rollback answer is eight bytes", "body length", 8)
        elif self._is_older_dialect(stream, response):
            stream.dialect = self._dialect = Dialect.UPR
            self._ask(stream)
        elif stream.dialect is Dialect.UPR and response.status == Status.KEY_ENOENT:
            self._roll_back(stream, 0)
        elif response.status == Status.SUCCESS:
            raise WrongRole("a failover log has entries of sixteen bytes, and at least one", "body length", 8)
        else:
            self._answer(stream, response.status)
            self._remove(stream)

    def _answered_too_late(self, stream: PassiveStream, response: Response) -> None:
        """The stream was closed here meanwhile. If the node had opened it itself, tell the producer to close it."""
        if response.status == Status.SUCCESS and stream.answer_opaque is None:
            self._send_close(stream.vbucket)

    def _begin(self, stream: PassiveStream, response: FailoverLogResponse) -> None:
        replica = self.store.vbucket(stream.vbucket)
        if replica.state not in (VbucketState.REPLICA, VbucketState.PENDING):
            raise StatusError.of(Status.NOT_MY_VBUCKET)
        replica.replication.replace_failover_log(response.entries)
        stream.phase = StreamPhase.LIVE
        stream.snapshot_start = replica.high_seqno
        self._answer(stream, Status.SUCCESS)
        if self.negotiation.sync_writes and replica.high_prepared_seqno and replica.snapshot_complete:
            self._prepared.append((stream.vbucket, replica.high_prepared_seqno, _ANY_LEVEL))

    def _is_older_dialect(self, stream: PassiveStream, response: Response) -> bool:
        """A producer that refuses the 48-byte request may know the 40-byte one (docs/protocol/upr.md#both)."""
        refused = response.status in (Status.EINVAL, Status.UNKNOWN_COMMAND)
        return refused and stream.dialect is Dialect.DCP and not self.negotiation.v7_statuses

    def _roll_back(self, stream: PassiveStream, seqno: int) -> None:
        """Try another branch at the same seqno, or else undo changes; then ask again.

        See docs/protocol/consumer.md#streams, step 3.
        """
        replica = self.store.vbucket(stream.vbucket)
        log: FailoverLog = replica.failover_log
        skipped, high = stream.skipped_branches, replica.high_seqno
        if seqno == 0 and skipped + 1 < len(log) and log.entries[skipped].seqno == high:
            stream.skipped_branches += 1
        else:
            stream.skipped_branches = 0
            # A rollback to where we are already would repeat for ever: go back to the beginning.
            replica.rollback(seqno if seqno < high else 0)
        self._ask(stream)

    def _answer(self, stream: PassiveStream, status: int, *, bare: bool = False) -> None:
        if stream.done is not None:
            done, stream.done = stream.done, None
            done(stream.vbucket, status)
        elif stream.answer_opaque is not None and bare:
            self._send(OtherResponse(Opcode.DCP_ADD_STREAM, opaque=stream.answer_opaque, status=status))
        elif stream.answer_opaque is not None:
            self._send(AddStreamResponse(stream.opaque, opaque=stream.answer_opaque, status=status))

    def _remove(self, stream: PassiveStream) -> None:
        stream.phase = StreamPhase.DEAD
        if self.streams.get(stream.vbucket) is stream:
            del self.streams[stream.vbucket]
            self._table.set_state(stream.vbucket, SlotState.CLOSED)
        self.registry.release(stream.vbucket, self)

    # ---------------------------------------------------------------------------------------------- ending streams

    def kill_stream(self, vbucket: int) -> None:
        """Take no more changes for the vbucket; the stream stays registered until its end.

        See docs/protocol/consumer.md#receiving.
        """
        stream = self.streams.get(vbucket)
        if stream is None or not stream.is_live:
            return
        if stream.phase in (StreamPhase.WAITING, StreamPhase.ASKED):
            self._answer(stream, Status.NOT_MY_VBUCKET)
        stream.phase = StreamPhase.DEAD
        self.registry.release(vbucket, self)
        self._table.set_state(vbucket, SlotState.IGNORED)

    def drop_stream(self, vb: int) -> None:
        """Stop consuming a vbucket, and tell the producer to close the stream."""
        stream = self.streams.get(vb)
        if stream is None:
            return
        live = stream.phase is StreamPhase.LIVE
        stream.done = None
        self._remove(stream)
        self._table.set_state(vb, SlotState.IGNORED)
        if live:
            self._send_close(vb)

    def _send_close(self, vb: int) -> None:
        self._closing.add(self._next_opaque())
        self._send(CloseStream(vbucket=vb, opaque=self._opaque))

    def _close_stream(self, request: CloseStream) -> None:
        stream = self.streams.get(request.vbucket)
        status = Status.SUCCESS
        if stream is None or not stream.is_live:
            status = self._not_found
        else:
            stream.phase = StreamPhase.DEAD
            self.registry.release(stream.vbucket, self)
            self._table.set_state(stream.vbucket, SlotState.IGNORED)
        self._send(OtherResponse(Opcode.DCP_CLOSE_STREAM, opaque=request.opaque, status=status))

    @property
    def _not_found(self) -> Status:
        return Status.DCP_STREAM_NOT_FOUND if self.negotiation.v7_statuses else Status.KEY_ENOENT

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
