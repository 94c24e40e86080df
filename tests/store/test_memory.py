"""The store's memory: it stays within the quota, and freed memory is reused once nobody can see it any more.

``UPRIVER_MEMORY_DOCUMENTS`` sets how many documents the quota test writes and streams, in a process of its own; the
full measure is 5000000. It counts anonymous memory, without the mapped file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.store.store_support import SMALL, open_bucket, records
from upriver.model import VbucketState
from upriver.store import Run
from upriver.store.arrays import MAPPED, POOL, octets, words

DOCUMENTS = int(os.environ.get("UPRIVER_MEMORY_DOCUMENTS", "500000"))
QUOTA_MB = 512 if DOCUMENTS >= 5_000_000 else 128

SCRIPT = """
import sys
from pathlib import Path
from upriver.errors import TemporaryFailure
from upriver.model import vbucket_of
from upriver.store import Bucket, Run, StoreOptions

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10

def load(bucket, numbers, streams):
    groups = {}
    for number in numbers:
        key = b"document:%012d" % number
        groups.setdefault(vbucket_of(key, bucket.vbuckets), []).append(key)
    highest = anonymous()
    for vbucket, keys in groups.items():
        while True:
            try:
                bucket.vbucket(vbucket).bulk.set_many(keys, [b"v" * 256] * len(keys), datatype=0)
                break
            except TemporaryFailure:
                bucket.wait_for_room()
        highest = max(highest, anonymous())
    received = 0
    for source in streams:
        while (event := source.poll()) is not None:
            if isinstance(event, Run):
                received += event.upto - event.after
    return received, max(highest, anonymous())

path, documents, quota_mb = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Bucket.open(path + "/warm", name="w", vbuckets=4, options=StoreOptions()) as bucket:
    bucket.create_all()
    load(bucket, range(2000), [vb.stream(0) for vb in bucket.existing()])
base = anonymous()
with Bucket.open(path + "/b", name="b", vbuckets=256, options=StoreOptions(quota_bytes=quota_mb << 20)) as bucket:
    bucket.create_all()
    streams = [vb.stream(0) for vb in bucket.existing()]
    highest = received = 0
    for at in range(0, documents, 25000):
        more, peak = load(bucket, range(at, at + 25000), streams if at % 100000 == 0 else streams[:16])
        received += more
        highest = max(highest, peak)
    more, peak = load(bucket, [], streams)
    print(received + more, base, max(highest, peak))
"""


@pytest.mark.timeout(1200)
def test_anonymous_memory_stays_within_the_quota_and_a_fifth(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(DOCUMENTS), str(QUOTA_MB)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    received, base, highest = map(int, done.stdout.split())
    print(f"{DOCUMENTS} documents, quota {QUOTA_MB} MiB: {base >> 20} MiB before, {highest >> 20} MiB at most")
    assert received == DOCUMENTS
    assert highest - base <= (QUOTA_MB << 20) * 1.2
    assert Path(tmp_path / "b" / "data.mdb").stat().st_size > DOCUMENTS * 256


@pytest.fixture
def allowance():
    POOL.allow(4 * MAPPED)
    yield
    POOL.allow(-4 * MAPPED)


def address(array) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("hold", [lambda a: a[7:], lambda a: a.data, lambda a: a[7:].view(np.uint8).data[1:]])
def test_memory_is_reused_once_the_last_view_of_it_is_gone(allowance, hold):
    first = octets(MAPPED)
    where = address(first)
    held = hold(first)
    del first
    second = octets(MAPPED)
    assert address(second) != where
    del held
    assert address(octets(MAPPED)) == where


def test_reused_memory_is_cleared_when_zeros_are_asked_for(allowance):
    first = octets(MAPPED)
    first[:] = 255
    where = address(first)
    del first
    second = words(MAPPED // 8)
    assert address(second) == where
    assert not second.any()


def test_the_pool_keeps_no_more_than_the_open_buckets_allow(allowance):
    many = [octets(MAPPED) for _ in range(10)]
    many.clear()
    assert POOL.free_bytes <= POOL.allowed_bytes
    large = octets(3 * MAPPED)
    del large
    assert len({address(octets(3 * MAPPED)) for _ in range(3)}) == 1  # sizes that nobody asks for were freed


def test_a_run_keeps_its_content_while_its_checkpoint_is_evicted_and_its_memory_reused(tmp_path):
    options = replace(SMALL, checkpoint_bytes=2 * MAPPED, quota_bytes=16 << 20)
    with open_bucket(tmp_path, options, 1) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        source = vb.stream(0)
        for round_ in range(3):
            vb.bulk.set_many([b"%d-%d" % (round_, i) for i in range(100)], [b"%d" % round_ * 1000] * 100)
            bucket.flush()
            while not isinstance(run := source.poll(), Run):
                assert run is not None
            bucket.trim_memory()
            for i in range(20):
                vb.bulk.set_many([b"other-%d-%d" % (i, j) for j in range(100)], [b"x" * 1000] * 100)
                bucket.flush()
                bucket.trim_memory()
            values = {record.value[:1] for record in records(run) if not record.key.startswith(b"other")}
            assert values <= {b"0", b"1", b"2"}
            if round_ == 0:
                assert [record.key for record in records(run)] == [b"0-%d" % i for i in range(100)]
                assert values == {b"0"}
