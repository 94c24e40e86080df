"""The quota holds: anonymous memory (the mapped file does not count) while documents are written and streamed.

``UPRIVER_MEMORY_DOCUMENTS`` sets how many; the full measure is 5000000. Runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
