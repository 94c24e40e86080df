"""What was just written, to all streams of a connection that have everything else: one call, however many they are.

With a thousand vbuckets most writes find one stream each to go to, and the way into a kernel costs ten times what the
kernel does. So what is new in many vbuckets becomes a table, and the streams that follow them are another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from upriver.wire.bulk.encode import PackedEncoder, SendBuffer

_I64_MAX = 2**63 - 1


class New(NamedTuple):
    """A whole snapshot of few packed records at ``address``; ``start`` 0: its marker begins with the first of them."""

    vbucket: int
    first: int
    last: int
    start: int
    flags: int
    address: int
    size: int


class Progress(NamedTuple):
    """What a follower was sent: how many documents, the last one's seqno, and how far it was told to be otherwise."""

    records: int
    last_sent: int
    last_advanced: int


class News:
    """Snapshots of several vbuckets, at most one of each; the caller keeps their records alive."""

    def __init__(self, rows: list[New]) -> None:
        self.vbuckets = [row.vbucket for row in rows]
        self.table: npt.NDArray[np.int64] = np.array(rows, np.int64).reshape(-1)
        self.outcomes: npt.NDArray[np.int64] = np.empty(len(rows), np.int64)

    def __len__(self) -> int:
        return len(self.vbuckets)


class Followers:
    """The streams of one connection that are up to date, by vbucket."""

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

    def progress(self, vbucket: int) -> Progress:
        """What it was sent since it was added, or since this was last asked."""
        from upriver.wire.kernels import encode as k

        row = self._rows[vbucket, k.F_RECORDS :]
        found = Progress(*row.tolist())
        row[:] = 0
        return found

    def mute(self, vbucket: int) -> None:
        """Nothing more for this one; may be called in any thread."""
        self._rows[vbucket, 0] = 0

    def encode(self, news: News, row: int, out: SendBuffer, budget: int) -> tuple[int, int]:
        """Frames for what is new from ``row`` on; returns where to go on and how many documents there were.

        It stops early when buffer or window is full. ``News.outcomes`` then says what became of each row before that.
        """
        row, out.used, records = _kernel()(
            news.table, row, len(news), self._flat, out.address, out.used, out.room, budget, news.outcomes, self._state
        )
        return row, records

    @staticmethod
    def left_out(news: News, row: int) -> tuple[list[int], list[int]]:
        """Vbuckets before ``row`` whose followers got nothing and need another way, and those that have their end."""
        from upriver.wire.kernels import encode as k

        outcomes = news.outcomes[:row]
        if not outcomes.size or int(outcomes.max()) <= k.SERVED:
            return [], []
        vbuckets = news.vbuckets
        return (
            [vbuckets[at] for at in np.flatnonzero(outcomes == k.LEFT_OUT).tolist()],
            [vbuckets[at] for at in np.flatnonzero(outcomes == k.FINISHED).tolist()],
        )


@cache
def _kernel() -> Callable[..., tuple[int, int, int]]:
    """Ready to be called: every indirection counts."""
    from upriver.wire.kernels import encode as bulk_frames

    return bulk_frames.encode_followed.compiled()
