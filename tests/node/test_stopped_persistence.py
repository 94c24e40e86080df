"""STOP_PERSISTENCE and START_PERSISTENCE over real sockets: what waits, what is refused, and that all of it ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.node.raw import ALL, Raw, frame, ready
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.store import Durability, StoreOptions
from upriver.wire import Opcode
from upriver.wire.messages import cluster, dcp, kv, session

OK, EINVAL, ETMPFAIL = Status.SUCCESS, Status.EINVAL, Status.ETMPFAIL
STOP, START = frame(Opcode.STOP_PERSISTENCE), frame(Opcode.START_PERSISTENCE)
PERSIST_ON_ACTIVE = b"\x11\x02"
SMALL = StoreOptions(durability=Durability.LAZY, flush_delay_s=0.0, quota_bytes=8 << 20, flush_bytes=1 << 20)


@pytest.fixture(scope="module")
def small(make_node) -> NodeThread:  # type: ignore[no-untyped-def]
    return make_node(store=SMALL)  # type: ignore[no-any-return]


@pytest.fixture
def admin(small: NodeThread) -> Iterator[Raw]:
    """A connection with persistence stopped; afterwards it is started and everything is written to disk."""
    with ready(small.port) as raw:
        assert raw.ask(STOP).specific == OK
        yield raw
        raw.ask(START)
        while int(stat(raw, b"ep_diskqueue_items")):
            pass


def stat(raw: Raw, wanted: bytes) -> bytes:
    raw.send(session.Stat())
    found = {}
    while (got := raw.receive()).key:
        found[got.key] = got.value
    return found[wanted]


def test_the_opcodes_are_those_of_a_real_server():
    assert (STOP[1], START[1]) == (0x80, 0x81)


def test_stopping_twice_or_starting_twice_is_an_error(admin: Raw):
    assert admin.ask(STOP).specific == EINVAL
    assert stat(admin, b"ep_flusher_state") == b"paused"
    assert admin.ask(START).specific == OK
    assert admin.ask(START).specific == EINVAL
    assert stat(admin, b"ep_flusher_state") == b"running"


def test_stopping_persistence_needs_a_bucket(small: NodeThread):
    with Raw(small.port) as raw:
        raw.hello(*ALL)
        assert raw.ask(STOP).specific == Status.NO_BUCKET


def test_a_wait_for_the_disk_ends_when_persistence_is_started(admin: Raw, small: NodeThread):
    stored = admin.ask(kv.Set(key=b"waits", value=b"v"))
    seqno = int.from_bytes(stored.extras[8:], "big")
    before = small.call(lambda: small.vbucket(0).persisted_seqno)
    with ready(small.port) as other:
        other.send(cluster.SeqnoPersistence(seqno, opaque=7), session.Noop(opaque=8))
        admin.ask(session.Noop())
        admin.ask(kv.Set(key=b"meanwhile", value=b"v"))
        assert small.call(lambda: small.vbucket(0).persisted_seqno) == before
        assert other.is_silent()
        assert admin.ask(START).specific == OK
        assert [(got.opaque, got.specific) for got in (other.receive(), other.receive())] == [(7, OK), (8, OK)]


def test_a_durable_write_is_answered_when_persistence_is_started(admin: Raw, small: NodeThread):
    with ready(small.port) as other:
        other.send(frame(Opcode.SET, extras=bytes(8), key=b"durable", value=b"v", framing=PERSIST_ON_ACTIVE))
        assert other.is_silent()
        assert admin.ask(kv.Get(b"durable")).specific == Status.KEY_ENOENT
        assert admin.ask(START).specific == OK
        assert other.receive().specific == OK
    assert admin.ask(kv.Get(b"durable")).specific == OK


def test_observers_see_what_is_only_in_memory(admin: Raw):
    admin.ask(kv.Set(key=b"observed", value=b"v", vbucket=3))
    asked = cluster.Observe((cluster.ObservedKey(3, b"observed"),))
    assert admin.ask(asked).value[-9] == 0
    admin.ask(START)
    with_seqno = admin.ask(kv.Set(key=b"observed", value=b"w", vbucket=3))
    assert admin.ask(cluster.SeqnoPersistence(int.from_bytes(with_seqno.extras[8:], "big"), vbucket=3)).specific == OK
    assert admin.ask(asked).value[-9] == 1


def fill(raw: Raw, vbucket: int = 1) -> None:
    """Write until the node has no memory left."""
    for number in itertools.count():
        if raw.ask(kv.Set(key=b"fill-%d" % number, value=bytes(60_000), vbucket=vbucket)).specific == ETMPFAIL:
            return


def test_without_memory_writes_and_new_streams_get_a_temporary_failure(admin: Raw, small: NodeThread):
    fill(admin)
    with ready(small.port, *ALL) as reader:
        assert reader.ask(dcp.Open(0, 1, b"step-21")).specific == OK
        assert reader.ask(dcp.DcpControl(b"enable_noop", b"true")).specific == OK
        # docs/protocol/stream-request.md#checks, step 21
        assert reader.ask(dcp.StreamRequest(vbucket=2)).specific == ETMPFAIL
        unknown = dcp.StreamRequest(
            vbucket=2, start_seqno=9, vbuuid=0xBAD, snap_start_seqno=9, snap_end_seqno=9, end_seqno=2**64 - 1
        )
        assert reader.ask(unknown).specific == Status.ROLLBACK  # step 17 comes first
        assert admin.ask(START).specific == OK
        assert admin.ask(cluster.SeqnoPersistence(1, vbucket=1)).specific == OK
        while reader.ask(dcp.StreamRequest(vbucket=2)).specific != OK:
            admin.ask(session.Noop())
        assert admin.ask(kv.Set(key=b"more", value=b"v", vbucket=1)).specific == OK


def test_without_memory_a_replica_may_still_be_filled(admin: Raw, small: NodeThread):
    fill(admin)
    with ready(small.port, *ALL) as reader:
        assert reader.ask(dcp.Open(0, 1, b"step-21-replica")).specific == OK
        for key, value in ((b"enable_noop", b"true"), (b"enable_sync_writes", b"true"), (b"consumer_name", b"other")):
            assert reader.ask(dcp.DcpControl(key, value)).specific == OK
        assert reader.ask(dcp.StreamRequest(vbucket=2)).specific == OK


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(frame(Opcode.COMPACT_DB, extras=bytes(24)), id="compact"),
        pytest.param(frame(Opcode.DEL_VBUCKET, vbucket=7), id="delete a vbucket"),
        pytest.param(
            frame(Opcode.COLLECTIONS_SET_MANIFEST, value=b'{"uid":"1","scopes":[{"name":"_default","uid":"0",'
                  b'"collections":[{"name":"_default","uid":"0"}]}]}'),
            id="manifest",
        ),
    ],
)  # fmt: skip
def test_what_needs_the_disk_is_refused_while_persistence_is_stopped(admin: Raw, request_bytes: bytes):
    assert admin.ask(request_bytes).specific == ETMPFAIL
    assert admin.ask(kv.Set(key=b"still", value=b"here", vbucket=7)).specific == OK


def test_a_live_stream_continues(admin: Raw, small: NodeThread):
    with ready(small.port, *ALL) as reader:
        reader.ask(dcp.Open(0, 1, b"live"))
        reader.ask(dcp.DcpControl(b"enable_noop", b"true"))
        assert reader.ask(dcp.StreamRequest(vbucket=5, end_seqno=2**64 - 1)).specific == OK
        admin.ask(kv.Set(key=b"live", value=b"v", vbucket=5))
        while not isinstance(message := reader.message(), dcp.DcpMutation):
            pass
        assert message.key == b"\0live"
