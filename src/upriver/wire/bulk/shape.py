"""Encodes records in bulk for streams whose values must change: stripped, inflated or compressed.

``ShapingEncoder`` is used like ``PackedEncoder`` and contains two of them. One encodes records whose values need no
change. From the first record that needs one, a kernel copies part of the run with changed values, and the other
encodes that copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from upriver.errors import CorruptStore
from upriver.model import SEQNO_MAX
from upriver.wire.bulk.decode import SLACK, address_of
from upriver.wire.bulk.encode import Buffer, Encoded, FrameOptions, PackedEncoder, SendBuffer, Stop
from upriver.wire.packed import AT_KIND, AT_PREV, RecordKind

_I64_MAX = 2**63 - 1
_STRETCH = 64 * 1024  # bytes changed at once: about what a stream sends in one turn
_USUAL = 2 * _STRETCH
_DOCUMENTS = frozenset({RecordKind.MUTATION, RecordKind.DELETION, RecordKind.EXPIRATION, RecordKind.COMMIT})


@dataclass(frozen=True, slots=True)
class ValueShape:
    """How a stream wants its values (docs/protocol/open.md#values)."""

    stop_datatypes: int = 0  # values with any of these bits may need a change
    xattrs: bool = False
    deleted_user_xattrs: bool = False
    no_body: bool = False
    force_compression: bool = False
    keep_datatype: bool = False
    snappy: bool = False  # the reader can inflate snappy

    def bits(self) -> int:
        switches = (
            self.xattrs, self.deleted_user_xattrs, self.no_body, self.force_compression, self.keep_datatype,
            self.snappy,
        )  # fmt: skip
        return sum(1 << n for n, on in enumerate(switches) if on)


class ScratchMemory:
    """Memory in which values are changed. A thread's encoders share one: nothing stays in it between calls."""

    def __init__(self) -> None:
        from upriver.wire.kernels.snappy import TABLE_BYTES

        self.table = np.zeros(TABLE_BYTES // 8, np.int64)
        self.work = np.zeros(4, np.int64)
        self.state = np.zeros(6, np.int64)
        self.out: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.scratch: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.fit(_USUAL)

    def fit(self, size: int) -> None:
        """Make room for ``size`` bytes; memory that only a large document needed is released."""
        if len(self.out) != size + SLACK:
            self.out, self.scratch = np.empty(size + SLACK, np.uint8), np.empty(size + SLACK, np.uint8)


@dataclass(slots=True)
class _Progress:
    """The sum of several encodings of one run."""

    records: int = 0
    last: int = 0
    scanned: int = 0
    invisible: int = 0

    def add(self, done: Encoded) -> None:
        self.records += done.records_sent
        self.invisible = done.invisible or self.invisible
        self.last = done.last_seqno or self.last
        self.scanned = done.last_scanned_seqno or self.scanned


class ShapingEncoder:
    """Takes the place of a ``PackedEncoder``; like its scratch memory, it belongs to one thread.

    The encoder for changed values is made when the first one comes: most streams never have one.
    """

    __slots__ = ("_filter", "_options", "_plan", "_scratch", "_shape", "_shaped", "_wanted", "plain_encoder")

    def __init__(self, options: FrameOptions, shape: ValueShape, scratch: ScratchMemory) -> None:
        self.plain_encoder = PackedEncoder(options)  # stops at values that need a change, but never compresses
        self._options, self._shape, self._scratch = options, shape, scratch
        self._shaped: PackedEncoder | None = None
        self._plan: npt.NDArray[np.int64] | None = None

    def encode(
        self, run: Buffer, out: SendBuffer, *, offset: int = 0, after: int = 0, upto: int = SEQNO_MAX,
        budget: int = _I64_MAX,
    ) -> Encoded:  # fmt: skip
        """Like ``PackedEncoder.encode``, but ``SPECIAL`` means a broken document or a record of another kind."""
        source = np.frombuffer(run, np.uint8) if len(run) else np.empty(0, np.uint8)
        begin, total, stop = out.used, _Progress(), Stop.SPECIAL
        while stop is Stop.SPECIAL:
            if not self._shape.force_compression:
                done = self.plain_encoder.encode(
                    source, out, offset=offset, after=after, upto=upto, budget=budget - (out.used - begin)
                )
                total.add(done)
                offset, stop = done.next_offset, done.stop
                if stop is not Stop.SPECIAL or not self._is_document(source, offset):
                    break
            at, stop = self._stretch(source, out, offset, (after, upto, budget - (out.used - begin)), total)
            if at == offset:
                break
            offset = at
        return Encoded(out.used - begin, total.records, offset, total.last, total.scanned, stop, total.invisible)

    @staticmethod
    def _is_document(source: npt.NDArray[np.uint8], offset: int) -> bool:
        return int(source[offset + AT_KIND]) in _DOCUMENTS

    def _stretch(
        self, source: npt.NDArray[np.uint8], out: SendBuffer, offset: int, bounds: tuple[int, int, int],
        total: _Progress,
    ) -> tuple[int, Stop]:  # fmt: skip
        """Change and encode part of the run; returns where to continue, with ``SPECIAL`` if there may be more."""
        from upriver.wire.kernels import shape as k

        shaped, plan = self._prepared()
        after, upto, budget = bounds
        limit = max(1, min(_STRETCH, out.room - out.used, budget))
        plan[k.AFTER : k.LIMIT + 1] = min(after, _I64_MAX), min(upto, _I64_MAX), limit
        next_offset, written, scanned, reason, invisible = self._run(source, offset, plan)
        stretch = self._scratch.out[:written]
        done = shaped.encode(stretch, out, budget=budget)
        total.add(done)
        if done.next_offset < written:  # the buffer or the window is full, or the caller must encode the record
            at = done.next_offset + AT_PREV
            return int(stretch[at : at + 8].view(np.int64)[0]), done.stop
        total.scanned = scanned or total.scanned
        total.invisible = invisible or total.invisible
        if reason in (k.ENOUGH, k.SPECIAL):
            return next_offset, Stop.SPECIAL
        return next_offset, Stop.PAST if reason == k.PAST else Stop.END

    def _prepared(self) -> tuple[PackedEncoder, npt.NDArray[np.int64]]:
        if self._shaped is None or self._plan is None:
            options = replace(self._options, no_value=False, keep_datatype=False, stop_datatypes=0)
            self._shaped, self._filter = PackedEncoder(options), options.filter_ids()
            ids = address_of(self._filter), len(self._filter)
            self._wanted = np.array([options.bits(), 0, 0, 0, 0, *ids], np.int64)  # what ``is_wanted`` reads
            wanted = address_of(self._wanted)
            self._plan = np.array([self._shape.bits(), self._shape.stop_datatypes, 0, 0, 0, 0, 0, 0, wanted], np.int64)
        return self._shaped, self._plan

    def _run(
        self, source: npt.NDArray[np.uint8], offset: int, plan: npt.NDArray[np.int64], size: int = _USUAL
    ) -> tuple[int, int, int, int, int]:
        from upriver.wire.kernels import shape as k

        memory = self._scratch
        memory.fit(size)
        plan[k.TABLE : k.SCRATCH_SIZE + 1] = address_of(memory.table), address_of(memory.scratch), len(memory.scratch)
        memory.state[:] = offset, 0, 0, 0, 0, 0
        target = address_of(memory.out), len(memory.out)
        k.shape_run(address_of(source), len(source), *target, address_of(plan), memory.work, memory.state)
        at, written, scanned, reason, needed, invisible = memory.state.tolist()
        if reason == k.CORRUPT:
            raise CorruptStore(f"the packed record at byte {at} of a run of {len(source)} bytes has wrong lengths")
        if reason == k.TOO_SMALL:
            return self._run(source, offset, plan, max(needed, 2 * size))
        return at, written, scanned, reason, invisible
