"""Checks received rows in bulk: ``StreamTable`` the order of their seqnos, ``ValueChecker`` their values.

``StreamTable`` keeps the state of every stream of a connection in one array, against which a kernel checks whole
batches of rows: seqnos must rise inside the announced snapshot. It also stamps each row with its snapshot, branch and
epoch. ``ValueChecker`` checks that each value is what its datatype says (docs/protocol/messages.md#checks, steps 8
and 9).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from upriver.errors import InvalidMessage
from upriver.model import SEQNO_MAX, Datatype, signed
from upriver.wire.bulk.decode import SLACK, Columns, address_of
from upriver.wire.values import check_value

CHECKED = int(Datatype.SNAPPY | Datatype.XATTR)
_I64_MAX = 2**63 - 1
_SCRATCH = 256 * 1024  # bytes; a larger compressed value with attributes is checked as an object
_NOTHING = np.empty(0, np.uint8)


class SlotState(IntEnum):
    """What happens to the rows of a stream; the numbers are the kernels'."""

    CLOSED = 0  # there is no stream: a row for it breaks a rule
    OPEN = 1
    OUT_OF_ORDER = 2  # between the two OSO messages: seqnos come in any order and without a snapshot
    IGNORED = 3  # ended at this end, which the peer may not know yet: its rows are dropped


class StreamTable:
    """One slot per stream, by vbucket; by opaque if a vbucket may have several streams (stream-ids)."""

    def __init__(self, slots: int = 1024, *, by_opaque: bool = False) -> None:
        self._slots = np.zeros((slots, 8), np.int64)
        self._address = address_of(self._slots)
        self._dropped = np.zeros(1, np.int64)
        self._by_opaque = int(by_opaque)

    def open(
        self, slot: int, *, opaque: int, seqno: int = 0, vbuuid: int = 0, epoch: int = 0, upto: int = SEQNO_MAX
    ) -> None:
        """Open a stream after ``seqno``; rows above ``upto`` are dropped. No row may come before a marker."""
        seqno, upto = min(seqno, _I64_MAX), min(upto, _I64_MAX)
        self._slots[slot] = seqno, 0, -1, signed(vbuuid), epoch, opaque, upto, SlotState.OPEN

    def snapshot(self, slot: int, start: int, end: int) -> None:
        """Apply a marker; for UPR's bare marker pass the last seqno and ``SEQNO_MAX``."""
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
        """Check and stamp rows ``first`` to ``last``; returns the first row that breaks a rule, or -1.

        The rows before that one have been processed. Dropped rows get event 0.
        """
        from upriver.wire.kernels import decode as kernels

        self._dropped[0] = 0
        bad = kernels.advance(
            first, last, self._by_opaque, columns.address, self._address, len(self._slots), self._dropped
        )
        columns.dropped += int(self._dropped[0])
        return int(bad)


class BrokenValue(NamedTuple):
    """A row whose value is not what its datatype says, and why."""

    row: int
    error: InvalidMessage


class ValueChecker:
    """Checks the values of rows, in one thread. Allocates its memory at first use: most connections need none."""

    def __init__(self) -> None:
        self._memory = _NOTHING, _NOTHING
        self._places: tuple[int, int, int] | None = None  # where the kernel finds the memory

    def _prepared(self) -> tuple[int, int, int]:
        from upriver.wire.kernels.json import MOST_LEVELS

        self._memory = np.empty(_SCRATCH + SLACK, np.uint8), np.empty(MOST_LEVELS, np.uint8)
        scratch, stack = map(address_of, self._memory)
        self._places = scratch, _SCRATCH, stack
        return self._places

    def first_broken(self, columns: Columns, first: int, last: int) -> BrokenValue | None:
        """The first of the rows ``first`` to ``last`` whose value must be refused."""
        from upriver.wire.kernels import values as value_kernels

        memory = self._places or self._prepared()
        row = first
        while (row := int(value_kernels.first_odd(row, last, columns.address, *memory))) < last:
            try:
                check_value(columns.value(row), int(columns.view("datatype")[row]))
            except InvalidMessage as error:
                return BrokenValue(row, error)
            row += 1
        return None
