"""Packed records to frames in one reusable send buffer, and columns to packed records, in bulk.

``PackedEncoder`` filters and encodes a run of records by the options of a stream. It stops, and says why, at whatever
it cannot encode: system events, prepares, values that must be inflated or stripped, a full window. The caller encodes
that one record as an object and goes on at ``next_offset``.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from upriver.errors import CorruptStore, LocalProtocolError
from upriver.model import SEQNO_MAX
from upriver.wire.bulk.decode import SLACK, Columns, address_of, lend

_I64_MAX = 2**63 - 1
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


class Stop(IntEnum):
    """Why an encoder returned; the kernels' numbers."""

    END = 0  # everything was looked at
    FULL = 1  # the send buffer is full: send it and go on
    WINDOW = 2  # flow control: wait for an acknowledgement
    PAST = 3  # the next record is beyond ``upto``
    SPECIAL = 4  # the record at ``next_offset`` is for the caller


class SendBuffer:
    """Frames that wait to be sent; the memory is then used again.

    ``append`` puts control frames between the bulk ones. A blocking sender uses ``view()`` and ``clear()``; a
    transport that keeps what it is given (asyncio from 3.12 on, uvloop) must get ``take()`` instead.
    """

    def __init__(self, size: int = 1 << 20) -> None:
        self._size = size
        self._pool: deque[npt.NDArray[np.uint8]] = deque(maxlen=4)
        self.used = 0
        self._adopt(lend(self._pool, size + SLACK))

    def _adopt(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        self.room = len(memory) - SLACK  # bytes that it holds in all
        self.address = address_of(memory)

    def reserve(self, size: int) -> None:
        """Make room for ``size`` more bytes."""
        if self.used + size > self.room:
            larger = np.empty(max(self.used + size, 2 * self.room) + SLACK, np.uint8)
            larger[: self.used] = self._memory[: self.used]
            self._adopt(larger)

    def append(self, data: bytes | bytearray | memoryview) -> None:
        self.reserve(len(data))
        self._memory[self.used : self.used + len(data)] = np.frombuffer(data, np.uint8)
        self.used += len(data)

    def view(self) -> memoryview:
        """What is to be sent."""
        return self._memory.data[: self.used]

    def clear(self) -> None:
        """What ``view()`` showed has been sent."""
        self.used = 0

    def take(self) -> memoryview:
        """What is to be sent, for the caller to keep: its memory is reused when the last reference to it is gone."""
        taken = self.view()
        self._adopt(lend(self._pool, self._size + SLACK))
        self.used = 0
        return taken


@dataclass(frozen=True, slots=True)
class FrameOptions:
    """What one stream asked for, and the same as the kernels' parameters."""

    opaque: int = 0
    vbucket: int = 0
    stream_id: int = 0  # 0: none
    collections: bool = True  # False: only the default collection, keys without prefix
    collection_ids: Iterable[int] | None = None  # None: all of them
    delete_times: bool = False
    expiry_opcode: bool = False
    upr: bool = False
    no_value: bool = False
    keep_datatype: bool = False  # with no_value: the datatype of the value that is left out
    skip_deletes: bool = False
    hifi_mfu: bool = False
    stop_datatypes: int = 0  # values with any of these bits are for the caller
    plain_commits: bool = False  # commits as the documents they made; prepares and aborts are skipped

    def bits(self) -> int:
        return (
            self.collections | self.delete_times << 1 | self.expiry_opcode << 2 | self.upr << 3 | self.no_value << 4
            | self.keep_datatype << 5 | self.skip_deletes << 6 | (self.collection_ids is not None) << 7
            | self.hifi_mfu << 8 | self.plain_commits << 9
        )  # fmt: skip

    def filter_ids(self) -> npt.NDArray[np.int64]:
        return _NO_IDS if self.collection_ids is None else np.array(sorted(self.collection_ids), np.int64)


_STOPS = tuple(Stop)
_NO_IDS = np.zeros(0, np.int64)


class Encoded(NamedTuple):
    """What an encoder did. A seqno is 0 if there was none; ``invisible`` is that of the last prepare or abort."""

    bytes_written: int
    records_sent: int
    next_offset: int
    last_seqno: int
    last_scanned_seqno: int
    stop: Stop
    invisible: int = 0


class PackedEncoder:
    """Encodes the packed records of one stream. Make one per stream: its options do not change."""

    __slots__ = ("_filter", "_plan", "_plan_at", "_state")

    def __init__(self, options: FrameOptions) -> None:
        if options.stream_id > 0xFFFF or options.vbucket > 0xFFFF:
            raise LocalProtocolError(f"stream-id {options.stream_id} or vbucket {options.vbucket} does not fit")
        self._filter = options.filter_ids()
        stream = options.bits(), options.opaque, options.vbucket, options.stream_id, options.stop_datatypes
        ids_at = address_of(self._filter) if len(self._filter) else 0
        self._plan = array(
            "q", (*stream, ids_at, len(self._filter), 0, 0, 0)
        )  # an array tells its address faster than NumPy does
        self._plan_at = self._plan.buffer_info()[0]
        self._state = np.zeros(7, np.int64)

    @property
    def plain_encoder(self) -> PackedEncoder:
        """The encoder for values that need no change: this one."""
        return self

    @property
    def address(self) -> int:
        """Where kernels find what the stream asked for."""
        return self._plan_at

    def encode(
        self, run: Buffer, out: SendBuffer, *, offset: int = 0, after: int = 0, upto: int = SEQNO_MAX,
        budget: int = _I64_MAX,
    ) -> Encoded:  # fmt: skip
        """Append frames to ``out`` for the records of ``run`` from ``offset`` on with a seqno in ``(after, upto]``.

        ``budget`` is what is left of the flow-control window; the frame that uses it up is still sent
        (docs/protocol/flow.md#window).
        """
        limits = min(after, _I64_MAX), min(upto, _I64_MAX), min(budget, _I64_MAX)
        self._plan[7], self._plan[8], self._plan[9] = limits
        source = np.frombuffer(run, np.uint8) if len(run) else np.empty(0, np.uint8)
        result = self._run(source, out, offset)
        if result.stop is Stop.FULL and out.used == 0:  # one document larger than the whole buffer
            out.reserve(2 * out.room)
            return self.encode(run, out, offset=result.next_offset, after=after, upto=upto, budget=budget)
        return result

    def _run(self, source: npt.NDArray[np.uint8], out: SendBuffer, offset: int) -> Encoded:
        from upriver.wire.kernels import encode as bulk_frames

        state, before = self._state, out.used
        state[:] = offset, before, 0, 0, 0, 0, 0
        bulk_frames.encode_packed(address_of(source), len(source), out.address, out.room, self._plan_at, state)
        at, out.used, records, last, scanned, reason, invisible = state.tolist()
        if reason == bulk_frames.CORRUPT:
            raise CorruptStore(f"the packed record at byte {at} of a run of {len(source)} does not add up")
        return Encoded(out.used - before, records, at, last, scanned, _STOPS[reason], invisible)


@dataclass(frozen=True, slots=True)
class PackedRun:
    """Rows as packed records: one run, and where in it each record starts."""

    data: memoryview
    starts: npt.NDArray[np.int64]


def pack_columns(columns: Columns, rows: npt.NDArray[np.int64] | None = None) -> PackedRun:
    """The rows (all, or those named, in that order) as packed records with prefixed keys and no ``prev_seqno``."""
    from upriver.wire.kernels import encode as bulk_frames

    if rows is None:
        rows = np.arange(columns.rows, dtype=np.int64)
    rows = np.ascontiguousarray(rows, np.int64)
    memory = np.empty(_packed_bound(columns, rows) + SLACK, np.uint8)
    starts = np.empty(len(rows), np.int64)
    state = np.zeros(6, np.int64)
    bulk_frames.pack_columns(
        address_of(rows), len(rows), address_of(memory), len(memory) - SLACK, columns.address, address_of(starts), state
    )
    return PackedRun(memory.data[: int(state[1])], starts)


class RowPacker:
    """``pack_columns`` for rows that come one at a time, always into the same memory."""

    def __init__(self, room: int = 16 * 1024) -> None:
        self._row, self._start, self._state = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(6, np.int64)
        self._memory = np.empty(room + SLACK, np.uint8)
        self._room = room
        self._addresses = address_of(self._row), address_of(self._memory), address_of(self._start)

    def pack(self, columns: Columns, row: int) -> memoryview | None:
        """The row's record, valid until the next call; None if it is too large for the memory."""
        from upriver.wire.kernels import encode as bulk_frames

        state = self._state
        self._row[0], state[1] = row, 0
        at_row, at_memory, at_start = self._addresses
        bulk_frames.pack_columns(at_row, 1, at_memory, self._room, columns.address, at_start, state)
        return self._memory.data[: int(state[1])] if state[2] else None


def _packed_bound(columns: Columns, rows: npt.NDArray[np.int64]) -> int:
    keys, values = columns["key_at"], columns["value_at"]
    data = int((keys[rows + 1] - keys[rows]).sum()) + int((values[rows + 1] - values[rows]).sum())
    return data + len(rows) * (64 + 5)


def rows_by_vbucket(
    columns: Columns, first: int = 0, last: int | None = None
) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Rows ``first`` to ``last`` by vbucket, each in order of arrival: what ``pack_columns`` takes."""
    vbuckets = columns["vbucket"][first:last]
    order = np.argsort(vbuckets, kind="stable")
    found, starts = np.unique(vbuckets[order], return_index=True)
    groups = np.split(order + first, starts[1:])
    return [(int(vbucket), rows) for vbucket, rows in zip(found, groups, strict=True)]
