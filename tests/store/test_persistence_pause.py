"""Stopping persistence: nothing becomes durable until it is started again."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from tests.store.store_support import SMALL, open_bucket
from upriver.errors import TemporaryFailure
from upriver.model import VbucketState
from upriver.store import Durability

BACKGROUND = replace(SMALL, background=True, flush_delay_s=0.0, durability=Durability.LAZY)


@pytest.fixture
def bucket(tmp_path):
    with open_bucket(tmp_path, BACKGROUND) as opened:
        opened.create_all()
        yield opened


def test_a_crash_while_persistence_is_stopped_loses_exactly_what_was_written_since(tmp_path):
    bucket = open_bucket(tmp_path, BACKGROUND)
    bucket.create_all()
    bucket.vbucket(0).documents.set(b"before", b"1")
    bucket.flush()
    assert bucket.stop_persistence()
    bucket.vbucket(0).documents.set(b"after", b"2")
    bucket.set_state(1, VbucketState.REPLICA)
    bucket.abandon()
    with open_bucket(tmp_path, BACKGROUND) as again:
        assert (again.vbucket(0).high_seqno, again.vbucket(0).persisted_seqno) == (1, 1)
        assert again.vbucket(1).state is VbucketState.ACTIVE


def test_starting_again_writes_everything_that_waits(bucket):
    bucket.stop_persistence()
    for number in range(100):
        bucket.vbucket(number % 4).documents.set(b"%d" % number, b"v")
    commits = bucket.stats()["commits"]
    assert [vb.persisted_seqno for vb in bucket.existing()] == [0, 0, 0, 0]
    assert bucket.start_persistence()
    assert bucket.wait_for_room()
    bucket.flush()
    assert [vb.persisted_seqno for vb in bucket.existing()] == [25, 25, 25, 25]
    assert bucket.stats()["commits"] > commits


def test_the_background_thread_writes_by_itself_once_persistence_is_started(bucket):
    written: list[tuple[int, int]] = []
    bucket.stop_persistence()
    bucket.vbucket(2).documents.set(b"key", b"v")
    done = threading.Event()

    def persisted(told: list[tuple[int, int]]) -> None:
        written.extend(told)
        done.set()

    bucket.listeners.on_persisted = persisted
    bucket.start_persistence()
    assert done.wait(30)
    assert (2, 1) in written


def test_writers_get_a_temporary_failure_when_too_much_waits(bucket):
    bucket.stop_persistence()
    with pytest.raises(TemporaryFailure):
        _write_for_ever(bucket)
    assert bucket.dirty_bytes >= BACKGROUND.dirty_bytes
    bucket.start_persistence()
    assert bucket.wait_for_room()
    bucket.vbucket(0).documents.set(b"more", b"v")


def test_a_clean_shutdown_persists_everything_during_a_pause(tmp_path):
    with open_bucket(tmp_path, BACKGROUND) as bucket:
        bucket.create_all()
        bucket.stop_persistence()
        bucket.vbucket(3).documents.set(b"key", b"v")
    with open_bucket(tmp_path, BACKGROUND) as again:
        assert again.opened_clean
        assert again.vbucket(3).documents.get(b"key").value == b"v"


@pytest.mark.parametrize("work", ["flush", "compact"])
def test_work_that_needs_an_up_to_date_disk_is_refused(bucket, work):
    bucket.stop_persistence()
    with pytest.raises(TemporaryFailure, match="persistence is stopped"):
        getattr(bucket, work)()


def test_stopping_or_starting_twice_says_that_nothing_changed(bucket):
    assert not bucket.start_persistence()
    assert bucket.stop_persistence()
    assert not bucket.stop_persistence()
    assert bucket.stats()["paused"]
    assert bucket.start_persistence()
    assert not bucket.stats()["paused"]


def _write_for_ever(bucket):
    for number in itertools.count():
        bucket.vbucket(0).documents.set(b"%d" % number, bytes(4096))
