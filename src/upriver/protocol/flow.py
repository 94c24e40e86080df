"""The flow-control window of one DCP connection, counted byte for byte (docs/protocol/flow.md#window)."""

from __future__ import annotations

UNLIMITED = 2**63 - 1
PREPARE_SURCHARGE = 2  # a prepare is charged 57 bytes and sends 55: a known miscount that both sides must share


class FlowWindow:
    """How many unacknowledged bytes may be on their way.

    A message may go as long as the window is not used up *before* it, so one message can overshoot by any amount.

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
        """So many bytes were sent."""
        if self.size:
            self.outstanding += count

    def acknowledge(self, count: int) -> None:
        """The peer has processed so many bytes; more than were sent is not held against it."""
        if self.size:
            self.outstanding = max(0, self.outstanding - count)
            self.total_acknowledged += count

    def resize(self, size: int) -> None:
        """A new window; 0 turns flow control off and forgets what is outstanding."""
        self.size = size
        if not size:
            self.outstanding = self.total_acknowledged = 0
