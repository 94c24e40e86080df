"""Decodes frames into columns in bulk: document messages become rows, all other frames are passed on in order.

``BulkDecoder`` is the columnar counterpart of ``framing.FrameSplitter``: the same stream, the same errors, no object
per mutation. Importing this module imports numpy; the first decode imports numba and loads the kernels, or compiles
them, once per machine. Set ``NUMBA_CACHE_DIR`` to choose where compiled kernels are kept; by default that is beside
the package, or in the user's cache directory if the package is read-only.
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
    """The address of an array's bytes; the caller keeps the array alive."""
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
    "key_at": np.int32,  # row n's key is key[key_at[n]:key_at[n + 1]]; values work the same way
    "value_at": np.int32,
    "key": np.uint8,
    "value": np.uint8,
    "snapshot_start": np.int64,  # from here on: the stream's state when the row came, see ``StreamTable``
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
        """Elements of a column: one more than the rows, because offsets also have an end."""
        if name in _DATA:
            return (self.key_bytes if name == "key" else self.value_bytes) + SLACK
        return self.rows + 1


DEFAULT_SIZES = ColumnSizes()


class Lease:
    """A block of memory on loan from a pool, returned when nothing refers to the lease any more.

    ``np.asarray(lease)`` is the memory; every view and Arrow buffer of it keeps the lease alive.
    """

    def __init__(self, arena: Array, pool: deque[Array] | None) -> None:
        self.__array_interface__ = arena.__array_interface__
        self._arena = arena
        if pool is not None:
            weakref.finalize(self, pool.append, arena).atexit = False


class Columns:
    """Rows of document messages, column by column, in one block of memory.

    ``columns["seqno"]`` is a NumPy view without a copy. ``key_at``/``key`` and ``value_at``/``value`` are offsets and
    bytes as Arrow lays them out. Views, and Arrow batches made from them, hold on to the memory: it is reused only
    after the last of them is gone. The exception is the decoder's current set, which ``clear()`` overwrites.
    """

    def __init__(self, sizes: ColumnSizes = DEFAULT_SIZES, pool: deque[Array] | None = None) -> None:
        if sizes.rows < 1 or sizes.key_bytes < MAX_WIRE_KEY or not 0 < sizes.value_bytes < 2**31 - SLACK:
            raise ValueError(f"{sizes}: needs room for one row and one key, and value_bytes below 2 GiB")
        self.sizes = sizes
        self.rows = 0
        self.dropped = 0  # of ``rows``, how many have event 0 and do not count
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
        """Zero the columns that the kernel writes only where they are not 0; call before it starts at row 0."""
        for name in _MOSTLY_ZERO:
            self.view(name)[:rows] = 0

    def view(self, name: str) -> Array:
        """A whole column, including the part beyond ``rows``."""
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
        """The value of a row, as received."""
        return self._bytes("value", row)

    def _bytes(self, name: str, row: int) -> bytes:
        at = self.view(name + "_at")
        return self.view(name)[at[row] : at[row + 1]].tobytes()


