"""The formats on disk. Each has a checksum over its content and its key, so that damage is noticed.

* A block of records: a head with its length, its checksum and a link, the seqno at which the block before it ends. So a
  missing block is noticed too. The vbucket's record has the last seqno of the newest block.
* A list of dead seqnos: a head, then the seqnos. The vbucket's record has their number.
* A key table: a bit in its first word says that its last word is a checksum. The vbucket's record lists the tables.
* A small record: a head, then JSON.

Older versions wrote no checksums. Content without one is accepted only in a store that an older version began.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from upriver.store.disk.kernels import checksum as c
from upriver.store.disk.kernels import nodes

Words = npt.NDArray[np.uint64]
Octets = npt.NDArray[np.uint8]

OLD_BLOCK = Struct("<IIQQQ")  # flags, records, first seqno, safe seqno, 0
BLOCK = Struct("<IIQQQQQ")  # the same, but the last is the checksum; then link and length
EXACT = 1  # block flag: nothing in it was deduplicated, so every seqno in it is a state that existed
DEAD = Struct("<III")  # mark, number of seqnos, CRC-32: an old list has no head, and its length is a multiple of 8
DEAD_MARK = 0xDEADFEED
RECORD = Struct("<BII")  # version, length, CRC-32: an old record begins with "{"
RECORD_VERSION = 1
NO_WORDS: Words = np.zeros(0, np.uint64)
NO_WORDS.flags.writeable = False  # like tables in LMDB's memory: kernels are compiled for read-only arrays

COUNT_BITS = 40  # of a table's first word; the others are the number of filter words
TABLE_SEALED = 1 << (COUNT_BITS - 1)
SLOT = 3

WRONG = {
    c.TORN: "has the wrong length",
    c.CHANGED: "does not match its checksum",
    c.UNSEALED: "has lost its checksum",
    c.GAP: "does not follow the block before it: one is missing",
    nodes.BEYOND: "extends beyond the end of the file",
    nodes.MISPLACED: "is in a damaged page",
}


class Damage(Exception):
    """What is wrong; the caller adds the vbucket and the file."""


class Block(NamedTuple):
    """An undamaged block with the records ``data[at:]``."""

    data: Octets
    at: int
    flags: int
    records: int
    first: int
    safe: int
    link: int | None  # end of the block before it; None in old formats


def open_block(vbucket: int, last: int, value: Any, strict: bool) -> Block:
    data = np.frombuffer(value, np.uint8)
    state = c.block_state(data, vbucket, last, strict)
    if state != c.WHOLE:
        raise Damage(f"the block that ends at seqno {last} {WRONG[state]}")
    flags, records, first, safe, _ = OLD_BLOCK.unpack_from(value)
    if flags & c.SEALED:
        return Block(data, BLOCK.size, flags, records, first, safe, BLOCK.unpack_from(value)[5])
    return Block(data, OLD_BLOCK.size, flags, records, first, safe, None)


def seal_dead(vbucket: int, last: int, seqnos: Words) -> bytes:
    content = seqnos.tobytes()
    return DEAD.pack(DEAD_MARK, seqnos.size, _crc(content, vbucket, last)) + content


def open_dead(vbucket: int, last: int, value: Any, strict: bool) -> Words:
    """A copy of the seqnos."""
    if len(value) % 8 == 0:
        if strict or (len(value) and value[:4] == DEAD.pack(DEAD_MARK, 0, 0)[:4]):
            raise Damage(f"the list of replaced seqnos at {last} has lost its checksum")
        return np.frombuffer(value, np.uint8).copy().view(np.uint64)
    mark, count, crc = DEAD.unpack_from(value) if len(value) >= DEAD.size else (0, 0, 0)
    if mark != DEAD_MARK or len(value) != DEAD.size + 8 * count:
        raise Damage(f"the list of replaced seqnos at {last} has the wrong length")
    content = bytes(value[DEAD.size :])
    if _crc(content, vbucket, last) != crc:
        raise Damage(f"the list of replaced seqnos at {last} does not match its checksum")
    return np.frombuffer(content, np.uint64)


def _crc(content: Any, vbucket: int, last: int) -> int:
    return zlib.crc32(content, (last ^ last >> 32 ^ vbucket << 16) & 0xFFFFFFFF)


# ---- key tables: a word with the number of entries and of filter words (in format 1: none), the filter, the slots ----


def entries_of(table: Words) -> int:
    return int(table[0]) & (TABLE_SEALED - 1)


def filter_of(table: Words) -> Words:
    return table[1 : 1 + (int(table[0]) >> COUNT_BITS)]


def slots_of(table: Words) -> Words:
    begin = 1 + (int(table[0]) >> COUNT_BITS)
    return table[begin : begin + (table.size - begin) // SLOT * SLOT]


def seal_table(vbucket: int, generation: int, table: Words) -> None:
    """Put the checksum into the last word, which is free."""
    table[0] |= np.uint64(TABLE_SEALED)
    table[-1] = _table_checksum(vbucket, generation, table)


def check_table(vbucket: int, generation: int, table: Words, strict: bool) -> None:
    where = f"key table {generation}"
    sealed = bool(table.size) and bool(int(table[0]) & TABLE_SEALED)
    if not sealed:
        if strict or not table.size or (table.size - 1 - (int(table[0]) >> COUNT_BITS)) % SLOT:
            raise Damage(f"{where} has lost its checksum")
        return
    filter_words = int(table[0]) >> COUNT_BITS
    # Not many more slots than the filter's entries need: a damaged length could reach behind the end of the file.
    if not filter_words + 2 <= table.size <= 512 + 25 * filter_words:
        raise Damage(f"{where} has the wrong length")
    if _table_checksum(vbucket, generation, table) != int(table[-1]):
        raise Damage(f"{where} does not match its checksum")


def _table_checksum(vbucket: int, generation: int, table: Words) -> int:
    octets = table.view(np.uint8)
    return int(c.checksum(octets, 0, octets.size - 8, np.uint64(vbucket << 32 | generation)))


# ---- small records ----


def seal_record(key: bytes, fields: dict[str, Any]) -> bytes:
    """The record as JSON with a head; arrays become lists."""
    content = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return RECORD.pack(RECORD_VERSION, len(content), zlib.crc32(content, zlib.crc32(key))) + content


def open_record(key: bytes, value: Any, strict: bool) -> dict[str, Any]:
    content = value
    if len(value) >= RECORD.size and value[0] == RECORD_VERSION:
        _, length, crc = RECORD.unpack_from(value)
        content = value[RECORD.size :]
        if len(value) != RECORD.size + length or zlib.crc32(content, zlib.crc32(key)) != crc:
            raise Damage("does not match its checksum")
    elif strict:
        raise Damage("has lost its checksum")
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError as failure:
        raise Damage("cannot be read") from failure
    if not isinstance(parsed, dict):
        raise Damage("is not an object")
    return parsed
