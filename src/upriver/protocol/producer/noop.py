"""When a producer sends a noop, and which answer it accepts (docs/protocol/flow.md#noop)."""

from __future__ import annotations

from math import inf

DEFAULT_INTERVAL_S = 20.0
SHORTEST_INTERVAL_S = 0.1
_FIRST_OPAQUE = 10_000_001


class NoopTimer:
    """One noop every interval, whatever else is sent, and never a second one before the first is answered.

    >>> timer = NoopTimer(now=0.0); timer.enabled = True
    >>> timer.due_at
    20.0
    >>> timer.sent(20.0), timer.due_at
    (10000001, inf)
    >>> timer.answered(10000001), timer.due_at
    (True, 40.0)
    """

    __slots__ = ("_last_sent", "_opaque", "enabled", "interval_s", "outstanding")

    def __init__(self, now: float) -> None:
        self.enabled = False
        self.interval_s = DEFAULT_INTERVAL_S
        self.outstanding = False
        self._last_sent = now
        self._opaque = _FIRST_OPAQUE - 1

    @property
    def due_at(self) -> float:
        """When the next noop is to be sent; never, while one is unanswered."""
        return self._last_sent + self.interval_s if self.enabled and not self.outstanding else inf

    def sent(self, now: float) -> int:
        """A noop goes out now; returns its opaque."""
        self._last_sent = now
        self._opaque += 1
        self.outstanding = True
        return self._opaque

    def answered(self, opaque: int) -> bool:
        """Whether an answer is the one to the last noop; any other ends the connection."""
        if opaque != self._opaque:
            return False
        self.outstanding = False
        return True
