"""The file: which files are refused, a full disk, the space that compaction reclaims, the time to open."""

from __future__ import annotations

import resource
from dataclasses import replace

import lmdb
import pytest

from tests.store.store_support import BACKGROUND, SMALL, Clock, changes, open_bucket
from upriver.errors import CorruptStore, DiskFull, KeyNotFound, NotOurFile, StoreError, TemporaryFailure
from upriver.model import VbucketState
from upriver.store import StoreOptions
from upriver.store.log.blocks import blocks_after


def filled(path, count=2000):
    with open_bucket(path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.bulk.set_many([b"%d" % i for i in range(count)], [bytes(200)] * count)
    return path / "data.mdb"


@pytest.mark.parametrize("left", [0, 1, 100, 4096, 8192, 20_000, 100_000])
def test_a_truncated_file_is_refused_and_the_other_buckets_open(tmp_path, left):
    file = filled(tmp_path / "broken")
    filled(tmp_path / "whole")
    with file.open("r+b") as handle:
        handle.truncate(left)
    with pytest.raises(CorruptStore, match=r"data\.mdb"):
        open_bucket(tmp_path / "broken")
    with open_bucket(tmp_path / "whole") as bucket:
        assert bucket.vbucket(0).item_count == 2000


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"SQLite format 3\0" * 1000)
    with pytest.raises(NotOurFile, match="move it away"):
        open_bucket(tmp_path)


def test_an_lmdb_file_of_another_program_is_refused(tmp_path):
    with lmdb.open(str(tmp_path), max_dbs=2) as env:
        tree = env.open_db(b"theirs")
        with env.begin(write=True, db=tree) as transaction:
            transaction.put(b"a", b"1")
    with pytest.raises(NotOurFile):
        open_bucket(tmp_path)


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "photos.zip").write_bytes(b"PK")
    with pytest.raises(NotOurFile, match=r"photos\.zip"):
        open_bucket(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotOurFile):
        open_bucket(tmp_path / "file")


def test_a_bucket_of_another_shape_is_refused(tmp_path):
    filled(tmp_path)
    with pytest.raises(NotOurFile, match="4 vbuckets"):
        open_bucket(tmp_path, vbuckets=8)


def test_a_bucket_has_one_owner(tmp_path):
    with open_bucket(tmp_path), pytest.raises(StoreError, match="another process"):
        open_bucket(tmp_path)
    open_bucket(tmp_path).close()


def damaged_meta(path, data):
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True, db=env.open_db(b"meta")) as transaction:
        transaction.put(b"v\0\0", data)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"state":9}'])
def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path, data):
    filled(tmp_path)
    damaged_meta(tmp_path, data)
    with pytest.raises(CorruptStore, match=r"data\.mdb"):
        open_bucket(tmp_path)


