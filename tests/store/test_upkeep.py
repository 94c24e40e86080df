"""Compaction, the expiry pager and the flusher while others read and write, and when they fail."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.store.store_support import SMALL, Clock, changes, open_bucket
from upriver.errors import CorruptStore, DiskFull, KeyNotFound, TemporaryFailure
from upriver.model import VbucketState
from upriver.store import bucket as bucket_module
from upriver.store.collections.transition import Transition
from upriver.store.disk.file import Disk
from upriver.store.upkeep import compaction, expiry

KEYS = [b"key-%d" % number for number in range(60)]


def lock_is_free(shared) -> bool:
    """Whether the lock is free, as another thread sees it."""
    taken: list[bool] = []

    def ask() -> None:
        taken.append(shared.lock.acquire(timeout=0.5))
        if taken[0]:
            shared.lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return taken[0]


def during(monkeypatch, module, name, life) -> list[bool]:
    """Call ``life`` in the middle of the work, and note whether the lock was free then."""
    original = getattr(module, name)
    free: list[bool] = []

    def interrupted(*arguments):
        result = original(*arguments)
        if not free:
            free.append(life())
        return result

    monkeypatch.setattr(module, name, interrupted)
    return free


def test_a_compaction_lets_others_write_and_purges_only_what_was_old(tmp_path, monkeypatch):
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.bulk.set_many(KEYS, [b"1"] * 60)
        vb.bulk.set_many(KEYS[:40], [b"2"] * 40)
        vb.bulk.delete_many(KEYS[:30])
        vb.documents.set(b"last", b"x")

        def life() -> bool:
            vb.bulk.set_many(KEYS[:5], [b"3"] * 5)
            vb.bulk.delete_many(KEYS[5:10] + KEYS[50:55])
            return lock_is_free(vb.shared)

        free = during(monkeypatch, compaction, "rewrite_table", life)
        bucket.compact(0, drop_deletes=True)
        assert free == [True]
        assert vb.purge_seqno == 130
        for _ in range(2):
            assert [vb.documents.get(key).value for key in KEYS[:5]] == [b"3"] * 5
            assert all(vb.documents.get_meta(key).deleted for key in KEYS[5:10] + KEYS[50:55])
            for key in KEYS[10:30]:
                with pytest.raises(KeyNotFound):
                    vb.documents.get_meta(key)
            assert (vb.item_count, vb.tombstone_count) == (30 + 1 + 5 - 5, 10)
            bucket.flush()
            bucket.trim_memory()
            found = changes(vb.stream(0))
            assert len(found) == len({record.key for record in found}) == vb.item_count + 10
    with open_bucket(tmp_path) as bucket:
        assert len(changes(bucket.vbucket(0).stream(0))) == 41
        assert bucket.vbucket(0).tombstone_count == 10


def test_a_collection_dropped_during_a_compaction_is_erased_by_the_next(tmp_path, monkeypatch):
    manifest = '{"uid":"%x","scopes":[{"uid":"0","name":"_default","collections":[{"uid":"0","name":"_default"}%s]}]}'
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        bucket.apply_manifest(manifest % (1, ',{"uid":"8","name":"c"}'))
        vb.bulk.set_many(KEYS, [b"1"] * 60, 8)
        vb.bulk.set_many(KEYS, [b"1"] * 60)

        def life() -> bool:
            new = type(bucket.manifest).parse(manifest % (2, ""))
            vb.collections.apply_manifest(Transition(vb.collections.manifest, new))
            return True

        during(monkeypatch, compaction, "rewrite_table", life)
        bucket.compact(0)
        assert vb.erasing
        monkeypatch.undo()
        bucket.compact(0)
        assert not vb.erasing
        assert vb.content.records == 60 + 2  # and two system events


def test_the_pager_lets_others_write_and_leaves_what_was_renewed(tmp_path, monkeypatch):
    clock = Clock()
    with open_bucket(tmp_path, SMALL, now_ns=clock) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.bulk.set_many(KEYS, [b"1"] * 60, expiry=10)
        clock.seconds += 11

        def life() -> bool:
            vb.documents.set(KEYS[0], b"2", expiry=10)
            return lock_is_free(vb.shared)

        free = during(monkeypatch, expiry, "_due", life)
        assert bucket.run_expiry_pager() == 59
        assert free == [True]
        assert vb.documents.get(KEYS[0]).value == b"2"
        assert (vb.expired_count, bucket.stats()["expired"]) == (59, 59)
        clock.seconds += 11
        assert bucket.run_expiry_pager() == 1
        assert vb.expired_count == 60


def test_a_pager_that_failed_runs_again(tmp_path, monkeypatch):
    clock = Clock()
    with open_bucket(tmp_path, SMALL, now_ns=clock) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.bulk.set_many(KEYS, [b"1"] * 60, expiry=10)
        clock.seconds += 11

        def unwilling() -> bool:
            raise DiskFull("no")

        during(monkeypatch, expiry, "_due", unwilling)
        with pytest.raises(DiskFull):
            bucket.run_expiry_pager()
        monkeypatch.undo()
        assert bucket.run_expiry_pager() == 60


@pytest.mark.parametrize(("work", "run"), [("compact", "maintain"), ("expire_due", "run_expiry_pager")])
def test_upkeep_does_not_restore_a_vbucket_that_was_deleted_meanwhile(tmp_path, monkeypatch, work, run):
    monkeypatch.setattr(bucket_module, "wants_compaction", lambda _: True)
    with open_bucket(tmp_path) as bucket:
        for number in (0, 1, 2):
            bucket.set_state(number, VbucketState.ACTIVE).bulk.set_many(KEYS, [b"1"] * 60, expiry=10)

        def life() -> bool:
            bucket.delete_vbucket(1)
            return True

        during(monkeypatch, bucket_module, work, life)
        getattr(bucket, run)()
    with open_bucket(tmp_path) as bucket:
        assert [vbucket.id for vbucket in bucket.existing()] == [0, 2]


@pytest.mark.parametrize("run", ["maintain", "run_expiry_pager"])
def test_a_bucket_may_be_closed_during_upkeep(tmp_path, monkeypatch, run):
    monkeypatch.setattr(bucket_module, "wants_compaction", lambda _: True)
    for _ in range(5):
        clock = Clock()
        bucket = open_bucket(tmp_path, SMALL, now_ns=clock)
        for number in range(4):
            bucket.set_state(number, VbucketState.ACTIVE).bulk.set_many(KEYS, [b"1"] * 60, expiry=10)
        clock.seconds += 11
        begun = threading.Event()

        def work(bucket=bucket, begun=begun) -> int:
            begun.set()
            return [getattr(bucket, run)() for _ in range(50)][-1]

        with ThreadPoolExecutor() as aside:
            upkeep = aside.submit(work)
            begun.wait()
            bucket.close()
            assert upkeep.result() == 0  # it noticed that the bucket is closing
    with open_bucket(tmp_path) as bucket:
        assert len(list(bucket.existing())) == 4
        assert all(len(vbucket.failover_log) == 1 for vbucket in bucket.existing())  # every shutdown was clean


def test_what_a_failed_commit_did_not_write_is_written_by_the_next(tmp_path, monkeypatch):
    """A flush that returns without an error means that everything is on disk, whatever failed before."""
    with open_bucket(tmp_path, SMALL) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        before = vb.persisted_seqno

        def fail(*_):
            raise CorruptStore("an input/output error")

        monkeypatch.setattr(Disk, "write", fail)
        vb.bulk.set_many(KEYS, [b"1"] * 60)
        for _ in range(2):
            with pytest.raises(CorruptStore):
                bucket.flush()
            assert vb.persisted_seqno == before
        monkeypatch.undo()
    with open_bucket(tmp_path, SMALL) as bucket:
        assert bucket.vbucket(0).item_count == 60
        assert bucket.vbucket(0).documents.get(KEYS[-1]).value == b"1"


def test_a_flusher_that_died_is_reported(tmp_path, monkeypatch):
    bucket = open_bucket(tmp_path, replace(SMALL, background=True, flush_delay_s=0.0))
    vb = bucket.set_state(0, VbucketState.ACTIVE)
    died = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: died.set())

    def fail(*_):
        raise CorruptStore("an input/output error")

    monkeypatch.setattr(Disk, "write", fail)
    vb.documents.set(b"k", b"v")
    assert died.wait(60)
    with pytest.raises(TemporaryFailure, match="an input/output error"):
        vb.documents.set(b"k", b"w")
    assert vb.documents.get(b"k").value == b"v"
    bucket.abandon()
