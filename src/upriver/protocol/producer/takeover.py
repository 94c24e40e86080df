"""The producer's half of a takeover: it hands a vbucket over without losing a write.

See docs/protocol/vbuckets.md#takeover.
"""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from upriver.model import VbucketState
from upriver.wire import Opcode
from upriver.wire.constants import MarkerFlag, StreamEndStatus, UprVbucketState

if TYPE_CHECKING:
    from upriver.protocol.producer.stream import ProducerStream
    from upriver.wire.packed import SnapshotStart

_LOOK_AGAIN_S = 0.1


class TakeoverStep(Enum):
    """The step of a takeover. The values are what statistics show, padded where two steps show the same."""

    SENDING = "takeover-send"  # sending the history; the consumer confirms every snapshot
    PENDING = "takeover-wait"  # the consumer was told to become pending
    LAST = "takeover-send "  # the vbucket is dead here; sending what was written before
    ACTIVE = "takeover-wait "  # the consumer was told to become active
    DONE = "dead"


class Takeover:
    """One takeover. It advances when the stream has caught up and when the consumer confirms."""

    def __init__(self, stream: ProducerStream, now: float) -> None:
        self._stream = stream
        self._store = stream.producer.store
        self._step = TakeoverStep.SENDING
        self._unconfirmed = 0
        self._is_retired = False
        self._patient_until = now + stream.producer.limits.takeover_s

    @property
    def state(self) -> str:
        return self._step.value.strip()

    def marker_sent(self, snapshot: SnapshotStart | None) -> None:
        if snapshot is not None and snapshot.flags & MarkerFlag.MEMORY and not self._stream.frames.upr:
            self._unconfirmed += 1

    @property
    def wake_at(self) -> float:
        return self._patient_until if self._step is TakeoverStep.SENDING else inf

    def wake(self, now: float) -> None:
        """Make writers wait if the takeover takes too long: history may grow as fast as it is sent.

        See docs/protocol/vbuckets.md#takeover.
        """
        if now < self.wake_at or self._stream.ended:
            return
        if self._stream.backfilling:
            self._patient_until = now + _LOOK_AGAIN_S
        else:
            self._patient_until = inf
            self._store.hold_writers(self._stream.vbucket_id, True)

    def over(self) -> None:
        """The takeover is done or given up: let writers go on."""
        self._store.hold_writers(self._stream.vbucket_id, False)

    def caught_up(self) -> None:
        """Everything was sent: take the next step if the consumer has confirmed it all."""
        if self._unconfirmed:
            return
        if self._step is TakeoverStep.SENDING:
            self._tell(VbucketState.PENDING, TakeoverStep.PENDING)
        elif self._step is TakeoverStep.LAST and self._is_retired:
            self._tell(VbucketState.ACTIVE, TakeoverStep.ACTIVE)

    def _tell(self, state: VbucketState, step: TakeoverStep) -> None:
        frames = self._stream.frames
        self._step = step
        self.over()
        self._stream.push(frames.set_vbucket_state(UprVbucketState[state.name] if frames.upr else state))
        if frames.upr:  # UPR has no answer to wait for
            self.confirmed(Opcode.DCP_SET_VBUCKET_STATE)

    def confirmed(self, opcode: int) -> None:
        """The consumer answered a marker or a state change."""
        if opcode == Opcode.DCP_SNAPSHOT_MARKER:
            self._unconfirmed = max(0, self._unconfirmed - 1)
        elif self._step is TakeoverStep.PENDING:
            self._step = TakeoverStep.LAST
            self._store.retire(self._stream.vbucket_id, self._retired)  # no more writes here from now on
        elif self._step is TakeoverStep.ACTIVE:
            self._step = TakeoverStep.DONE
            self._stream.end(StreamEndStatus.OK)

    def _retired(self, error: Exception | None) -> None:
        """The dead state is on disk. Only now may the consumer become active: a crash must not leave two owners."""
        if self._stream.ended:
            return
        if error is not None:
            self._stream.end(StreamEndStatus.STATE_CHANGED)
            return
        self._is_retired = True
        self._stream.producer.make_ready(self._stream)
