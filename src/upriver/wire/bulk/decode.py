"""Frames to columns in bulk: document messages become rows, all other frames are handed over in order.

``BulkDecoder`` is the columnar twin of ``framing.FrameSplitter``: the same stream, the same errors, no object per
mutation. Importing this module imports numpy; the first decode imports numba and loads (or compiles, once per
machine) the kernels. Set ``NUMBA_CACHE_DIR`` to choose where compiled kernels are kept; without it they lie beside
the package, or in the user's cache directory when that is read-only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from upriver.errors import FramingError, LocalProtocolError
from upriver.model import Datatype
from upriver.wire.checks import DEFAULT_CONTEXT, Context
from upriver.wire.constants import Dialect
from upriver.wire.framing import HEADER_SIZE, MAX_FRAME, frame_size
from upriver.wire.keys import MAX_WIRE_KEY
from upriver.wire.layout import ANY_DATATYPE
from upriver.wire.messages.dcp import DELETION_DATATYPES

Array = npt.NDArray[Any]


def address_of(array: Array) -> int:
    """Where an array's bytes are; the caller keeps the array alive."""
    return int(array.__array_interface__["data"][0])


SLACK = 128  # how far kernels may write past the end of a data area

# The columns of a row, in the order of the kernels' address table; ``event`` is the opcode, 0x57 to 0x59.
LAYOUT: Mapping[str, type[np.generic]] = {
    "event": np.uint8,
    "vbucket": np.uint16,
    "collection_id": np.uint32,
    "datatype": np.uint8,
    "seqno": np.uint64,
    "rev_seqno": np.uint64,
    "cas": np.uint64,
    "flags": np.uint32,
    "expiry": np.uint32,
    "delete_time": np.uint32,
    "lock_time": np.uint32,
    "stream_id": np.uint16,  # 0: the stream has none
    "opaque": np.uint32,
    "nru": np.uint8,
    "key_at": np.int32,  # row n's key is key[key_at[n]:key_at[n + 1]]; so for values
    "value_at": np.int32,
    "key": np.uint8,
    "value": np.uint8,
    "snapshot_start": np.int64,  # from here on: what the stream knew when the row came, see ``StreamTable``
    "snapshot_end": np.int64,
    "vbuuid": np.int64,
    "epoch": np.int32,
}
_DATA = ("key", "value")
_MOSTLY_ZERO = ("collection_id", "expiry", "delete_time", "lock_time", "stream_id", "nru")  # written only if not 0


class ColumnSizes(NamedTuple):
    """How much fits into one ``Columns``."""

    rows: int = 32_768
    key_bytes: int = 32_768 * 48
    value_bytes: int = 16 * 1024 * 1024

    def count(self, name: str) -> int:
        """Elements of a column: one row more than fit, because offsets have an end."""
        if name in _DATA:
            return (self.key_bytes if name == "key" else self.value_bytes) + SLACK
        return self.rows + 1


DEFAULT_SIZES = ColumnSizes()


class Lease:
    """A loan of a block of memory, which goes back to the pool when nothing refers to it any more.

    ``np.asarray(lease)`` is the memory; every view and Arrow buffer of it refers to the lease.
    """

    def __init__(self, arena: Array, pool: deque[Array] | None) -> None:
        self.__array_interface__ = arena.__array_interface__
        self._arena = arena
        if pool is not None:
            weakref.finalize(self, pool.append, arena).atexit = False


class Columns:
    """Rows of document messages, column by column, in one block of memory.

    ``columns["seqno"]`` is a NumPy view without a copy. ``key_at``/``key`` and ``value_at``/``value`` are offsets and
    bytes as Arrow lays them out. Views, and Arrow batches made from them, keep the memory to themselves: it is
    reused only after the last of them is gone, unless it is the decoder's current set, which ``clear()`` rewinds.
    """

    def __init__(self, sizes: ColumnSizes = DEFAULT_SIZES, pool: deque[Array] | None = None) -> None:
        if sizes.rows < 1 or sizes.key_bytes < MAX_WIRE_KEY or not 0 < sizes.value_bytes < 2**31 - SLACK:
            raise ValueError(f"{sizes}: at least one row and one key, and values that 32-bit offsets reach")
        self.sizes = sizes
        self.rows = 0
        self.dropped = 0  # of those, how many have event 0 and do not count
        offsets, size = _offsets(sizes)
        self._memory = lend(pool, size)
        self._offsets = offsets
        address = address_of(self._memory)
        ends = [address + offsets[name] + sizes.count(name) for name in _DATA]
        self.table = np.array([address + at for at in offsets.values()] + ends, np.int64)
        self.address = address_of(self.table)  # what kernels take
        self.view("key_at")[0] = self.view("value_at")[0] = 0
        self.zero(sizes.rows)

    def zero(self, rows: int) -> None:
        """Zero the columns that the kernel writes only where they are not 0; before it starts at row 0."""
        for name in _MOSTLY_ZERO:
            self.view(name)[:rows] = 0

    def view(self, name: str) -> Array:
        """A whole column, also beyond ``rows``."""
        dtype = LAYOUT[name]
        return np.ndarray(self.sizes.count(name), dtype, self._memory, self._offsets[name])

    def __getitem__(self, name: str) -> Array:
        if name in _DATA:
            return self.view(name)[: int(self.view(name + "_at")[self.rows])]
        return self.view(name)[: self.rows + name.endswith("_at")]

    def __len__(self) -> int:
        return self.rows

    def key(self, row: int) -> bytes:
        """The key of a row, without its collection prefix."""
        return self._bytes("key", row)

    def value(self, row: int) -> bytes:
        """The value of a row, as it came."""
        return self._bytes("value", row)

    def _bytes(self, name: str, row: int) -> bytes:
        at = self.view(name + "_at")
        return self.view(name)[at[row] : at[row + 1]].tobytes()


