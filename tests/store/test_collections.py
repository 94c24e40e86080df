"""The manifest, its rules, and its effect on vbuckets (docs/protocol/collections.md)."""

from __future__ import annotations

from struct import unpack

import orjson
import pytest

from tests.store.store_support import changes, open_bucket, records
from upriver.errors import CannotApplyManifest, InvalidArguments, KeyNotFound, UnknownCollection, UnknownScope
from upriver.model import VbucketState
from upriver.store import Manifest, ManifestEvent, Run, SnapshotStart
from upriver.store.log.blocks import blocks_after


def manifest(uid, *scopes, default=({"name": "_default", "uid": "0"},)):
    """Scopes as (name, id, collection, ...); a collection is (name, id) or a dict."""
    entries = [{"name": "_default", "uid": "0", "collections": list(default)}]
    for name, number, *collections in scopes:
        inside = [c if isinstance(c, dict) else {"name": c[0], "uid": c[1]} for c in collections]
        entries.append({"name": name, "uid": number, "collections": inside})
    return orjson.dumps({"uid": uid, "scopes": entries})


SHOP = ("shop", "8", ("orders", "9"), ("items", "a"))


@pytest.fixture
def bucket(tmp_path):
    opened = open_bucket(tmp_path)
    yield opened
    opened.abandon()


@pytest.fixture
def vb(bucket):
    return bucket.set_state(0, VbucketState.ACTIVE)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(b"{", id="not JSON"),
        pytest.param(b"[]", id="not an object"),
        pytest.param(b'{"uid":"1"}', id="no scopes"),
        pytest.param(b'{"uid":1,"scopes":[]}', id="uid is a number"),
        pytest.param(b'{"uid":"0x1","scopes":[]}', id="uid with 0x"),
        pytest.param(b'{"uid":"11112222333344445","scopes":[]}', id="uid too long"),
        pytest.param(b'{"uid":"1","scopes":[]}', id="no default scope"),
        pytest.param(b'{"uid":"1","scopes":[{"name":"_default","uid":"0"}]}', id="scope without collections"),
        pytest.param(manifest("1", ("s", "7")), id="reserved scope id"),
        pytest.param(manifest("1", ("s", "8", ("c", "1"))), id="reserved collection id"),
        pytest.param(manifest("1", ("$s", "8")), id="name begins with $"),
        pytest.param(manifest("1", ("s" * 252, "8")), id="name too long"),
        pytest.param(manifest("1", ("s p", "8")), id="name with a space"),
        pytest.param(manifest("1", ("s", "8"), ("s", "9")), id="scope name twice"),
        pytest.param(manifest("1", ("s", "8"), ("t", "8")), id="scope id twice"),
        pytest.param(manifest("1", ("s", "8", ("c", "9"), ("d", "9"))), id="collection id twice"),
        pytest.param(manifest("1", ("s", "8", ("c", "9"), ("c", "a"))), id="collection name twice"),
        pytest.param(manifest("1", ("s", "8", ("c", "0"))), id="id 0 elsewhere"),
        pytest.param(manifest("1", ("s", "8", {"name": "c", "uid": "9", "maxTTL": -1})), id="negative maxTTL"),
        pytest.param(manifest("1", ("s", "8", {"name": "c", "uid": "9", "maxTTL": 1 << 31})), id="maxTTL too large"),
        pytest.param(manifest("1", ("s", "8", {"name": "c", "uid": "9", "maxTTL": True})), id="maxTTL true"),
        pytest.param(manifest("1", ("s", "8", {"name": "c", "uid": "9", "flush_uid": "2"})), id="flush_uid ahead"),
        pytest.param(manifest("0", SHOP), id="uid 0 with content"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(bucket, broken):
    with pytest.raises(InvalidArguments):
        bucket.apply_manifest(broken)
    assert bucket.manifest == Manifest()


def test_a_manifest_survives_a_round_trip(bucket):
    whole = {"name": "c", "uid": "1c", "maxTTL": 72000, "history": True, "metered": True, "flush_uid": "9"}
    data = manifest("a2", ("s", "8", whole))
    bucket.apply_manifest(data)
    assert orjson.loads(bucket.manifest.to_json()) == orjson.loads(data)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(manifest("4", SHOP), id="lower uid"),
        pytest.param(manifest("5", ("shop", "8", ("orders", "9"))), id="same uid, other content"),
        pytest.param(manifest("6", ("store", "8", ("orders", "9"))), id="scope renamed"),
        pytest.param(manifest("6", ("shop", "8", ("sales", "9"))), id="collection renamed"),
        pytest.param(manifest("6", ("shop", "8"), ("other", "b", ("orders", "9"))), id="collection moved"),
    ],
)
def test_a_manifest_that_contradicts_the_current_one_cannot_be_applied(bucket, bad):
    bucket.apply_manifest(manifest("5", SHOP))
    with pytest.raises(CannotApplyManifest):
        bucket.apply_manifest(bad)
    bucket.apply_manifest(manifest("5", SHOP))


