"""Compaction and the expiry pager beside readers and writers: they work on what is on disk while life goes on."""

from __future__ import annotations

import threading

import pytest
from store_support import SMALL, Clock, changes, open_bucket

from upriver.errors import DiskFull, KeyNotFound
from upriver.model import VbucketState
from upriver.store import compaction, expiry

KEYS = [b"key-%d" % number for number in range(60)]


def lock_is_free(shared) -> bool:
    """As another thread sees it."""
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
    """Let ``life`` happen in the middle of the work, and note whether the lock was free then."""
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
        vb.set_many(KEYS, [b"1"] * 60)
        vb.set_many(KEYS[:40], [b"2"] * 40)
        vb.delete_many(KEYS[:30])
        vb.set(b"last", b"x")

        def life() -> bool:
            vb.set_many(KEYS[:5], [b"3"] * 5)
            vb.delete_many(KEYS[5:10] + KEYS[50:55])
            return lock_is_free(vb.shared)

        free = during(monkeypatch, compaction, "rewrite_table", life)
        bucket.compact(0, drop_deletes=True)
        assert free == [True]
        assert vb.purge_seqno == 130
        for _ in range(2):
            assert [vb.get(key).value for key in KEYS[:5]] == [b"3"] * 5
            assert all(vb.get_meta(key).deleted for key in KEYS[5:10] + KEYS[50:55])
            for key in KEYS[10:30]:
                with pytest.raises(KeyNotFound):
                    vb.get_meta(key)
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
        vb.set_many(KEYS, [b"1"] * 60, 8)
        vb.set_many(KEYS, [b"1"] * 60)

        def life() -> bool:
            vb.apply_manifest(type(bucket.manifest).parse(manifest % (2, "")))
            return True

        during(monkeypatch, compaction, "rewrite_table", life)
        bucket.compact(0)
        assert vb.erasing
        monkeypatch.undo()
        bucket.compact(0)
        assert not vb.erasing
        assert vb.content.records == 60 + 2  # and the two events


def test_the_pager_lets_others_write_and_leaves_what_was_renewed(tmp_path, monkeypatch):
    clock = Clock()
    with open_bucket(tmp_path, SMALL, now_ns=clock) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.set_many(KEYS, [b"1"] * 60, expiry=10)
        clock.seconds += 11

        def life() -> bool:
            vb.set(KEYS[0], b"2", expiry=10)
            return lock_is_free(vb.shared)

        free = during(monkeypatch, expiry, "_due", life)
        assert bucket.run_expiry_pager() == 59
        assert free == [True]
        assert vb.get(KEYS[0]).value == b"2"
        assert (vb.expired_count, bucket.stats()["expired"]) == (59, 59)
        clock.seconds += 11
        assert bucket.run_expiry_pager() == 1
        assert vb.expired_count == 60


def test_a_pager_that_failed_comes_back(tmp_path, monkeypatch):
    clock = Clock()
    with open_bucket(tmp_path, SMALL, now_ns=clock) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.set_many(KEYS, [b"1"] * 60, expiry=10)
        clock.seconds += 11

        def unwilling() -> bool:
            raise DiskFull("no")

        during(monkeypatch, expiry, "_due", unwilling)
        with pytest.raises(DiskFull):
            bucket.run_expiry_pager()
        monkeypatch.undo()
        assert bucket.run_expiry_pager() == 60
