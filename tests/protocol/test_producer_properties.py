"""The producer without a socket: whatever is written, filtered and acknowledged, the promises of
docs/protocol/snapshots.md#promises hold.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.producing import Link, Streamed, charged
from tests.support.examples import examples
from upriver.errors import CorruptStore
from upriver.model import DEFAULT_COLLECTION, Datatype, VbucketState
from upriver.protocol.producer.controls import ProducerOptions
from upriver.protocol.producer.frames import MarkerFacts, StreamFrames
from upriver.protocol.producer.stream_filter import StreamFilter
from upriver.store import Bucket, StoreOptions, StreamSource
from upriver.wire import Context, Message, decode
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, SendBuffer
from upriver.wire.constants import Dialect, OpenFlag, StreamEndStatus, SystemEventId
from upriver.wire.messages import dcp, events
from upriver.wire.packed import RecordKind, pack, unpack

MANIFEST = """{"uid":"2","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]},
    {"name":"shop","uid":"8","collections":[{"name":"cart","uid":"9"},{"name":"user","uid":"a"}]}]}"""
COLLECTIONS = (DEFAULT_COLLECTION, 9, 10)


class World:
    """A bucket with one vbucket, a producer with one stream, and a reader that acknowledges."""

    def __init__(self, path: Path, collections: bool, **controls: str) -> None:
        self.bucket = Bucket.open(path, name="b", vbuckets=1, options=StoreOptions(background=False))
        self.vbucket = self.bucket.set_state(0, VbucketState.ACTIVE)
        self.bucket.apply_manifest(MANIFEST)
        self.streamed = Streamed(self.bucket)
        self.link = Link(self.streamed, b"p", collections, **controls)
        self.options, self.producer = self.link.options, self.link.producer
        self.context = Context(collections=collections)
        self.messages: list[Message] = []

    def request(self, value: bytes = b"", **position: int) -> None:
        self.link.ask(dcp.StreamRequest(value=value, **position))

    def stop_reading(self) -> dict[str, int]:
        """Disconnect, and resume later from the client's position."""
        for stream in list(self.producer.streams.values()):
            self.producer.close_stream(stream)
        self.options.window.outstanding = 0
        marker = next((m for m in reversed(self.messages) if isinstance(m, dcp.SnapshotMarker)), None)
        seqno = max((m.by_seqno for m in self.messages if hasattr(m, "by_seqno")), default=0)
        if marker is None:
            return {}
        start = min(marker.start_seqno, seqno)
        uuid = self.vbucket.failover_log.uuid
        return {
            "start_seqno": seqno, "vbuuid": uuid, "snap_start_seqno": start,
            "snap_end_seqno": max(marker.end_seqno, seqno),
        }  # fmt: skip

    def read_some(self) -> None:
        """Receive without acknowledging."""
        self.streamed.turn()
        self.messages += [decode(frame, self.context) for frame in self.link.frames()]

    def read(self) -> None:
        """Receive everything, acknowledging as it comes."""
        while True:
            self.streamed.turn()
            frames = self.link.frames()
            if not frames:
                return
            for frame in frames:
                self.messages.append(decode(frame, self.context))
                self.link.ask(dcp.BufferAck(charged(frame)))


ITEMS = (
    dcp.DcpMutation, dcp.DcpDeletion, dcp.Prepare, dcp.Commit, dcp.Abort, events.SystemEvent, dcp.SeqnoAdvanced,
)  # fmt: skip


def seqno_of(message: Message) -> int:
    """The seqno of a message; 0 if it has none."""
    if isinstance(message, dcp.Commit):
        return message.commit_seqno
    return message.abort_seqno if isinstance(message, dcp.Abort) else getattr(message, "by_seqno", 0)


def check_promises(messages: list[Message]) -> None:
    """docs/protocol/snapshots.md#promises: ranges, order, one version per key and snapshot, something behind every
    marker.
    """
    marker, last, keys, announced = None, 0, set(), False
    for message in messages:
        if isinstance(message, dcp.SnapshotMarker | dcp.SnapshotMarkerV20):
            assert not announced, "a marker stood alone"
            assert marker is None or message.start_seqno > marker.end_seqno or last == 0, "ranges overlap"
            marker, keys, announced = message, set(), True
        elif isinstance(message, ITEMS):
            announced = False
            assert marker is not None
            seqno = seqno_of(message)
            assert marker.start_seqno <= seqno <= marker.end_seqno
            assert seqno > last
            last = seqno
            if isinstance(message, dcp.DcpMutation | dcp.DcpDeletion):
                assert message.key not in keys, "a key came twice in a snapshot"
                keys.add(message.key)
    assert not announced, "a marker stood alone"
    assert marker is None or last == marker.end_seqno, "the last snapshot cannot be completed"


