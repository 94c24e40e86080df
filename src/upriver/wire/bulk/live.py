"""Encodes new changes for all live streams of a connection in one kernel call.

With a thousand vbuckets, most writes go to one stream each, and a call then costs ten times as much as the work in
the kernel. So the new snapshots of many vbuckets form one table, and the live streams of a connection another.
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
    """A whole small snapshot of packed records at ``address``. ``start`` 0: its marker starts at its first record."""

    vbucket: int
    first: int
    last: int
    start: int
    flags: int
    address: int
    size: int


class LiveProgress(NamedTuple):
    """What a live stream was sent: the number of documents, the last seqno, and the last SEQNO_ADVANCED (0: none)."""

    records: int
    last_sent: int
    last_advanced: int


class LiveBatch:
    """New snapshots, at most one per vbucket; the caller keeps their records alive."""

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
        """Add a stream that ends at ``end``; a replica gets 2.0 markers. The caller keeps the encoder alive."""
        switches = can_advance | is_filtered << 1 | is_replica << 2
        self._rows[vbucket] = encoder.address, switches, min(end, _I64_MAX), 0, 0, 0

    def progress(self, vbucket: int) -> LiveProgress:
        """What the stream has been sent since it was added."""
        from upriver.wire.kernels import encode as k

        return LiveProgress(*self._rows[vbucket, k.F_RECORDS :].tolist())

    def mute(self, vbucket: int) -> None:
        """Send nothing more on this stream; may be called from any thread."""
        self._rows[vbucket, 0] = 0

    def encode(self, batch: LiveBatch, row: int, out: SendBuffer, budget: int) -> tuple[int, int]:
        """Encode the snapshots from ``row`` on; returns the row to continue at and the number of documents encoded.

        Stops early when the buffer or the window is full. ``batch.outcomes`` has the outcome of each row before.
        """
        row, out.used, records = _kernel()(
            batch.table, row, len(batch), self._flat, out.address, out.used, out.room, budget, batch.outcomes,
            self._state,
        )  # fmt: skip
        return row, records

    @staticmethod
    def left_out(batch: LiveBatch, row: int) -> tuple[list[int], list[int]]:
        """Of the rows before ``row``: vbuckets whose streams must send theirs themselves, and those that finished."""
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
    """The compiled function itself: at this call rate every indirection counts."""
    from upriver.wire.kernels import encode as bulk_frames

    return bulk_frames.encode_followed.compiled()
