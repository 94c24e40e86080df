"""The producer's half of a takeover: hand over a vbucket without losing a write (``protocol.md`` 7.1)."""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import TYPE_CHECKING

from upriver.model import VbucketState
from upriver.node import log
from upriver.wire import Opcode
from upriver.wire.constants import MarkerFlag, StreamEndStatus, UprVbucketState

if TYPE_CHECKING:
    from upriver.node.dcp.producer_stream import ProducerStream
    from upriver.store import SnapshotStart


class Step(Enum):
    SENDING = "takeover-send"  # the log, every snapshot to be confirmed
    PENDING = "takeover-wait"  # the consumer was told to become pending
    LAST = "takeover-send "  # we are dead; what was written before that
    ACTIVE = "takeover-wait "  # the consumer was told to become active
    DONE = "dead"


class Takeover:
    """Moves on whenever the stream is caught up, and when the consumer confirms."""

    def __init__(self, stream: ProducerStream) -> None:
        self._stream = stream
        self._step = Step.SENDING
        self._unconfirmed = 0
        self._death_is_durable = False
        self._sending_since = time.monotonic()

    @property
    def state(self) -> str:
        return self._step.value.strip()

    def marker_sent(self, snapshot: SnapshotStart | None) -> None:
        if snapshot is not None and snapshot.flags & MarkerFlag.MEMORY and not self._stream.frames.upr:
            self._unconfirmed += 1

    def tick(self, now: float, most_s: float) -> None:
        """A log that grows as fast as it is sent never ends: after a while writers have to wait (7.1)."""
        if self._step is Step.SENDING and not self._stream.backfilling and now - self._sending_since > most_s:
            self._stream.producer.bucket.backed_up.add(self._stream.vbucket_id)

    def over(self) -> None:
        """Done, or given up: writers need not wait any longer."""
        self._stream.producer.bucket.backed_up.discard(self._stream.vbucket_id)

    def caught_up(self) -> None:
        """Everything there is was sent: the next step, once the consumer has confirmed it all."""
        if self._unconfirmed:
            return
        if self._step is Step.SENDING:
            self._tell(VbucketState.PENDING, Step.PENDING)
        elif self._step is Step.LAST and self._death_is_durable:
            self._tell(VbucketState.ACTIVE, Step.ACTIVE)

    def _tell(self, state: VbucketState, step: Step) -> None:
        frames = self._stream.frames
        self._step = step
        self.over()
        self._stream.push(frames.set_vbucket_state(UprVbucketState[state.name] if frames.upr else state))
        if frames.upr:  # that dialect has no answer to wait for
            self.confirmed(Opcode.DCP_SET_VBUCKET_STATE)

    def confirmed(self, opcode: int) -> None:
        """The consumer answered a marker or a state."""
        if opcode == Opcode.DCP_SNAPSHOT_MARKER:
            self._unconfirmed = max(0, self._unconfirmed - 1)
        elif self._step is Step.PENDING:
            self._step = Step.LAST
            self._die()
        elif self._step is Step.ACTIVE:
            self._step = Step.DONE
            self._stream.end(StreamEndStatus.OK)

    def _die(self) -> None:
        """From here on nobody writes to the vbucket here; our own streams are not told."""
        stream = self._stream
        bucket = stream.producer.bucket
        bucket.set_state(stream.vbucket_id, VbucketState.DEAD, silent=True, durable=False)
        log.info("vbucket_handed_over", bucket=bucket.name, vbucket=stream.vbucket_id, to=stream.producer.name)
        if bucket.member:  # after a crash the cluster map decides who is active
            self._death_is_durable = True
        else:
            bucket.on_disk().add_done_callback(self._died)

    def _died(self, flushed: asyncio.Future[None]) -> None:
        """A node without a map that crashed now must not come back as a second owner."""
        if self._stream.ended or flushed.cancelled():
            return
        if (error := flushed.exception()) is not None:
            log.warning("takeover_failed", vbucket=self._stream.vbucket_id, reason=error)
            self._stream.end(StreamEndStatus.STATE_CHANGED)
            return
        self._death_is_durable = True
        self._stream.producer.make_ready(self._stream)
