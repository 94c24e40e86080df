"""The expiry pager: documents whose time has come become tombstones, each with a new seqno (``protocol.md`` 10.5)."""

from __future__ import annotations

import numpy as np

from upriver.errors import KeyNotFound
from upriver.model import SEQNO_MAX
from upriver.store import kernels as k
from upriver.store import runs
from upriver.store.scan import DiskScan
from upriver.store.vbucket import VBucket
from upriver.wire.keys import split_key
from upriver.wire.packed import HEADER_SIZE, unpack


def expire_due(vbucket: VBucket) -> int:
    """Expire what is due; costs nothing while no document of the vbucket is."""
    now = vbucket.shared.now_s
    if int(vbucket.registers[k.EXPIRY]) > now:
        return 0
    shared, registers = vbucket.shared, vbucket.registers
    with shared.commit_lock:  # what is on disk stays as it is; others read and write meanwhile
        shared.flush()
        with shared.lock:
            shared.flush()  # what came meanwhile
            registers[k.EXPIRY] = SEQNO_MAX  # until somebody writes what expires earlier
        ahead = now
        try:
            due, later = _due(vbucket, now)
            with shared.lock:
                expired = sum(_expire(vbucket, wire_key) for wire_key in due)
            ahead = later
            return expired
        finally:
            with shared.lock:
                registers[k.EXPIRY] = min(int(registers[k.EXPIRY]), ahead)


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


def _expire(vbucket: VBucket, wire_key: bytes) -> bool:
    collection_id, key = split_key(wire_key)
    before = vbucket.high_seqno
    try:
        vbucket.get(key, collection_id)  # reading it is what expires it
    except KeyNotFound:
        return vbucket.high_seqno > before
    return False
