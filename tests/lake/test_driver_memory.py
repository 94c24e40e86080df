"""The memory of the driver is bounded by settings, not by how large documents are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.lake.feed_sync import FeedSync
from tests.lake.feeds import Feed
from upriver.lake.change_log import write_log

APPLY = """
import json, resource, sys
from upriver.lake.apply import plan
from upriver.lake.apply.policy import TableOptions
from upriver.lake.tables import Tables
from upriver.lake.layout import Lake
from upriver.lake.change_log import WrittenFiles
from upriver.lake.apply.policy import MergePolicy

small = {"target_bytes": 4 << 20, "inline_bytes": 4 << 20}
plan.SHARED_BYTES = 4 << 20
tables = Tables(Lake(sys.argv[1]), "app", TableOptions(vbuckets=64, policy=MergePolicy(**small)))

def apply(path, batch):
    tables.apply(batch, WrittenFiles.from_tasks([json.load(open(path))]))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

little = apply(sys.argv[2], 0)
print(apply(sys.argv[3], 1) - little)
"""


def log(sync: FeedSync, path: Path, documents: int) -> None:
    """A batch of documents of about half a megabyte, of a kind that compresses well."""
    for index in range(documents):
        sync.feed.put(f"k{index}", {"list": [index] * 100_000, "n": index})
    path.write_text(json.dumps(write_log(sync.feed.batch(), sync.root, sync.number).to_json()))
    sync.number += 1


def test_a_batch_of_large_documents_is_applied_in_slices(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake")
    sync.feed = Feed(vbuckets=64)
    log(sync, tmp_path / "little.json", 10)
    log(sync, tmp_path / "much.json", 250)
    files = [str(tmp_path / name) for name in ("little.json", "much.json")]
    command = [sys.executable, "-c", APPLY, sync.root, *files]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown_mib = int(done.stdout)
    assert grown_mib < 100, f"{grown_mib} MiB more for a batch of about 100 MiB"
    sync.options = sync.options.__class__(vbuckets=64)
    sync.open()
    assert {key: said["n"] for key, said in sync.read().items()} == {f"k{index}": index for index in range(250)}
