"""A writer is killed with SIGKILL at random instants: everything reported as persisted is there, in order.

Every operation is a function of its vbucket and seqno, so the state at a high seqno can be computed.
``UPRIVER_CRASHES`` sets how many instants; ``make chaos-store`` takes 200.

See ARCHITECTURE.md#faults.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from pathlib import Path

import pytest

from tests.store.store_support import Record, changes, open_bucket
from upriver.errors import KeyNotFound, TemporaryFailure
from upriver.model import VbucketState
from upriver.store import Bucket, Run, SnapshotStart, StoreOptions
from upriver.store.index import keyindex

CRASHES = int(os.environ.get("UPRIVER_CRASHES", "25"))
VBUCKETS = 3
KEYS = 97
OPTIONS = StoreOptions(flush_delay_s=0.002, flush_bytes=1 << 18, block_bytes=8192, checkpoint_bytes=16384)
REPORT = struct.Struct("<HQ")
READY = REPORT.pack(0xFFFF, 0)


@pytest.fixture(autouse=True)
def small_key_tables(monkeypatch):
    """Make key tables so small that a few keys fill several on disk."""
    monkeypatch.setattr(keyindex, "SMALLEST_TABLE", 8)
    monkeypatch.setattr(keyindex, "WORTH_A_TABLE", 8)
    monkeypatch.setattr(keyindex, "MOST_UNKNOWN", 8)


def operation(vbucket: int, seqno: int) -> tuple[bytes, bytes | None]:
    """The operation at this seqno: a key, and a value or None for a deletion."""
    key = b"key%d" % (seqno * 7919 % KEYS)
    return key, None if seqno % 5 == 0 else b"%d:%d:" % (vbucket, seqno) + b"x" * (seqno * 31 % 500)


def write(path: Path, report: int) -> None:
    """The writer, which never stops by itself."""
    bucket = open_bucket(path, OPTIONS, VBUCKETS)
    bucket.listeners.on_persisted = lambda told: tell(report, told)
    for number in range(VBUCKETS):
        bucket.set_state(number, VbucketState.ACTIVE)
    os.write(report, READY)
    step = 0
    while True:
        step += 1
        number = step % VBUCKETS
        write_one(bucket, number, step)


def tell(report: int, told: list[tuple[int, int]]) -> None:
    os.write(report, b"".join(REPORT.pack(*item) for item in told))


def write_one(bucket: Bucket, number: int, step: int) -> None:
    vb = bucket.vbucket(number)
    key, value = operation(number, vb.high_seqno + 1)
    try:
        if value is None:
            vb.bulk.delete_many([key])
        else:
            vb.documents.set(key, value)
        if step % 1000 == 0:
            bucket.compact(number)
    except TemporaryFailure:
        bucket.wait_for_room()


def warm_up(path: Path) -> None:
    """Load the kernels before the first fork, so that kills hit the writing and not the loading."""
    with open_bucket(path, OPTIONS, VBUCKETS) as bucket:
        bucket.set_state(0, VbucketState.ACTIVE)
        for step in range(1, 31):
            write_one(bucket, 0, step * 100)
        bucket.trim_memory()
        bucket.vbucket(0).documents.get(b"key%d" % (7919 % KEYS))
        changes(bucket.vbucket(0).stream(0))


def killed_writer(path: Path, delay_s: float, after_a_commit: bool) -> dict[int, int]:
    """Run the writer, kill it, and return the seqnos that were reported to it as persisted.

    The kill comes some time after the start, or after the first commit, which a slow disk can delay for long.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write(path, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as reports:
        while reports.read(len(READY)) != READY:
            pass
        told = reports.read(REPORT.size) if after_a_commit else b""
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        told += reports.read()
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    persisted: dict[int, int] = {}
    for at in range(0, len(told) - REPORT.size + 1, REPORT.size):
        number, seqno = REPORT.unpack_from(told, at)
        if number < VBUCKETS:
            persisted[number] = seqno
    return persisted


def expected(vbucket: int, high: int) -> dict[bytes, tuple[int, bytes | None]]:
    state: dict[bytes, tuple[int, bytes | None]] = {}
    for seqno in range(1, high + 1):
        key, value = operation(vbucket, seqno)
        state[key] = (seqno, value)
    return state


def check(found: list[Record], vbucket: int, high: int, purged: int) -> None:
    """The stream has every key's last version, in order; deletions may have been purged."""
    seqnos = [record.seqno for record in found]
    assert seqnos == sorted(set(seqnos))
    wanted = expected(vbucket, high)
    for record in found:
        value = record.value if record.head.kind == 0 else None
        assert wanted.pop(record.key) == (record.seqno, value)
    assert all(value is None and seqno <= purged for seqno, value in wanted.values())


@pytest.mark.timeout(1200)
def test_what_was_persisted_survives_every_kill(tmp_path):
    warm_up(tmp_path / "warm")
    instants = random.Random(2026)
    logs: dict[int, set[int]] = {number: set() for number in range(VBUCKETS)}
    highs = dict.fromkeys(range(VBUCKETS), 0)
    for life in range(CRASHES):
        told = killed_writer(tmp_path / "b", instants.uniform(0.0, 0.12), after_a_commit=life % 2 == 0)
        with open_bucket(tmp_path / "b", OPTIONS, VBUCKETS) as bucket:
            for vb in bucket.existing():
                high = vb.high_seqno
                assert high >= told.get(vb.id, 0)
                assert high >= highs[vb.id]
                highs[vb.id] = high
                newest = vb.failover_log.entries[0]
                assert newest.seqno == high
                assert newest.uuid not in logs[vb.id], "seqnos would be assigned again under the same uuid"
                logs[vb.id].add(newest.uuid)
                check(changes(vb.stream(0, high)), vb.id, high, vb.purge_seqno)
                for key, (seqno, value) in expected(vb.id, high).items():
                    if value is not None:
                        document = vb.documents.get(key)
                        assert (document.seqno, document.value) == (seqno, value)
                    else:
                        with pytest.raises(KeyNotFound):
                            vb.documents.get(key)
    assert min(highs.values()) > 0


def replicate(vb, replica) -> None:
    source = vb.stream(0)
    while (event := source.poll()) is not None:
        if isinstance(event, SnapshotStart):
            replica.replication.begin_snapshot(event.start, event.end, event.flags)
        elif isinstance(event, Run):
            replica.replication.apply_records(bytes(event.data))


def test_a_rollback_is_atomic(tmp_path):
    """Kill a process during its rollback: the replica is at the old seqno or at the new one, never between."""
    with open_bucket(tmp_path / "a", OPTIONS, VBUCKETS) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        for seqno in range(1, 4001):
            key, value = operation(0, seqno)
            vb.bulk.delete_many([key]) if value is None else vb.documents.set(key, value)
            if seqno in (1000, 2000, 3000):
                bucket.flush()
        with open_bucket(tmp_path / "b", OPTIONS, VBUCKETS) as other:
            replicate(vb, other.set_state(0, VbucketState.REPLICA))
    warm_up(tmp_path / "warm")
    instants = random.Random(7)
    outcomes = set()
    for target in (3000, 2000, 1000):
        child = os.fork()
        if child == 0:
            try:
                open_bucket(tmp_path / "b", OPTIONS, VBUCKETS).vbucket(0).rollback(target)
                time.sleep(10)
            finally:
                os._exit(0)
        time.sleep(instants.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open_bucket(tmp_path / "b", OPTIONS, VBUCKETS) as bucket:
            replica = bucket.vbucket(0)
            outcomes.add(replica.high_seqno)
            assert replica.high_seqno in (0, 1000, 2000, 3000, 4000)
            check(changes(replica.stream(0)), 0, replica.high_seqno, 0)
    assert outcomes
