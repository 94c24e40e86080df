"""The state of each vbucket's stream in a feed: waiting, opening, open, parked or done; and when to try again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto

from upriver.model import SEQNO_MAX

MAX_BACKOFF_S = 5.0


def backoff(attempt: int) -> float:
    """Seconds to wait before retry number ``attempt``.

    >>> [backoff(n) for n in (0, 1, 2, 20)]
    [0.0, 0.05, 0.1, 5.0]
    """
    return min(MAX_BACKOFF_S, 0.05 * 2 ** min(attempt - 1, 10)) if attempt else 0.0


class _State(Enum):
    WAITING = auto()  # for its turn, its node, or the end of a pause
    OPENING = auto()
    OPEN = auto()
    PARKED = auto()  # its filter names nothing
    DONE = auto()


class StreamStates:
    """The states of one feed's vbuckets; ``jitter`` returns factors around 1 for pauses."""

    def __init__(self, vbuckets: Iterable[int], jitter: Callable[[], float]) -> None:
        self._state = dict.fromkeys(vbuckets, _State.WAITING)
        self.waiting: dict[int, float] = dict.fromkeys(self._state, 0.0)  # until when
        self.opening, self._undone = 0, len(self._state)
        self._jitter = jitter
        self._fruitless = dict.fromkeys(self._state, 0)  # attempts in a row without progress
        self._rollback_span: dict[
            int, tuple[int, int]
        ] = {}  # by vbucket: furthest seqno before, lowest target of its rollbacks

    @property
    def vbuckets(self) -> list[int]:
        return list(self._state)

    @property
    def all_done(self) -> bool:
        return self._undone == 0

    def open(self, vb: int) -> None:
        """The producer has accepted the stream request."""
        self._enter(vb, _State.OPEN)

    def ask(self, vb: int) -> None:
        """A stream request is on its way."""
        self._enter(vb, _State.OPENING)

    def park(self, vb: int) -> None:
        """Nothing can be read until the filter changes."""
        self._enter(vb, _State.PARKED)

    def unpark(self) -> None:
        """The filter has changed."""
        for vb, state in self._state.items():
            if state is _State.PARKED:
                self.wait(vb, 0.0)

    def finish(self, vb: int) -> None:
        self._enter(vb, _State.DONE)
        self._undone -= 1

    def wait(self, vb: int, until: float) -> None:
        """Try again from ``until`` on."""
        self._enter(vb, _State.WAITING)
        self.waiting[vb] = until

    def pause(self, vb: int, now: float) -> None:
        """Try again after a pause that grows with each fruitless attempt."""
        self._fruitless[vb] += 1
        self.wait(vb, now + backoff(self._fruitless[vb]) * self._jitter())

    def wait_after_end(self, vb: int, now: float, *, moved: bool) -> None:
        """A stream ended too early: try again at once, or after a pause if there was no progress last time."""
        if moved:
            self._fruitless[vb] = 0
        if self._fruitless[vb]:
            self.pause(vb, now)
        else:
            self.wait(vb, now)
        self._fruitless[vb] += 1

    def wait_after_rollback(self, vb: int, seqno: int, target: int, now: float) -> None:
        """Try again at once, or after a pause if neither the seqno got further nor the target lower."""
        furthest, lowest = self._rollback_span.get(vb, (0, SEQNO_MAX))
        self._rollback_span[vb] = max(furthest, seqno), target if seqno > furthest else min(lowest, target)
        if seqno > furthest or target < lowest:
            self._fruitless[vb] = 0
            self.wait(vb, now)
        else:
            self.pause(vb, now)

    def _enter(self, vb: int, state: _State) -> None:
        self.opening += (state is _State.OPENING) - (self._state[vb] is _State.OPENING)
        self._state[vb] = state
        self.waiting.pop(vb, None)
