"""What was just written, for all live streams of a connection: one call, however many they are.

With a thousand vbuckets most writes go to one stream each, and calling a kernel costs ten times what the kernel does.
So the new snapshots of many vbuckets become one table, and the live streams of a connection are another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from upriver.wire.bulk.encode import PackedEncoder, SendBuffer

_I64_MAX = 2**63 - 1


class LiveSnapshot(NamedTuple):
    """A whole snapshot of few packed records at ``address``; ``start`` 0: its marker begins with the first of them."""

    vbucket: int
    first: int
    last: int
    start: int
    flags: int
    address: int
    size: int


class LiveProgress(NamedTuple):
    """What a live stream was sent: how many documents, the last one's seqno, and the last SEQNO_ADVANCED (0: none)."""

    records: int
    last_sent: int
    last_advanced: int


class LiveBatch:
    """New snapshots of several vbuckets, at most one of each; the caller keeps their records alive."""

    def __init__(self, snapshots: list[LiveSnapshot]) -> None:
        self.vbuckets = [snapshot.vbucket for snapshot in snapshots]
        self.table: npt.NDArray[np.int64] = np.array(snapshots, np.int64).reshape(-1)
        self.outcomes: npt.NDArray[np.int64] = np.empty(len(snapshots), np.int64)

    def __len__(self) -> int:
        return len(self.vbuckets)


class LiveTable:
    """The live streams of one connection, by vbucket."""

    def __init__(self, vbuckets: int) -> None:
        from upriver.wire.kernels import encode as k

        self._rows: npt.NDArray[np.int64] = np.zeros((vbuckets, k.F_WIDTH), np.int64)
        self._flat = self._rows.reshape(-1)
        self._state: npt.NDArray[np.int64] = np.zeros(7, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, vbucket: int, encoder: PackedEncoder, end: int, *, can_advance: bool, is_filtered: bool,
        is_replica: bool = False,
    ) -> None:  # fmt: skip
        """A stream that ends at ``end``, with markers of version 2.0 for a replica; the caller keeps its encoder."""
        switches = can_advance | is_filtered << 1 | is_replica << 2
        self._rows[vbucket] = encoder.address, switches, min(end, _I64_MAX), 0, 0, 0

    def progress(self, vbucket: int) -> LiveProgress:
        """What the stream was sent since it was added."""
        from upriver.wire.kernels import encode as k

        return LiveProgress(*self._rows[vbucket, k.F_RECORDS :].tolist())

    def mute(self, vbucket: int) -> None:
        """Nothing more for this one; may be called in any thread."""
        self._rows[vbucket, 0] = 0

    def encode(self, batch: LiveBatch, row: int, out: SendBuffer, budget: int) -> tuple[int, int]:
        """Frames for the snapshots from ``row`` on; returns where to go on and how many documents there were.

        It stops early when buffer or window is full. ``LiveBatch.outcomes`` then says what became of each row before.
        """
        row, out.used, records = _kernel()(
            batch.table, row, len(batch), self._flat, out.address, out.used, out.room, budget, batch.outcomes,
            self._state,
        )  # fmt: skip
        return row, records

    @staticmethod
    def left_out(batch: LiveBatch, row: int) -> tuple[list[int], list[int]]:
        """Vbuckets before ``row`` whose streams got nothing and must send it alone, and those that are at their end."""
        from upriver.wire.kernels import encode as k

        outcomes = batch.outcomes[:row]
        if not outcomes.size or int(outcomes.max()) <= k.SERVED:
            return [], []
        vbuckets = batch.vbuckets
        return (
            [vbuckets[at] for at in np.flatnonzero(outcomes == k.LEFT_OUT).tolist()],
            [vbuckets[at] for at in np.flatnonzero(outcomes == k.FINISHED).tolist()],
        )


@cache
def _kernel() -> Callable[..., tuple[int, int, int]]:
    """Ready to be called: every indirection counts."""
    from upriver.wire.kernels import encode as bulk_frames

    return bulk_frames.encode_followed.compiled()
