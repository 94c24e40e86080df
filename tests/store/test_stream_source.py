"""Snapshots as a producer sends them: complete, in order, with correct markers (docs/protocol/snapshots.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.store_support import SMALL, changes, events, markers, open_bucket, records
from tests.support.examples import examples
from upriver.model import VbucketState
from upriver.store import End, EndReason, OsoEnd, OsoStart, Run, SnapshotStart, follow, live_after

FIRST_MEMORY, MORE_MEMORY, DISK = 0x05, 0x01, 0x06
LARGE = bytes(15_000)  # a few of them exceed one step of a scan
ROOMY = replace(SMALL, checkpoint_bytes=1 << 20)


@pytest.fixture
def bucket(tmp_path):
    opened = open_bucket(tmp_path, ROOMY)
    yield opened
    opened.abandon()


@pytest.fixture
def vb(bucket):
    return bucket.set_state(0, VbucketState.ACTIVE)


def to_disk(bucket):
    bucket.flush()
    bucket.trim_memory()


def seqnos(source):
    return [record.seqno for record in changes(source)]


def test_a_fresh_stream_begins_at_zero_and_continues_without_new_checkpoints(vb):
    source = vb.stream(0)
    assert source.poll() is None
    vb.documents.set(b"a", b"1")
    vb.documents.set(b"b", b"1")
    assert markers(source) == [(0, 2, FIRST_MEMORY)]
    vb.documents.set(b"c", b"1")
    assert markers(source) == [(3, 3, MORE_MEMORY)]


def test_a_key_written_twice_before_it_is_read_is_sent_once(vb):
    for value in (b"1", b"2", b"3"):
        vb.documents.set(b"a", value)
    vb.documents.set(b"b", b"x")
    assert [(r.seqno, r.key, r.value) for r in changes(vb.stream(0))] == [(3, b"a", b"3"), (4, b"b", b"x")]


def test_what_was_announced_is_not_deduplicated_away_later(vb):
    vb.documents.set(b"a", b"old")
    source = vb.stream(0)
    marker = source.poll()
    vb.documents.set(b"a", b"new")
    assert isinstance(marker, SnapshotStart)
    assert marker.end == 1
    assert [record.value for record in records(source.poll())] == [b"old"]
    assert [(r.seqno, r.value) for r in changes(source)] == [(2, b"new")]


def stopped_inside_a_snapshot(vb, between):
    """A reader of 0..6 that stopped at 4 and lacks the version at 2, which the one at 6 replaced."""
    other = vb.stream(0)
    vb.documents.set(b"a", b"1")
    vb.documents.set(b"e", b"2")
    changes(other)
    vb.documents.set(b"a", b"3")
    vb.documents.set(b"b", b"4")
    between()
    changes(other)
    vb.documents.set(b"e", b"6")
    changes(other)
    return vb.stream(4, snap_start=0, snap_end=6)


def test_a_reader_that_stopped_inside_a_snapshot_gets_one_that_reaches_its_end(vb):
    source = stopped_inside_a_snapshot(vb, lambda: vb.documents.set(b"c", b"5"))
    assert source.poll()[:3] == (0, 6, FIRST_MEMORY)
    assert seqnos(source) == [5, 6]


def test_a_reader_that_stopped_inside_a_snapshot_is_not_consistent_before_its_end(bucket, vb):
    """A durable write keeps the segments around it apart; a marker that ends at 5 would be wrong."""
    source = stopped_inside_a_snapshot(vb, lambda: vb.durable.prepare(b"c", b"5", level=1))
    assert source.poll() is None
    bucket.flush()
    assert source.poll()[:3] == (0, 6, DISK)
    assert seqnos(source) == [5, 6]


def test_a_slow_reader_gets_in_one_snapshot_what_a_fast_one_got_in_many(vb):
    fast, slow = vb.stream(0), vb.stream(0)
    for value in (b"1", b"2", b"3"):
        vb.documents.set(b"a", value)
        vb.documents.set(b"k" + value, value)
        changes(fast)
    found = events(slow)
    assert found[0][:3] == (0, 6, FIRST_MEMORY)
    assert [record.seqno for record in found[1]] == [2, 4, 5, 6]
    assert len(found) == 2
    assert markers(vb.stream(3)) == [(3, 6, FIRST_MEMORY)]


def test_a_source_is_handed_over_only_when_the_next_snapshot_is_all_that_the_reader_lacks(vb):
    woken = []
    source, other = vb.stream(0, wake=lambda: woken.append(1)), vb.stream(0)
    assert source.hand_over() is None  # the first marker must begin where the reader's snapshot began
    vb.documents.set(b"a", b"1")
    changes(source)
    assert source.hand_over() == 1
    vb.documents.set(b"b", b"2")
    assert not woken
    changes(other)
    vb.documents.set(b"c", b"3")
    assert live_after(vb, 1) is None  # there are two snapshots
    source.take_back(0, 1)
    assert seqnos(source) == [2, 3]
    vb.documents.set(b"d", b"4")
    assert source.hand_over() is None
    assert seqnos(source) == [4]
    assert source.hand_over() == 4
    vb.documents.set(b"e", b"5")
    live = live_after(vb, 4)
    assert (live.first, live.last, live.begins_checkpoint) == (5, 5, False)
    assert live_after(vb, 5) is None
    source.take_back(live.first, live.last)
    assert source.poll() is None
    woken.clear()
    vb.documents.set(b"f", b"6")
    assert woken == [1]
    assert seqnos(source) == [6]


def test_a_slow_readers_snapshot_still_ends_where_its_stream_does(vb):
    fast = vb.stream(0)
    for value in (b"1", b"2", b"3"):
        vb.documents.set(b"a", value)
        changes(fast)
    assert seqnos(vb.stream(0, 2)) == [2]


def test_prepares_and_commits_are_never_left_out_of_a_slow_readers_snapshots(vb):
    fast = vb.stream(0)
    steps = [
        lambda: vb.documents.set(b"a", b"1"),
        lambda: vb.documents.set(b"a", b"2"),
        lambda: vb.durable.prepare(b"a", b"3", level=1),
        lambda: vb.durable.commit(b"a"),
        lambda: vb.documents.set(b"a", b"5"),
        lambda: vb.durable.prepare(b"a", b"6", level=1),
        lambda: vb.durable.abort(b"a"),
        lambda: vb.documents.set(b"a", b"8"),
        lambda: vb.documents.set(b"a", b"9"),
    ]
    for step in steps:
        step()
        changes(fast)
    slow = vb.stream(0)
    assert [record.seqno for record in changes(slow)] == [2, 3, 4, 5, 6, 7, 9]


def test_the_marker_of_a_reader_that_is_behind_says_what_was_visible_at_its_end(vb):
    fast = vb.stream(0)
    vb.documents.set(b"a", b"1")
    vb.durable.prepare(b"b", b"2", level=1)
    changes(fast)
    vb.documents.set(b"c", b"3")
    changes(fast)
    assert [(e.end, e.max_visible) for e in events(vb.stream(0)) if isinstance(e, SnapshotStart)] == [(2, 1), (3, 3)]


def test_disk_then_memory_without_a_gap_or_a_repeat(bucket, vb):
    vb.bulk.set_many([b"%d" % i for i in range(500)], [b"x" * 100] * 500)
    to_disk(bucket)
    source = vb.stream(0)
    assert isinstance(source.poll(), SnapshotStart)
    assert source.backfilling
    vb.documents.set(b"5", b"newer")
    vb.documents.set(b"new", b"1")
    found = events(source)
    assert [e for e in found if isinstance(e, SnapshotStart)] == [
        SnapshotStart(501, 502, FIRST_MEMORY, 502, 502, 0, 0, 0)
    ]
    assert [r.seqno for e in found if isinstance(e, list) for r in e] == list(range(1, 503))


def test_the_disk_marker_ends_at_the_files_high_seqno(bucket, vb):
    vb.bulk.set_many([b"%d" % i for i in range(10)], [b"x"] * 10)
    to_disk(bucket)
    vb.documents.set(b"memory", b"x")
    assert markers(vb.stream(0)) == [(0, 10, DISK), (11, 11, FIRST_MEMORY)]
    assert markers(vb.stream(4, snap_start=2, snap_end=8)) == [(2, 10, DISK), (11, 11, FIRST_MEMORY)]


def test_the_disk_has_only_the_latest_version_of_each_key(bucket, vb):
    for round_ in range(4):
        vb.bulk.set_many([b"%d" % i for i in range(50)], [b"%d" % round_] * 50)
        bucket.flush()
    vb.documents.delete(b"7")
    to_disk(bucket)
    found = changes(vb.stream(0))
    assert [record.seqno for record in found] == [*range(151, 158), *range(159, 202)]
    assert found[-1].key == b"7"
    assert found[-1].head.kind == 1


def test_a_stream_from_the_middle_gets_only_what_it_lacks(bucket, vb):
    vb.bulk.set_many([b"%d" % i for i in range(300)], [b"x" * 50] * 300)
    assert seqnos(vb.stream(250)) == list(range(251, 301))
    to_disk(bucket)
    assert seqnos(vb.stream(250)) == list(range(251, 301))


def test_a_reader_that_fell_behind_reads_from_disk_and_then_from_memory_again(bucket, vb):
    source = vb.stream(0)
    vb.documents.set(b"a", b"1")
    changes(source)
    vb.bulk.set_many([b"%d" % i for i in range(20)], [b"x"] * 20)
    to_disk(bucket)
    vb.documents.set(b"b", b"1")
    assert markers(source) == [(2, 21, DISK), (22, 22, FIRST_MEMORY)]


def test_memory_checkpoints_are_bounded_over_the_whole_bucket(tmp_path):
    options = replace(SMALL, quota_bytes=8 << 20, checkpoint_bytes=64 << 10)
    with open_bucket(tmp_path, options) as bucket:
        vbuckets = [bucket.set_state(number, VbucketState.ACTIVE) for number in range(4)]
        sources = [vb.stream(0) for vb in vbuckets]
        for i in range(60):
            for vb in vbuckets:
                vb.bulk.set_many([b"%d-%d" % (i, j) for j in range(100)], [bytes(700)] * 100)
            bucket.flush()
        assert bucket.memory_bytes < 8 << 20
        for source in sources:
            assert seqnos(source) == list(range(1, 6001))


def test_a_document_larger_than_a_checkpoint_is_streamed_like_any_other(bucket, vb):
    source = vb.stream(0)
    for size in (3 << 20, 10, 2 << 20):
        vb.documents.set(b"k%d" % size, bytes(size))
        assert [len(record.value) for record in changes(source)] == [size]
    to_disk(bucket)
    assert [len(record.value) for record in changes(vb.stream(0))] == [3 << 20, 10, 2 << 20]


def test_a_stream_ends_after_the_snapshot_that_has_its_end(vb):
    vb.bulk.set_many([b"a", b"b", b"c"], [b"1"] * 3)
    assert events(vb.stream(0, 2))[-1] == End(EndReason.OK)
    assert events(vb.stream(3, 3)) == [End(EndReason.OK)]
    assert seqnos(vb.stream(0, 3)) == [1, 2, 3]


def test_a_stream_to_the_high_seqno_ends_exactly_there(vb):
    vb.documents.set(b"a", b"1")
    source = vb.stream(0, vb.high_seqno)
    vb.documents.set(b"a", b"2")
    assert [(r.seqno, r.value) for r in changes(source)] == [(1, b"1")]


def test_a_disk_only_stream_ends_with_the_disk(bucket, vb):
    vb.documents.set(b"a", b"1")
    bucket.flush()
    vb.documents.set(b"b", b"1")
    found = events(vb.stream(0, disk_only=True))
    assert found[0].flags == DISK
    assert [r.seqno for r in found[1]] == [1]
    assert found[-1] == End(EndReason.OK)


def test_a_waiting_reader_is_woken_once(vb):
    woken = []
    source = vb.stream(0, wake=lambda: woken.append(1))
    assert source.poll() is None
    vb.documents.set(b"a", b"1")
    vb.documents.set(b"b", b"1")
    assert woken == [1]
    changes(source)
    vb.documents.set(b"c", b"1")
    assert woken == [1, 1]


def test_a_change_of_state_ends_every_stream(bucket, vb):
    source = vb.stream(0)
    vb.documents.set(b"a", b"1")
    bucket.set_state(0, VbucketState.DEAD)
    assert events(source) == [End(EndReason.STATE_CHANGED)]
    assert source.poll() is None


@pytest.mark.parametrize("start", [0, 10], ids=["from the beginning", "from a position"])
def test_a_purge_during_a_disk_scan_keeps_what_the_reader_still_needs(bucket, vb, start):
    """A reader that began at 0 was never sent deleted documents and needs no tombstones."""
    vb.bulk.set_many([b"%d" % i for i in range(4000)], [b"x" * 400] * 4000)
    vb.documents.delete(b"3999")
    vb.documents.set(b"last", b"1")
    to_disk(bucket)
    source = vb.stream(start)
    first = [source.poll() for _ in range(2)]
    assert isinstance(first[1], Run)
    bucket.compact(drop_deletes=True)
    assert vb.purge_seqno == (0 if start else 4001)
    rest = seqnos(source)
    assert (rest[-1], 4001 in rest, 4000 in rest) == (4002, start > 0, False)
    bucket.compact(drop_deletes=True)
    assert vb.purge_seqno == 4001


def test_a_compaction_during_a_disk_scan_changes_nothing_for_its_reader(bucket, vb):
    vb.bulk.set_many([b"%d" % i for i in range(4000)], [b"x" * 400] * 4000)
    to_disk(bucket)
    source = vb.stream(0)
    assert source.poll().end == 4000
    got = [r.seqno for r in records(source.poll())]
    vb.bulk.set_many([b"%d" % i for i in range(3000, 4000)], [b"y" * 400] * 1000)
    bucket.compact()
    bucket.trim_memory()
    found = events(source)
    assert [(e.start, e.end, e.flags) for e in found if isinstance(e, SnapshotStart)] == [(4001, 5000, DISK)]
    got += [r.seqno for e in found if isinstance(e, list) for r in e]
    assert got == [*range(1, 5001)]


@settings(max_examples=examples(40))
@given(st.data())
def test_marker_ranges_never_overlap_whatever_is_written_and_compacted_meanwhile(tmp_path_factory, data):
    """Each snapshot has the newest version of each key up to its end."""
    with open_bucket(tmp_path_factory.mktemp("overlap")) as bucket:
        vb, history = bucket.set_state(0, VbucketState.ACTIVE), {}
        sources = []
        for step in data.draw(st.lists(st.sampled_from("wwwdcpfroo"), min_size=5, max_size=30)):
            if step == "w":
                keys = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=30))
                for key in keys:
                    history[vb.documents.set(b"%d" % key, LARGE).seqno] = key
            elif step == "d" and history:
                key = data.draw(st.sampled_from(sorted(history.values())))
                vb.bulk.delete_many([b"%d" % key])
                history[vb.high_seqno] = key
            elif step in "cp":
                bucket.compact(drop_deletes=step == "p")
            elif step == "f":
                to_disk(bucket)
            elif step == "o":
                sources.append((vb.stream(0), []))
            for source, found in sources if step == "r" else ():
                take(source, found)
        for source, found in sources:
            while take(source, found):
                pass
            check_snapshots(found, history, vb.high_seqno, vb.purge_seqno)
            source.close()


def take(source, found):
    """Read one event and copy its records; False if there was none."""
    event = source.poll()
    if isinstance(event, Run):
        event = [(record.seqno, int(record.key)) for record in records(event)]
    if event is not None:
        found.append(event)
    return event is not None


def check_snapshots(found, history, high, purged):
    reached, seen, state = 0, 0, {}
    for event in found:
        if isinstance(event, SnapshotStart):
            assert event.start > reached or reached == 0
            reached = event.end
        else:
            for seqno, key in event:
                assert seen < seqno <= reached
                seen, state[key] = seqno, seqno
    assert reached == high
    newest = {key: seqno for seqno, key in sorted(history.items())}
    for key, seqno in newest.items():
        assert state.get(key) == seqno or (seqno <= purged and key not in state)


def test_readers_do_not_make_the_file_grow(tmp_path):
    with open_bucket(tmp_path, replace(ROOMY, block_bytes=65472)) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        keys, values = [b"%d" % i for i in range(2000)], [bytes(500)] * 2000
        sizes = []
        vb.bulk.set_many(keys, values)
        to_disk(bucket)
        source = vb.stream(0)
        source.poll()
        source.poll()
        for _ in range(12):
            vb.bulk.set_many(keys, values)
            bucket.compact()
            sizes.append(bucket.disk_bytes)
        assert sizes[-1] <= sizes[3] * 1.5
        source.close()


def test_prepares_are_in_the_stream_and_the_marker_says_what_is_visible(vb):
    vb.documents.set(b"a", b"1")
    vb.durable.prepare(b"a", b"2", level=1)
    marker = vb.stream(0, visible_only=True).poll()
    assert (marker.end, marker.last_matching, marker.max_visible) == (2, 1, 1)
    vb.durable.commit(b"a")
    found = changes(vb.stream(0))
    assert [record.head.kind for record in found] == [0, 4, 5]
    assert found[2].value == b"2"
    assert found[2].head.extra == 2


def test_a_replica_in_the_middle_of_a_snapshot_promises_its_end(tmp_path, bucket, vb):
    vb.bulk.set_many([b"%d" % i for i in range(10)], [b"x"] * 10)
    source = vb.stream(0)
    marker, run = source.poll(), source.poll()
    with open_bucket(tmp_path / "replica", ROOMY) as other:
        replica = other.set_state(0, VbucketState.REPLICA)
        replica.replication.begin_snapshot(marker.start, marker.end, marker.flags)
        data, size = bytes(run.data), len(run.data) // 10
        replica.replication.apply_records(data[: 4 * size])
        onward = replica.stream(0, 5)
        assert onward.poll()[:3] == (0, 10, FIRST_MEMORY)
        assert [r.seqno for r in records(onward.poll())] == [1, 2, 3, 4]
        assert onward.poll() is None
        replica.replication.apply_records(data[4 * size :])
        assert seqnos(onward) == [5, 6, 7, 8, 9, 10]
        other.flush()
        other.trim_memory()
        assert markers(replica.stream(0)) == [(0, 10, DISK)]


MANIFEST = b"""{"uid":"%d","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}%s]}]}"""


def test_a_filtered_stream_knows_the_last_seqno_that_will_pass(bucket, vb):
    bucket.apply_manifest(MANIFEST % (1, b',{"name":"c","uid":"9"}'))
    vb.documents.set(b"a", b"1", 9)
    vb.documents.set(b"b", b"1", 0)
    assert vb.stream(1, collections=frozenset([9])).poll().last_matching == 2
    assert vb.stream(2, collections=frozenset([9])).poll().last_matching == 0
    to_disk(bucket)
    assert vb.stream(0, collections=frozenset([9])).poll().last_matching == 2


def test_a_stream_whose_collections_were_dropped_ends_after_the_drop(bucket, vb):
    bucket.apply_manifest(MANIFEST % (1, b',{"name":"c","uid":"9"}'))
    source = vb.stream(0, collections=frozenset([9]))
    vb.documents.set(b"a", b"1", 9)
    bucket.apply_manifest(MANIFEST % (2, b""))
    found = events(source)
    assert found[-1] == End(EndReason.FILTER_EMPTY)
    assert [r.head.kind for e in found if isinstance(e, list) for r in e] == [3, 0, 3]


def test_a_small_collection_may_come_out_of_order(bucket, vb):
    bucket.apply_manifest(MANIFEST % (1, b',{"name":"c","uid":"9"}'))
    vb.bulk.set_many([b"%d" % i for i in range(1000)], [b"x"] * 1000)
    vb.documents.set(b"a", b"1", 9)
    to_disk(bucket)
    found = events(vb.stream(0, collections=frozenset([9]), oso=True))
    assert found[0] == OsoStart()
    assert found[-1] == OsoEnd(1002)
    vb.documents.set(b"more", b"1", 9)
    source = vb.stream(0, collections=frozenset([0]), oso=True)
    assert isinstance(source.poll(), SnapshotStart)


def test_followers_are_told_what_is_new_and_woken_for_what_comes_next(vb):
    woken = []
    vb.documents.set(b"a", b"1")
    assert follow(vb, 0, 0, lambda: woken.append("too much")) == (False, None)
    simple, new = follow(vb, 0, 1000, lambda: woken.append("more"))
    assert simple
    assert (new.first, new.last) == (1, 1)
    assert follow(vb, 1, 1000, lambda: woken.append("more of it")) == (True, None)
    vb.documents.set(b"a", b"2")
    assert woken == ["more", "more of it"]