def contents(messages: list[Message]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    prepared: dict[bytes, bytes] = {}
    for message in messages:
        if isinstance(message, dcp.DcpMutation):
            found[message.key] = message.value
        elif isinstance(message, dcp.Prepare):
            prepared[message.key] = message.value
        elif isinstance(message, dcp.Commit):
            found[message.key] = prepared.pop(message.key)
        elif isinstance(message, dcp.DcpDeletion):
            found.pop(message.key, None)
    return found


WRITES = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(COLLECTIONS), st.integers(0, 5)),
        st.tuples(st.just("delete"), st.sampled_from(COLLECTIONS), st.integers(0, 5)),
        st.tuples(st.just("prepare"), st.sampled_from(COLLECTIONS), st.integers(6, 8)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("forget"), st.just(0), st.just(0)),
        st.tuples(st.just("read"), st.just(0), st.just(0)),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
    ),
    max_size=40,
)
FILTERS = st.sampled_from([
    (False, b"", (0,)), (True, b"", COLLECTIONS), (True, b'{"collections":["9"]}', (9,)),
    (True, b'{"collections":["0","a"]}', (0, 10)), (True, b'{"scope":"8"}', (9, 10)),
])  # fmt: skip
_paths = itertools.count()


def apply(world: World, model: dict[tuple[int, bytes], bytes], step: int, write: tuple[str, int, int]) -> None:
    kind, collection, number = write
    key, vb = b"k%d" % number, world.vbucket
    if kind == "set":
        model[collection, key] = b"v%d" % step
        vb.documents.set(key, model[collection, key], collection)
    elif kind == "delete" and model.pop((collection, key), None) is not None:
        vb.documents.delete(key, collection)
    elif kind == "prepare":
        prepared = vb.durable.prepare(key, b"p%d" % step, collection, level=1)
        if step % 2:
            vb.durable.commit(key, collection, prepared.seqno)
            model[collection, key] = b"p%d" % step
        else:
            vb.durable.abort(key, collection, prepared.seqno)
    elif kind in ("flush", "forget"):
        world.bucket.flush()
        if kind == "forget":
            world.bucket.trim_memory()
    elif kind == "read":
        world.read()
    elif kind == "look":  # a faster reader is up to date: what it has seen is not deduplicated any more
        vb.stream(vb.high_seqno, vb.high_seqno).close()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(before=WRITES, after=WRITES, chosen=FILTERS, window=st.sampled_from(["0", "1", "100", "5000"]))
def test_every_stream_keeps_the_promises_and_ends_with_the_contents_of_the_store(
    tmp_path: Path, before: list[Any], after: list[Any], chosen: tuple[bool, bytes, tuple[int, ...]], window: str
):
    collections, value, visible = chosen
    world = World(tmp_path / str(next(_paths)), collections, connection_buffer_size=window)
    model: dict[tuple[int, bytes], bytes] = {}
    for step, write in enumerate(before):
        apply(world, model, step, write)
    world.request(value)
    for step, write in enumerate(after, len(before)):
        apply(world, model, step, write)
    world.read()
    check_promises(world.messages)
    prefixed = {(bytes((cid,)) if collections else b"") + key: v for (cid, key), v in model.items() if cid in visible}
    assert contents(world.messages) == prefixed
    assert world.options.window.outstanding == 0
    world.bucket.abandon()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(before=WRITES, between=WRITES, chosen=FILTERS, window=st.sampled_from(["1", "100", "300", "5000"]))
