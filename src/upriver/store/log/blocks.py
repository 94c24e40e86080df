"""Blocks of a vbucket's log on disk, read in order: each is whole and none is missing, or ``DamagedVbucket``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from upriver.errors import DamagedVbucket
from upriver.model import SEQNO_MAX
from upriver.store.disk.file import BLOCK_KEY, Block
from upriver.store.log.kernels import runs
from upriver.wire.packed import RecordHead, unpack

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket


def blocks_after(vbucket: VBucket, after: int, upto: int = SEQNO_MAX) -> Iterator[tuple[int, Block]]:
    """(last seqno, block) of what is on disk above ``after``. A block is valid until the next one is asked for."""
    disk, reached = vbucket.shared.disk, after
    with disk.read(vbucket.id) as transaction:
        cursor = transaction.cursor(db=disk.log)
        more = cursor.set_range(BLOCK_KEY.pack(vbucket.id, after + 1))
        while more:
            owner, last = BLOCK_KEY.unpack(cursor.key())
            if owner != vbucket.id:
                break
            block = disk.block(owner, last, disk.value(cursor, owner))
            if block.link is not None and (block.link > reached or (reached > after and block.link != reached)):
                raise missing_block(vbucket, reached)
            yield last, block
            if last >= upto:
                return
            reached, more = last, cursor.next()
        check_log_end(vbucket, reached)


def missing_block(vbucket: VBucket, reached: int) -> DamagedVbucket:
    """What to raise when no block follows the one that ends at ``reached``."""
    return vbucket.shared.disk.damaged(vbucket.id, f"the block behind seqno {reached} is missing")


def check_log_end(vbucket: VBucket, reached: int) -> None:
    """There are no more blocks: raise if there should be."""
    if reached < vbucket.log_end:
        raise missing_block(vbucket, reached)


def record_on_disk(vbucket: VBucket, seqno: int) -> tuple[RecordHead, bytes, bytes]:
    """The record of this seqno: its header, prefixed key and value."""
    for _, block in blocks_after(vbucket, seqno - 1, seqno):
        at = runs.locate(block.data, block.at, block.data.size, np.uint64(seqno))
        if at >= 0:
            return unpack(block.data.data, at)
    raise vbucket.shared.disk.damaged(vbucket.id, f"seqno {seqno} is in the key index but not in the log")
