"""Random histories on two nodes and a reader, compared with a model that remembers every version.

Failovers, promotions in the middle of a snapshot, crashes, purges and rollbacks come in any order. Whatever happens, a
store shows the state that its history says, and a reader that follows the rules never keeps a document that is gone
nor misses one that is there.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.store.store_support import SMALL, open_bucket, records
from tests.support.examples import examples
from upriver.errors import KeyNotFound
from upriver.model import Claim, FailoverLog, VbucketState
from upriver.protocol.history import Accept, History, RollbackTo, decide
from upriver.store import Run, SnapshotStart
from upriver.store.index import keyindex

KEYS = [b"a", b"b", b"c", b"d", b"e"]
Version = tuple[int, bytes, bytes | None]
TINY = replace(SMALL, checkpoint_bytes=700)


@pytest.fixture(autouse=True)
def small_key_tables(monkeypatch):
    """Make key tables so small that a few keys fill several on disk."""
    monkeypatch.setattr(keyindex, "SMALLEST_TABLE", 8)
    monkeypatch.setattr(keyindex, "WORTH_A_TABLE", 8)
    monkeypatch.setattr(keyindex, "MOST_UNKNOWN", 8)


def fold(versions: list[Version]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for _, key, value in versions:
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return state


class Node:
    """A store with one vbucket, and its expected history."""

    def __init__(self, path: Path, state: VbucketState) -> None:
        self.path = path
        self.bucket = open_bucket(path, TINY, 1)
        self.bucket.set_state(0, state)
        self.true: list[Version] = []
        self.partial: list[Version] = []
        self.received: list[Version] = []  # as received, without the versions deduplicated on the way

    @property
    def vb(self):
        return self.bucket.vbucket(0)

    @property
    def state(self) -> dict[bytes, bytes]:
        return fold(self.true + self.partial)

    def history(self) -> History:
        return History(self.vb.failover_log, self.vb.high_seqno, self.vb.purge_seqno)

    def truncate(self, seqno: int) -> None:
        self.true = [version for version in self.true if version[0] <= seqno]
        self.partial = [version for version in self.partial if version[0] <= seqno]
        self.received = [version for version in self.received if version[0] <= seqno]

    def reopen(self, clean: bool) -> None:
        persisted = self.vb.high_seqno if clean else self.vb.persisted_seqno
        self.bucket.close() if clean else self.bucket.abandon()
        self.bucket = open_bucket(self.path, TINY, 1)
        self.truncate(persisted)

    def stored(self) -> dict[bytes, bytes]:
        found = {}
        for key in KEYS:
            try:
                documents = self.vb.documents
                read = documents.get if self.vb.state is VbucketState.ACTIVE else documents.get_replica
                found[key] = read(key).value
            except KeyNotFound:
                pass
        return found


def version_of(record) -> Version:
    return (record.seqno, record.key, record.value if record.head.kind == 0 else None)


class Reader:
    """A client that keeps every change and its consistent points."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.consistent = [0]
        self.position = Claim()

    def forget_above(self, seqno: int) -> None:
        point = max(c for c in self.consistent if c <= seqno)
        self.consistent = [c for c in self.consistent if c <= point]
        self.versions = [version for version in self.versions if version[0] <= point]
        self.position = Claim(self.position.vbuuid, point, point, point)