def test_a_reader_that_was_away_ends_with_the_contents_of_the_store(
    tmp_path: Path, before: list[Any], between: list[Any], chosen: tuple[bool, bytes, tuple[int, ...]], window: str
):
    collections, value, visible = chosen
    world = World(tmp_path / str(next(_paths)), collections, connection_buffer_size=window)
    model: dict[tuple[int, bytes], bytes] = {}
    for step, write in enumerate(before):
        apply(world, model, step, write)
    world.request(value)
    world.read_some()
    position = world.stop_reading()
    first, world.messages = world.messages, []
    for step, write in enumerate(between, len(before)):
        apply(world, model, step, write)
    world.request(value, **position)
    world.read()
    check_promises(world.messages)
    prefixed = {(bytes((cid,)) if collections else b"") + key: v for (cid, key), v in model.items() if cid in visible}
    assert contents(first + world.messages) == prefixed
    world.bucket.abandon()


DOCUMENTS = st.builds(
    dict,
    kind=st.sampled_from([RecordKind.MUTATION, RecordKind.DELETION, RecordKind.EXPIRATION, RecordKind.COMMIT]),
    key=st.binary(min_size=1, max_size=40).map(lambda key: b"\0" + key),
    value=st.binary(max_size=50),
    seqno=st.integers(1, 2**63 - 1),
    rev_seqno=st.integers(0, 2**64 - 1),
    cas=st.integers(1, 2**64 - 1),
    flags=st.integers(0, 2**32 - 1),
    time=st.integers(0, 2**32 - 1),
    extra=st.integers(0, 255) | st.just(1 << 63 | 77),  # of a commit: that it deletes
)


@given(
    document=DOCUMENTS, flags=st.sampled_from([0x1, 0x21, 0x9, 0x41, 0x25]), collections=st.booleans(),
    hifi=st.booleans(), expiry=st.booleans(), stream_id=st.sampled_from([0, 1, 65535]), upr=st.booleans(),
)  # fmt: skip
def test_single_documents_and_bulk_documents_are_the_same_bytes(
    document: dict[str, Any], flags: int, collections: bool, hifi: bool, expiry: bool, stream_id: int, upr: bool
):
    options = ProducerOptions.opened(dcp.Open(0, flags, b"n"), collections=collections, snappy=True, now=0.0)
    options.hifi_mfu, options.expiry_opcode = hifi, expiry and bool(flags & OpenFlag.INCLUDE_DELETE_TIMES)
    stream_id = 0 if upr else stream_id
    deletes = document["kind"] == RecordKind.COMMIT and document["extra"] >> 63
    if document["kind"] in (RecordKind.DELETION, RecordKind.EXPIRATION) or deletes:
        document = {**document, "value": b""}
    record = pack(**document)
    frames = StreamFrames(options, Dialect.UPR if upr else Dialect.DCP, 7, 99, stream_id)
    out = SendBuffer(1 << 12)
    PackedEncoder(
        FrameOptions(
            opaque=99, vbucket=7, stream_id=stream_id, collections=collections,
            delete_times=bool(flags & OpenFlag.INCLUDE_DELETE_TIMES), expiry_opcode=options.expiry_opcode and not upr,
            upr=upr, no_value=bool(flags & 0x48), keep_datatype=bool(flags & 0x40), hifi_mfu=hifi, plain_commits=True,
        )
    ).encode(record, out)  # fmt: skip
    gone = bool(deletes) if document["kind"] == RecordKind.COMMIT else None
    assert frames.document(*unpack(record), deleted=gone) == bytes(out.view())


@given(start=st.integers(0, 100), more=st.integers(0, 100), flags=st.sampled_from([1, 5, 6, 9, 0xD]))
def test_the_fast_marker_is_the_declared_one(start: int, more: int, flags: int):
    options = ProducerOptions.opened(dcp.Open(0, 1, b"n"), collections=True, snappy=False, now=0.0)
    made = StreamFrames(options, Dialect.DCP, 7, 99, 0).marker(MarkerFacts(start, start + more, flags))
    assert made == dcp.SnapshotMarker(start, start + more, flags, vbucket=7, opaque=99).encode()


