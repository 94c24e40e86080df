"""The expiry pager: turns expired documents into tombstones, each with a new seqno.

See docs/protocol/kv.md#clocks.
"""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np

from upriver.errors import KeyNotFound
from upriver.model import SEQNO_MAX, VbucketState
from upriver.store import registers as r
from upriver.store.log.blocks import DiskScan
from upriver.store.log.kernels import runs
from upriver.store.vbucket import VBucket
from upriver.wire.keys import split_key
from upriver.wire.packed import HEADER_SIZE, unpack

AT_ONCE = 64  # documents expired before the lock is released
REST_S = 0.0005


def expire_due(vbucket: VBucket) -> int:
    """Expire the documents that are due and return how many; costs nothing while none is."""
    now = vbucket.shared.now_s
    if int(vbucket.registers[r.EXPIRY]) > now:
        return 0
    shared, registers = vbucket.shared, vbucket.registers
    with shared.commit_lock:  # the disk does not change; other threads read and write meanwhile
        shared.flush()
        with shared.lock:
            shared.flush()  # changes made meanwhile
            registers[r.EXPIRY] = SEQNO_MAX  # writes lower it again
        ahead = now
        try:
            due, later = _due(vbucket, now)
            expired = 0
            for at in range(0, len(due), AT_ONCE):
                expired += _expire(vbucket, due[at : at + AT_ONCE])
                time.sleep(REST_S)  # other threads would never get a lock that is retaken at once
            ahead = later
            return expired
        finally:
            with shared.lock:
                registers[r.EXPIRY] = min(int(registers[r.EXPIRY]), ahead)


def _due(vbucket: VBucket, now: int) -> tuple[list[bytes], int]:
    """Keys of expired documents on disk, and the earliest expiry that is still ahead."""
    scan = DiskScan(vbucket, 0)
    position, due, earliest = 0, [], 2**64 - 1
    while position < scan.end:
        data, position = scan.step(position)
        run = np.frombuffer(data, np.uint8)
        found = np.empty(run.size // HEADER_SIZE, np.int64)
        count, ahead = runs.expired(run, 0, run.size, np.uint64(now), found)
        due += [unpack(data, int(at))[1] for at in found[:count]]
        earliest = min(earliest, int(ahead))
    return due, earliest


def _expire(vbucket: VBucket, wire_keys: list[bytes]) -> int:
    """Expire these keys if the vbucket is still active; returns how many had not changed meanwhile."""
    with vbucket.shared.lock:
        if vbucket.state is not VbucketState.ACTIVE:
            return 0
        before = vbucket.expired_count
        for wire_key in wire_keys:
            collection_id, key = split_key(wire_key)
            with suppress(KeyNotFound):
                vbucket.documents.get(key, collection_id)  # reading an expired document expires it
        return vbucket.expired_count - before
