"""The state of every stream of a connection as one array, against which a kernel checks whole batches of rows.

The state machine of a stream has the rules; this is their arithmetic for rows: seqnos must rise inside the announced
snapshot, and each row is stamped with the snapshot, branch and epoch that it belongs to.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from upriver.model import SEQNO_MAX, signed
from upriver.wire.bulk.decode import Columns, address_of

_I64_MAX = 2**63 - 1


class SlotState(IntEnum):
    """What happens to the rows of a stream; the kernels' numbers."""

    CLOSED = 0  # no such stream: a row of it breaks the rules
    OPEN = 1
    OUT_OF_ORDER = 2  # between the two OSO messages: seqnos in any order, and no snapshot
    IGNORED = 3  # ended here, but the peer may not know yet: its rows are dropped


class StreamTable:
    """One slot per stream: by vbucket, or by opaque where a vbucket may have several streams (stream-ids)."""

    def __init__(self, slots: int = 1024, *, by_opaque: bool = False) -> None:
        self._slots = np.zeros((slots, 8), np.int64)
        self._address = address_of(self._slots)
        self._dropped = np.zeros(1, np.int64)
        self._by_opaque = int(by_opaque)

    def open(
        self, slot: int, *, opaque: int, seqno: int = 0, vbuuid: int = 0, epoch: int = 0, upto: int = SEQNO_MAX
    ) -> None:
        """A stream begins after ``seqno``; rows above ``upto`` are dropped. No row may come before a marker."""
        seqno, upto = min(seqno, _I64_MAX), min(upto, _I64_MAX)
        self._slots[slot] = seqno, 0, -1, signed(vbuuid), epoch, opaque, upto, SlotState.OPEN

    def snapshot(self, slot: int, start: int, end: int) -> None:
        """A marker; for the bare marker of UPR pass the last seqno and ``SEQNO_MAX``."""
        self._slots[slot, 1:3] = min(start, _I64_MAX), min(end, _I64_MAX)

    def seqno_advanced(self, slot: int, seqno: int) -> None:
        self._slots[slot, 0] = max(seqno, int(self._slots[slot, 0]))

    def set_state(self, slot: int, state: SlotState) -> None:
        self._slots[slot, 7] = state

    def state(self, slot: int) -> SlotState:
        return SlotState(int(self._slots[slot, 7]))

    def seqno(self, slot: int) -> int:
        """The last seqno received."""
        return int(self._slots[slot, 0])

    def seqnos(self) -> npt.NDArray[np.int64]:
        """The last seqno of every slot, as a copy."""
        return self._slots[:, 0].copy()

    def snapshot_of(self, slot: int) -> tuple[int, int]:
        """Start and end of the current snapshot; the end is -1 before the first marker."""
        return int(self._slots[slot, 1]), int(self._slots[slot, 2])

    def advance(self, columns: Columns, first: int, last: int) -> int:
        """Take rows ``first`` to ``last``; returns the first row that breaks a rule, or -1.

        Rows before the bad one were taken. Rows to be dropped have event 0 from now on.
        """
        from upriver.wire.kernels import decode as kernels

        self._dropped[0] = 0
        bad = kernels.advance(
            first, last, self._by_opaque, columns.address, self._address, len(self._slots), self._dropped
        )
        columns.dropped += int(self._dropped[0])
        return int(bad)
