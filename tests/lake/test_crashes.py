"""A sync that dies at any commit, or on a full disk, leaves tables that the replayed batch makes right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lake.desks import Desk
from tests.lake.test_truth import normal
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.delta import Table
from upriver.lake.files import DataFile


def scenario(desk: Desk) -> None:
    """Batches with everything in them: two collections, updates, a rollback, a drop, a wider type."""
    feed = desk.feed
    for index in range(20):
        feed.put(f"k{index}", {"n": index})
        feed.put(f"u{index}", {"n": index}, "users")
    desk.commit()
    for index in range(0, 20, 3):
        feed.put(f"k{index}", {"n": index + 0.5})
        feed.delete(f"u{index}", "users")
    desk.commit()
    feed.fail_over(1, feed.histories[1].seqno // 2)
    feed.put("after", {"n": 1, "new": "x"})
    desk.commit()
    feed.drop("users")
    feed.put("u1", {"again": True}, "users")
    desk.commit()


ORDER_CHANGES = 20 + 7 + 1 + 1  # each once, and the rollback


class Crash(Exception):
    """The process is gone."""


@pytest.mark.parametrize("landed", [False, True], ids=["before it landed", "after it landed"])
@pytest.mark.parametrize("policy", [MergePolicy(small_rows=0), MergePolicy(small_rows=10**6)], ids=["tail", "merged"])
def test_a_crash_at_any_commit_is_made_good_by_the_replay(tmp_path, monkeypatch, policy, landed) -> None:
    write, left = Table._write, [0]

    def dying(self, *arguments):
        left[0] -= 1
        if left[0] != 0:
            return write(self, *arguments)
        if landed:
            write(self, *arguments)
        raise Crash

    for crash_at in range(1, 60):
        desk = Desk(tmp_path / f"lake{crash_at}", policy=policy)
        monkeypatch.setattr(Table, "_write", dying)
        left[0] = crash_at
        crashed = _run_with_replays(desk)
        monkeypatch.setattr(Table, "_write", write)
        for name in ("orders", "users"):
            assert desk.read(f"shop.{name}") == {k: normal(v) for k, v in desk.feed.truth(name).items()}, crash_at
        assert desk.orders.changes.delta.to_pyarrow_table().num_rows == ORDER_CHANGES, crash_at
        if not crashed:
            return
    pytest.fail("never got through without a crash")


def _run_with_replays(desk: Desk) -> bool:
    """As Spark does: a batch that failed is read again, from the same changes, by a new process."""
    crashed = [False]

    def commit() -> None:
        batches = desk.feed.batch()
        for _ in range(3):
            try:
                written = write_log(batches, desk.root, desk.number)
                desk.tables.apply(desk.number, WrittenFiles.from_tasks([written.to_json()]))
                break
            except Crash:
                crashed[0] = True
                desk.open()
        desk.number += 1

    desk.commit = commit  # type: ignore[method-assign]
    scenario(desk)
    return crashed[0]


def test_the_same_batch_again_changes_nothing(desk: Desk) -> None:
    desk.feed.put("a", {"n": 1})
    batches = desk.feed.batch()
    for _ in range(3):
        desk.tables.apply(0, write_log(batches, desk.root, 0))
        desk.open()
    assert desk.orders.changes.delta.to_pyarrow_table().num_rows == 1
    committed = {file.path for file in desk.orders.changes.files()}
    home = Path(desk.orders.changes.uri)
    on_disk = {str(path.relative_to(home)) for path in home.rglob("vb*/*.parquet")}
    assert on_disk == committed  # files of the replays are gone


FULL = """
import errno, random, sys
from pathlib import Path
import pyarrow.parquet as pq
from tests.lake.desks import Desk
from tests.lake.test_truth import normal
from upriver.lake.change_log import write_log

disk = Path(sys.argv[1])
ballast = disk / "ballast"
noise = random.Random(1)
desk = Desk(disk / "lake")
desk.feed.put("small", {"n": 1})
desk.commit()
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
        desk.feed.put(f"k{index}", {"n": index, "text": "%x" % noise.getrandbits(1000), f"f{leave}": 1})
    batches = desk.feed.batch()
    changes += 60
    fill(leave)
    for attempt in range(2):
        try:
            desk.tables.apply(desk.number, write_log(batches, desk.root, desk.number))
            break
        except Exception as error:
            assert not attempt, error
            failures += 1
            log = desk.orders.changes
            log.refresh()
            at.add("after the log" if log.version("app") == desk.number else "before the log")
            assert "small" in desk.read(), "what was there before is gone"
            ballast.unlink()
            desk.open()
    ballast.unlink(missing_ok=True)
    desk.number += 1
    assert desk.read() == {key: normal(value) for key, value in desk.feed.truth().items()}, leave
    files = desk.orders.changes.delta.file_uris()  # not read through it: its threads may abort the end of a process
    assert sum(pq.read_metadata(file).num_rows for file in files) == changes, leave
print("right", failures, *sorted(at), sep=", ")
"""


def test_a_disk_that_fills_up_anywhere_in_a_commit_fails_the_batch_and_the_next_try_makes_it_right(tmp_path) -> None:
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


def test_a_commit_that_raised_but_landed_keeps_its_files(desk: Desk, monkeypatch) -> None:
    desk.feed.put("a", {"n": 1})
    written = write_log(desk.feed.batch(), desk.root, 0)
    write = Table._write

    def landing(self, *arguments):
        write(self, *arguments)
        raise Crash

    monkeypatch.setattr(Table, "_write", landing)
    with pytest.raises(Crash):
        desk.tables.apply(0, written)
    monkeypatch.setattr(Table, "_write", write)
    files: list[DataFile] = written.files["shop.orders"]
    desk.open()
    desk.orders.changes.drop_uncommitted(files)
    assert desk.orders.changes.delta.to_pyarrow_table().num_rows == 1
