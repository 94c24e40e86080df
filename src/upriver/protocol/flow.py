"""What paces a DCP connection: its flow-control window and the producer's noop timer.

See docs/protocol/flow.md#window and docs/protocol/flow.md#noop.
"""

from __future__ import annotations

from math import inf

UNLIMITED = 2**63 - 1
PREPARE_SURCHARGE = 2  # a prepare is 55 bytes long and is charged as 57: a known miscount that both sides must share


class FlowWindow:
    """How many bytes may be sent before the peer acknowledges some of them.

    A message may be sent if the window is not used up *before* it, so one message can overshoot by any amount.

    >>> window = FlowWindow(); window.resize(100)
    >>> window.charge(99); window.room
    1
    >>> window.charge(5000); window.room
    -4999
    >>> window.acknowledge(5099); window.room
    100
    """

    __slots__ = ("outstanding", "size", "total_acknowledged")

    def __init__(self) -> None:
        self.size = 0  # 0: flow control is off
        self.outstanding = 0
        self.total_acknowledged = 0

    @property
    def room(self) -> int:
        """Bytes until the window is used up; nothing may be sent when it is 0 or less."""
        return self.size - self.outstanding if self.size else UNLIMITED

    @property
    def is_open(self) -> bool:
        return not self.size or self.outstanding < self.size

    def charge(self, count: int) -> None:
        """Count bytes that were sent."""
        if self.size:
            self.outstanding += count

    def acknowledge(self, count: int) -> None:
        """Count bytes that the peer has processed; acknowledging more than was sent is not an error."""
        if self.size:
            self.outstanding = max(0, self.outstanding - count)
            self.total_acknowledged += count

    def resize(self, size: int) -> None:
        """Set the size of the window; 0 turns flow control off and forgets what is outstanding."""
        self.size = size
        if not size:
            self.outstanding = self.total_acknowledged = 0


DEFAULT_INTERVAL_S = 20.0
SHORTEST_INTERVAL_S = 0.1
_FIRST_OPAQUE = 10_000_001


class NoopTimer:
    """Says when to send a noop: one per interval, whatever else is sent, and none while the last is unanswered.

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
        """When to send the next noop; infinite while one is unanswered."""
        return self._last_sent + self.interval_s if self.enabled and not self.outstanding else inf

    def sent(self, now: float) -> int:
        """Note that a noop is sent now; returns its opaque."""
        self._last_sent = now
        self._opaque += 1
        self.outstanding = True
        return self._opaque

    def answered(self, opaque: int) -> bool:
        """Whether this opaque answers the last noop; if not, the connection must end."""
        if opaque != self._opaque:
            return False
        self.outstanding = False
        return True