def test_scopes_and_collections_are_found_by_name(bucket):
    bucket.apply_manifest(manifest("5", SHOP))
    assert bucket.manifest.find_collection("shop.orders").id == 9
    assert bucket.manifest.find_collection(".").id == 0
    assert bucket.manifest.find_scope("shop").id == bucket.manifest.find_scope("shop.x").id == 8
    with pytest.raises(UnknownScope):
        bucket.manifest.find_collection("nope.orders")
    with pytest.raises(UnknownCollection):
        bucket.manifest.find_collection("shop.nope")
    with pytest.raises(InvalidArguments):
        bucket.manifest.find_collection("shop")


def system_events(vb, start=0):
    """(event, version, key, manifest uid) of the system events above ``start``."""
    found = [r for r in changes(vb.stream(start)) if r.head.kind == 3]
    return [(ManifestEvent(r.head.extra >> 8), r.head.extra & 0xFF, r.key, unpack(">Q", r.value[:8])[0]) for r in found]


def test_events_come_in_the_documented_order_and_only_the_last_has_the_new_uid(bucket, vb):
    bucket.apply_manifest(manifest("5", SHOP))
    assert system_events(vb) == [
        (ManifestEvent.CREATE_SCOPE, 0, b"shop", 0),
        (ManifestEvent.BEGIN_COLLECTION, 0, b"orders", 0),
        (ManifestEvent.BEGIN_COLLECTION, 0, b"items", 5),
    ]
    ttl = {"name": "users", "uid": "c", "maxTTL": 60}
    kept = {"name": "_default", "uid": "0", "maxTTL": 30}
    bucket.apply_manifest(manifest("6", ("crm", "b", ttl), default=(kept,)))
    assert system_events(vb, 3) == [
        (ManifestEvent.END_COLLECTION, 0, b"", 5),
        (ManifestEvent.END_COLLECTION, 0, b"", 5),
        (ManifestEvent.CREATE_SCOPE, 0, b"crm", 5),
        (ManifestEvent.BEGIN_COLLECTION, 1, b"users", 5),
        (ManifestEvent.MODIFY_COLLECTION, 1, b"_default", 5),
        (ManifestEvent.DROP_SCOPE, 0, b"", 6),
    ]


def test_the_value_of_an_event_is_uid_scope_collection_ttl(bucket, vb):
    bucket.apply_manifest(manifest("7", ("s", "8", {"name": "c", "uid": "9", "maxTTL": 60})))
    begin = changes(vb.stream(0))[-1]
    assert begin.value == bytes.fromhex("000000000000000700000008000000090000003c")
    assert begin.head.collection_id == 9


def test_documents_of_collections_are_kept_apart_and_counted(bucket, vb):
    bucket.apply_manifest(manifest("5", SHOP))
    vb.documents.set(b"k", b"default")
    vb.documents.set(b"k", b"order", 9)
    vb.documents.set(b"l", b"order", 9)
    assert (vb.documents.get(b"k").value, vb.documents.get(b"k", 9).value) == (b"default", b"order")
    assert (vb.collection_item_count(0), vb.collection_item_count(9), vb.item_count) == (1, 2, 3)
    assert (vb.collection_high_seqno(0), vb.collection_high_seqno(9), vb.collection_high_seqno(10)) == (4, 6, 3)
    with pytest.raises(UnknownCollection):
        vb.documents.set(b"k", b"x", 77)