@pytest.fixture
def small_files():
    """Files cannot grow beyond 4 MiB while ``limit()`` holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_writes_and_loses_nothing(tmp_path, small_files):
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.bulk.set_many([b"a%d" % i for i in range(1000)], [b"safe"] * 1000)
        bucket.flush()
        small_files(4 << 20)
        vb.bulk.set_many([b"b%d" % i for i in range(8000)], [bytes(1000)] * 8000)
        with pytest.raises(DiskFull):
            bucket.flush()
        with pytest.raises(TemporaryFailure):
            vb.documents.set(b"c", b"1")
        assert vb.persisted_seqno == 1000
        assert vb.documents.get(b"a7").value == b"safe"
        assert len(vb.documents.get(b"b7").value) == 1000
        assert len(changes(vb.stream(0))) == 9000
        small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        bucket.flush()
        assert vb.persisted_seqno == 9000
        vb.documents.set(b"c", b"1")
    with open_bucket(tmp_path) as bucket:
        assert bucket.vbucket(0).item_count == 9001


def test_the_background_flusher_recovers_from_a_full_disk_by_itself(tmp_path, small_files):
    told = []
    with open_bucket(tmp_path, BACKGROUND) as bucket:
        bucket.listeners.on_trouble = told.append
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        small_files(1 << 20)
        vb.bulk.set_many([b"b%d" % i for i in range(4000)], [bytes(1000)] * 4000)
        with pytest.raises(DiskFull):
            bucket.flush()
        small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        assert bucket.wait_for_room(30)
        bucket.flush()
        assert vb.persisted_seqno == 4000
    assert [bool(reason) for reason in told] == [True, False]
    assert "data.mdb" in told[0]


def test_space_inside_the_file_is_used_when_the_disk_is_full(tmp_path, small_files):
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.bulk.set_many([b"%d" % i for i in range(4000)], [bytes(1000)] * 4000)
        bucket.flush()
        vb.bulk.delete_many([b"%d" % i for i in range(3900)])
        bucket.compact(drop_deletes=True)
        vb.documents.set(b"k", b"1")
        bucket.flush()
        small_files(bucket.disk_bytes)
        vb.bulk.set_many([b"%d" % i for i in range(1000)], [bytes(1000)] * 1000)
        bucket.flush()
        assert vb.persisted_seqno == vb.high_seqno


def test_a_map_that_is_full_is_a_full_disk(tmp_path):
    bucket = open_bucket(tmp_path, replace(SMALL, map_bytes=2 << 20))
    vb = bucket.set_state(0, VbucketState.ACTIVE)
    vb.bulk.set_many([b"b%d" % i for i in range(4000)], [bytes(1000)] * 4000)
    with pytest.raises(DiskFull):
        bucket.flush()
    assert len(vb.documents.get(b"b7").value) == 1000
    bucket.abandon()


def test_writes_are_held_back_when_the_disk_cannot_follow(tmp_path):
    with open_bucket(tmp_path, replace(SMALL, quota_bytes=8 << 20)) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)

        def write_on():
            for i in range(100):
                vb.bulk.set_many([b"%d-%d" % (i, j) for j in range(100)], [bytes(1000)] * 100)

        with pytest.raises(TemporaryFailure):
            write_on()
        assert bucket.dirty_bytes < 4 << 20
        room = []
        bucket.listeners.on_room = lambda: room.append(1)
        bucket.flush()
        assert room == [1]
        vb.documents.set(b"k", b"1")


def test_persisted_seqnos_are_told_after_the_commit(tmp_path):
    with open_bucket(tmp_path) as bucket:
        told = []
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        bucket.listeners.on_persisted = told.extend
        vb.documents.set(b"k", b"1")
        assert vb.persisted_seqno == 0
        bucket.flush()
        assert told == [(0, 1)]
        assert vb.persisted_seqno == 1


def test_compaction_gives_back_old_versions_and_old_tombstones(tmp_path):
    clock = Clock()
    with open_bucket(tmp_path, now_ns=clock) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        keys = [b"%d" % i for i in range(1000)]
        for _ in range(5):
            vb.bulk.set_many(keys, [bytes(200)] * 1000)
            bucket.flush()
        vb.bulk.delete_many(keys[:500])
        bucket.flush()
        bucket.compact()
        assert (vb.purge_seqno, vb.tombstone_count, vb.item_count) == (0, 500, 500)
        assert sum(block.data.size for _, block in blocks_after(vb, 0)) < 500 * 300 + 500 * 90
        clock.seconds += 3 * 86400 + 1
        bucket.compact()
        assert vb.purge_seqno == 5499  # the last change is never purged: the high seqno must not drop
        assert (vb.tombstone_count, vb.item_count, vb.high_seqno) == (1, 500, 5500)
        bucket.trim_memory()
        assert len(changes(vb.stream(0))) == 501
        assert vb.documents.get(b"700").rev_seqno == 5
        with pytest.raises(KeyNotFound):
            vb.documents.get_meta(b"7")
        vb.documents.set(b"7", b"again")
        assert vb.documents.get(b"7").rev_seqno > 6  # above every rev that a purged tombstone had


def test_blocks_of_many_small_commits_are_joined(tmp_path):
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        for i in range(200):
            vb.documents.set(b"%d" % i, b"x")
            bucket.flush()
        assert sum(1 for _ in blocks_after(vb, 0)) == 200
        bucket.compact()
        assert sum(1 for _ in blocks_after(vb, 0)) < 10
        bucket.trim_memory()
        assert [record.seqno for record in changes(vb.stream(0))] == list(range(1, 201))


def test_a_dead_version_stays_dead_when_its_successor_is_compacted_away(tmp_path):
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.bulk.set_many([b"%d" % i for i in range(13)], [bytes(200)] * 13)
        bucket.flush()
        for value in (b"1", b"2", b"3"):
            vb.documents.set(b"0", value * 4000)
            bucket.flush()
        vb.documents.delete(b"0")
        vb.documents.set(b"z", b"1")
        bucket.compact(drop_deletes=True)
        bucket.compact(drop_deletes=True)
        bucket.trim_memory()
        assert b"0" not in [record.key for record in changes(vb.stream(0))]


def test_a_deleted_vbucket_leaves_nothing_behind(tmp_path):
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        other = bucket.set_state(1, VbucketState.ACTIVE)
        for each in (vb, other):
            each.bulk.set_many([b"%d" % i for i in range(100)], [b"x"] * 100)
        uuid = vb.uuid
        bucket.delete_vbucket(0)
        again = bucket.set_state(0, VbucketState.ACTIVE)
        assert (again.high_seqno, again.item_count) == (0, 0)
        assert again.uuid != uuid
        assert changes(again.stream(0)) == []
        assert len(changes(other.stream(0))) == 100


def test_the_key_table_follows_when_memory_for_it_is_short(tmp_path):
    with open_bucket(tmp_path, replace(SMALL, quota_bytes=8 << 20)) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        for i in range(20):
            vb.bulk.set_many([b"%d-%d" % (i, j) for j in range(3000)], [b"x"] * 3000)
            bucket.flush()
        assert vb.indexed_seqno > 0
        vb.documents.set(b"0-0", b"y")
        assert vb.documents.get(b"0-0").rev_seqno == 2
        assert vb.item_count == 60_000
        bucket.flush()
    with open_bucket(tmp_path) as bucket:
        vb = bucket.vbucket(0)
        assert vb.documents.get(b"0-0").value == b"y"
        assert vb.documents.get(b"19-2999").rev_seqno == 1


@pytest.mark.parametrize("durability", ["fsync", "lazy"])
def test_both_durabilities_persist(tmp_path, durability):
    options = StoreOptions(background=False, durability=type(SMALL.durability)(durability))
    with open_bucket(tmp_path, options) as bucket:
        bucket.set_state(0, VbucketState.ACTIVE).documents.set(b"k", b"1")
    with open_bucket(tmp_path, options) as bucket:
        assert bucket.vbucket(0).documents.get(b"k").value == b"1"
