"""The positions of all vbuckets of a feed while it runs, moved on by whole runs of rows.

For each vbucket there is a ``Position`` as of its last control message. Rows since then only move a seqno, in an array
that kernels update (``wire.bulk.row_checks``). The current position is computed from both on demand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upriver.model import SEQNO_MAX
from upriver.protocol.position import Position
from upriver.wire.bulk.decode import Columns
from upriver.wire.bulk.row_checks import SlotState, StreamTable


@dataclass(slots=True)
class FrozenPositions:
    """The positions of all vbuckets at one moment: cheap to make, and computed only on demand."""

    _before: list[Position]
    _seqnos: npt.NDArray[np.int64]
    _upto: list[int]
    _held: dict[int, int]  # by vbucket: the highest seqno of an out-of-order snapshot that is not complete

    def position(self, vb: int, seqno: int | None = None) -> Position:
        """The position; with ``seqno``, as if only the rows up to it had come."""
        if vb in self._held:
            return _with_part(self._before[vb], max(self._held[vb], int(self._seqnos[vb])))
        reached = int(self._seqnos[vb]) if seqno is None else seqno
        return _without_promise(_moved(self._before[vb], reached, self._upto[vb]))

    def epoch(self, vb: int) -> int:
        return self._before[vb].epoch


def _moved(before: Position, reached: int, upto: int) -> Position:
    """The position after rows up to ``reached``, of which those above ``upto`` were dropped."""
    return before.read(min(reached, upto), max(reached, before.snap_end))


def _without_promise(at: Position) -> Position:
    """At 0 the reader has nothing of the snapshot that a marker announced, so do not claim it."""
    return at if at.seqno else at._replace(snap_end=0)


def _with_part(at: Position, highest: int) -> Position:
    """Inside an out-of-order snapshot: nothing is complete, but the reader has some changes up to ``highest``."""
    at = at.resume()
    return at._replace(snap_end=max(at.snap_end, highest))


class PositionTable:
    """Where a feed is in every vbucket of a bucket."""

    def __init__(self, vbuckets: int) -> None:
        self.streams = StreamTable(vbuckets)
        self.interrupted: dict[int, tuple[int, int]] = {}  # out-of-order snapshots cut short: branch, highest seqno
        self._before = [Position()] * vbuckets
        self._upto = [SEQNO_MAX] * vbuckets
        self._out_of_order: set[int] = set()

    # ---------------------------------------------------------------------------------------------- asking

    def position(self, vb: int) -> Position:
        """The current position of a vbucket."""
        if vb in self._out_of_order or vb in self.interrupted:
            highest = max(self.streams.seqno(vb), self.interrupted.get(vb, (0, 0))[1])
            return _with_part(self._before[vb], highest)
        return _without_promise(self._now(vb))

    def frozen(self) -> FrozenPositions:
        """The positions of this moment."""
        held = {vb: highest for vb, (_, highest) in self.interrupted.items()} | dict.fromkeys(self._out_of_order, 0)
        return FrozenPositions(self._before.copy(), self.streams.seqnos(), self._upto.copy(), held)

    def seqno(self, vb: int) -> int:
        """The last seqno received, wanted or not."""
        return self.streams.seqno(vb)

    def vbuuid(self, vb: int) -> int:
        return self._before[vb].vbuuid

    def epoch(self, vb: int) -> int:
        return self._before[vb].epoch

    def covered(self, vb: int) -> int:
        """No snapshot announced so far ends after this seqno."""
        return max(self._now(vb).snap_end, self.streams.seqno(vb))

    # ---------------------------------------------------------------------------------------------- streams

    def resume(self, vb: int, position: Position) -> None:
        """Begin at a saved position."""
        self._go_to(vb, position.checked().resume())

    def open(self, vb: int, opaque: int, upto: int = SEQNO_MAX) -> None:
        """A stream begins at the current position. Its messages carry ``opaque``; rows above ``upto`` are dropped."""
        at, seqno = self._before[vb], self.streams.seqno(vb)
        self._upto[vb] = upto
        self.streams.open(vb, opaque=opaque, seqno=seqno, vbuuid=at.vbuuid, epoch=at.epoch, upto=upto)

    def adopt(self, vb: int, vbuuid: int, opaque: int, upto: int = SEQNO_MAX) -> None:
        """The producer accepted us: from here on, history is the branch ``vbuuid``."""
        self.set_branch(vb, vbuuid)
        self.open(vb, opaque, upto)

    def set_branch(self, vb: int, vbuuid: int) -> None:
        """Set the branch of the current position."""
        self._before[vb] = self._before[vb]._replace(vbuuid=vbuuid)

    def next_epoch(self, vb: int) -> int:
        """Begin a new epoch, after a rollback; returns its number."""
        self._before[vb] = self._before[vb]._replace(epoch=self._before[vb].epoch + 1)
        return self._before[vb].epoch

    def close(self, vb: int) -> None:
        """The stream is gone; data that still arrives is dropped, and the position stays."""
        if vb in self._out_of_order:
            self._out_of_order.discard(vb)
            highest = self.streams.seqno(vb)
            if highest > self._before[vb].seqno:
                self.interrupted[vb] = self.vbuuid(vb), highest
            self._go_to(vb, self._before[vb])
        self.streams.set_state(vb, SlotState.IGNORED)

    # ---------------------------------------------------------------------------------------------- what comes

    def begin_snapshot(self, vb: int, start: int, end: int) -> None:
        """A snapshot marker has come."""
        if vb not in self._out_of_order:
            at, reached, upto = self._before[vb], self.streams.seqno(vb), self._upto[vb]
            at = _moved(at, reached, upto)
            if reached <= upto:
                self._before[vb] = at.begin_snapshot(start, end)
            else:  # rows were dropped: a new snapshot does not make the reader consistent
                self._before[vb] = at._replace(snap_end=max(at.snap_end, end))
        self.streams.snapshot(vb, start, end)

    def advance(self, columns: Columns, first: int, last: int) -> int:
        """Check the order of rows and stamp them with snapshot, branch and epoch; returns the first bad row, or -1."""
        return self.streams.advance(columns, first, last)

    def move(self, vb: int, seqno: int) -> bool:
        """A seqno was reached without a row; False if it is behind, or outside the announced snapshot."""
        if vb not in self._out_of_order and not self.streams.seqno(vb) <= seqno <= self.streams.snapshot_of(vb)[1]:
            return False
        self.streams.seqno_advanced(vb, seqno)
        return True

    def begin_out_of_order(self, vb: int) -> None:
        """Until the snapshot ends, only the position before it can be resumed from (docs/protocol/snapshots.md#oso)."""
        self._before[vb] = self._now(vb).resume()
        self._out_of_order.add(vb)
        self.streams.set_state(vb, SlotState.OUT_OF_ORDER)

    def end_out_of_order(self, vb: int) -> int:
        """The snapshot is complete; returns the seqno reached, the highest one received."""
        self._out_of_order.discard(vb)
        self.streams.set_state(vb, SlotState.OPEN)
        reached = self.streams.seqno(vb)
        self._before[vb] = self._before[vb].read(reached, reached)
        return reached

    # ---------------------------------------------------------------------------------------------- going back

    def roll_back(self, vb: int, target: int) -> None:
        """Forget everything above ``target``, which must come from ``Position.rollback_target``."""
        at = self.position(vb).rolled_back(target)
        self._out_of_order.discard(vb)
        self.interrupted.pop(vb, None)
        self._go_to(vb, at)

    def _now(self, vb: int) -> Position:
        if vb in self._out_of_order:
            return self._before[vb]
        return _moved(self._before[vb], self.streams.seqno(vb), self._upto[vb])

    def _go_to(self, vb: int, position: Position) -> None:
        self._before[vb] = position
        self.streams.open(vb, opaque=0, seqno=position.seqno)
        self.streams.set_state(vb, SlotState.CLOSED)
