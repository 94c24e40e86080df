"""Many connections that follow the same vbuckets, each at its own pace: none misses or repeats anything."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.producing import Link, Streamed, charged
from tests.protocol.test_producer_properties import check_promises, contents, seqno_of
from tests.support.examples import examples
from upriver.model import VbucketState
from upriver.protocol.producer.live import LIVE_BYTES
from upriver.store import Bucket, StoreOptions
from upriver.wire import Context, Message, decode
from upriver.wire.messages import dcp

VBUCKETS, READERS = 3, 3
_paths = itertools.count()


class Reader:
    """A connection with a stream of each vbucket; it may be slow to read and to acknowledge."""

    def __init__(self, crowd: Crowd, name: bytes, window: int, is_replica: bool) -> None:
        controls = {"enable_sync_writes": "true", "consumer_name": "other"} if is_replica else {}
        self.crowd = crowd
        self.link = Link(crowd.streamed, name, connection_buffer_size=str(window), **controls)
        self.options, self.producer = self.link.options, self.link.producer
        self.streams: dict[int, list[list[Message]]] = {vbucket: [] for vbucket in range(VBUCKETS)}
        self.unacknowledged = 0
        self.lazy = False

    def open(self, vbucket: int) -> None:
        """Reopen the stream from where it was closed, at the end of a snapshot."""
        position: dict[str, int] = {}
        if seqno := max(map(seqno_of, self.received(vbucket)), default=0):
            uuid = self.crowd.bucket.vbucket(vbucket).failover_log.uuid
            position = {"start_seqno": seqno, "vbuuid": uuid, "snap_start_seqno": seqno, "snap_end_seqno": seqno}
        self.streams[vbucket].append([])
        self.link.ask(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket, end_seqno=2**64 - 1, **position))
        assert (vbucket, 0) in self.producer.streams

    def received(self, vbucket: int) -> list[Message]:
        return [message for stream in self.streams[vbucket] for message in stream]

    def close(self, vbucket: int) -> None:
        self.link.ask(dcp.CloseStream(vbucket=vbucket))

    def read(self) -> None:
        for frame in self.link.frames():
            self.streams[frame.specific][-1].append(decode(frame, Context(collections=True)))
            self.unacknowledged += charged(frame)
        if self.options.window.size:
            # Byte for byte (docs/protocol/flow.md#window)
            assert self.options.window.outstanding == self.unacknowledged
        if not self.lazy and self.unacknowledged:
            self.link.ask(dcp.BufferAck(self.unacknowledged))
            self.unacknowledged = 0

    def catch_up(self) -> None:
        """Read and acknowledge until nothing comes: the end of a snapshot."""
        self.block(False)
        self.lazy = False
        self.read()
        self.crowd.streamed.turn()
        while self.link.sent:
            self.read()
            self.crowd.streamed.turn()

    def block(self, blocked: bool) -> None:
        """Block the socket, or let it take everything."""
        self.link.can_send = not blocked


class Crowd:
    """A bucket and all connections that follow it."""

    def __init__(self, path: Path, windows: list[int]) -> None:
        self.bucket = Bucket.open(path, name="b", vbuckets=VBUCKETS, options=StoreOptions(background=False))
        self.bucket.create_all(VbucketState.ACTIVE)
        self.streamed = Streamed(self.bucket)
        self.readers = [Reader(self, b"r%d" % n, window, n == 0) for n, window in enumerate(windows)]
        self.model: dict[int, dict[bytes, bytes]] = {vbucket: {} for vbucket in range(VBUCKETS)}
        self.manifest = 0

    def settle(self) -> None:
        """Run until no connection has anything to send or read."""
        while True:
            self.streamed.turn()
            if not any(reader.link.sent for reader in self.readers):
                return
            for reader in self.readers:
                reader.read()

    def write(self, vbucket: int, key: int, value: bytes) -> None:
        self.bucket.vbucket(vbucket).documents.set(b"k%d" % key, value)
        self.model[vbucket][b"\0k%d" % key] = value

    def delete(self, vbucket: int, key: int) -> None:
        if self.model[vbucket].pop(b"\0k%d" % key, None) is not None:
            self.bucket.vbucket(vbucket).documents.delete(b"k%d" % key)

    def write_durably(self, vbucket: int, key: int, value: bytes) -> None:
        vb = self.bucket.vbucket(vbucket)
        prepared = vb.durable.prepare(b"k%d" % key, value, 0, level=1)
        vb.durable.commit(b"k%d" % key, 0, prepared.seqno)
        self.model[vbucket][b"\0k%d" % key] = value

    def new_collection(self) -> None:
        """A system event in every vbucket: live streams have to send it alone."""
        self.manifest += 1
        names = ",".join(f'{{"name":"c{n}","uid":"{n + 8:x}"}}' for n in range(self.manifest))
        self.bucket.apply_manifest(
            f'{{"uid":"{self.manifest}","scopes":[{{"name":"_default","uid":"0","collections":'
            f'[{{"name":"_default","uid":"0"}},{names}]}}]}}'.encode()
        )


vbuckets, readers, keys = st.integers(0, VBUCKETS - 1), st.integers(0, READERS - 1), st.integers(0, 4)
STEPS = st.lists(
    st.one_of(
        *[st.tuples(st.just("write"), vbuckets, keys)] * 4,
        st.tuples(st.just("burst"), vbuckets, keys),
        st.tuples(st.sampled_from(["delete", "durable"]), vbuckets, keys),
        *[st.tuples(st.just("turn"), st.just(0), st.just(0))] * 4,
        st.tuples(st.sampled_from(["block", "unblock", "lazy", "eager", "statistics"]), readers, st.just(0)),
        st.tuples(st.sampled_from(["close", "open"]), readers, vbuckets),
        st.tuples(st.sampled_from(["flush", "forget", "collection"]), st.just(0), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)


def take(crowd: Crowd, step: int, kind: str, one: int, two: int) -> None:
    if kind == "write":
        crowd.write(one, two, b"v%d" % step)
    elif kind == "burst":
        for key in range(two, two + 3):
            crowd.write(one, key, b"%d" % step * (LIVE_BYTES // 2))
    elif kind == "delete":
        crowd.delete(one, two)
    elif kind == "durable":
        crowd.write_durably(one, two, b"d%d" % step)
    elif kind == "turn":
        crowd.settle()
    elif kind == "flush":
        crowd.bucket.flush()
    elif kind == "forget":
        crowd.bucket.flush()
        crowd.bucket.trim_memory()
    elif kind == "collection":
        crowd.new_collection()
    else:
        act(crowd.readers[one], kind, two)


def act(reader: Reader, kind: str, vbucket: int) -> None:
    if kind in ("block", "unblock"):
        reader.block(kind == "block")
    elif kind in ("lazy", "eager"):
        reader.lazy = kind == "lazy"
        reader.read()
    elif kind == "statistics":
        for stream in reader.producer.streams.values():
            assert stream.last_sent_seqno <= stream.last_read_seqno
    elif kind == "close" and (vbucket, 0) in reader.producer.streams:
        reader.catch_up()
        reader.close(vbucket)
    elif kind == "open" and (vbucket, 0) not in reader.producer.streams:
        reader.open(vbucket)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS, windows=st.lists(st.sampled_from([0, 0, 200, 5000]), min_size=READERS, max_size=READERS))
def test_every_follower_ends_with_the_contents_of_the_store(tmp_path: Path, steps: list[Any], windows: list[int]):
    crowd = Crowd(tmp_path / str(next(_paths)), windows)
    for reader in crowd.readers:
        for vbucket in range(VBUCKETS):
            reader.open(vbucket)
    for number, (kind, one, two) in enumerate(steps):
        take(crowd, number, kind, one, two)
    for reader in crowd.readers:
        act(reader, "eager", 0)
        reader.block(False)
        for vbucket in range(VBUCKETS):
            act(reader, "open", vbucket)
    crowd.settle()
    for reader in crowd.readers:
        for vbucket in range(VBUCKETS):
            assert contents(reader.received(vbucket)) == crowd.model[vbucket]
            for messages in reader.streams[vbucket]:
                check_promises(messages)
            stream = reader.producer.streams[vbucket, 0]
            assert stream.last_read_seqno == crowd.bucket.vbucket(vbucket).high_seqno
        assert reader.options.window.outstanding == 0
        everything = [m for vbucket in range(VBUCKETS) for m in reader.received(vbucket)]
        items = [m for m in everything if seqno_of(m) and not isinstance(m, dcp.SeqnoAdvanced)]
        assert reader.producer.items_sent == len(items)
    crowd.bucket.abandon()


def test_a_connection_that_fails_takes_nothing_from_the_others(tmp_path: Path):
    crowd = Crowd(tmp_path / "b", [0] * READERS)
    for reader in crowd.readers:
        reader.open(0)
    crowd.write(0, 0, b"first")
    crowd.settle()
    broken, *others = crowd.readers

    def encode(*arguments: object) -> None:
        raise RuntimeError("a bug of ours")

    broken.producer.live_table.encode = encode  # type: ignore[method-assign, assignment]
    crowd.streamed.links.remove(broken.link)  # the shell that would end this connection
    for key in (1, 2):
        crowd.write(0, key, b"v")
        crowd.settle()
    with pytest.raises(RuntimeError, match="a bug of ours"):
        broken.producer.data_to_send()
    for reader in others:
        assert contents(reader.received(0)) == crowd.model[0]
        check_promises(reader.received(0))
    crowd.bucket.abandon()