def _offsets(sizes: ColumnSizes) -> tuple[dict[str, int], int]:
    """Where each column starts in the arena, on cache lines, and the arena's size."""
    offsets, at = {}, 0
    for name, dtype in LAYOUT.items():
        offsets[name] = at
        at += -(-sizes.count(name) * np.dtype(dtype).itemsize // 64) * 64
    return offsets, at


def lend(pool: deque[Array] | None, size: int) -> Array:
    """Memory of ``size`` bytes, from the pool if it has some; all of a pool's blocks have one size."""
    try:
        arena = pool.pop() if pool else np.empty(size, np.uint8)
    except IndexError:  # another thread was quicker
        arena = np.empty(size, np.uint8)
    return np.asarray(Lease(arena, pool))


_INCOMPLETE, _FULL, _CONTROLS_FULL, _BROKEN = range(4)  # why the kernel stopped


@cache
def _kernel() -> Callable[..., object]:
    from upriver.wire.kernels.decode import decode  # loads numba, which takes a second

    return decode


@lru_cache(256)
def _rules(context: Context, limit: int, sizes: ColumnSizes) -> tuple[Array, int]:
    """What the kernel must know of a connection (the numbers of ``kernels.COLLECTIONS`` and so on), and its address."""
    checked = int(Datatype.SNAPPY | Datatype.XATTR) if context.check_values else 0  # the object reader inflates

    def bits(datatypes: Iterable[int]) -> int:
        return sum(1 << n for n in datatypes if not n & ~context.datatypes and not n & checked)

    tombstones = bits(DELETION_DATATYPES)
    v1_deletions = tombstones if context.dialect is Dialect.DCP else 1
    agreed = int(context.collections), limit, bits(ANY_DATATYPE), tombstones, v1_deletions
    table = np.array(agreed + sizes, np.int64)
    return table, address_of(table)


class ControlFrame(NamedTuple):
    """A frame for the object reader; it arrived before row ``row``. The bytes are valid until the next part."""

    row: int
    frame: memoryview


@dataclass(slots=True)
class Decoded:
    """The result of one step: rows ``first`` to ``last`` (excluded) of ``columns``, and the control frames."""

    columns: Columns
    first: int
    last: int
    controls: list[ControlFrame]
    row_bytes: int  # wire size of the rows, for flow control; the caller counts control frames itself
    full: bool  # ``take()`` or ``clear()`` before the next step


class BulkDecoder:
    """Cuts a byte stream into columns and control frames, however it arrives.

    Iterate ``feed(data)``, or read a socket straight into ``buffer()`` and iterate ``received(n)``; to the end,
    before the next call. Rows pile up in ``columns`` over many calls until ``take()`` hands them over with their
    memory, or ``clear()`` forgets them. ``context`` says what the connection agreed on; assign it when that changes.
    After a ``FramingError`` the decoder is poisoned, like the splitter.
    """

    def __init__(
        self,
        context: Context = DEFAULT_CONTEXT,
        sizes: ColumnSizes = DEFAULT_SIZES,
        *,
        limit: int = MAX_FRAME,
        receive_bytes: int = 1 << 20,
    ) -> None:
        self.context = context
        self.limit = limit
        self.sizes = sizes
        self._pool: deque[Array] = deque(maxlen=4)
        self._state = np.zeros(8, np.int64)  # where the kernel stands, see ``kernels.AT``
        self._controls = np.empty((1024, 3), np.int64)
        self._controls_address = address_of(self._controls)
        self._receive_bytes = receive_bytes
        self._error: FramingError | None = None
        self._agreed, self._limited, self._sized = context, limit, sizes  # what ``_rules`` were made for
        self._rules = _rules(context, limit, sizes)
        self._allocate(receive_bytes)
        self._begin = self._end = 0
        self._use(Columns(sizes, self._pool))

    def _allocate(self, size: int) -> None:
        self._buffer = np.empty(size + SLACK, np.uint8)
        self._address = address_of(self._buffer)

    def _use(self, columns: Columns) -> None:
        self.columns = columns
        self._state[1:5] = 0

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return self._end - self._begin

    def take(self) -> Columns:
        """The rows so far, yours for as long as you like; the decoder goes on with other memory."""
        taken = self.columns
        self._use(Columns(self.sizes, self._pool))
        return taken

    def clear(self) -> None:
        """Forget the rows so far; their memory is written over by what comes next."""
        if self.columns.sizes != self.sizes:  # made for one large document
            self._use(Columns(self.sizes, self._pool))
            return
        if self._state[4]:
            self.columns.zero(self.columns.rows)
        self.columns.rows = self.columns.dropped = 0
        self._state[1:5] = 0

    def buffer(self) -> memoryview:
        """Where the next bytes from the socket go: never empty. Say how many with ``received``."""
        self._reserve(self._missing())
        return self._buffer.data[self._end : -SLACK]

    def received(self, size: int) -> Iterator[Decoded]:
        """``size`` bytes were written into ``buffer()``."""
        self._end += size
        return self._drain()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Decoded]:
        """The next bytes of the stream, decoded where they are; only a partial frame is copied."""
        source = memoryview(data).cast("B")
        at = 0
        while self.pending and at < len(source):
            step = min(self._missing(), len(source) - at)
            self._reserve(step)
            self._buffer[self._end : self._end + step] = source[at : at + step]
            self._end += step
            at += step
            yield from self._drain()
        if at < len(source):
            yield from self._in_place(source, at)

    def receive_eof(self) -> None:
        """The peer closed; anything left over was a frame that it did not finish."""
        if self.pending:
            raise FramingError(f"connection ended inside a frame, {self.pending} bytes in", "body", self.pending)

    def _missing(self) -> int:
        """Bytes until the pending frame is complete, or until its header is."""
        if self.pending < HEADER_SIZE:
            return HEADER_SIZE - self.pending
        return max(1, frame_size(self._buffer.data, self._begin, MAX_FRAME) - self.pending)

    def _reserve(self, size: int) -> None:
        """Room for ``size`` bytes behind the pending ones, which move to the front. What grew shrinks again."""
        room, pending = len(self._buffer) - SLACK, self.pending
        wanted = max(self._receive_bytes, pending + size)
        if not self._begin and wanted == room:
            return
        kept = self._buffer[self._begin : self._end].copy()
        if wanted > room or wanted == self._receive_bytes < room:
            self._allocate(wanted)
        self._buffer[:pending] = kept
        self._begin, self._end = 0, pending

    def _drain(self) -> Iterator[Decoded]:
        """Decode what lies in our own buffer."""
        view = self._buffer.data
        self._state[0] = self._begin
        for part in self._parts(view, self._address, self._end, self._address + len(view)):
            self._begin = int(self._state[0])
            yield part
        self._begin = int(self._state[0])

    def _in_place(self, source: memoryview, at: int) -> Iterator[Decoded]:
        """Decode from the caller's bytes and keep a partial frame."""
        address = address_of(np.frombuffer(source, np.uint8))
        self._state[0] = at
        yield from self._parts(source, address, len(source), address + len(source))
        rest = source[int(self._state[0]) :]
        self._begin = self._end = 0
        self._reserve(len(rest))
        self._buffer[: len(rest)] = rest
        self._end = len(rest)

    def _parts(self, source: memoryview, address: int, end: int, safe: int) -> Iterator[Decoded]:
        if self._error:
            raise self._error
        reason = _FULL
        while reason in (_FULL, _CONTROLS_FULL):
            part, reason = self._step(source, address, end, safe)
            if part.first != part.last or part.controls or (part.full and part.last):
                yield part
            if reason == _FULL:
                self._make_room(source)
        if reason == _BROKEN:
            self._break(source)

    def _step(self, source: memoryview, address: int, end: int, safe: int) -> tuple[Decoded, int]:
        columns, state = self.columns, self._state
        first = columns.rows
        if self._agreed is not self.context or self._limited != self.limit or self._sized is not columns.sizes:
            self._agreed, self._limited, self._sized = self.context, self.limit, columns.sizes
            self._rules = _rules(self.context, self.limit, columns.sizes)
        _kernel()(address, end, safe, self._rules[1], columns.address, self._controls_address, state)
        _, columns.rows, _, _, _, count, charged, reason = state.tolist()
        found = self._controls[:count].tolist() if count else ()
        controls = [ControlFrame(row, source[at : at + size]) for row, at, size in found]
        return Decoded(columns, first, columns.rows, controls, charged, reason == _FULL), reason

    def _make_room(self, source: memoryview) -> None:
        """After a full set: the caller emptied it, or the next document alone is larger than it."""
        if self.columns.rows:
            raise LocalProtocolError("the columns are full: take() or clear() them before going on")
        size = frame_size(source, int(self._state[0]))
        if size > self.columns.sizes.value_bytes:
            self._use(Columns(self.sizes._replace(value_bytes=size)))

    def _break(self, source: memoryview) -> None:
        try:
            frame_size(source, int(self._state[0]), self.limit)
        except FramingError as error:
            self._error = error
            raise
        raise AssertionError("the kernel refused a frame that the splitter accepts")
