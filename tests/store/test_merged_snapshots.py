"""Readers of memory, some behind, some up to date, some resumed inside a snapshot: every snapshot is a true state.

Whatever is written, flushed and read in whatever order: a snapshot has a key once, lies in its marker's range, and
leaves its reader with the state that the vbucket had at that seqno. On a replica in the middle of a snapshot too.

See docs/protocol/snapshots.md#promises.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.store_support import SMALL, Record, open_bucket, records
from tests.support.examples import examples
from upriver.model import VbucketState
from upriver.store import End, EndReason, NewSnapshot, Run, SnapshotStart, StreamEvent, VBucket, live_after
from upriver.wire.bulk.decode import address_of

KEYS = [b"a", b"b", b"c", b"d"]
MUTATION, SYSTEM, PREPARE, COMMIT, ABORT = 0, 3, 4, 5, 6
DELETES = 1 << 63
MANIFEST = b"""{"uid":"%d","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}%s]}]}"""
State = dict[tuple[int, bytes], bytes]
_folders = itertools.count()


def apply_to(state: State, record: Record) -> None:
    """A change as a client with sync writes sees it.

    A prepare is pending until its key changes: from disk a commit comes as the document that it made, or not at all.
    """
    kind, key = record.head.kind, record.key
    if kind == PREPARE:
        state[PREPARE, key] = record.value
    elif kind != SYSTEM:
        state.pop((PREPARE, key), None)
    if kind == MUTATION or (kind == COMMIT and not record.head.extra & DELETES):
        state[MUTATION, key] = record.value
    elif kind not in (PREPARE, ABORT, SYSTEM):
        state.pop((MUTATION, key), None)


class Truth:
    """All versions that an active vbucket ever had, read one by one."""

    def __init__(self, vb: VBucket) -> None:
        self.vb = vb
        self.log: list[Record] = []

    def note(self) -> None:
        """To be called after every write, so that nothing is deduplicated."""
        copy = self.vb.memory.open
        assert copy is not None
        data = copy.checkpoint.data.data[copy.at : copy.end]
        self.log += records(Run(data, self.log[-1].seqno if self.log else 0, self.vb.high_seqno, memory=True))

    def state_at(self, seqno: int) -> State:
        state: State = {}
        for record in self.log:
            if record.seqno <= seqno:
                apply_to(state, record)
        return state


class Reader:
    """Follows one vbucket and checks every promise."""

    def __init__(self, vb: VBucket, truth: Truth, short: bool) -> None:
        self.vb, self.truth, self.short = vb, truth, short
        self.state: State = {}
        self.position = 0
        self.consistent = 0
        self.marker: SnapshotStart | None = None
        self.seen: set[tuple[bool, bytes]] = set()
        self.runs = 0
        self.idle = False  # the source was empty, and has not woken the reader since
        self.origin = 0
        self.handed_over = False  # ``live_after`` reads instead of the source
        self.source = vb.stream(0, wake=self.wake)

    def wake(self) -> None:
        self.idle = False
        if self.handed_over:
            self._take_back()

    def news(self) -> None:
        self.idle = False

    def _take_back(self) -> None:
        self.handed_over = False
        self.source.take_back(self.origin, self.position)

    def start_again(self) -> None:
        self.__init__(self.vb, self.truth, self.short)  # type: ignore[misc]

    def poll(self, events: int) -> None:
        if self.handed_over:
            live = self._next_live()
            if live is not None:
                at = live.address - address_of(live.data)
                run = Run(live.data.data[at : at + live.size], self.position, live.last, memory=True)
                last = [each.seqno for each in records(run)][-1]
                self._begin(SnapshotStart(live.first, live.last, 1, last, 0, 0, 0, 0))
                self.origin = live.first
                self._take(run, None)
                return
            if self.position == self.vb.high_seqno:
                return
            self._take_back()
        while events and (event := self._next_event()) is not None:
            events -= 1
            if isinstance(event, End):  # tombstones that it needs were purged
                assert event.reason is EndReason.ROLLBACK
                self.start_again()
            elif isinstance(event, SnapshotStart):
                self._begin(event)
            else:
                assert isinstance(event, Run), event
                self._take(event, None)

    def _next_live(self) -> NewSnapshot | None:
        """Read as a producer's fan-out does: this gives everything there is, until the reader is woken."""
        self.idle = True
        self.vb.wait(self.news)
        live = live_after(self.vb, self.position)
        self.idle = self.idle and (live is not None or self.position == self.vb.high_seqno)
        return live

    def _next_event(self) -> StreamEvent | None:
        self.idle = True
        event = self.source.poll()
        self.idle = self.idle and event is None
        if event is None and self.short and self.source.hand_over() is not None:
            self.handed_over, self.origin = True, 0
            self.vb.wait(self.news)
        return event

    def _begin(self, marker: SnapshotStart) -> None:
        assert marker.start <= marker.end
        assert marker.end > self.position
        if self.marker is not None and self.position == self.marker.end:
            assert marker.start > self.marker.end, "ranges overlap"
        elif self.marker is not None:
            assert marker.end >= self.marker.end, "a promise is taken back"
        self.marker = marker
        self.seen = set()
        self.runs = 0

    def _take(self, run: Run, most: int | None) -> None:
        marker = self.marker
        assert marker is not None
        self.runs += 1
        found = list(records(run))
        for record in found[:most]:
            assert self.position < record.seqno <= marker.end
            assert marker.start <= record.seqno
            named = record.head.kind in (PREPARE, ABORT), record.key
            if record.head.kind != SYSTEM:
                assert named not in self.seen, "a key twice in one snapshot"
                self.seen.add(named)
            apply_to(self.state, record)
            self.position = record.seqno
        if most is None:
            self.position = run.upto
            assert run.upto <= marker.end
            if run.upto == marker.end:
                if found and self.runs == 1:
                    assert marker.last_matching == found[-1].seqno
                assert self.state == self.truth.state_at(marker.end)
                self.consistent = marker.end

    def stop_half_way(self) -> None:
        """Stop in the middle of a run and resume with the position reached."""
        if self.handed_over:
            self._take_back()  # a source that was handed over has not moved since
        while (event := self.source.poll()) is not None:
            if isinstance(event, SnapshotStart):
                self._begin(event)
            elif isinstance(event, Run):
                self._take(event, len(list(records(event))) // 2)
                break
            else:
                self.start_again()
                return
        self.source.close()
        inside = self.marker is not None and self.position < self.marker.end
        end = self.marker.end if inside and self.marker is not None else self.position
        if self.position > self.vb.high_seqno or (inside and end > self.vb.high_seqno):
            self.start_again()  # its vbucket is not that far yet
            return
        start = min(self.consistent, self.position)
        self.idle = False
        self.source = self.vb.stream(
            self.position, snap_start=start if inside else self.position, snap_end=end, wake=self.wake
        )
        self.marker = None if not inside else self.marker._replace(end=end)  # type: ignore[union-attr]


class World:
    """An active vbucket, its replica, and readers of both."""

    def __init__(self, folder: Path, checkpoint_bytes: int) -> None:
        options = replace(SMALL, checkpoint_bytes=checkpoint_bytes)
        self.buckets = [open_bucket(folder / name, options, 1) for name in ("one", "two")]
        self.active = self.buckets[0].set_state(0, VbucketState.ACTIVE)
        self.replica = self.buckets[1].set_state(0, VbucketState.REPLICA)
        self.truth = Truth(self.active)
        self.link = self.active.stream(0)
        self.on_the_way: list[bytes] = []
        self.upto = 0
        short = (False, True, True)  # which readers use ``live_after`` when they are up to date
        self.readers = [Reader(vb, self.truth, each) for vb in (self.active, self.replica) for each in short]
        self.steps = itertools.count(1)

    def write(self, kind: str, key: bytes) -> None:
        vb, value = self.active, b"%d" % next(self.steps)
        pending = b"\0" + key in vb.pending
        if kind == "event":
            self.buckets[0].apply_manifest(MANIFEST % (int(value), b',{"name":"c","uid":"9"}' if len(key) % 2 else b""))
        elif kind == "complete" and pending:
            (vb.durable.commit if int(value) % 2 else vb.durable.abort)(key)
        elif pending or kind == "complete":
            return
        elif kind == "prepare":
            vb.durable.prepare(key, value, level=1)
        elif kind == "delete" and (MUTATION, key) in self.truth.state_at(vb.high_seqno):
            vb.documents.delete(key)
        else:
            vb.documents.set(key, value)
        if self.active.memory.open is not None:
            self.truth.note()

    def replicate(self, most: int) -> None:
        """Send some records to the replica, one by one, so that its snapshots stay incomplete."""
        vb = self.replica
        while most:
            most -= 1
            if self.on_the_way:
                vb.replication.apply_records(self.on_the_way.pop(0))
            elif self.upto > vb.high_seqno:
                vb.replication.advance(self.upto)
            elif (event := self.link.poll()) is None or isinstance(event, End):  # purged: the stream has ended
                return
            elif isinstance(event, SnapshotStart):
                vb.replication.begin_snapshot(event.start, event.end, event.flags)
            else:
                assert isinstance(event, Run)
                self.upto = event.upto
                self.on_the_way = single_records(event)

    def do(self, step: tuple[str, Any]) -> None:
        kind, what = step
        if kind == "poll":
            self.readers[what[0]].poll(what[1])
        elif kind == "stop":
            self.readers[what].stop_half_way()
        elif kind == "replicate":
            self.replicate(what)
        elif kind in ("flush", "trim"):
            self.buckets[what].flush()
            if kind == "trim":
                self.buckets[what].trim_memory()
        elif kind == "purge":
            self.buckets[what].compact(drop_deletes=True)
        else:
            self.write(kind, what)

    def finish(self) -> None:
        """At rest every reader has everything."""
        for bucket in self.buckets:
            bucket.flush()
        for reader in self.readers:
            if not reader.idle:
                reader.poll(10_000)
            if reader.vb.snapshot_complete:
                assert reader.position == reader.vb.high_seqno
                assert reader.state == self.truth.state_at(reader.vb.high_seqno)
        for bucket in self.buckets:
            bucket.abandon()


def single_records(run: Run) -> list[bytes]:
    """The records of a run that are in its range and not superseded, as bytes."""
    meant, found, at, data = {record.seqno for record in records(run)}, [], 0, bytes(run.data)
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if int.from_bytes(data[at + 8 : at + 16], "little") in meant:
            found.append(data[at : at + size])
        at += size
    return found


READERS = st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["set", "set", "set", "delete", "prepare", "complete", "event"]), st.sampled_from(KEYS)),
    st.tuples(st.just("poll"), st.tuples(READERS, st.integers(1, 4))),
    st.tuples(st.just("stop"), READERS),
    st.tuples(st.just("replicate"), st.integers(1, 8)),
    st.tuples(st.sampled_from(["flush", "flush", "trim", "purge"]), st.integers(0, 1)),
)


@pytest.mark.parametrize("checkpoint_bytes", [500, 1 << 20])
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=10, max_size=80))
def test_every_snapshot_of_every_reader_is_a_state_that_existed(tmp_path, checkpoint_bytes, steps):
    world = World(tmp_path / str(next(_folders)), checkpoint_bytes)
    for step in steps:
        world.do(step)
    world.finish()
