"""Stores as earlier versions wrote them: format 2 had no checksums, format 1 also only one key table per vbucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import orjson

from upriver.store.disk.kernels import checksum
from upriver.store.disk.sealed import BLOCK, COUNT_BITS, DEAD, OLD_BLOCK, RECORD, TABLE_SEALED


def make_old(path: Path, number: int) -> None:
    """Turn a closed store into an older format: remove checksums and everything else added with them."""
    with lmdb.open(str(path), max_dbs=8) as file, file.begin(write=True) as transaction:
        trees = {name: file.open_db(name, transaction) for name in (b"log", b"dead", b"index", b"meta")}
        for key, value in list(transaction.cursor(db=trees[b"log"])):
            transaction.put(key, _old_block(value), db=trees[b"log"])
        for key, value in list(transaction.cursor(db=trees[b"dead"])):
            transaction.put(key, value[DEAD.size :], db=trees[b"dead"])
        for key, value in list(transaction.cursor(db=trees[b"index"])):
            transaction.delete(key, db=trees[b"index"])
            transaction.put(key[:2] if number == 1 else key, _old_table(value, number), db=trees[b"index"])
        transaction.delete(b"present", db=trees[b"meta"])
        for key, value in list(transaction.cursor(db=trees[b"meta"])):
            transaction.put(key, _old_record(key, value, number), db=trees[b"meta"])
    (path / "closed.json").unlink(missing_ok=True)


def _old_block(value: bytes) -> bytes:
    flags, *fields = BLOCK.unpack_from(value)[:4]
    return OLD_BLOCK.pack(flags & ~checksum.SEALED, *fields, 0) + value[BLOCK.size :]


def _old_table(value: bytes, number: int) -> bytes:
    words = np.frombuffer(value, np.uint64).copy()
    words[0] &= np.uint64(~TABLE_SEALED & (1 << 64) - 1)
    if number == 1:
        filter_words = int(words[0]) >> COUNT_BITS
        words[filter_words] = int(words[0]) & (1 << COUNT_BITS) - 1
        words = words[filter_words:]
    return words[:-1].tobytes()


def _old_record(key: bytes, value: bytes, number: int) -> bytes:
    fields: dict[str, Any] = orjson.loads(value[RECORD.size :])
    for name in ("log_end", "tables", "sealed"):
        fields.pop(name, None)
    if key == b"bucket":
        fields["format"] = number
    return orjson.dumps(fields)
