"""A sync that dies at any commit, or on a full disk, leaves tables that the replayed batch repairs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lake.feed_sync import FeedSync
from tests.lake.test_truth import normal
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.delta import Table
from upriver.lake.files import DataFile


def scenario(sync: FeedSync) -> None:
    """Batches with everything in them: two collections, updates, a rollback, a drop, a wider type."""
    feed = sync.feed
    for index in range(20):
        feed.put(f"k{index}", {"n": index})
        feed.put(f"u{index}", {"n": index}, "users")
    sync.commit()
    for index in range(0, 20, 3):
        feed.put(f"k{index}", {"n": index + 0.5})
        feed.delete(f"u{index}", "users")
    sync.commit()
    feed.fail_over(1, feed.histories[1].seqno // 2)
    feed.put("after", {"n": 1, "new": "x"})
    sync.commit()
    feed.drop("users")
    feed.put("u1", {"again": True}, "users")
    sync.commit()


ORDER_CHANGES = 20 + 7 + 1 + 1  # each once, and the rollback


class Crash(Exception):
    """The process is gone."""


@pytest.mark.parametrize("landed", [False, True], ids=["before it landed", "after it landed"])
@pytest.mark.parametrize("policy", [MergePolicy(small_rows=0), MergePolicy(small_rows=10**6)], ids=["tail", "merged"])
def test_a_replay_repairs_a_crash_at_any_commit(tmp_path, monkeypatch, policy, landed) -> None:
    write, left = Table._write, [0]

    def dying(self, *arguments):
        left[0] -= 1
        if left[0] != 0:
            return write(self, *arguments)
        if landed:
            write(self, *arguments)
        raise Crash

    for crash_at in range(1, 60):
        sync = FeedSync(tmp_path / f"lake{crash_at}", policy=policy)
        monkeypatch.setattr(Table, "_write", dying)
        left[0] = crash_at
        crashed = _run_with_replays(sync)
        monkeypatch.setattr(Table, "_write", write)
        for name in ("orders", "users"):
            assert sync.read(f"shop.{name}") == {k: normal(v) for k, v in sync.feed.truth(name).items()}, crash_at
        assert sync.orders.changes.delta.to_pyarrow_table().num_rows == ORDER_CHANGES, crash_at
        if not crashed:
            return
    pytest.fail("never got through without a crash")


def _run_with_replays(sync: FeedSync) -> bool:
    """Repeat a failed batch from the same changes in a new process, as Spark does."""
    crashed = [False]

    def commit() -> None:
        batches = sync.feed.batch()
        for _ in range(3):
            try:
                written = write_log(batches, sync.root, sync.number)
                sync.tables.apply(sync.number, WrittenFiles.from_tasks([written.to_json()]))
                break
            except Crash:
                crashed[0] = True
                sync.open()
        sync.number += 1

    sync.commit = commit  # type: ignore[method-assign]
    scenario(sync)
    return crashed[0]


def test_the_same_batch_again_changes_nothing(sync: FeedSync) -> None:
    sync.feed.put("a", {"n": 1})
    batches = sync.feed.batch()
    for _ in range(3):
        sync.tables.apply(0, write_log(batches, sync.root, 0))
        sync.open()
    assert sync.orders.changes.delta.to_pyarrow_table().num_rows == 1
    committed = {file.path for file in sync.orders.changes.files()}
    home = Path(sync.orders.changes.uri)
    on_disk = {str(path.relative_to(home)) for path in home.rglob("vb*/*.parquet")}
    assert on_disk == committed  # files of the replays are gone


FULL = """
import errno, random, sys
from pathlib import Path
import pyarrow.parquet as pq
from tests.lake.feed_sync import FeedSync
from tests.lake.test_truth import normal
from upriver.lake.change_log import write_log

disk = Path(sys.argv[1])
ballast = disk / "ballast"
noise = random.Random(1)
sync = FeedSync(disk / "lake")
sync.feed.put("small", {"n": 1})
sync.commit()
changes, failures, at = 1, 0, set()

def fill(leave):
    with ballast.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(1024))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        out.truncate(max(0, out.tell() - leave))

for leave in [*range(0, 60_000, 4_096), 10**9]:
    for index in range(60):
        sync.feed.put(f"k{index}", {"n": index, "text": "%x" % noise.getrandbits(1000), f"f{leave}": 1})
    batches = sync.feed.batch()
    changes += 60
    fill(leave)
    for attempt in range(2):
        try:
            sync.tables.apply(sync.number, write_log(batches, sync.root, sync.number))
            break
        except Exception as error:
            assert not attempt, error
            failures += 1
            log = sync.orders.changes
            log.refresh()
            at.add("after the log" if log.version("app") == sync.number else "before the log")
            assert "small" in sync.read(), "what was there before is gone"
            ballast.unlink()
            sync.open()
    ballast.unlink(missing_ok=True)
    sync.number += 1
    assert sync.read() == {key: normal(value) for key, value in sync.feed.truth().items()}, leave
    files = sync.orders.changes.delta.file_uris()  # not read through it: its threads may abort the end of a process
    assert sum(pq.read_metadata(file).num_rows for file in files) == changes, leave
print("right", failures, *sorted(at), sep=", ")
"""


def test_a_disk_that_fills_up_during_a_commit_fails_the_batch_and_the_next_try_repairs_it(tmp_path) -> None:
    """On a file system of two megabytes with a little less room left each time."""
    here = str(Path(__file__).parents[2])
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=2m tmpfs {tmp_path}"
    if shutil.which("unshare") is None or subprocess.run([*alone, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("needs a Linux that lets users mount")
    command = f"{mount} && exec {sys.executable} - {tmp_path}"
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here}/src"}
    done = subprocess.run([*alone, "sh", "-c", command], input=FULL, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.strip().split(", ")
    assert said[0] == "right"
    assert int(said[1]) > 5
    assert said[2:] == ["after the log", "before the log"]  # it failed both before and after the first commit


def test_a_commit_that_raised_but_landed_keeps_its_files(sync: FeedSync, monkeypatch) -> None:
    sync.feed.put("a", {"n": 1})
    written = write_log(sync.feed.batch(), sync.root, 0)
    write = Table._write

    def landing(self, *arguments):
        write(self, *arguments)
        raise Crash

    monkeypatch.setattr(Table, "_write", landing)
    with pytest.raises(Crash):
        sync.tables.apply(0, written)
    monkeypatch.setattr(Table, "_write", write)
    files: list[DataFile] = written.files["shop.orders"]
    sync.open()
    sync.orders.changes.drop_uncommitted(files)
    assert sync.orders.changes.delta.to_pyarrow_table().num_rows == 1
