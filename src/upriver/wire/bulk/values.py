"""The values of received rows, checked in bulk: each must be what its datatype says.

See docs/protocol/messages.md#checks, steps 8 and 9.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from upriver.errors import InvalidMessage
from upriver.model import Datatype
from upriver.wire.bulk.decode import SLACK, Columns, address_of
from upriver.wire.values import check_value

CHECKED = int(Datatype.SNAPPY | Datatype.XATTR)
_SCRATCH = 256 * 1024  # a larger compressed value with attributes is checked as an object

_NOTHING = np.empty(0, np.uint8)


class BrokenValue(NamedTuple):
    """A row whose value is not what it says, and why."""

    row: int
    error: InvalidMessage


class ValueChecker:
    """Checks rows of columns, for one thread. Its memory is made at the first use: most connections need none."""

    def __init__(self) -> None:
        self._memory = _NOTHING, _NOTHING
        self._places: tuple[int, int, int] | None = None  # where the kernel finds it

    def _prepared(self) -> tuple[int, int, int]:
        from upriver.wire.kernels.json import MOST_LEVELS

        self._memory = np.empty(_SCRATCH + SLACK, np.uint8), np.empty(MOST_LEVELS, np.uint8)
        scratch, stack = map(address_of, self._memory)
        self._places = scratch, _SCRATCH, stack
        return self._places

    def first_broken(self, columns: Columns, first: int, last: int) -> BrokenValue | None:
        """The first of rows ``first`` to ``last`` that must be refused."""
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
