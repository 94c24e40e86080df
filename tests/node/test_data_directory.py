"""``upriver serve`` and its directory: one process at a time, writable, and "ready" only when that is true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.raw import ready
from upriver import testing
from upriver.errors import DirectoryInUse
from upriver.model import VbucketState
from upriver.node.buckets import Buckets
from upriver.node.data_directory import DataDirectory
from upriver.store import Bucket, StoreOptions, claim
from upriver.wire.messages import kv

QUIET = StoreOptions(background=False)


def serve(data: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The outcome of a node that ends by itself."""
    command = [sys.executable, "-c", "from upriver.cli import main; main()", "serve", "--data", str(data)]
    command += ["--vbuckets", "2", "--kv-port", "0", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (1, "", False), done.stderr
    assert all(text in done.stderr for text in said), done.stderr


@pytest.fixture(scope="module")
def node():
    with testing.node(vbuckets=2) as made:
        yield made


def test_a_second_node_on_the_same_data_ends_at_once_and_says_which_process_has_it(node: testing.RunningNode):
    before = sorted(node.data.rglob("*"))
    refused(serve(node.data), str(node.data), "in use by another node (process ", "--data")
    assert sorted(node.data.rglob("*")) == before
    with ready(node.kv_port) as raw:
        raw.ask(kv.Set(key=b"k", value=b"v"))
        assert raw.ask(kv.Get(b"k")).value == b"v"


def test_a_node_ends_when_another_process_has_one_of_its_buckets_open(node: testing.RunningNode, tmp_path: Path):
    (tmp_path / "default").symlink_to(node.data / "default")
    refused(serve(tmp_path), "default is open in another process")


@pytest.mark.parametrize("below", ["file", "file/data"])
def test_a_directory_that_cannot_be_created_is_reported_in_one_line(tmp_path: Path, below: str):
    (tmp_path / "file").write_text("")
    refused(serve(tmp_path / below), "cannot write to the data directory", below)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_reported_in_one_line(tmp_path: Path):
    tmp_path.chmod(0o500)
    refused(serve(tmp_path), "cannot write to the data directory", "Permission denied")


def test_a_node_whose_only_bucket_was_cut_short_ends_and_names_the_file(tmp_path: Path):
    with Bucket.open(tmp_path / "default", name="default", vbuckets=2, options=QUIET) as bucket:
        bucket.set_state(0, VbucketState.ACTIVE).bulk.set_many([b"%d" % n for n in range(500)], [bytes(100)] * 500)
    (tmp_path / "default" / "upriver.bucket").write_text("2")
    os.truncate(tmp_path / "default" / "data.mdb", 20_000)
    refused(serve(tmp_path), "no bucket can be opened", "default/data.mdb was cut short")


def test_a_failed_start_leaves_the_buckets_closed_and_the_history_as_it_was(node: testing.RunningNode, tmp_path: Path):
    with Bucket.open(tmp_path / "default", name="default", vbuckets=2, options=QUIET) as bucket:
        before = bucket.set_state(0, VbucketState.ACTIVE).failover_log
    (tmp_path / "default" / "upriver.bucket").write_text("2")
    refused(serve(tmp_path, "--kv-port", str(node.kv_port)), "cannot serve")
    with Bucket.open(tmp_path / "default", name="default", vbuckets=2, options=QUIET) as bucket:
        assert bucket.opened_clean
        assert bucket.vbucket(0).failover_log == before


def test_a_broken_bucket_is_not_erased_while_another_process_has_it_open(tmp_path: Path):
    path = tmp_path / "b"
    path.mkdir()
    (path / "upriver.bucket").write_text("nonsense")
    buckets = Buckets(tmp_path, 2, QUIET, None)  # type: ignore[arg-type]
    buckets.open_all()
    with claim(path), pytest.raises(Exception, match="is open in another process"):
        buckets.delete("b")
    assert (path / "upriver.bucket").exists()
    assert "b" in buckets.broken
    buckets.delete("b")
    assert not path.exists()


def test_the_directory_is_free_again_when_its_node_has_stopped(tmp_path: Path):
    first = DataDirectory.claim(tmp_path)
    with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"):
        DataDirectory.claim(tmp_path)
    first.release()
    DataDirectory.claim(tmp_path).release()
