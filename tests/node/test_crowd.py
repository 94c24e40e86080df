"""Fairness and limits over real sockets: a client that asks for too much, or does not read, slows only itself."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.node.raw import ALL, BASIC, Raw, frame, ready
from tests.node.streaming import producer
from tests.support.node_thread import NodeThread, eventually
from upriver.errors import Status
from upriver.model import VbucketState
from upriver.node.options import Limits
from upriver.store import Durability, StoreOptions
from upriver.wire import Opcode
from upriver.wire.messages import cluster, dcp, kv, session

OK = Status.SUCCESS
VBUCKETS = 64
_keys = itertools.count()


@pytest.fixture(scope="module")
def crowd(make_node) -> NodeThread:  # type: ignore[no-untyped-def]
    store = StoreOptions(durability=Durability.LAZY, flush_delay_s=0.01, quota_bytes=16 << 20)
    return make_node(vbuckets=VBUCKETS, store=store)  # type: ignore[no-any-return]


@pytest.fixture
def client(crowd: NodeThread) -> Iterator[Raw]:
    with ready(crowd.port, *ALL) as raw:
        yield raw


def is_served(client: Raw, vbucket: int = 0) -> bool:
    """A write and a read by a well-behaved client."""
    key = b"\0served-%d" % next(_keys)
    written = client.ask(kv.Set(key=key, value=b"v", vbucket=vbucket)).specific
    return written == client.ask(kv.Get(key, vbucket=vbucket)).specific == OK


def send_endlessly(flood: Raw, question: bytes) -> None:
    while True:
        flood.send(question * 1000)


def unsent(crowd: NodeThread) -> int:
    """The largest number of bytes that wait in the node for one client."""
    return crowd.call(lambda: max(conn.transport.get_write_buffer_size() for conn in crowd.node.connections))


def test_ten_thousand_streams_on_one_connection_are_opened_while_others_are_served(crowd: NodeThread, client: Raw):
    wanted = 10_000
    with producer(crowd, enable_stream_id="true") as raw:
        requests = [
            dcp.StreamRequest(vbucket=n % VBUCKETS, value=b'{"sid":%d}' % (1 + n // VBUCKETS), opaque=n)
            for n in range(wanted)
        ]
        served_meanwhile = opened = 0
        with ThreadPoolExecutor() as aside:
            sending = aside.submit(raw.send, *requests)  # returns only when the node has read most of them
            while opened < wanted:
                assert is_served(client)
                opened = len(streams_of(crowd))
                served_meanwhile += 0 < opened < wanted
            sending.result()
        assert served_meanwhile > 3, "the others had to wait until all streams were open"
        client.ask(kv.Set(key=b"\0news", value=b"v", vbucket=5))
        of_vbucket = {n for n in range(wanted) if n % VBUCKETS == 5}
        told: set[int] = set()
        while told < of_vbucket:
            got = raw.receive()
            if got.opcode == Opcode.DCP_MUTATION and got.key == b"\0news":
                told.add(got.opaque)
        assert told == of_vbucket


def streams_of(crowd: NodeThread) -> list[object]:
    return crowd.call(
        lambda: [each for conn in crowd.node.connections if conn.dcp is not None for each in conn.dcp.streams]  # type: ignore[union-attr]
    )


def test_streams_beyond_the_limit_are_refused_and_the_others_stay_open(make_node) -> None:  # type: ignore[no-untyped-def]
    node = make_node(limits=Limits(max_streams=100))
    with producer(node, enable_stream_id="true") as raw:
        raw.send(*[dcp.StreamRequest(value=b'{"sid":%d}' % sid) for sid in range(1, 201)])
        statuses = [raw.response().specific for _ in range(200)]
        assert statuses == [OK] * 100 + [Status.ENOMEM] * 100


def test_many_connections_with_a_stream_for_every_vbucket_follow_while_others_are_served(
    crowd: NodeThread, client: Raw
):
    with ExitStack() as stack:
        readers = [stack.enter_context(producer(crowd)) for _ in range(40)]
        for reader in readers:
            reader.send(*[dcp.StreamRequest(vbucket=vbucket) for vbucket in range(VBUCKETS)])
        for round_ in range(3):
            for vbucket in range(VBUCKETS):
                assert client.ask(kv.Set(key=b"\0round-%d" % round_, value=b"v", vbucket=vbucket)).specific == OK
        for reader in readers:
            wanted = {(vbucket, b"\0round-2") for vbucket in range(VBUCKETS)}
            while wanted:
                got = reader.receive()
                if got.opcode == Opcode.DCP_MUTATION:
                    wanted.discard((got.specific, got.key))
    assert is_served(client)


def test_a_client_that_floods_requests_and_reads_no_answers_is_not_read_from(crowd: NodeThread, client: Raw):
    assert client.ask(kv.Set(key=b"\0large", value=bytes(100_000))).specific == OK
    with ready(crowd.port, *ALL) as flood:
        flood.socket.settimeout(0.5)
        question = kv.Get(b"\0large").frame().encode()
        with pytest.raises(TimeoutError):
            send_endlessly(flood, question)
        for _ in range(50):
            assert is_served(client)
        assert unsent(crowd) < 8 << 20


def test_a_dcp_connection_that_floods_requests_is_not_read_from(crowd: NodeThread, client: Raw):
    with producer(crowd) as flood:
        flood.socket.settimeout(0.5)
        question = session.Stat(b"vbucket-details").frame().encode()
        with pytest.raises(TimeoutError):
            send_endlessly(flood, question)
        for _ in range(50):
            assert is_served(client)
        assert unsent(crowd) < 64 << 20


def test_a_reader_that_never_acknowledges_pins_no_memory(crowd: NodeThread, client: Raw):
    with producer(crowd, connection_buffer_size="1000") as stuck:
        stuck.send(*[dcp.StreamRequest(vbucket=vbucket) for vbucket in range(VBUCKETS)])
        quota = crowd.node.options.store.quota_bytes
        for _ in range(3 * quota // 100_000):
            while client.ask(kv.Set(key=b"\0%d" % next(_keys), value=bytes(100_000))).specific != OK:
                pass  # the disk is slower than this client
        store = crowd.node.buckets.get("default").store
        assert crowd.call(lambda: store.memory_bytes) <= quota
        assert unsent(crowd) < 1 << 20
        assert eventually(lambda: is_served(client)), "it is answered as soon as the disk has caught up"


def test_requests_that_wait_for_a_pending_vbucket_are_bounded_in_bytes(crowd: NodeThread, client: Raw):
    assert client.ask(cluster.SetVbucket(VbucketState.PENDING, vbucket=40)).specific == OK
    with producer(crowd) as greedy:
        greedy.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            send_endlessly(greedy, kv.Set(key=b"\0parked", value=bytes(100_000), vbucket=40).frame().encode())
        eventually(lambda: parked(crowd)[0] > 1 << 20)
        size, count = parked(crowd)
        assert size < 64 << 20
        assert is_served(client)
        assert client.ask(cluster.SetVbucket(VbucketState.ACTIVE, vbucket=40)).specific == OK
        greedy.socket.settimeout(60)
        done = {greedy.response().specific for _ in range(count)}
        assert OK in done
        assert done <= {OK, Status.ETMPFAIL}, "more at once than the quota holds"


def parked(crowd: NodeThread) -> tuple[int, int]:
    """Bytes and number of waiting requests, of the connection that has the most."""
    return crowd.call(lambda: max((conn._waiting_bytes, conn._waiting) for conn in crowd.node.connections))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(Opcode.HELLO, value=bytes(16 * 1024)), id="HELLO of 16 KiB"),
        pytest.param(frame(Opcode.SASL_AUTH, key=b"PLAIN", value=bytes(20_000)), id="a password of 20 KB"),
        pytest.param(frame(Opcode.SET, extras=bytes(8), key=b"k", value=bytes(20_000))[:24], id="only a header"),
    ],
)
def test_a_connection_that_has_not_logged_in_may_not_send_more_than_16_kib(make_node, data: bytes):  # type: ignore[no-untyped-def]
    node = make_node(username="u", password="p")
    with Raw(node.port) as raw:
        raw.send(data)
        assert raw.is_closed()
    with Raw(node.port) as raw:
        raw.hello(*BASIC)
        raw.send(frame(Opcode.SASL_AUTH, key=b"PLAIN", value=bytes(16 * 1024 - 24 - 5)))
        assert raw.receive().specific != OK, "just under the limit it is read and answered"


def test_a_connection_whose_second_login_fails_has_the_limits_of_a_new_one(make_node):  # type: ignore[no-untyped-def]
    node = make_node(username="u", password="p")
    with Raw(node.port) as raw:
        raw.hello(*BASIC)
        assert raw.ask(frame(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0u\0p")).specific == OK
        raw.bucket()
        assert raw.ask(kv.Set(key=b"k", value=bytes(20_000))).specific == OK
        assert raw.ask(frame(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0u\0wrong")).specific == Status.AUTH_ERROR
        raw.send(kv.Set(key=b"k", value=bytes(20_000)))
        assert raw.is_closed()


def test_a_slow_reader_is_not_taken_for_a_dead_one(make_node):  # type: ignore[no-untyped-def]
    node = make_node(limits=Limits(dcp_idle_s=3.0))
    node.call(lambda: node.vbucket(0).documents.set(b"large", bytes(19 << 20)))
    with producer(node, set_noop_interval="3600") as raw:
        raw.send(dcp.StreamRequest(vbucket=0))
        for _ in range(40):  # 16 MB in 4 s: longer than a dead one would live, and there is always something left
            left = 400_000
            while left > 0:
                left -= len(raw.socket.recv(left))
            raw.send(dcp.BufferAck(1))
            time.sleep(0.1)
        assert any(conn.dcp is not None for conn in node.call(lambda: list(node.node.connections)))


@pytest.mark.parametrize("closed_first", [False, True])
def test_a_closed_connection_is_freed_without_the_garbage_collector(crowd: NodeThread, client: Raw, closed_first: bool):
    """Full collections are rare, because they hold up all clients: nothing may depend on them."""
    eventually(lambda: crowd.call(lambda: all(conn.dcp is None for conn in crowd.node.connections)))
    gc.disable()
    try:
        with producer(crowd) as raw:
            raw.send(*[dcp.StreamRequest(vbucket=vbucket) for vbucket in range(8)])
            assert [raw.response().specific for _ in range(8)] == [OK] * 8
            assert client.ask(kv.Set(key=b"\0last", value=b"v", vbucket=1)).specific == OK
            left = crowd.call(lambda: references(crowd))
            assert len(left) == 9
            if closed_first:
                raw.send(*[dcp.CloseStream(vbucket=vbucket) for vbucket in range(8)])
                assert [raw.response().specific for _ in range(8)] == [OK] * 8
        deadline = time.monotonic() + 30
        while any(each() is not None for each in left) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [each() for each in left if each() is not None] == []
    finally:
        gc.enable()


def test_a_closed_consumer_is_freed_without_the_garbage_collector(crowd: NodeThread) -> None:
    eventually(lambda: crowd.call(lambda: all(conn.dcp is None for conn in crowd.node.connections)))
    gc.disable()
    try:
        with ready(crowd.port, *ALL) as raw:
            assert raw.ask(dcp.Open(0, 0, b"consumer")).specific == OK
            [made] = crowd.call(lambda: [weakref.ref(c.dcp) for c in crowd.node.connections if c.dcp is not None])
        eventually(lambda: made() is None)
    finally:
        gc.enable()


def test_a_connection_that_fails_takes_nothing_from_the_others(crowd: NodeThread, client: Raw) -> None:
    with producer(crowd) as broken, producer(crowd) as other:
        for raw in (broken, other):
            raw.send(dcp.StreamRequest(vbucket=3))
        client.ask(kv.Set(key=b"\0before", value=b"v", vbucket=3))
        for raw in (broken, other):
            receive_key(raw, b"\0before")

        def fail(most: int) -> bytes:
            raise RuntimeError("a bug of ours")

        def break_it() -> None:
            role = list(crowd.node.buckets.get("default").dcp_connections.values())[-2].dcp
            role.machine.data_to_send = fail  # type: ignore[union-attr, method-assign, assignment]

        crowd.call(break_it)
        client.ask(kv.Set(key=b"\0after", value=b"v", vbucket=3))
        receive_key(other, b"\0after")
        assert broken.is_closed()


def receive_key(raw: Raw, key: bytes) -> None:
    while raw.receive().key != key:
        pass


def references(crowd: NodeThread) -> list[weakref.ref[object]]:
    """Weak references to the parts of a connection."""
    [made] = [conn.dcp for conn in crowd.node.connections if conn.dcp is not None]
    return [weakref.ref(made), *(weakref.ref(stream.source) for stream in made.streams.values())]  # type: ignore[union-attr]
