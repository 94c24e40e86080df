"""What clients of the KV operations may rely on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.store_support import SMALL, Clock, open_bucket
from tests.support.examples import examples
from upriver.errors import (
    BadDelta,
    InvalidArguments,
    InvalidCas,
    KeyExists,
    KeyNotFound,
    Locked,
    NotLocked,
    NotMyVbucket,
    NotStored,
    SyncWriteInProgress,
    TooBig,
)
from upriver.model import Datatype, VbucketState
from upriver.store import StoreOptions, WithMetaOption
from upriver.store import registers as k
from upriver.wire.packed import RecordKind, pack
from upriver.wire.values import deflate, join_xattrs, split_xattrs

NOW_NS = Clock()()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def bucket(tmp_path, clock):
    opened = open_bucket(tmp_path, now_ns=clock)
    yield opened
    opened.abandon()


@pytest.fixture
def vb(bucket):
    return bucket.set_state(0, VbucketState.ACTIVE)


def test_what_was_written_is_read_before_and_after_it_is_on_disk(bucket, vb):
    stored = vb.documents.set(b"k", b"value", flags=7)
    for _ in range(2):
        document = vb.documents.get(b"k")
        assert (document.value, document.flags, document.cas, document.seqno) == (b"value", 7, stored.cas, 1)
        bucket.flush()
        bucket.trim_memory()


def test_seqno_rev_and_cas_rise_with_every_change(vb):
    first = vb.documents.set(b"k", b"1")
    second = vb.documents.set(b"k", b"2")
    gone = vb.documents.delete(b"k")
    again = vb.documents.set(b"k", b"3")
    assert [s.seqno for s in (first, second, gone, again)] == [1, 2, 3, 4]
    assert first.cas < second.cas < gone.cas < again.cas
    assert vb.documents.get(b"k").rev_seqno == 4


def test_a_clock_that_jumps_back_does_not_take_the_cas_along(tmp_path, clock):
    bucket = open_bucket(tmp_path, now_ns=clock)
    before = bucket.set_state(0, VbucketState.ACTIVE).documents.set(b"k", b"1").cas
    bucket.close()
    clock.seconds -= 86400
    bucket = open_bucket(tmp_path, now_ns=clock)
    assert bucket.vbucket(0).documents.set(b"k", b"2").cas > before
    bucket.abandon()


def test_cas_protects_a_write(vb):
    stored = vb.documents.set(b"k", b"1")
    with pytest.raises(KeyExists):
        vb.documents.set(b"k", b"2", cas=stored.cas + 1)
    with pytest.raises(KeyNotFound):
        vb.documents.set(b"other", b"2", cas=stored.cas)
    assert vb.documents.set(b"k", b"2", cas=stored.cas).seqno == 2


def test_add_needs_nothing_and_replace_needs_something(vb):
    with pytest.raises(KeyNotFound):
        vb.documents.replace(b"k", b"1")
    vb.documents.add(b"k", b"1")
    with pytest.raises(KeyExists):
        vb.documents.add(b"k", b"2")
    vb.documents.replace(b"k", b"2")
    vb.documents.delete(b"k")
    vb.documents.add(b"k", b"3")
    assert vb.documents.get(b"k").value == b"3"


def test_a_deleted_document_is_a_tombstone_with_a_time(vb, clock):
    vb.documents.set(b"k", b"1")
    vb.documents.delete(b"k")
    with pytest.raises(KeyNotFound):
        vb.documents.get(b"k")
    meta = vb.documents.get_meta(b"k")
    assert (meta.deleted, meta.delete_time, meta.rev_seqno) == (True, clock.seconds, 2)
    with pytest.raises(KeyNotFound):
        vb.documents.delete(b"k")


def test_append_and_prepend(vb):
    with pytest.raises(NotStored):
        vb.documents.append(b"k", b"x")
    vb.documents.set(b"k", b"b", flags=3)
    vb.documents.append(b"k", b"c")
    vb.documents.prepend(b"k", b"a")
    assert (vb.documents.get(b"k").value, vb.documents.get(b"k").flags) == (b"abc", 3)


def test_appending_to_a_compressed_value_gives_a_plain_one(vb):
    vb.documents.set(b"k", deflate(b"hello"), datatype=Datatype.SNAPPY)
    assert vb.documents.get(b"k").datatype == Datatype.SNAPPY
    vb.documents.append(b"k", b" world")
    assert (vb.documents.get(b"k").value, vb.documents.get(b"k").datatype) == (b"hello world", 0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.booleans())
@settings(max_examples=examples(50), deadline=None)
def test_counters_wrap_upwards_and_stop_at_zero_downwards(tmp_path_factory, start, delta, decrement):
    with open_bucket(tmp_path_factory.mktemp("c")) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.documents.counter(b"k", 1, initial=start)
        number, _ = vb.documents.counter(b"k", delta, decrement=decrement)
        expected = max(0, start - delta) if decrement else (start + delta) % 2**64
        assert number == expected
        assert vb.documents.get(b"k").value == b"%d" % expected


def test_a_counter_counts_only_numbers_and_is_created_only_on_request(vb):
    with pytest.raises(KeyNotFound):
        vb.documents.counter(b"k", 1, create=False)
    vb.documents.set(b"k", b"12 apples")
    with pytest.raises(BadDelta):
        vb.documents.counter(b"k", 1)


def test_json_is_detected_and_other_bits_are_kept(vb):
    for value, datatype in [(b'{"a":1}', 1), (b"[1,2", 0), (b"plain", 0), (b"12", 1), (b"", 0)]:
        vb.documents.set(b"k", value)
        assert vb.documents.get(b"k").datatype == datatype, value
    blob = join_xattrs({"a": b"1"}, b"body")
    vb.documents.set(b"k", blob, datatype=Datatype.XATTR)
    assert (vb.documents.get(b"k").value, vb.documents.get(b"k").datatype) == (blob, Datatype.XATTR)
    for wrapped, bits in [(join_xattrs({"a": b"1"}, b"{}"), Datatype.XATTR), (deflate(b"[]"), Datatype.SNAPPY)]:
        vb.documents.set(b"k", wrapped, datatype=bits)
        assert (vb.documents.get(b"k").value, vb.documents.get(b"k").datatype) == (wrapped, bits | Datatype.JSON)


def test_only_system_xattrs_survive_a_deletion(vb):
    vb.documents.set(b"k", join_xattrs({"_sync": b"7", "user": b"8"}, b"body"), datatype=Datatype.XATTR)
    vb.documents.delete(b"k")
    meta = vb.documents.get_meta(b"k")
    assert split_xattrs(meta.value) == ({"_sync": b"7"}, b"")
    assert meta.datatype == Datatype.XATTR


def test_twenty_mebibytes_fit_and_one_byte_more_does_not(bucket, vb):
    value = bytes(20 << 20)
    vb.documents.set(b"k", value)
    bucket.flush()
    bucket.trim_memory()
    assert vb.documents.get(b"k").value == value
    with pytest.raises(TooBig):
        vb.documents.set(b"k", value + b"x")


def test_keys_have_limits(vb):
    vb.documents.set(b"k" * 250, b"")
    for key in (b"", b"k" * 251):
        with pytest.raises(InvalidArguments):
            vb.documents.set(key, b"")


def test_a_locked_document_opens_only_for_its_holder(vb, clock):
    vb.documents.set(b"k", b"1")
    held = vb.documents.lock(b"k", seconds=10)
    for refused in (
        lambda: vb.documents.set(b"k", b"2"),
        lambda: vb.documents.delete(b"k"),
        lambda: vb.documents.lock(b"k"),
    ):
        with pytest.raises(Locked):
            refused()
    assert vb.documents.get(b"k").value == b"1"
    vb.documents.set(b"k", b"2", cas=held.cas)
    with pytest.raises(NotLocked):
        vb.documents.unlock(b"k", held.cas)
    vb.documents.lock(b"k", seconds=10)
    clock.seconds += 11
    vb.documents.set(b"k", b"3")


def test_relative_and_absolute_expiry(vb, clock):
    vb.documents.set(b"rel", b"1", expiry=60)
    vb.documents.set(b"abs", b"1", expiry=clock.seconds + 60)
    vb.documents.set(b"past", b"1", expiry=clock.seconds - 5)
    assert vb.documents.get(b"rel").expiry == vb.documents.get(b"abs").expiry == clock.seconds + 60
    with pytest.raises(KeyNotFound):
        vb.documents.get(b"past")
    clock.seconds += 60
    before = vb.high_seqno
    with pytest.raises(KeyNotFound):
        vb.documents.get(b"rel")
    assert vb.high_seqno == before + 1
    assert vb.documents.get_meta(b"rel").expired
    vb.documents.add(b"abs", b"2")  # an expired document does not exist
    assert vb.documents.get(b"abs").value == b"2"


def test_touch_moves_the_expiry_and_is_a_change(vb, clock):
    vb.documents.set(b"k", b"1", expiry=10)
    assert vb.documents.touch(b"k", 100).seqno == 2
    assert vb.documents.get_and_touch(b"k", 200).expiry == clock.seconds + 200
    clock.seconds += 150
    assert vb.documents.get(b"k").value == b"1"


def test_a_bucket_may_limit_the_time_to_live(tmp_path, clock):
    options = StoreOptions(background=False, max_ttl_s=100)
    with open_bucket(tmp_path, options, now_ns=clock) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.documents.set(b"a", b"1")
        vb.documents.set(b"b", b"1", expiry=50)
        assert vb.documents.get(b"a").expiry == clock.seconds + 100
        assert vb.documents.get(b"b").expiry == clock.seconds + 50


def test_the_pager_expires_what_nobody_reads(bucket, vb, clock):
    vb.bulk.set_many([b"%d" % i for i in range(100)], [b"x"] * 100, expiry=60)
    vb.documents.set(b"stays", b"x")
    assert bucket.run_expiry_pager() == 0
    clock.seconds += 61
    assert bucket.run_expiry_pager() == 100
    assert vb.item_count == 1
    assert vb.high_seqno == 201
    assert bucket.run_expiry_pager() == 0


REV_WINS = [
    pytest.param({"rev_seqno": 3}, True, id="higher rev"),
    pytest.param({"rev_seqno": 1}, False, id="lower rev"),
    pytest.param({"cas": 1}, True, id="same rev, higher cas"),
    pytest.param({"cas": -1}, False, id="same rev, lower cas"),
    pytest.param({"expiry": 2_000_000_000}, True, id="same cas, later expiry"),
    pytest.param({"flags": 4}, True, id="same expiry, smaller flags"),
    pytest.param({"flags": 6}, False, id="same expiry, larger flags"),
    pytest.param({}, False, id="a full tie loses"),
]


@pytest.mark.parametrize(("change", "wins"), REV_WINS)
def test_conflicts_are_resolved_by_rev(vb, change, wins):
    vb.documents.set(b"k", b"old", flags=5)
    vb.documents.set(b"k", b"old", flags=5)
    here = vb.documents.get(b"k")
    meta = {
        "rev_seqno": change.get("rev_seqno", here.rev_seqno),
        "meta_cas": here.cas + change.get("cas", 0),
        "flags": change.get("flags", 5),
        "expiry": change.get("expiry", 0),
    }
    if wins:
        assert vb.with_meta.set(b"k", b"new", **meta).cas == meta["meta_cas"]
        assert vb.documents.get(b"k").value == b"new"
        assert vb.documents.get(b"k").rev_seqno == meta["rev_seqno"]
    else:
        with pytest.raises(KeyExists):
            vb.with_meta.set(b"k", b"new", **meta)


def test_conflicts_are_resolved_by_cas_on_lww_buckets(tmp_path):
    with open_bucket(tmp_path, StoreOptions(background=False, lww=True)) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        cas = vb.documents.set(b"k", b"old").cas
        with pytest.raises(InvalidArguments):
            vb.with_meta.set(b"k", b"new", rev_seqno=9, meta_cas=cas + 1)
        with pytest.raises(KeyExists):
            vb.with_meta.set(b"k", b"new", rev_seqno=99, meta_cas=cas - 1, options=WithMetaOption.FORCE_ACCEPT)
        vb.with_meta.set(b"k", b"new", rev_seqno=1, meta_cas=cas + 1, options=WithMetaOption.FORCE_ACCEPT)
        assert vb.documents.get(b"k").value == b"new"


def test_a_delete_with_meta_needs_no_document_and_raises_the_clock(vb):
    far = NOW_NS + 3_600 * 10**9
    vb.with_meta.delete(b"k", rev_seqno=10, meta_cas=far, delete_time=1234)
    meta = vb.documents.get_meta(b"k")
    assert (meta.deleted, meta.rev_seqno, meta.cas, meta.delete_time) == (True, 10, far, 1234)
    assert vb.documents.set(b"other", b"1").cas > far
    assert vb.documents.set(b"k", b"1").seqno == 3
    assert vb.documents.get(b"k").rev_seqno == 11


@pytest.mark.parametrize("cas", [(1 << 64) - 2, 1 << 63, NOW_NS + 4_000 * 10**9])
def test_a_cas_far_in_the_future_is_refused(vb, cas):
    """The CAS clock follows the documents it sees: later writes would soon run out of CAS values."""
    with pytest.raises(InvalidCas) as refused:
        vb.with_meta.set(b"k", b"v", rev_seqno=1, meta_cas=cas)
    assert refused.value.status == 0x0F
    with pytest.raises(InvalidCas):
        vb.with_meta.delete(b"k", rev_seqno=1, meta_cas=cas)
    options = WithMetaOption.REGENERATE_CAS | WithMetaOption.SKIP_CONFLICT_RESOLUTION
    vb.with_meta.set(b"k", b"v", rev_seqno=1, meta_cas=cas, options=options)
    assert vb.documents.set(b"k", b"w").cas < NOW_NS + 10**9


def test_a_vbucket_that_has_a_document_with_a_future_cas_stays_writable(tmp_path):
    """Another cluster may have sent one, or an earlier version of this node accepted it."""
    poison = pack(RecordKind.MUTATION, b"\0poison", b"v", seqno=1, cas=(1 << 64) - 2)
    with open_bucket(tmp_path) as bucket:
        vb = bucket.set_state(0, VbucketState.REPLICA)
        vb.replication.begin_snapshot(1, 1)
        vb.replication.apply_records(poison)
        bucket.set_state(0, VbucketState.ACTIVE)
        assert vb.documents.get(b"poison").cas == (1 << 64) - 2
        cas = [vb.documents.set(key, b"w").cas for key in (b"poison", b"other", b"poison")]
        assert cas == sorted(set(cas))
        vb.registers[k.CAS] = (1 << 64) - 2  # as an earlier version kept it
    with open_bucket(tmp_path) as bucket:
        vb = bucket.vbucket(0)
        later = [vb.documents.set(key, b"w").cas for key in (b"poison", b"other", b"poison")]
        assert later == sorted({*later, *cas})[3:]
        vb.bulk.set_many([b"a", b"b"], [b"1", b"2"])


def test_a_revision_has_48_bits(vb):
    with pytest.raises(InvalidArguments, match="48 bits"):
        vb.with_meta.set(b"k", b"v", rev_seqno=1 << 48, meta_cas=77)


def test_a_prepared_write_is_invisible_until_it_is_committed(vb):
    vb.documents.set(b"k", b"old")
    prepared = vb.durable.prepare(b"k", b"new", level=1)
    assert vb.documents.get(b"k").value == b"old"
    with pytest.raises(SyncWriteInProgress):
        vb.documents.set(b"k", b"other")
    with pytest.raises(SyncWriteInProgress):
        vb.durable.prepare(b"k", b"other", level=1)
    assert (vb.max_visible_seqno, vb.high_prepared_seqno) == (1, 2)
    vb.durable.commit(b"k", 0, prepared.seqno)
    assert (vb.documents.get(b"k").value, vb.documents.get(b"k").rev_seqno, vb.documents.get(b"k").cas) == (
        b"new",
        2,
        prepared.cas,
    )
    vb.durable.prepare(b"k", b"", level=1, deleted=True)
    vb.durable.abort(b"k")
    assert vb.documents.get(b"k").value == b"new"
    vb.durable.prepare(b"k", b"", level=1, deleted=True)
    vb.durable.commit(b"k")
    with pytest.raises(KeyNotFound):
        vb.documents.get(b"k")
    assert vb.item_count == 0


def test_a_pending_write_survives_a_restart(tmp_path):
    with open_bucket(tmp_path) as bucket:
        prepared = bucket.set_state(0, VbucketState.ACTIVE).durable.prepare(b"k", b"new", level=1)
    with open_bucket(tmp_path) as bucket:
        vb = bucket.vbucket(0)
        with pytest.raises(SyncWriteInProgress):
            vb.documents.set(b"k", b"x")
        vb.durable.commit(b"k", 0, prepared.seqno)
        assert vb.documents.get(b"k").value == b"new"


def test_only_an_active_vbucket_serves_clients(bucket, vb):
    vb.documents.set(b"k", b"1")
    with pytest.raises(NotMyVbucket):
        bucket.vbucket(1)
    for state in (VbucketState.REPLICA, VbucketState.PENDING, VbucketState.DEAD):
        bucket.set_state(0, state)
        for refused in (
            lambda: vb.documents.get(b"k"),
            lambda: vb.documents.set(b"k", b"2"),
            lambda: vb.bulk.set_many([b"k"], [b"2"]),
        ):
            with pytest.raises(NotMyVbucket):
                refused()
    bucket.set_state(0, VbucketState.REPLICA)
    assert vb.documents.get_replica(b"k").value == b"1"


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=2000)), max_size=40))
@settings(max_examples=examples(25), deadline=None)
def test_bulk_writes_have_the_same_result_as_single_writes(tmp_path_factory, writes):
    with open_bucket(tmp_path_factory.mktemp("m"), SMALL) as bucket:
        one, many = bucket.set_state(0, VbucketState.ACTIVE), bucket.set_state(1, VbucketState.ACTIVE)
        for key, value in writes:
            one.documents.set(key, value)
        many.bulk.set_many([key for key, _ in writes], [value for _, value in writes])
        assert one.high_seqno == many.high_seqno
        assert one.item_count == many.item_count
        for key in {key for key, _ in writes}:
            left, right = one.documents.get(key), many.documents.get(key)
            assert (left.value, left.rev_seqno, left.seqno, left.datatype) == (
                right.value, right.rev_seqno, right.seqno, right.datatype,
            )  # fmt: skip


def test_a_random_key_is_a_live_one(bucket, vb):
    with pytest.raises(KeyNotFound):
        vb.documents.get_random()
    vb.bulk.set_many([b"%d" % i for i in range(50)], [b"x"] * 50)
    bucket.flush()
    vb.bulk.delete_many([b"%d" % i for i in range(49)])
    assert vb.documents.get_random().key == b"49"


def test_create_all_creates_every_vbucket(bucket):
    bucket.create_all()
    assert [vb.id for vb in bucket.existing()] == [0, 1, 2, 3]
    assert len({vb.uuid for vb in bucket.existing()}) == 4
    assert bucket.stats()["items"] == 0