class Histories(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.active = Node(self.folder / "one", VbucketState.ACTIVE)
        self.other = Node(self.folder / "two", VbucketState.REPLICA)
        self.reader = Reader()
        self.counter = 0

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.active.bucket.abandon()
            self.other.bucket.abandon()
            shutil.rmtree(self.folder)

    @rule(key=st.sampled_from(KEYS), size=st.integers(0, 300))
    def write(self, key: bytes, size: int) -> None:
        self.counter += 1
        value = b"%d" % self.counter + b"x" * size
        stored = self.active.vb.documents.set(key, value)
        self.active.true.append((stored.seqno, key, value))

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
    def write_many(self, keys: list[bytes]) -> None:
        values = []
        for _ in keys:
            self.counter += 1
            values.append(b"many %d" % self.counter)
        high = self.active.vb.bulk.set_many(keys, values)
        first = high - len(keys) + 1
        self.active.true += [(first + i, k, v) for i, (k, v) in enumerate(zip(keys, values, strict=True))]

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        if key in self.active.state:
            stored = self.active.vb.documents.delete(key)
            self.active.true.append((stored.seqno, key, None))

    @rule(both=st.booleans(), trim=st.booleans())
    def flush(self, both: bool, trim: bool) -> None:
        for node in (self.active, self.other) if both else (self.active,):
            node.bucket.flush()
            if trim:
                node.bucket.trim_memory()

    @rule(clean=st.booleans())
    def restart_active(self, clean: bool) -> None:
        uuid = self.active.vb.uuid
        self.active.reopen(clean)
        assert (self.active.vb.uuid == uuid) is clean
        if not clean:
            assert self.active.vb.failover_log.entries[0].seqno == self.active.vb.high_seqno

    @rule(clean=st.booleans())
    def restart_replica(self, clean: bool) -> None:
        log = self.other.vb.failover_log if clean else None
        self.other.reopen(clean)
        if log is not None:
            assert self.other.vb.failover_log == log
        self._forget_incomplete_truth()

    def _forget_incomplete_truth(self) -> None:
        """After a crash the last snapshot may be complete in the model but not on disk."""
        node = self.other
        if not node.vb.snapshot_complete:
            done = node.vb.complete_seqno
            node.partial = [v for v in node.received if v[0] > done]
            node.true = [v for v in node.true if v[0] <= done]

    @rule(drop=st.booleans(), both=st.booleans())
    def compact(self, drop: bool, both: bool) -> None:
        self.active.bucket.compact(drop_deletes=drop)
        if both:
            self.other.bucket.compact()

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=2, max_size=6), most=st.integers(1, 4))
    def fail_over_inside_a_snapshot(self, keys: list[bytes], most: int) -> None:
        self.write_many(keys)
        self.replicate(most)
        self.fail_over()

    @rule(most=st.integers(0, 12))
    def replicate(self, most: int) -> None:
        replica, node = self.other, self.active
        vb = replica.vb
        if vb.state is VbucketState.ACTIVE:
            return
        wanted = self._position_of(vb)
        answer = decide(node.history(), wanted)
        if isinstance(answer, RollbackTo):
            self._roll_back(replica, answer.seqno)
            wanted = self._position_of(vb)
            answer = decide(node.history(), wanted)
            if isinstance(
                answer, RollbackTo
            ):  # the replica went back further than asked, to a branch that the node has forgotten
                self._roll_back(replica, answer.seqno)
                wanted = self._position_of(vb)
            assert decide(node.history(), wanted) == Accept()
        vb.replication.replace_failover_log([tuple(entry) for entry in node.vb.failover_log])
        if not vb.snapshot_complete:
            node.bucket.flush()  # the rest of a snapshot may have to come from disk
        self._pump(node, replica, wanted, most)

    def _position_of(self, vb) -> Claim:
        start = vb.high_seqno
        if vb.snapshot_complete:
            return Claim(vb.uuid if start else 0, start, start, start)
        return Claim(vb.uuid if start else 0, start, min(vb.snap_start, start), vb.snap_end)

    def _roll_back(self, node: Node, to: int) -> None:
        point = node.vb.rollback(to)
        assert point <= to
        node.truncate(point)
        assert all(entry.seqno <= point for entry in node.vb.failover_log)

    def _pump(self, node: Node, replica: Node, wanted: Claim, most: int) -> None:
        vb = replica.vb
        source = node.vb.stream(wanted.seqno, snap_start=wanted.snap_start, snap_end=wanted.snap_end)
        while most > 0 and (event := source.poll()) is not None:
            if isinstance(event, SnapshotStart):
                vb.replication.begin_snapshot(event.start, event.end, event.flags)
            assert isinstance(event, SnapshotStart | Run), event
            if isinstance(event, Run):
                most -= self._apply(node, replica, event, most)
        source.close()

    def _apply(self, node: Node, replica: Node, run: Run, most: int) -> int:
        vb = replica.vb
        meant = list(records(run))
        taken = meant[:most]
        for record in taken:
            at, data = 0, bytes(run.data)
            while int.from_bytes(data[at + 8 : at + 16], "little") != record.seqno:
                at += int.from_bytes(data[at : at + 4], "little")
            vb.replication.apply_records(data[at : at + record.head.size])
            replica.partial.append(version_of(record))
            replica.received.append(version_of(record))
        if len(taken) == len(meant) and run.upto > vb.high_seqno:
            vb.replication.advance(run.upto)
        if vb.snapshot_complete:
            replica.true = [version for version in node.true if version[0] <= vb.high_seqno]
            replica.partial = []
        return len(taken) + 1

    @rule()
    def fail_over(self) -> None:
        """The active node is gone for a while; the other becomes active with what it has."""
        replica = self.other
        if replica.vb.receiving_initial_disk_snapshot:
            return
        complete = replica.vb.complete_seqno
        replica.bucket.set_state(0, VbucketState.ACTIVE)
        assert replica.vb.failover_log.entries[0].seqno == complete
        replica.true, replica.partial = replica.true + replica.partial, []
        self.active.bucket.set_state(0, VbucketState.REPLICA)
        self.active, self.other = replica, self.active

    @rule(lost=st.integers(0, 6))
    def lose_the_tail(self, lost: int) -> None:
        """The active vbucket continues from an earlier point, as after a failover to a replica that was behind."""
        node = self.active
        node.bucket.flush()
        node.bucket.set_state(0, VbucketState.REPLICA)
        self._roll_back(node, max(0, node.vb.high_seqno - lost))
        node.bucket.set_state(0, VbucketState.ACTIVE)

    @rule(most=st.integers(1, 8))
    def read(self, most: int) -> None:
        """The reader takes some changes from the node that is active now."""
        reader, node = self.reader, self.active
        for _ in range(5):
            answer = decide(node.history(), reader.position)
            if isinstance(answer, Accept):
                break
            reader.forget_above(answer.seqno)
        else:
            raise AssertionError("the reader never gets in")
        p = reader.position
        if p.seqno < p.snap_end:
            node.bucket.flush()
        source = node.vb.stream(p.seqno, snap_start=p.snap_start, snap_end=p.snap_end)
        while most > 0 and (event := source.poll()) is not None:
            most -= 1
            if isinstance(event, SnapshotStart):
                snapshot = event
                assert event.start <= p.seqno + 1 or event.start > p.snap_end or event.start > p.seqno
            else:
                p = self._take(event, snapshot, p, most)
                if most < 2:
                    break
        source.close()
        reader.position = replace(p, vbuuid=node.vb.uuid)
        if p.seqno == p.snap_end == node.vb.high_seqno:
            assert fold(reader.versions) == node.state

    def _take(self, run: Run, snapshot: SnapshotStart, p: Claim, most: int) -> Claim:
        reader = self.reader
        whole = list(records(run))
        stop_early = most < 2 and len(whole) > 1
        taken = whole[: len(whole) // 2] if stop_early else whole
        seen = [record.key for record in taken]
        assert len(set(seen)) == len(seen), "a key twice in one snapshot"
        for record in taken:
            assert max(p.seqno, snapshot.start - 1) < record.seqno <= snapshot.end
            reader.versions.append(version_of(record))
            p = Claim(p.vbuuid, record.seqno, min(snapshot.start, p.seqno), snapshot.end)
        if not stop_early and run.upto == snapshot.end:
            reader.consistent.append(run.upto)
            p = Claim(p.vbuuid, run.upto, run.upto, run.upto)
        return p

    @invariant()
    def the_stores_show_what_their_history_says(self) -> None:
        if not hasattr(self, "active"):
            return
        for node in (self.active, self.other):
            assert node.stored() == node.state
            assert node.vb.item_count == len(node.state)

    @invariant()
    def the_disk_has_the_latest_version_of_every_key_in_order(self) -> None:
        if not hasattr(self, "active") or self.counter % 5:
            return
        vb = self.active.vb
        self.active.bucket.flush()
        source = vb.stream(0, vb.high_seqno, disk_only=True)
        found: list[Version] = []
        while (event := source.poll()) is not None:
            if isinstance(event, Run):
                found += [version_of(record) for record in records(event)]
        assert [seqno for seqno, _, _ in found] == sorted(seqno for seqno, _, _ in found)
        assert fold(found) == self.active.state
        assert len({key for _, key, _ in found}) == len(found)


def test_new_logs_are_independent() -> None:
    assert FailoverLog.new(1) != FailoverLog.new(2)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