@pytest.mark.parametrize(
    ("flags", "stop"),
    [
        (0, Datatype.XATTR | Datatype.SNAPPY),
        (OpenFlag.INCLUDE_XATTRS, Datatype.XATTR | Datatype.SNAPPY),
        (OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETED_USER_XATTRS, Datatype.SNAPPY),
        (OpenFlag.NO_VALUE, 0),
        (OpenFlag.NO_VALUE | OpenFlag.INCLUDE_XATTRS, Datatype.XATTR),
    ],
)
def test_the_bulk_encoder_stops_only_at_values_that_must_be_changed(flags: int, stop: int):
    options = ProducerOptions.opened(dcp.Open(0, flags | 1, b"n"), collections=True, snappy=False, now=0.0)
    assert StreamFrames(options, Dialect.DCP, 0, 0, 0).stop_datatypes == stop


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just(SystemEventId.BEGIN_COLLECTION), st.integers(8, 9), st.integers(10, 14)),
        st.tuples(st.just(SystemEventId.END_COLLECTION), st.integers(8, 9), st.integers(10, 14)),
    )
)


@given(log=EVENTS)
def test_a_scope_follows_exactly_the_collections_that_its_events_made(log: list[tuple[int, int, int]]):
    seen = StreamFilter(collections=True, ids=(), scope_id=8)
    alive: set[int] = set()
    for event, scope, collection in log:
        value = (1).to_bytes(8, "big") + scope.to_bytes(4, "big") + collection.to_bytes(4, "big")
        assert seen.passes(event, value) is (scope == 8)
        if scope == 8:
            (alive.add if event == SystemEventId.BEGIN_COLLECTION else alive.discard)(collection)
    assert seen.collection_ids == alive
    assert not seen.is_empty, "only the drop of the scope ends it"


def test_the_end_of_a_filter_is_told(tmp_path: Path):
    world = World(tmp_path, True)
    world.request(b'{"collections":["9"]}')
    world.read()
    world.bucket.apply_manifest(MANIFEST.replace('{"name":"cart","uid":"9"},', "").replace('"uid":"2"', '"uid":"3"'))
    world.read()
    assert world.messages[-1] == dcp.StreamEnd(StreamEndStatus.FILTER_EMPTY)
    assert not world.producer.streams
    world.bucket.abandon()


def test_a_disk_that_cannot_be_read_ends_that_stream_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World(tmp_path, True)
    world.request()

    def poll(source: StreamSource) -> None:
        raise CorruptStore("a block does not add up")

    monkeypatch.setattr(StreamSource, "poll", poll)
    world.read()
    monkeypatch.undo()
    assert world.messages == [dcp.StreamEnd(StreamEndStatus.BACKFILL_FAIL)]
    world.request()
    world.read()
    assert world.producer.streams, "another stream of the connection works"
    world.bucket.abandon()


def test_streams_share_the_connection_by_turns(tmp_path: Path):
    """Two streams with much to send: neither waits until the other has sent everything."""
    world = World(tmp_path, True, enable_stream_id="true")
    world.vbucket.bulk.set_many([b"k%06d" % n for n in range(20_000)], [b"v" * 100] * 20_000)
    world.bucket.flush()
    world.bucket.trim_memory()
    world.request(b'{"sid":1}')
    world.request(b'{"sid":2}')
    world.read()
    order = [m.stream_id for m in world.messages if isinstance(m, dcp.DcpMutation)]
    changes = sum(1 for before, after in itertools.pairwise(order) if before != after)
    assert len(order) == 40_000
    assert changes > 10
    world.bucket.abandon()


def test_backfills_one_after_the_other_if_the_client_wants_that(tmp_path: Path):
    world = World(tmp_path, True, enable_stream_id="true", backfill_order="sequential")
    world.vbucket.bulk.set_many([b"k%06d" % n for n in range(20_000)], [b"v" * 100] * 20_000)
    world.bucket.flush()
    world.bucket.trim_memory()
    for sid in (1, 2, 3):
        world.request(b'{"sid":%d}' % sid)
    world.read()
    order = [m.stream_id for m in world.messages if isinstance(m, dcp.DcpMutation)]
    assert [sid for sid, _ in itertools.groupby(order)] == [1, 2, 3]
    assert len(order) == 60_000
    world.bucket.abandon()


def test_a_stream_that_is_closed_leaves_nothing_behind_in_an_idle_vbucket(tmp_path: Path):
    world = World(tmp_path, True)
    world.request()
    world.read()
    source = weakref.ref(next(iter(world.producer.streams.values())).source)
    world.producer.close_stream(next(iter(world.producer.streams.values())))
    gc.collect()
    assert source() is None
    world.bucket.abandon()
