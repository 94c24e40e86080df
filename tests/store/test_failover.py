"""Branches of history: failovers, lost changes, and rollbacks (docs/protocol/rollback.md)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from tests.store.store_support import SMALL, changes, open_bucket, records
from upriver.errors import KeyNotFound, NotMyVbucket
from upriver.model import Claim, VbucketState
from upriver.protocol.history import Accept, History, RollbackTo, decide
from upriver.store import End, EndReason, Run, SnapshotStart
from upriver.store.upkeep import rollback as rollback_module

ROOMY = replace(SMALL, checkpoint_bytes=1 << 20)


@pytest.fixture
def buckets(tmp_path):
    one, two = open_bucket(tmp_path / "one", ROOMY), open_bucket(tmp_path / "two", ROOMY)
    yield one, two
    one.abandon()
    two.abandon()


def pump(source, replica, upto=2**64):
    """Replicate until the first record above ``upto``."""
    while (event := source.poll()) is not None:
        if isinstance(event, SnapshotStart):
            replica.replication.begin_snapshot(event.start, event.end, event.flags)
        elif isinstance(event, Run):
            for record in records(event):
                if record.seqno > upto:
                    return
                replica.replication.apply_records(cut(event, record))


def cut(run, record):
    at, data = 0, bytes(run.data)
    while int.from_bytes(data[at + 8 : at + 16], "little") != record.seqno:
        at += int.from_bytes(data[at : at + 4], "little")
    return data[at : at + record.head.size]


def history(vb):
    return History(vb.failover_log, vb.high_seqno, vb.purge_seqno)


def state_of(found):
    state = {}
    for record in found:
        state[record.key] = record.value if record.head.kind == 0 else None
    return state


def test_a_reader_inside_a_snapshot_is_rolled_back_to_where_it_was_consistent(buckets):
    """A document is written at 30 and again at 80; a reader is at 50 in snapshot 1..100; the successor has only 60."""
    active = buckets[0].set_state(0, VbucketState.ACTIVE)
    replica = buckets[1].set_state(0, VbucketState.REPLICA)
    for seqno in range(1, 61):
        active.documents.set(b"doc" if seqno == 30 else b"k%d" % seqno, b"%d" % seqno)
    replica.replication.replace_failover_log([tuple(entry) for entry in active.failover_log])
    buckets[0].flush()
    pump(active.stream(0), replica)
    assert replica.high_seqno == 60
    for seqno in range(61, 101):
        active.documents.set(b"doc" if seqno == 80 else b"k%d" % seqno, b"%d" % seqno)
    buckets[0].flush()
    buckets[0].trim_memory()

    source = active.stream(0)
    marker, run = source.poll(), source.poll()
    received = [record for record in records(run) if record.seqno <= 50]
    assert (marker.start, marker.end) == (0, 100)
    assert b"doc" not in state_of(received)  # its version at 30 was deduplicated: this reader never got it
    uuid = active.uuid

    buckets[1].set_state(0, VbucketState.ACTIVE)
    successor = replica
    assert tuple(successor.failover_log.entries[0]) == (successor.uuid, 60)
    assert successor.documents.get(b"doc").value == b"30"

    honest = Claim(uuid, 50, marker.start, marker.end)
    assert decide(history(successor), honest) == RollbackTo(0)
    assert state_of(changes(successor.stream(0)))[b"doc"] == b"30"

    lie = Claim(uuid, 50, 50, 50)
    assert decide(history(successor), lie) == Accept()
    assert b"doc" not in state_of(received + changes(successor.stream(50)))  # without the rollback it is lost silently


def test_a_promotion_in_the_middle_of_a_snapshot_branches_at_the_last_complete_one(buckets):
    active = buckets[0].set_state(0, VbucketState.ACTIVE)
    replica = buckets[1].set_state(0, VbucketState.REPLICA)
    active.bulk.set_many([b"%d" % i for i in range(10)], [b"x"] * 10)
    source = active.stream(0)
    pump(source, replica)
    active.bulk.set_many([b"%d" % i for i in range(10)], [b"y"] * 10)
    pump(source, replica, upto=15)
    assert (replica.high_seqno, replica.snapshot, replica.snapshot_complete) == (15, (11, 20), False)
    buckets[1].set_state(0, VbucketState.ACTIVE)
    assert replica.failover_log.entries[0].seqno == 10
    assert replica.documents.set(b"new", b"1").seqno == 16
    assert [record.seqno for record in changes(replica.stream(10))] == [11, 12, 13, 14, 15, 16]


def test_a_takeover_continues_the_same_branch(buckets):
    active = buckets[0].set_state(0, VbucketState.ACTIVE)
    replica = buckets[1].set_state(0, VbucketState.REPLICA)
    active.documents.set(b"a", b"1")
    replica.replication.replace_failover_log([tuple(entry) for entry in active.failover_log])
    pump(active.stream(0), replica)
    buckets[1].set_state(0, VbucketState.PENDING)
    buckets[1].set_state(0, VbucketState.ACTIVE, takeover=True)
    assert replica.failover_log == active.failover_log
    assert replica.documents.set(b"b", b"1").seqno == 2


def test_a_clean_restart_changes_nothing_and_a_crash_branches(tmp_path):
    bucket = open_bucket(tmp_path)
    vb = bucket.set_state(0, VbucketState.ACTIVE)
    vb.documents.set(b"a", b"1")
    first = vb.failover_log
    bucket.close()
    bucket = open_bucket(tmp_path)
    assert bucket.vbucket(0).failover_log == first
    bucket.vbucket(0).documents.set(b"b", b"1")
    bucket.flush()
    cas = bucket.vbucket(0).documents.set(b"lost", b"1").cas
    bucket.abandon()
    bucket = open_bucket(tmp_path)
    vb = bucket.vbucket(0)
    assert [entry.seqno for entry in vb.failover_log] == [2, 0]
    assert vb.failover_log.entries[1:] == first.entries
    stored = vb.documents.set(b"c", b"1")
    assert (stored.seqno, stored.vbuuid) == (3, vb.uuid)
    assert stored.cas > cas
    reader_of_the_lost_tail = Claim(first.uuid, 3, 3, 3)
    assert decide(history(vb), reader_of_the_lost_tail) == RollbackTo(2)
    bucket.abandon()


def test_a_replica_that_crashed_keeps_its_log_and_its_snapshot(buckets, tmp_path):
    active = buckets[0].set_state(0, VbucketState.ACTIVE)
    active.bulk.set_many([b"%d" % i for i in range(10)], [b"x"] * 10)
    bucket = open_bucket(tmp_path / "three", ROOMY)
    replica = bucket.set_state(0, VbucketState.REPLICA)
    replica.replication.replace_failover_log([tuple(entry) for entry in active.failover_log])
    pump(active.stream(0), replica, upto=4)
    bucket.flush()
    bucket.abandon()
    bucket = open_bucket(tmp_path / "three", ROOMY)
    replica = bucket.vbucket(0)
    assert replica.failover_log == active.failover_log
    assert (replica.high_seqno, replica.snapshot) == (4, (0, 10))
    pump(active.stream(4, snap_start=0, snap_end=10), replica)
    assert replica.snapshot_complete
    assert replica.item_count == 10
    bucket.abandon()


def roll_back_of(buckets, writes, to, between=lambda: None):
    active = buckets[0].set_state(0, VbucketState.ACTIVE)
    replica = buckets[1].set_state(0, VbucketState.REPLICA)
    replica.replication.replace_failover_log([tuple(entry) for entry in active.failover_log])
    source = active.stream(0)
    for batch in writes:
        for key, value in batch:
            active.documents.delete(key) if value is None else active.documents.set(key, value)
        pump(source, replica)
    between()
    return replica, replica.rollback(to)


def test_a_rollback_brings_back_what_was_overwritten_and_deleted(buckets):
    writes = [[(b"a", b"1"), (b"b", b"1"), (b"c", b"1")], [(b"a", b"2"), (b"b", None), (b"d", b"1")]]
    replica, point = roll_back_of(buckets, writes, 3)
    assert point == 3
    assert [replica.documents.get_replica(key).value for key in (b"a", b"b", b"c")] == [b"1"] * 3
    with pytest.raises(KeyNotFound):
        replica.documents.get_replica(b"d")
    assert (replica.high_seqno, replica.persisted_seqno, replica.item_count, replica.tombstone_count) == (3, 3, 3, 0)
    assert [record.seqno for record in changes(replica.stream(0))] == [1, 2, 3]


def test_a_rollback_into_a_deduplicated_snapshot_goes_to_its_start(buckets):
    writes = [[(b"a", b"1"), (b"b", b"1")], [(b"c", b"1"), (b"a", b"2"), (b"c", b"2"), (b"d", b"1")]]
    replica, point = roll_back_of(buckets, writes, 4)
    assert point == 2
    assert replica.documents.get_replica(b"a").value == b"1"


def test_a_rollback_below_what_compaction_left_empties_the_vbucket(buckets):
    writes = [[(b"a", b"1")], [(b"a", b"2")], [(b"a", b"3")], [(b"b", b"1")]]
    replica, point = roll_back_of(buckets, writes, 2, between=buckets[1].compact)
    assert point == 0
    assert (replica.high_seqno, replica.item_count, len(replica.failover_log)) == (0, 0, 1)
    assert changes(replica.stream(0)) == []


def test_a_rollback_does_not_stop_where_compaction_took_a_version_away(buckets):
    """At 3 the documents a and b had versions that are gone now, so no state below the end can be restored."""
    writes = [[(b"a", b"1"), (b"b", b"1"), (b"c", b"1")], [(b"a", b"2"), (b"b", b"2")]]
    _, point = roll_back_of(buckets, writes, 3, between=buckets[1].compact)
    assert point == 0


def fill_and_purge(bucket):
    """Two of the keys 0 to 49 are deleted and their tombstones purged; their older versions are still in the log."""
    active = bucket.set_state(0, VbucketState.ACTIVE)
    for number in range(50):
        active.documents.set(b"%d" % number, b"x" * 100)
    active.documents.set(b"last", b"0")
    bucket.flush()
    for key in (b"3", b"7"):
        active.documents.delete(key)
    active.documents.set(b"last", b"1")
    bucket.compact(drop_deletes=True)
    assert (active.purge_seqno, active.rollback_floor) == (53, 54)
    return active


def documents_in(replica, keys):
    found = set()
    for key in keys:
        with suppress(KeyNotFound):
            replica.documents.get_replica(key)
            found.add(key)
    return found


@pytest.mark.parametrize("to", [54, 60])
def test_a_rollback_to_above_a_purge_keeps_what_was_deleted_deleted(buckets, to):
    """The tombstones are gone, the old versions are not: they must not come back to life."""
    active = fill_and_purge(buckets[0])
    for number in range(20):
        active.documents.set(b"lost %d" % number, b"1")
    kept = {b"%d" % number for number in range(50)} - {b"3", b"7"} | {b"last"}
    kept |= {b"lost %d" % number for number in range(to - 54)}
    buckets[0].flush()
    replica = buckets[0].set_state(0, VbucketState.REPLICA)
    assert replica.rollback(to) == to
    assert documents_in(replica, kept | {b"3", b"7"}) == kept
    assert {record.key for record in changes(replica.stream(0, to))} == kept
    assert (replica.item_count, replica.tombstone_count) == (len(kept), 0)


def test_a_rollback_into_blocks_that_were_merged_after_a_purge_keeps_what_was_deleted_deleted(buckets):
    """The shortened block ends where compaction keeps its list of dead seqnos."""
    active = fill_and_purge(buckets[0])
    active.documents.set(b"lost", b"1")
    buckets[0].flush()
    buckets[0].compact()
    assert active.rollback_floor == 54
    replica = buckets[0].set_state(0, VbucketState.REPLICA)
    assert replica.rollback(54) == 54
    kept = {b"%d" % number for number in range(50)} - {b"3", b"7"} | {b"last"}
    assert documents_in(replica, kept | {b"3", b"7"}) == kept
    assert {record.key for record in changes(replica.stream(0, 54))} == kept
    assert replica.documents.get_replica(b"last").value == b"1"


def test_a_rollback_prunes_the_log_ends_streams_and_is_for_replicas_only(buckets):
    writes = [[(b"a", b"1"), (b"b", b"1")], [(b"c", b"1")]]
    active = buckets[0].set_state(0, VbucketState.ACTIVE)
    with pytest.raises(NotMyVbucket):
        active.rollback(0)
    replica, _ = roll_back_of(buckets, writes, 3)
    replica.replication.replace_failover_log([(7, 3), (6, 1), (5, 0)])
    source = replica.stream(0)
    assert replica.rollback(2) == 2
    assert [entry.uuid for entry in replica.failover_log] == [6, 5]
    assert source.poll() == End(EndReason.STATE_CHANGED)


def test_a_rollback_that_fails_changes_nothing(buckets, monkeypatch):
    def fails(*_):
        raise RuntimeError("power cut")

    writes = [[(b"a", b"1")], [(b"a", b"2"), (b"b", b"1")]]
    monkeypatch.setattr(rollback_module, "_begin_branch", fails)
    with pytest.raises(RuntimeError):
        roll_back_of(buckets, writes, 1)
    replica = buckets[1].vbucket(0)
    assert replica.documents.get_replica(b"a").value == b"2"
    assert (replica.high_seqno, replica.item_count) == (3, 2)
    monkeypatch.undo()
    assert replica.rollback(1) == 1
    assert replica.documents.get_replica(b"a").value == b"1"


def test_a_rolled_back_replica_survives_a_restart(tmp_path, buckets):
    writes = [[(b"%d" % i, b"1")] for i in range(50)] + [[(b"%d" % i, b"2")] for i in range(50)]
    replica, point = roll_back_of(buckets, writes, 60)
    assert point == 60
    buckets[1].close()
    with open_bucket(tmp_path / "two", ROOMY) as bucket:
        replica = bucket.vbucket(0)
        values = [replica.documents.get_replica(b"%d" % i).value for i in range(50)]
        assert values == [b"2"] * 10 + [b"1"] * 40
        assert replica.item_count == 50
        assert sorted(int(record.key) for record in changes(replica.stream(0))) == list(range(50))  # each once


def test_the_failover_log_drops_its_oldest_branches(tmp_path):
    bucket = open_bucket(tmp_path)
    bucket.set_state(0, VbucketState.ACTIVE)
    for _ in range(30):
        bucket.vbucket(0).documents.set(b"a", b"1")
        bucket.flush()
        bucket.abandon()
        bucket = open_bucket(tmp_path)
    assert len(bucket.vbucket(0).failover_log) == 25
    assert all(0 < entry.uuid < 1 << 48 for entry in bucket.vbucket(0).failover_log)
    bucket.abandon()