def _offsets(sizes: ColumnSizes) -> tuple[dict[str, int], int]:
    """Where each column starts in the memory block, aligned to cache lines, and the size of the block."""
    offsets, at = {}, 0
    for name, dtype in LAYOUT.items():
        offsets[name] = at
        at += -(-sizes.count(name) * np.dtype(dtype).itemsize // 64) * 64
    return offsets, at


def lend(pool: deque[Array] | None, size: int) -> Array:
    """Memory of ``size`` bytes, from the pool if it has a block; all blocks of a pool have the same size."""
    try:
        arena = pool.pop() if pool else np.empty(size, np.uint8)
    except IndexError:  # another thread took the last block
        arena = np.empty(size, np.uint8)
    return np.asarray(Lease(arena, pool))


_INCOMPLETE, _FULL, _CONTROLS_FULL, _BROKEN = range(4)  # why the kernel stopped


@cache
def _kernel() -> Callable[..., object]:
    from upriver.wire.kernels.decode import decode  # loads numba, which takes a second

    return decode


@lru_cache(256)
def _rules(context: Context, limit: int, sizes: ColumnSizes) -> tuple[Array, int]:
    """What the kernel must know about a connection (the slots ``COLLECTIONS`` to ``MAX_VALUES``), and its address."""
    checked = int(Datatype.SNAPPY | Datatype.XATTR) if context.check_values else 0  # the object reader inflates

    def bits(datatypes: Iterable[int]) -> int:
        return sum(1 << n for n in datatypes if not n & ~context.datatypes and not n & checked)

    tombstones = bits(DELETION_DATATYPES)
    v1_deletions = tombstones if context.dialect is Dialect.DCP else 1
    agreed = int(context.collections), limit, bits(ANY_DATATYPE), tombstones, v1_deletions
    table = np.array(agreed + sizes, np.int64)
    return table, address_of(table)


class ControlFrame(NamedTuple):
    """A frame for the object reader, which arrived before row ``row``. Its bytes are valid until the next part."""

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
    """Decodes a byte stream, in pieces of any size, into columns and control frames.

    Iterate ``feed(data)``, or read a socket straight into ``buffer()`` and iterate ``received(n)``; exhaust the
    iterator before the next call. Rows accumulate in ``columns`` over many calls until ``take()`` hands them over
    with their memory, or ``clear()`` discards them. ``context`` says what the connection agreed on; assign it when
    that changes. After a ``FramingError`` every call raises it again, as in the splitter.
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
        self._state = np.zeros(8, np.int64)  # the kernel's state; its slots are in ``kernels.decode``
        self._controls = np.empty((1024, 3), np.int64)
        self._controls_address = address_of(self._controls)
        self._receive_bytes = receive_bytes
        self._error: FramingError | None = None
        self._agreed, self._limited, self._sized = context, limit, sizes  # what ``_rules`` was made for
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
        """The rows so far, which now belong to the caller; the decoder continues with other memory."""
        taken = self.columns
        self._use(Columns(self.sizes, self._pool))
        return taken

    def clear(self) -> None:
        """Discard the rows so far; the next rows overwrite their memory."""
        if self.columns.sizes != self.sizes:  # made for one large document
            self._use(Columns(self.sizes, self._pool))
            return
        if self._state[4]:
            self.columns.zero(self.columns.rows)
        self.columns.rows = self.columns.dropped = 0
        self._state[1:5] = 0

    def buffer(self) -> memoryview:
        """Where to read the next bytes from the socket; never empty. Report their number with ``received``."""
        self._reserve(self._missing())
        return self._buffer.data[self._end : -SLACK]

    def received(self, size: int) -> Iterator[Decoded]:
        """``size`` bytes were written into ``buffer()``."""
        self._end += size
        return self._drain()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Decoded]:
        """Decode the next bytes of the stream in place; only a partial frame is copied."""
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
        """The peer closed the connection; leftover bytes are an unfinished frame, which is an error."""
        if self.pending:
            raise FramingError(f"connection ended inside a frame, {self.pending} bytes in", "body", self.pending)

    def _missing(self) -> int:
        """Bytes until the pending frame is complete, or until its header is."""
        if self.pending < HEADER_SIZE:
            return HEADER_SIZE - self.pending
        return max(1, frame_size(self._buffer.data, self._begin, MAX_FRAME) - self.pending)

    def _reserve(self, size: int) -> None:
        """Make room for ``size`` bytes after the pending ones, which move to the front; a grown buffer shrinks."""
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
        """Decode what is in the buffer."""
        view = self._buffer.data
        self._state[0] = self._begin
        for part in self._parts(view, self._address, self._end, self._address + len(view)):
            self._begin = int(self._state[0])
            yield part
        self._begin = int(self._state[0])

    def _in_place(self, source: memoryview, at: int) -> Iterator[Decoded]:
        """Decode from the caller's bytes; a partial frame is copied into the buffer."""
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
        """Continue after full columns: the caller has emptied them, or one document is larger than they are."""
        if self.columns.rows:
            raise LocalProtocolError("the columns are full: call take() or clear() before the next step")
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
