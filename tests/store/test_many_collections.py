"""As many collections as a real cluster may have, in many vbuckets: created at once and kept; one more is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.store_support import SMALL, changes, open_bucket
from tests.store.test_manifest_crash import collections_by_events, manifest
from upriver.errors import CannotApplyManifest, UnknownCollection
from upriver.model import VbucketState
from upriver.store import Bucket
from upriver.store.disk.file import meta_key

VBUCKETS, MOST = 32, 1000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many")
    with open_bucket(path, vbuckets=VBUCKETS) as bucket:
        bucket.create_all(VbucketState.ACTIVE)
        bucket.vbucket(1).documents.set(b"before", b"v")
        bucket.apply_manifest(manifest(1, *range(8, 8 + MOST)))
    return path


def meta_bytes(bucket: Bucket) -> int:
    disk = bucket._shared.disk
    with disk.read() as transaction:
        return len(transaction.get(meta_key(0), db=disk.meta))


def test_every_vbucket_has_all_collections(path: Path):
    with open_bucket(path, vbuckets=VBUCKETS) as bucket:
        for vb in bucket.existing():
            events = [record for record in changes(vb.stream(0, vb.high_seqno)) if record.head.kind == 3]
            seqnos = [record.seqno for record in events]
            assert seqnos == list(range(vb.high_seqno - MOST + 1, vb.high_seqno + 1))
            assert collections_by_events(vb) == {0, *range(8, 8 + MOST)}
            assert vb.collection_start_seqno(8) == seqnos[0]
            assert vb.collection_high_seqno(7 + MOST) == seqnos[-1]
            vb.documents.set(b"k", b"v", 7 + MOST)


def test_a_vbuckets_record_does_not_repeat_the_collections(path: Path):
    """The record is written with every commit."""
    with open_bucket(path, vbuckets=VBUCKETS) as bucket:
        assert meta_bytes(bucket) < len(bucket.manifest.to_json())
        assert len({id(vb.collections.manifest) for vb in bucket.existing()}) == 1


def test_one_more_collection_is_refused_and_fewer_are_accepted(path: Path):
    with open_bucket(path, vbuckets=VBUCKETS) as bucket:
        high = bucket.vbucket(0).high_seqno
        with pytest.raises(CannotApplyManifest, match="1001 collections besides _default; a bucket can have 1000"):
            bucket.apply_manifest(manifest(2, *range(8, 9 + MOST)))
        assert (bucket.manifest.uid, bucket.vbucket(0).high_seqno) == (1, high)


def test_unused_manifests_are_deleted(tmp_path: Path):
    with open_bucket(tmp_path, vbuckets=2) as bucket:
        bucket.create_all(VbucketState.ACTIVE)
        for uid in range(1, 9):
            bucket.apply_manifest(manifest(uid, *range(8, 8 + uid)))
        assert len(bucket._shared.manifests) <= 2
        bucket.set_state(1, VbucketState.REPLICA)
        bucket.apply_manifest(manifest(9))
        bucket.flush()
    with open_bucket(tmp_path, vbuckets=2) as bucket:
        assert [len(vb.collections.manifest.collections) for vb in bucket.existing()] == [1, 9]
        bucket.set_state(1, VbucketState.ACTIVE)
        assert collections_by_events(bucket.vbucket(1)) == {0}


def test_a_change_is_one_commit(tmp_path: Path):
    with open_bucket(tmp_path, vbuckets=VBUCKETS) as bucket:
        bucket.create_all(VbucketState.ACTIVE)
        before = bucket.stats()["commits"]
        bucket.apply_manifest(manifest(1, 8))
        assert bucket.stats()["commits"] == before + 1


def test_an_emptied_bucket_keeps_its_collections(tmp_path: Path):
    with open_bucket(tmp_path, SMALL, vbuckets=4) as bucket:
        bucket.create_all(VbucketState.ACTIVE)
        bucket.set_state(3, VbucketState.REPLICA)
        bucket.apply_manifest(manifest(1, 8))
        for number in range(100):
            bucket.vbucket(0).documents.set(b"k%d" % number, b"v" * 100, 8)
        bucket.flush()
        bucket.vbucket(1).documents.set(b"waits", b"v", 8)
        old, source = bucket.vbucket(0), bucket.vbucket(0).stream(0)
        uuid = old.uuid
        bucket.empty()
        assert source.poll().reason.value == "state changed"
        assert [vb.state for vb in bucket.existing()] == [VbucketState.ACTIVE] * 3 + [VbucketState.REPLICA]
        assert (bucket.dirty_bytes, bucket.stats()["items"]) == (0, 0)
        assert bucket.vbucket(0).uuid != uuid
        old.documents.set(b"k1", b"new", 8)  # the vbucket is still the same object
        assert bucket.vbucket(0).documents.get(b"k1", 8).value == b"new"
    with open_bucket(tmp_path, SMALL, vbuckets=4) as bucket:
        assert [record.key for record in changes(bucket.vbucket(0).stream(0, 2))][1:] == [b"k1"]
        assert bucket.vbucket(1).high_seqno == 1
        with pytest.raises(UnknownCollection):
            bucket.vbucket(0).documents.get(b"k", 9)
