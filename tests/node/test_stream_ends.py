"""How streams end: by state, by the client, by a takeover; and that everything arrives before the end."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.node.raw import Raw, frame, ready
from tests.node.streaming import OK, is_end, only, producer, take, to_disk, write
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.model import VbucketState
from upriver.node.options import Limits
from upriver.protocol.producer import turns
from upriver.protocol.producer.stream import RUN_BYTES
from upriver.wire import Magic, Message, Opcode
from upriver.wire.constants import MarkerFlag, StreamEndStatus, StreamFlag
from upriver.wire.messages import cluster, dcp, kv


@pytest.fixture(scope="module")
def node(make_node) -> NodeThread:  # type: ignore[no-untyped-def]
    return make_node(vbuckets=64)


_vbuckets = itertools.count()


@pytest.fixture
def vb(node: NodeThread) -> int:
    """A vbucket that no other test has touched."""
    return next(_vbuckets)


def test_a_change_of_state_ends_every_stream_of_the_vbucket(node: NodeThread, vb: int):
    with ready(node.port) as admin, producer(node) as one, producer(node) as two:
        for raw in (one, two):
            raw.send(dcp.StreamRequest(vbucket=vb))
            assert raw.receive().specific == OK
        assert admin.ask(cluster.SetVbucket(VbucketState.REPLICA, vbucket=vb)).specific == OK
        for raw in (one, two):
            assert take(raw, is_end)[-1].status == StreamEndStatus.STATE_CHANGED  # type: ignore[attr-defined]


def test_closing_is_silent_unless_the_end_was_asked_for(node: NodeThread, vb: int):
    with producer(node) as raw:
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == Status.KEY_ENOENT
        raw.ask(dcp.StreamRequest(vbucket=vb))
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == OK
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == Status.KEY_ENOENT
    with producer(node, send_stream_end_on_client_close_stream="true") as raw:
        raw.ask(dcp.StreamRequest(vbucket=vb))
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == OK
        assert take(raw, is_end)[-1].status == StreamEndStatus.CLOSED  # type: ignore[attr-defined]


def test_streams_with_ids_are_closed_by_their_id(node: NodeThread, vb: int):
    with producer(node, enable_stream_id="true") as raw:
        for sid in (1, 2):
            assert raw.ask(dcp.StreamRequest(vbucket=vb, value=b'{"sid":%d}' % sid)).specific == OK
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == Status.DCP_STREAM_ID_INVALID
        assert raw.ask(frame(0x52, vbucket=vb, framing=b"\x22\0\3")).specific == Status.DCP_STREAM_ID_INVALID
        assert raw.ask(frame(0x52, vbucket=vb, framing=b"\x22\0\1")).specific == OK
        write(node, vb, b"k")
        got = take(raw, lambda m: isinstance(m, dcp.DcpMutation))
        assert {m.stream_id for m in got} == {2}


def test_a_vbucket_is_handed_over_without_losing_a_write(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b")

    def confirm(raw: Raw, message: Message) -> None:
        raw.send(frame(message.opcode, magic=Magic.RESPONSE, opaque=message.opaque))

    with producer(node) as raw, ready(node.port) as client:
        raw.send(dcp.StreamRequest(vbucket=vb, opaque=5, flags=StreamFlag.TAKEOVER))
        seen = []
        for message in iter(lambda: take(raw, lambda m: True)[0], None):
            seen.append(message)
            if isinstance(message, dcp.SnapshotMarker) and message.flags & MarkerFlag.ACK:
                confirm(raw, message)
            elif isinstance(message, dcp.SetVbucketState):
                if message.state == VbucketState.PENDING:
                    assert client.ask(kv.Set(key=b"late", value=b"v", vbucket=vb)).specific == OK
                confirm(raw, message)
            elif isinstance(message, dcp.StreamEnd):
                break
        assert [m.state for m in only(seen, dcp.SetVbucketState)] == [VbucketState.PENDING, VbucketState.ACTIVE]  # type: ignore[attr-defined]
        assert [m.key for m in only(seen, dcp.DcpMutation)] == [b"\0a", b"\0b", b"\0late"]  # type: ignore[attr-defined]
        assert seen[-1].status == StreamEndStatus.OK  # type: ignore[attr-defined]
        assert client.ask(cluster.GetVbucket(vbucket=vb)).value == VbucketState.DEAD.to_bytes(4, "big")
        assert client.ask(kv.Set(key=b"x", value=b"v", vbucket=vb)).specific == Status.NOT_MY_VBUCKET


def test_writers_wait_for_a_takeover_that_does_not_catch_up(make_node):  # type: ignore[no-untyped-def]
    node = make_node(vbuckets=2, limits=Limits(takeover_s=0.2))
    write(node, 0, b"a")
    with producer(node) as raw, ready(node.port) as client:
        raw.send(dcp.StreamRequest(vbucket=0, opaque=5, flags=StreamFlag.TAKEOVER))
        take(raw, lambda m: isinstance(m, dcp.DcpMutation))
        deadline = time.monotonic() + 60
        while client.ask(kv.Set(key=b"k", value=b"v")).specific == OK:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.ask(kv.Set(key=b"k", value=b"v")).specific == Status.ETMPFAIL
        assert client.ask(kv.Get(b"k")).specific == OK
        assert client.ask(kv.Set(key=b"k", value=b"v", vbucket=1)).specific == OK
        raw.ask(dcp.CloseStream(vbucket=0))
        assert client.ask(kv.Set(key=b"k", value=b"v")).specific == OK


def test_many_vbuckets_come_complete_and_each_in_order(node: NodeThread):
    """Large backfills over several vbuckets on one connection, read back against the store."""
    numbers = range(40, 56)
    for number in numbers:
        keys = [b"%d-%d" % (number, n) for n in range(3000)]
        node.call(lambda number=number, keys=keys: node.vbucket(number).bulk.set_many(keys, [key * 30 for key in keys]))
    to_disk(node)
    with producer(node, connection_buffer_size="100000") as raw:
        for number in numbers:
            raw.send(dcp.StreamRequest(vbucket=number, end_seqno=node.vbucket(number).high_seqno))
        seqnos: dict[int, list[int]] = {number: [] for number in numbers}
        open_streams, unacked = len(numbers), 0
        while open_streams:
            got = raw.receive()
            if got.magic.is_response:
                continue
            unacked += got.size
            if unacked > 50_000:
                raw.send(dcp.BufferAck(unacked))
                unacked = 0
            if got.opcode == 0x57:
                assert got.value == got.key[1:] * 30, "the buffer was overwritten while it was being sent"
                seqnos[got.specific].append(int.from_bytes(got.extras[:8], "big"))
            open_streams -= got.opcode == 0x55
        for number in numbers:
            assert seqnos[number] == sorted(set(seqnos[number]))
            assert len(seqnos[number]) == 3000


@pytest.fixture
def two_backfills(make_node, monkeypatch: pytest.MonkeyPatch) -> NodeThread:  # type: ignore[no-untyped-def]
    """Only two run at once; those of vbuckets 0 and 1 take several turns, the others one."""
    monkeypatch.setattr(turns, "MAX_BACKFILLS", 2)
    made: NodeThread = make_node(vbuckets=10)
    for vbucket in range(10):
        write(made, vbucket, *[b"k%d" % n for n in range(8 if vbucket < 2 else 1)], value=bytes(RUN_BYTES))
    to_disk(made)
    return made


def open_all(raw: Raw) -> None:
    """A stream for every vbucket; on return two run and eight wait."""
    raw.send(*[dcp.StreamRequest(vbucket=vbucket, flags=StreamFlag.TO_LATEST) for vbucket in range(10)])
    assert [raw.response().specific for _ in range(10)] == [OK] * 10
    raw.send(dcp.DcpControl(b"connection_buffer_size", str(4 * RUN_BYTES).encode()))
    assert not [got for got in raw.until_quiet() if got.opcode == Opcode.DCP_STREAM_END]


def ends(raw: Raw, count: int) -> set[tuple[int, int]]:
    raw.send(dcp.DcpControl(b"connection_buffer_size", b"0"))
    found = [take(raw, is_end)[-1] for _ in range(count)]
    return {(end.vbucket, end.status) for end in found if isinstance(end, dcp.StreamEnd)}


def test_short_backfills_that_wait_for_long_ones_all_have_their_turn(two_backfills: NodeThread):
    with producer(two_backfills, connection_buffer_size="1") as raw:
        open_all(raw)
        assert ends(raw, 10) == {(vbucket, StreamEndStatus.OK) for vbucket in range(10)}


@pytest.mark.parametrize("told", ["true", "false"])
def test_streams_that_are_closed_while_they_wait_for_their_backfill_hold_up_no_others(
    two_backfills: NodeThread, told: str
):
    with producer(two_backfills, connection_buffer_size="1", send_stream_end_on_client_close_stream=told) as raw:
        open_all(raw)
        raw.send(*[dcp.CloseStream(vbucket=vbucket) for vbucket in range(2, 6)])
        rest = {(vbucket, StreamEndStatus.OK) for vbucket in (0, 1, 6, 7, 8, 9)}
        closed = {(vbucket, StreamEndStatus.CLOSED) for vbucket in range(2, 6)} if told == "true" else set()
        assert ends(raw, len(rest | closed)) == rest | closed
