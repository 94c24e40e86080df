"""The Castagnoli checksum of a value, as ``$document`` shows it and ``${Mutation.value_crc32c}`` writes it."""

from __future__ import annotations

import numpy as np
from numba import njit


def _make_table() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    table = np.zeros(256, np.uint32)
    for number in range(256):
        crc = number
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table[number] = crc
    return table


_TABLE = _make_table()


@njit(cache=True, nogil=True)
def _checksum(data, table):  # type: ignore[no-untyped-def]
    crc = np.uint32(0xFFFFFFFF)
    for byte in data:
        crc = table[(crc ^ byte) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return crc ^ np.uint32(0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The checksum of any bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return int(_checksum(np.frombuffer(data, np.uint8), _TABLE))
