"""A crash during a change of the manifest: after the next start every vbucket has the new manifest."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.store.store_support import changes, open_bucket
from upriver.model import VbucketState
from upriver.store import Bucket, StoreOptions
from upriver.store.disk.file import Disk

VBUCKETS = 16
OPTIONS = StoreOptions(background=False, flush_bytes=256, quota_bytes=8 << 20)  # several commits for every change
BEGIN, END = 0, 1


def manifest(uid: int, *numbers: int) -> bytes:
    inside = "".join(f',{{"name":"c{number}","uid":"{number:x}"}}' for number in numbers)
    default = f'{{"name":"_default","uid":"0","collections":[{{"name":"_default","uid":"0"}}{inside}]}}'
    return f'{{"uid":"{uid:x}","scopes":[{default}]}}'.encode()


def collections_by_events(vb: Any) -> set[int]:
    """The collections that a reader from the beginning knows."""
    known = {0}
    for record in changes(vb.stream(0, vb.high_seqno)):
        event = record.head.extra >> 8
        if record.head.kind == 3:
            (known.add if event == BEGIN else known.discard)(record.head.collection_id)
    return known


def check(bucket: Bucket) -> None:
    """Check that readers, writers and the bucket agree on the collections."""
    wanted = set(bucket.manifest.collections)
    for vb in bucket.existing():
        assert collections_by_events(vb) == wanted
        assert vb.collections.manifest == bucket.manifest
        for number in wanted:
            vb.documents.set(b"k", b"v", number)


class Killed(BaseException):
    """Ends the process like SIGKILL: no handler may catch it."""


@contextmanager
def dies_after(commits: int, monkeypatch: pytest.MonkeyPatch):
    """End the process before the commit after these."""
    left, write = [commits], Disk.write

    def counted(self: Disk, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write", counted)
        yield


@pytest.mark.parametrize("after", [(8, 9), (9,), ()], ids=["a collection is made", "one is dropped", "all are"])
@pytest.mark.parametrize("commits", range(5))
def test_a_change_that_was_begun_reaches_every_vbucket(
    tmp_path: Path, monkeypatch, after: tuple[int, ...], commits: int
):
    bucket = open_bucket(tmp_path, OPTIONS, VBUCKETS)
    bucket.create_all(VbucketState.ACTIVE)
    bucket.apply_manifest(manifest(1, 8, 9) if after != (8, 9) else manifest(1, 8))
    with dies_after(commits, monkeypatch), suppress(Killed):
        bucket.apply_manifest(manifest(2, *after))
    bucket.abandon()
    with open_bucket(tmp_path, OPTIONS, VBUCKETS) as bucket:
        assert bucket.manifest.uid == (2 if commits else 1)
        check(bucket)
    with open_bucket(tmp_path, OPTIONS, VBUCKETS) as bucket:
        check(bucket)


def test_a_second_crash_while_the_change_is_completed_does_no_harm(tmp_path: Path, monkeypatch):
    bucket = open_bucket(tmp_path, OPTIONS, VBUCKETS)
    bucket.create_all(VbucketState.ACTIVE)
    with dies_after(1, monkeypatch), pytest.raises(Killed):
        bucket.apply_manifest(manifest(1, 8, 9))
    bucket.abandon()
    for commits in range(3):
        with dies_after(commits, monkeypatch), pytest.raises(Killed):
            open_bucket(tmp_path, OPTIONS, VBUCKETS)
    with open_bucket(tmp_path, OPTIONS, VBUCKETS) as bucket:
        assert set(bucket.manifest.collections) == {0, 8, 9}
        check(bucket)


def change_for_ever(path: Path, ready: int) -> None:
    bucket = open_bucket(path, StoreOptions(flush_delay_s=0.001, flush_bytes=512), VBUCKETS)
    for uid in range(bucket.manifest.uid + 1, 10**6):
        bucket.apply_manifest(manifest(uid, *range(8 + uid % 3, 12 + uid % 5)))
        os.write(ready, b".")


def test_sigkill_at_any_instant_of_a_change(tmp_path: Path):
    with open_bucket(tmp_path, OPTIONS, VBUCKETS) as bucket:
        bucket.create_all(VbucketState.ACTIVE)
        check(bucket)
    choice = random.Random(1)
    for _ in range(6):
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            change_for_ever(tmp_path, theirs)
        assert os.read(ours, 1) == b"."
        time.sleep(choice.random() * 0.03)  # a random instant
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
        bucket = open_bucket(tmp_path, OPTIONS, VBUCKETS)
        check(bucket)
        bucket.abandon()
