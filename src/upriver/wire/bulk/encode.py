"""Encodes packed records into frames, in a reusable send buffer, and columns into packed records, in bulk.

``PackedEncoder`` filters and encodes a run of records by the options of a stream. It stops, and says why, when the
buffer or the window is full, and at records that it cannot encode: system events, prepares, and values that must be
inflated or stripped. The caller encodes such a record as an object and continues behind it.
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
    """Why an encoder returned; the numbers are the kernels'."""

    END = 0  # the run is finished
    FULL = 1  # the send buffer is full: send it and continue
    WINDOW = 2  # the flow control window is full: wait for an acknowledgement
    PAST = 3  # the next record is beyond ``upto``
    SPECIAL = 4  # the caller must encode the record at ``next_offset``


class SendBuffer:
    """Frames to be sent, in memory that is reused afterwards.

    ``append`` adds control frames between the bulk-encoded ones. A blocking sender uses ``view()`` and ``clear()``; a
    transport that keeps references to its input (asyncio from 3.12 on, uvloop) must get ``take()`` instead.
    """

    def __init__(self, size: int = 1 << 20) -> None:
        self._size = size
        self._pool: deque[npt.NDArray[np.uint8]] = deque(maxlen=4)
        self.used = 0
        self._adopt(lend(self._pool, size + SLACK))

    def _adopt(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        self.room = len(memory) - SLACK  # its capacity in bytes
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
        """The bytes to send."""
        return self._memory.data[: self.used]

    def clear(self) -> None:
        """Forget the bytes of ``view()``: they have been sent."""
        self.used = 0

    def take(self) -> memoryview:
        """The bytes to send, for the caller to keep; their memory is reused when the last reference is gone."""
        taken = self.view()
        self._adopt(lend(self._pool, self._size + SLACK))
        self.used = 0
        return taken


@dataclass(frozen=True, slots=True)
class FrameOptions:
    """What a stream asked for; ``bits`` and ``filter_ids`` give it to the kernels."""

    opaque: int = 0
    vbucket: int = 0
    stream_id: int = 0  # 0: none
    collections: bool = True  # False: only the default collection, keys without prefix
    collection_ids: Iterable[int] | None = None  # None: all of them
    delete_times: bool = False
    expiry_opcode: bool = False
    upr: bool = False
    no_value: bool = False
    keep_datatype: bool = False  # with no_value: send the datatype of the omitted value
    skip_deletes: bool = False
    hifi_mfu: bool = False
    stop_datatypes: int = 0  # the caller encodes values with any of these bits
    plain_commits: bool = False  # send a commit as the document it made; skip prepares and aborts

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
    """What an encoder did. ``invisible`` is the seqno of the last prepare or abort. A seqno is 0 if there was none."""

    bytes_written: int
    records_sent: int
    next_offset: int
    last_seqno: int
    last_scanned_seqno: int
    stop: Stop
    invisible: int = 0


class PackedEncoder:
    """Encodes the packed records of one stream, whose options do not change."""

    __slots__ = ("_filter", "_plan", "_plan_at", "_state")

    def __init__(self, options: FrameOptions) -> None:
        if options.stream_id > 0xFFFF or options.vbucket > 0xFFFF:
            raise LocalProtocolError(f"stream-id {options.stream_id} or vbucket {options.vbucket} does not fit")
        self._filter = options.filter_ids()
        stream = options.bits(), options.opaque, options.vbucket, options.stream_id, options.stop_datatypes
        ids_at = address_of(self._filter) if len(self._filter) else 0
        # ``array`` gives its address faster than NumPy does.
        self._plan = array("q", (*stream, ids_at, len(self._filter), 0, 0, 0))
        self._plan_at = self._plan.buffer_info()[0]
        self._state = np.zeros(7, np.int64)

    @property
    def plain_encoder(self) -> PackedEncoder:
        """The encoder for values that need no change: this one."""
        return self

    @property
    def address(self) -> int:
        """The address of the stream's options, for kernels."""
        return self._plan_at

    def encode(
        self, run: Buffer, out: SendBuffer, *, offset: int = 0, after: int = 0, upto: int = SEQNO_MAX,
        budget: int = _I64_MAX,
    ) -> Encoded:  # fmt: skip
        """Append frames to ``out`` for the records of ``run`` from ``offset`` on with a seqno in ``(after, upto]``.

        ``budget`` is the rest of the flow control window; the frame that uses it up is still sent
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
            raise CorruptStore(f"the packed record at byte {at} of a run of {len(source)} bytes has wrong lengths")
        return Encoded(out.used - before, records, at, last, scanned, _STOPS[reason], invisible)


@dataclass(frozen=True, slots=True)
class PackedRun:
    """Rows as one run of packed records, and where each record starts in it."""

    data: memoryview
    starts: npt.NDArray[np.int64]


def pack_columns(columns: Columns, rows: npt.NDArray[np.int64] | None = None) -> PackedRun:
    """Pack all rows, or the given ones in their order, as records with prefixed keys and no ``prev_seqno``."""
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
    """Packs single rows, always into the same memory; for several rows use ``pack_columns``."""

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
    """Rows ``first`` to ``last`` grouped by vbucket, each group in order of arrival, as ``pack_columns`` takes them."""
    vbuckets = columns["vbucket"][first:last]
    order = np.argsort(vbuckets, kind="stable")
    found, starts = np.unique(vbuckets[order], return_index=True)
    groups = np.split(order + first, starts[1:])
    return [(int(vbucket), rows) for vbucket, rows in zip(found, groups, strict=True)]