def test_a_dropped_collection_is_gone_at_once_and_erased_later(bucket, vb):
    bucket.apply_manifest(manifest("5", SHOP))
    keys = [b"%d" % i for i in range(500)]
    vb.bulk.set_many(keys, [bytes(200)] * 500, 9)
    vb.documents.set(b"stays", b"1")
    bucket.flush()
    bucket.apply_manifest(manifest("6", ("shop", "8", ("items", "a"))))
    with pytest.raises(UnknownCollection):
        vb.documents.get(b"1", 9)
    bucket.trim_memory()
    assert [r.key for r in changes(vb.stream(0)) if r.head.kind == 0] == [b"stays"]
    assert vb.item_count == 1
    before = sum(block.data.size for _, block in blocks_after(vb, 0))
    assert bucket.maintain() == 0
    after = sum(block.data.size for _, block in blocks_after(vb, 0))
    assert after < before / 10
    assert [r.key for r in changes(vb.stream(0)) if r.head.kind == 0] == [b"stays"]
    assert vb.documents.get(b"stays").value == b"1"


def test_a_flushed_collection_begins_anew_with_the_same_id(bucket, vb):
    bucket.apply_manifest(manifest("5", SHOP))
    vb.documents.set(b"k", b"1", 9)
    flushed = {"name": "orders", "uid": "9", "flush_uid": "6"}
    bucket.apply_manifest(manifest("6", ("shop", "8", flushed, ("items", "a"))))
    with pytest.raises(KeyNotFound):
        vb.documents.get(b"k", 9)
    assert vb.collection_item_count(9) == 0
    vb.documents.add(b"k", b"2", 9)
    assert vb.documents.get(b"k", 9).value == b"2"
    bucket.compact()
    assert vb.documents.get(b"k", 9).value == b"2"
    assert vb.item_count == 1


def test_the_default_collection_can_be_dropped(bucket, vb):
    vb.documents.set(b"k", b"1")
    bucket.apply_manifest(manifest("1", default=()))
    with pytest.raises(UnknownCollection):
        vb.documents.get(b"k")


def test_collections_survive_a_restart(tmp_path):
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        bucket.apply_manifest(manifest("5", SHOP))
        vb.documents.set(b"k", b"1", 9)
    with open_bucket(tmp_path) as bucket:
        assert bucket.manifest.uid == 5
        vb = bucket.vbucket(0)
        assert vb.documents.get(b"k", 9).value == b"1"
        bucket.apply_manifest(manifest("6"))
        assert system_events(vb, 4)[-1] == (ManifestEvent.DROP_SCOPE, 0, b"", 6)


def test_max_ttl_of_a_collection_caps_its_documents(bucket, vb):
    bucket.apply_manifest(manifest("7", ("s", "8", {"name": "c", "uid": "9", "maxTTL": 60})))
    vb.documents.set(b"k", b"1", 9)
    vb.documents.set(b"l", b"1")
    assert 0 < vb.documents.get(b"k", 9).expiry - vb.shared.now_s <= 60
    assert vb.documents.get(b"l").expiry == 0


def test_a_replica_learns_its_collections_from_the_stream(bucket, vb, tmp_path):
    bucket.apply_manifest(manifest("5", SHOP))
    vb.documents.set(b"k", b"1", 9)
    with open_bucket(tmp_path / "replica") as other:
        replica = other.set_state(0, VbucketState.REPLICA)
        follow(vb.stream(0), replica)
        assert replica.documents.get_replica(b"k", 9).value == b"1"
        assert replica.collections.manifest.to_json() == bucket.manifest.to_json()
        bucket.apply_manifest(manifest("6", ("shop", "8", ("items", "a"))))
        follow(vb.stream(replica.high_seqno), replica)
        with pytest.raises(UnknownCollection):
            replica.documents.get_replica(b"k", 9)
        assert replica.rollback(4) == 4
        assert replica.documents.get_replica(b"k", 9).value == b"1"
        assert replica.collections.manifest.uid == 5


def follow(source, replica):
    """Replicate what the source has now."""
    while (event := source.poll()) is not None:
        if isinstance(event, SnapshotStart):
            replica.replication.begin_snapshot(event.start, event.end, event.flags)
        elif isinstance(event, Run):
            assert list(records(event))
            replica.replication.apply_records(bytes(event.data))


def test_a_promoted_vbucket_catches_up_with_the_manifest(bucket, vb):
    bucket.set_state(1, VbucketState.REPLICA)
    bucket.apply_manifest(manifest("5", SHOP))
    assert bucket.vbucket(1).high_seqno == 0
    promoted = bucket.set_state(1, VbucketState.ACTIVE)
    assert promoted.high_seqno == 3
    promoted.documents.set(b"k", b"1", 9)
    late = bucket.set_state(2, VbucketState.ACTIVE)
    assert late.collection_ids() == [0, 9, 10]
