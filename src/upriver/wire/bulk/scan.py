"""Scans frames that a relay forwards, without decoding them.

The scan finds the few frames that the relay must look at and the last seqno of each vbucket; all other bytes pass
untouched.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from upriver.errors import FramingError
from upriver.wire.framing import HEADER_SIZE, MAX_FRAME, frame_size

VBUCKETS = 65536


class ScanStop(IntEnum):
    """Why a scan stopped."""

    NOTHING = 0  # only an incomplete frame is left
    FRAME = 1  # a frame of interest starts at the offset
    BROKEN = 2


class FrameScanner:
    """Scans one direction of a connection; ``seqnos[vb]`` is the last seqno seen for a vbucket."""

    def __init__(self, own_opaques_from: int) -> None:
        self.seqnos: npt.NDArray[np.int64] = np.zeros(VBUCKETS, np.int64)
        self._own = own_opaques_from
        self._state = np.zeros(2, np.int64)

    def scan(self, data: bytes, at: int) -> tuple[int, ScanStop]:
        """Scan from ``at`` to the next frame of interest; returns where it starts, or where the complete frames end."""
        from upriver.wire.kernels import scan as scan_kernel

        view = np.frombuffer(data, np.uint8)
        self._state[0] = at
        scan_kernel.scan(view.__array_interface__["data"][0], len(view), MAX_FRAME, self._own, self.seqnos, self._state)
        stopped, reason = self._state.tolist()
        return stopped, ScanStop(reason)


class SpanSplitter:
    """Cuts a byte stream at frames of interest; all bytes between two of them form one span."""

    def __init__(self, scanner: FrameScanner) -> None:
        self.scanner = scanner
        self._rest = b""

    def receive(self, data: bytes) -> list[tuple[bool, memoryview]]:
        """Spans as ``(of interest, bytes)``, in order; a frame of interest is a span of its own."""
        buffer = self._rest + data if self._rest else data
        view, at, found = memoryview(buffer), 0, []
        while True:
            stop, reason = self.scanner.scan(buffer, at)
            if stop > at:
                found.append((False, view[at:stop]))
            if reason is not ScanStop.FRAME:
                break
            size = frame_size(buffer, stop)
            found.append((True, view[stop : stop + size]))
            at = stop + size
        self._rest = bytes(view[stop:])
        if reason is ScanStop.BROKEN:
            frame_size(buffer, stop)
            raise FramingError("the frame cannot be forwarded", "magic", 0)
        if len(self._rest) >= HEADER_SIZE:
            frame_size(self._rest)
        return found
