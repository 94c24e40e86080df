"""Memory that all producers of one thread share."""

from __future__ import annotations

from upriver.wire.bulk.encode import SendBuffer
from upriver.wire.bulk.shape import ScratchMemory

SEND_BYTES = 256 * 1024  # of one send, unless a single document is larger
_MOST_FREE = 8


class ProducerMemory:
    """Send buffers that are free, and the scratch memory of the encoders.

    A producer holds a buffer only from when it is filled until all of it has been sent.
    """

    def __init__(self) -> None:
        self._free: list[SendBuffer] = []
        self._scratch: ScratchMemory | None = None

    def take(self) -> SendBuffer:
        return self._free.pop() if self._free else SendBuffer(SEND_BYTES)

    def give_back(self, buffer: SendBuffer) -> None:
        """One that grew for a large document is freed."""
        if buffer.room <= SEND_BYTES and len(self._free) < _MOST_FREE:
            buffer.clear()
            self._free.append(buffer)

    def scratch(self) -> ScratchMemory:
        """Made when the first stream needs it: to most nodes none ever comes."""
        if self._scratch is None:
            self._scratch = ScratchMemory()
        return self._scratch
