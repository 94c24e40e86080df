"""One stream of a producer: from the runs of its source to frames in a send buffer.

The bulk encoder takes documents, run by run. Records that it stops at, and everything that is not a document, become
single frames in ``_frames``. A snapshot marker is sent only together with the first item that it announces, because a
filter may leave nothing of the snapshot.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from upriver.errors import StoreError
from upriver.protocol.flow import PREPARE_SURCHARGE
from upriver.protocol.producer.controls import Oso
from upriver.protocol.producer.frames import Encoder, MarkerFacts, StreamFrames, make_encoder
from upriver.protocol.producer.stream_filter import StreamFilter
from upriver.protocol.producer.stream_request import Attempt
from upriver.wire import Opcode
from upriver.wire.bulk.encode import Encoded, PackedEncoder, SendBuffer, Stop
from upriver.wire.bulk.live import LiveTable
from upriver.wire.constants import Dialect, MarkerFlag, OpenFlag, OsoFlag, StreamEndStatus, UprStreamEndStatus
from upriver.wire.packed import (
    End,
    EndReason,
    OsoEnd,
    OsoStart,
    RecordHead,
    RecordKind,
    Run,
    SnapshotStart,
    StreamEvent,
    unpack,
)

if TYPE_CHECKING:
    from upriver.protocol.producer.live import LiveVbucket
    from upriver.protocol.producer.machine import Producer
    from upriver.protocol.producer.source import Source, SourceVbucket
    from upriver.protocol.producer.takeover import Takeover

RUN_BYTES = 64 * 1024  # sent for one vbucket before another gets its turn
# After so many seqnos hidden by a filter, the client is told the position (docs/protocol/snapshots.md#seqno-advanced)
_ANTI_LAG = 10_000
# Plain numbers: comparing an IntFlag takes longer than building the whole marker.
_MEMORY, _DISK, _ACK = int(MarkerFlag.MEMORY), int(MarkerFlag.DISK), int(MarkerFlag.ACK)
_PREPARE_OPCODE = int(Opcode.DCP_PREPARE)


class TurnEnd(Enum):
    """What ended a turn of ``fill``."""

    IDLE = auto()  # nothing to send now; the store will wake the stream
    MORE = auto()  # the stream had its share
    FULL = auto()  # the send buffer is full
    WINDOW = auto()  # the flow control window is used up
    ENDED = auto()  # the stream end is in the buffer


_STUCK = {Stop.WINDOW: TurnEnd.WINDOW, Stop.FULL: TurnEnd.FULL}


class ProducerStream:
    """A stream that was granted; call ``fill`` until it ends. Kept small: there can be 100,000 of them."""

    __slots__ = (
        "_can_be_live", "_encoder", "_frames", "_in_oso", "_initial", "_invisible", "_items_sent", "_last_advanced",
        "_last_read", "_last_sent", "_live_encoder", "_marker", "_marker_end", "_offset", "_oso_greatest", "_partial",
        "_run", "_snapshot", "can_advance", "dialect", "end_seqno", "ended", "filter", "flags", "frames",
        "is_woken", "live", "opaque", "options", "producer", "queued", "snap_end", "snap_start", "source",
        "start_seqno", "stream_id", "takeover", "vbucket", "vbucket_id", "vbuuid",
    )  # fmt: skip

    def __init__(self, producer: Producer, attempt: Attempt, opaque: int) -> None:
        options = producer.options
        self.producer = producer
        self.options = options
        self.vbucket_id, self.stream_id, self.opaque = attempt.vbucket_id, attempt.stream_id, opaque
        self.flags, self.start_seqno, self.end_seqno = attempt.flags, attempt.start, attempt.end
        self.vbuuid, self.snap_start, self.snap_end = attempt.vbuuid, attempt.snap_start, attempt.snap_end
        self.dialect = attempt.dialect
        self.frames = StreamFrames(options, attempt.dialect, attempt.vbucket_id, opaque, attempt.stream_id)
        self.filter = StreamFilter(
            collections=options.collections, ids=attempt.collection_ids, scope_id=attempt.scope_id,
            flatbuffers=options.flatbuffers,
        )  # fmt: skip
        self.can_advance = options.can_advance and attempt.dialect is Dialect.DCP
        self.is_woken = False  # the store has called since the last look
        self.queued = False  # it waits for its turn to send
        self.live: LiveVbucket | None = None  # set for a live stream: this keeps its position
        self.ended = False
        self.takeover: Takeover | None = None
        self.vbucket: SourceVbucket = attempt.facts
        self.source: Source
        self._last_sent = 0  # this and the next two do not count what it is sent while live
        self._last_read = attempt.start
        self._items_sent = 0
        self._frames: list[bytes] = []
        self._marker: bytes | None = None
        self._snapshot: SnapshotStart | None = None
        self._in_oso = False
        self._oso_greatest = 0
        self._run: Run | None = None
        self._offset = 0
        self._partial = attempt.snap_start < attempt.start < attempt.snap_end  # resumes inside a snapshot
        self._marker_end = 0
        self._last_advanced = 0
        self._invisible = 0  # the last prepare or abort of a collection that the stream follows
        self._initial = attempt.start == 0 and OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL in options.flags
        # The bulk encoder can write the markers of such streams too.
        self._can_be_live = attempt.dialect is Dialect.DCP and not (
            attempt.stream_id or options.force_value_compression
        )
        self._encoder: Encoder | None = None  # made when needed, and again when the filter changes
        self._live_encoder: PackedEncoder | None = None

    def _make_encoder(self) -> Encoder:
        producer = self.producer
        return make_encoder(
            self.options, self.frames, self.filter, self._initial, producer.limits.upr_expirations,
            producer.memory.scratch,
        )  # fmt: skip

    @property
    def backfilling(self) -> bool:
        return self.source.backfilling

    @property
    def needs_backfill(self) -> bool:
        """Whether the next step is to read from disk."""
        return self.source.backfilling or self.source.position < self.producer.store.memory_floor(self.vbucket)

    # ------------------------------------------------------------------------------------------ its position

    @property
    def last_read_seqno(self) -> int:
        """Everything up to this seqno was sent, or was filtered out."""
        return self.live.position if self.live is not None else self._last_read

    @property
    def last_sent_seqno(self) -> int:
        """The seqno of the last document or event that was sent."""
        sent = self.producer.live_table.progress(self.vbucket_id).last_sent if self.live is not None else 0
        return sent or self._last_sent

    @property
    def items_sent(self) -> int:
        sent = self.producer.live_table.progress(self.vbucket_id).records if self.live is not None else 0
        return self._items_sent + sent

    def go_live(self) -> None:
        """Become a live stream, if it can be one, has everything, and nothing waits to be sent."""
        encoder = self._live_encoder
        waits = self.is_woken or self._run is not None or self._frames or self._partial
        if encoder is None or waits or self.takeover is not None:
            return
        producer = self.producer
        if not len(producer.live_table):
            producer.live_table = LiveTable(producer.store.vbuckets)
        joined = producer.live.join(self)
        if joined is not None:
            producer.live_table.add(
                self.vbucket_id, encoder, self.end_seqno, can_advance=self.can_advance,
                is_filtered=self.filter.is_filtered, is_replica=self.options.sync_replication,
            )  # fmt: skip
            self.live = joined
            if self.is_woken:  # another thread ended it meanwhile and did not see that it is live
                self.leave_live()

    def leave_live(self) -> None:
        """Read on alone, from the position reached as a live stream."""
        if self.live is None:
            return
        live, table = self.live, self.producer.live_table
        table.mute(self.vbucket_id)
        sent = table.progress(self.vbucket_id)
        self._items_sent += sent.records
        self._last_sent = sent.last_sent or self._last_sent
        self._last_advanced = sent.last_advanced or self._last_advanced
        self._last_read = live.position
        self.live = None
        live.leave(self)
        self.source.take_back(live.origin, live.position)

    # ------------------------------------------------------------------------------------------ the turn

    def fill(self, out: SendBuffer, upto: int) -> TurnEnd:
        """Put the next frames into ``out``, until the stream has had its share or ``out`` holds ``upto`` bytes."""
        began = out.used
        while True:
            if self._frames and not self._send_frames(out):
                return TurnEnd.WINDOW
            if self.ended:
                return TurnEnd.ENDED
            if out.used >= upto:
                return TurnEnd.FULL
            if out.used - began >= RUN_BYTES:
                return TurnEnd.MORE
            try:
                stuck = self._step(out)
            except StoreError as error:
                self.producer.report_failure(self, error)
                self.end(StreamEndStatus.BACKFILL_FAIL)
            else:
                if stuck is not None:
                    return stuck

    def _step(self, out: SendBuffer) -> TurnEnd | None:
        if self._run is not None:
            return self._encode(out, self._run)
        event = self.source.poll()
        if event is not None:
            self._take(event)
            return None
        if self.takeover is not None:
            self.takeover.caught_up()
            return None if self._frames else TurnEnd.IDLE
        return TurnEnd.IDLE

    def _send_frames(self, out: SendBuffer) -> bool:
        """Send single frames while the window is open; False if it closes before the last one."""
        window = self.options.window
        for sent, frame in enumerate(self._frames):
            if not window.is_open:
                del self._frames[:sent]
                return False
            out.append(frame)
            surcharge = PREPARE_SURCHARGE if frame[1] == _PREPARE_OPCODE else 0
            window.charge(len(frame) + surcharge)
        self._frames.clear()
        return True

    def push(self, frame: bytes) -> None:
        """Queue a single frame behind the frames that wait already."""
        self._frames.append(frame)

    # ------------------------------------------------------------------------------------------ events of the store

    def _take(self, event: StreamEvent) -> None:
        if isinstance(event, Run):
            self._run, self._offset = event, 0
        elif isinstance(event, SnapshotStart):
            self._begin_snapshot(event)
        elif isinstance(event, End):
            self.end(_END_STATUS[event.reason])
        elif isinstance(event, OsoStart):
            self._in_oso, self._oso_greatest = True, 0
            self.push(self.frames.oso(OsoFlag.START))
        elif isinstance(event, OsoEnd):
            self._end_oso(event)

    def _begin_snapshot(self, event: SnapshotStart) -> None:
        self._snapshot = event
        self._invisible = 0
        if self._initial and event.flags & _MEMORY:
            self._initial = False
            self._encoder = self._live_encoder = None
        # A client that does not get SEQNO_ADVANCED needs an end seqno that a document has.
        self._marker_end = event.end if self.can_advance else event.last_matching
        if not self._marker_end:
            self._marker = None
            return
        flags = event.flags
        if self.takeover is not None and flags & _MEMORY and not self.frames.upr:
            flags |= _ACK
        self._marker = self.frames.marker(
            MarkerFacts(
                min(event.start, self._marker_end), self._marker_end, flags, event.max_visible, event.high_completed,
                event.purge_seqno, event.high_prepared,
            )
        )  # fmt: skip

    def _end_oso(self, event: OsoEnd) -> None:
        self._in_oso = False
        if self.options.oso is Oso.WITH_SEQNO_ADVANCED and event.max_seqno > self._oso_greatest:
            self.push(self.frames.seqno_advanced(event.max_seqno))
        self.push(self.frames.oso(OsoFlag.END))

    def end(self, status: StreamEndStatus) -> None:
        """End the stream after the frames that wait; the producer drops it once its end is sent."""
        if self.ended:
            return
        self._stop()
        self.push(self.frames.stream_end(self._wire_status(status)))
        self.producer.ending(self)

    def _wire_status(self, status: StreamEndStatus) -> int:
        if self.frames.upr:
            return UprStreamEndStatus.OK if status is StreamEndStatus.OK else UprStreamEndStatus.STATE_CHANGED
        if status is StreamEndStatus.FILTER_EMPTY and not self.options.collections:
            return StreamEndStatus.OK
        return status

    def drop(self) -> None:
        """Stop without a stream end: the client closed it, or the connection is gone."""
        self._stop()
        self._frames.clear()

    def _stop(self) -> None:
        self.leave_live()
        self.ended = True
        self._run = self._marker = None
        self.source.close()
        if self.takeover is not None:
            self.takeover.over()

    # ------------------------------------------------------------------------------------------ documents

    def _encode(self, out: SendBuffer, run: Run) -> TurnEnd | None:
        window, before = self.options.window, out.used
        if not window.is_open:
            return TurnEnd.WINDOW
        if self._marker is not None:
            out.append(self._marker)
        encoder = self._encoder
        if encoder is None:
            encoder = self._encoder = self._make_encoder()
            self._live_encoder = encoder.plain_encoder if self._can_be_live else None
        # A UPR stream ends exactly at its end seqno (docs/protocol/upr.md#differences)
        upto = min(run.upto, self.end_seqno) if self.frames.upr else run.upto
        done = encoder.encode(
            run.data, out, offset=self._offset, after=run.after, upto=upto,
            budget=window.room - (out.used - before),
        )  # fmt: skip
        if done.records_sent or done.stop in (Stop.WINDOW, Stop.FULL):
            if self._marker is not None:
                self._marker_sent()
        elif self._marker is not None:
            out.used = before  # nothing of the snapshot was sent: take the marker back
        window.charge(out.used - before)
        self._note(done)
        return self._after_encode(run, done)

    def _marker_sent(self) -> None:
        self._marker = None
        self._partial = False
        if self.takeover is not None:
            self.takeover.marker_sent(self._snapshot)

    def _note(self, done: Encoded) -> None:
        self._offset = done.next_offset
        self._items_sent += done.records_sent
        self._invisible = done.invisible or self._invisible
        if done.last_seqno:
            self._last_sent = done.last_seqno
            self._oso_greatest = max(self._oso_greatest, done.last_seqno)
        if done.last_scanned_seqno:
            self._last_read = done.last_scanned_seqno

    def _after_encode(self, run: Run, done: Encoded) -> TurnEnd | None:
        if done.stop is Stop.SPECIAL:
            self._take_single(run)
        elif done.stop not in _STUCK:
            self._run_finished(run)
        return _STUCK.get(done.stop)

    def _take_single(self, run: Run) -> None:
        """Queue the record at the offset as a single frame, if the stream sees it."""
        head, key, value = unpack(run.data, self._offset)
        self._offset += head.size
        frame = self._single(head, key, value)
        if frame is None:
            return
        if self._marker is not None:
            self.push(self._marker)
            self._marker_sent()
        self.push(frame)
        self._items_sent += 1
        self._last_sent = self._last_read = head.seqno
        self._oso_greatest = max(self._oso_greatest, head.seqno)

    def _single(self, head: RecordHead, key: bytes, value: bytes) -> bytes | None:
        kind = head.kind
        if kind == RecordKind.SYSTEM_EVENT:
            return self._system_event(head, key, value)
        if not self.filter.sees_collection(head.collection_id):
            return None
        if kind in (RecordKind.PREPARE, RecordKind.ABORT) and not self.options.sync_writes:
            self._invisible = head.seqno
            return None
        if kind == RecordKind.PREPARE:
            return self.frames.prepare(head, key, value)
        if kind == RecordKind.ABORT:
            return self.frames.abort(head, key)
        if kind == RecordKind.COMMIT:
            return self._commit(head, key, value)
        if self._initial and kind != RecordKind.MUTATION:
            return None
        return self.frames.document(head, key, value)

    def _commit(self, head: RecordHead, key: bytes, value: bytes) -> bytes:
        """A commit for replicas; for all others, and from disk, the document that it made."""
        from_disk = self._snapshot is not None and self._snapshot.flags & _DISK
        if self.options.sync_writes and not from_disk:
            return self.frames.commit(head, key)
        return self.frames.document(head, key, value, deleted=self.frames.commit_deletes(head))

    def _system_event(self, head: RecordHead, key: bytes, value: bytes) -> bytes | None:
        before = self.filter.collection_ids
        passes = self.filter.passes(head.extra >> 8, value) and not self.frames.upr
        if self.filter.collection_ids != before:
            self._encoder = self._live_encoder = None
        return self.frames.system_event(head, key, value) if passes else None

    # ------------------------------------------------------------------------------------------ ends of runs

    def _run_finished(self, run: Run) -> None:
        self._run = None
        self._last_read = run.upto
        snapshot = self._snapshot
        if snapshot is not None and not self._in_oso:
            if run.upto >= snapshot.end:
                self._finish_snapshot(snapshot)
            elif self.can_advance and self.filter.is_filtered and not run.memory:
                self._catch_up(run)
        if self.frames.upr and run.upto >= self.end_seqno:
            self.end(StreamEndStatus.OK)

    def _finish_snapshot(self, snapshot: SnapshotStart) -> None:
        """The whole snapshot was sent; if its last seqno is not an item of this stream, say that it is reached.

        See docs/protocol/snapshots.md#seqno-advanced.
        """
        self._snapshot = None
        if self._marker is not None:
            self._finish_unseen(snapshot)
        elif self.can_advance and self._marker_end and self._last_sent != self._marker_end:
            self._advance(self._marker_end)
        if self.filter.is_empty:
            self.end(StreamEndStatus.FILTER_EMPTY)

    def _finish_unseen(self, snapshot: SnapshotStart) -> None:
        """Nothing in the snapshot was for this stream; tell the client only if it must know the position."""
        marker, self._marker = self._marker, None
        if not self.can_advance or marker is None:
            return
        if self._partial or snapshot.flags & _DISK or self.filter.collection_ids is None:
            self.push(marker)
            self._marker_sent()
            self._advance(snapshot.end)
        elif self._invisible:
            self.push(self.frames.marker(MarkerFacts(self._invisible, self._invisible, snapshot.flags)))
            self._advance(self._invisible)

    def _catch_up(self, run: Run) -> None:
        """After many hidden seqnos, tell the client the position, so that a resume does not begin far back."""
        if run.upto - max(self._last_sent, self._last_advanced) < _ANTI_LAG:
            return
        if self._marker is not None:
            self.push(self._marker)
            self._marker_sent()
        self._advance(run.upto)

    def _advance(self, seqno: int) -> None:
        self._last_advanced = seqno
        self.push(self.frames.seqno_advanced(seqno))


_END_STATUS = {
    EndReason.OK: StreamEndStatus.OK,
    EndReason.STATE_CHANGED: StreamEndStatus.STATE_CHANGED,
    EndReason.ROLLBACK: StreamEndStatus.STATE_CHANGED,
    EndReason.BACKFILL_FAILED: StreamEndStatus.BACKFILL_FAIL,
    EndReason.FILTER_EMPTY: StreamEndStatus.FILTER_EMPTY,
}
