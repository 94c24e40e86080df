"""Flow control counted byte for byte, noops, and dead peers (docs/protocol/flow.md), over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.node.raw import ALL, BASIC, Raw, frame, ready
from tests.node.streaming import manifest
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.node.options import Limits
from upriver.wire import Magic, Opcode
from upriver.wire.constants import OpenFlag
from upriver.wire.messages import cluster, dcp, kv

OK = Status.SUCCESS


def producer(port: int, name: bytes, *features: int, flags: int = 1, **controls: str) -> Raw:
    raw = ready(port, *(features or BASIC))
    assert raw.ask(dcp.Open(0, flags, name)).specific == OK
    for key, value in controls.items():
        assert raw.ask(dcp.DcpControl(key.encode(), value.encode())).specific == OK
    return raw


def sizes(raw: Raw) -> list[int]:
    """The size of everything that arrives until the node is silent."""
    return [got.size for got in raw.until_quiet()]


@pytest.fixture(scope="module")
def filled(node: NodeThread) -> NodeThread:
    """Vbucket 0 has 100 documents of 100 bytes: 24 + 31 + 3 + 100 = 158 bytes each on the wire."""
    node.call(lambda: node.vbucket(0).bulk.set_many([b"k%02d" % number for number in range(100)], [b"v" * 100] * 100))
    return node


@pytest.mark.parametrize("window", [1, 44, 45, 200, 202, 203, 1000])
def test_a_message_is_sent_exactly_if_the_window_was_not_used_up_before_it(filled: NodeThread, window: int):
    with producer(filled.port, b"window", connection_buffer_size=str(window)) as raw:
        raw.send(dcp.StreamRequest(vbucket=0))
        expected, outstanding = [], 0
        for size in (44, *[158] * 100):
            if outstanding >= window:
                break
            expected.append(size)
            outstanding += size
        assert sizes(raw) == expected


def test_acknowledging_bytes_lets_exactly_as_many_through_again(filled: NodeThread):
    with producer(filled.port, b"acks", connection_buffer_size="400") as raw:
        raw.send(dcp.StreamRequest(vbucket=0))
        assert sum(sizes(raw)) == 44 + 158 * 3  # 360 < 400, so one more
        raw.send(dcp.BufferAck(118))  # outstanding 400: still full
        assert raw.until_quiet() == []
        raw.send(dcp.BufferAck(1))
        assert sizes(raw) == [158]
        raw.send(dcp.BufferAck(10**6))  # acknowledging too much is allowed: nothing is outstanding
        assert len(raw.until_quiet()) == 3


def test_a_full_window_does_not_hold_back_answers_and_noops(filled: NodeThread):
    with producer(filled.port, b"full", connection_buffer_size="1", enable_noop="true", set_noop_interval="0.1") as raw:
        raw.send(dcp.StreamRequest(vbucket=0))
        came = [raw.receive() for _ in range(3)]
        assert {got.opcode for got in came} == {Opcode.DCP_STREAM_REQ, Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_NOOP}
        assert raw.ask(dcp.DcpControl(b"set_priority", b"high")).specific == OK
        assert raw.ask(dcp.StreamRequest(vbucket=1)).specific == OK


@pytest.fixture(scope="module")
def shop(make_node) -> NodeThread:  # type: ignore[no-untyped-def]
    made: NodeThread = make_node()
    with ready(made.port, *ALL) as admin:
        assert admin.ask(cluster.SetManifest(manifest(1, (9, "cart")))).specific == OK
    return made


@pytest.mark.parametrize("window", [1, 44, 45, 101, 102, 103, 134])
def test_live_messages_of_every_kind_wait_for_the_window(shop: NodeThread, window: int):
    """A snapshot of 44 bytes of marker, 24 + 31 + 2 + 1 = 58 of a document, and 32 that say how far the stream is."""
    vb = shop.vbucket(6)
    with producer(shop.port, b"live", *ALL, enable_noop="true", set_noop_interval="3600") as raw:
        raw.send(dcp.StreamRequest(vbucket=6, value=b'{"collections":["9"]}'))
        shop.call(lambda: vb.documents.set(b"k", b"v", 9))
        raw.until_quiet()
        assert raw.ask(dcp.DcpControl(b"connection_buffer_size", str(window).encode())).specific == OK
        shop.call(lambda: _at_once(vb))
        expected, outstanding = [], 0
        for size in (44, 58, 32):
            if outstanding < window:
                expected.append(size)
                outstanding += size
        assert sizes(raw) == expected
        raw.send(dcp.BufferAck(outstanding))
        assert sum(sizes(raw)) <= 134 - sum(expected)


def _at_once(vb: Any) -> None:
    """A document that the stream sees and one that it does not, in one snapshot: the flusher cannot come between."""
    with vb.shared.lock:
        vb.documents.set(b"k", b"v", 9)
        vb.documents.set(b"k", b"v", 0)


def test_window_0_is_no_window(filled: NodeThread):
    with producer(filled.port, b"zero", connection_buffer_size="1") as raw:
        raw.send(dcp.StreamRequest(vbucket=0))
        assert len(raw.until_quiet()) == 1
        raw.send(dcp.DcpControl(b"connection_buffer_size", b"0"))
        assert len(raw.until_quiet()) == 100


def test_growing_the_window_lets_an_open_stream_continue(filled: NodeThread):
    with producer(filled.port, b"grow", connection_buffer_size="1") as raw:
        raw.send(dcp.StreamRequest(vbucket=0))
        assert len(raw.until_quiet()) == 1
        raw.send(dcp.DcpControl(b"connection_buffer_size", b"45"))
        assert len(raw.until_quiet()) == 1
        raw.send(dcp.DcpControl(b"connection_buffer_size", b"203"))
        assert len(raw.until_quiet()) == 1


def test_a_document_larger_than_the_window_passes(node: NodeThread):
    with ready(node.port) as writer:
        writer.ask(kv.Set(key=b"big", value=b"x" * 3_000_000, vbucket=5))
    with producer(node.port, b"large", connection_buffer_size="1024") as raw:
        raw.send(dcp.StreamRequest(vbucket=5))
        assert sizes(raw) == [44, 24 + 31 + 3 + 3_000_000]


def test_stream_ids_and_every_control_message_are_charged(filled: NodeThread):
    """Marker 47, mutation 161, stream end 31: the end needs the last byte of window."""
    total = 47 + 100 * (158 + 1 + 3)
    for window, ends in ((total, False), (total + 1, True)):
        controls = {"enable_noop": "true", "enable_stream_id": "true", "connection_buffer_size": str(window)}
        with producer(filled.port, b"sid", *ALL, **controls) as raw:
            raw.send(dcp.StreamRequest(vbucket=0, end_seqno=100, value=b'{"sid":9}'))
            got = raw.until_quiet()
            assert sum(each.size for each in got if each.opcode != Opcode.DCP_STREAM_END) == total
            assert (got[-1].opcode == Opcode.DCP_STREAM_END) is ends


@pytest.mark.parametrize(("vbucket", "spare", "comes"), [(6, 0, False), (7, 1, True)])
def test_a_prepare_is_charged_two_bytes_more_than_it_sends(node: NodeThread, vbucket: int, spare: int, comes: bool):
    node.call(lambda: node.vbucket(vbucket).durable.prepare(b"p", b"v", 0, level=1))
    sent = 24 + 31 + 1 + 1
    window = 61 + sent + 2 + spare
    controls = {"enable_sync_writes": "true", "consumer_name": "c", "connection_buffer_size": str(window)}
    with producer(node.port, b"prepares", **controls) as raw:
        raw.send(dcp.StreamRequest(vbucket=vbucket))
        assert sizes(raw) == [61, sent]
        node.call(lambda: node.vbucket(vbucket).documents.set(b"other", b"v"))
        assert bool(raw.until_quiet()) is comes


# ---------------------------------------------------------------------------------------------- noops


def noops(raw: Raw, count: int) -> Iterator[int]:
    for _ in range(count):
        got = raw.receive()
        assert (got.magic, got.opcode) == (Magic.REQUEST, Opcode.DCP_NOOP)
        yield got.opaque


def test_noops_come_every_interval_once_they_are_answered(node: NodeThread):
    with producer(node.port, b"noop", enable_noop="true", set_noop_interval="0.1") as raw:
        opaques = []
        for _ in range(3):
            [opaque] = noops(raw, 1)
            opaques.append(opaque)
            raw.send(frame(Opcode.DCP_NOOP, magic=Magic.RESPONSE, opaque=opaque))
        assert opaques == [10_000_001, 10_000_002, 10_000_003]


def test_no_second_noop_before_the_first_is_answered(node: NodeThread):
    with producer(node.port, b"one-noop", enable_noop="true", set_noop_interval="0.1") as raw:
        list(noops(raw, 1))
        time.sleep(0.6)
        assert raw.until_quiet() == []


def test_a_noop_answer_with_another_opaque_ends_the_connection(node: NodeThread):
    with producer(node.port, b"bad-noop", enable_noop="true", set_noop_interval="0.1") as raw:
        [opaque] = noops(raw, 1)
        raw.send(frame(Opcode.DCP_NOOP, magic=Magic.RESPONSE, opaque=opaque + 1))
        assert raw.is_closed()


def test_a_silent_peer_is_cut_and_one_that_answers_is_not(make_node):  # type: ignore[no-untyped-def]
    node = make_node(limits=Limits(dcp_idle_s=2.0))
    controls = {"enable_noop": "true", "set_noop_interval": "0.1"}
    with producer(node.port, b"silent", **controls) as silent, producer(node.port, b"alive", **controls) as alive:
        with ThreadPoolExecutor() as aside:
            closed = aside.submit(silent.is_closed)
            while not closed.done():
                [opaque] = noops(alive, 1)
                alive.send(frame(Opcode.DCP_NOOP, magic=Magic.RESPONSE, opaque=opaque))
        assert closed.result()
        assert alive.ask(dcp.DcpControl(b"set_priority", b"low")).specific == OK


@pytest.mark.parametrize(
    ("opcode", "status", "survives"),
    [
        (Opcode.DCP_MUTATION, Status.NOT_MY_VBUCKET, True),
        (Opcode.DCP_MUTATION, Status.KEY_ENOENT, True),
        (Opcode.DCP_MUTATION, Status.KEY_EEXISTS, True),
        (Opcode.DCP_STREAM_END, Status.KEY_ENOENT, True),
        (Opcode.DCP_COMMIT, Status.KEY_ENOENT, False),
        (Opcode.DCP_MUTATION, Status.ERANGE, False),
        (Opcode.DCP_MUTATION, Status.EINVAL, False),
        (Opcode.DCP_SNAPSHOT_MARKER, Status.ERANGE, False),
    ],
)
def test_error_answers_to_data_messages_are_forgiven_or_not(node: NodeThread, opcode: int, status: int, survives: bool):
    with producer(node.port, b"errors") as raw:
        raw.send(frame(opcode, magic=Magic.RESPONSE, vbucket=status))
        if survives:
            assert raw.ask(dcp.DcpControl(b"set_priority", b"low")).specific == OK
        else:
            assert raw.is_closed()


def test_with_the_newer_status_codes_the_older_ones_are_not_forgiven(node: NodeThread):
    with producer(node.port, b"v7", v7_dcp_status_codes="true") as raw:
        raw.send(frame(Opcode.DCP_MUTATION, magic=Magic.RESPONSE, vbucket=Status.DCP_STREAM_NOT_FOUND))
        assert raw.ask(dcp.DcpControl(b"set_priority", b"low")).specific == OK
        raw.send(frame(Opcode.DCP_MUTATION, magic=Magic.RESPONSE, vbucket=Status.KEY_ENOENT))
        assert raw.is_closed()


def test_a_client_that_never_reads_slows_only_itself(make_node):  # type: ignore[no-untyped-def]
    node = make_node(limits=Limits(dcp_idle_s=1.5))
    node.call(lambda: node.vbucket(0).bulk.set_many([b"k%06d" % n for n in range(30_000)], [b"v" * 1000] * 30_000))
    with producer(node.port, b"stuck", flags=OpenFlag.PRODUCER) as stuck, ready(node.port) as other:
        stuck.send(dcp.StreamRequest(vbucket=0))
        with pytest.raises(ConnectionError):
            _talk_until_cut(stuck, other)
        assert other.ask(kv.Get(b"k000001", vbucket=0)).specific == OK


def _talk_until_cut(stuck: Raw, other: Raw) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert other.ask(kv.Get(b"k000001", vbucket=0)).specific == OK
        stuck.send(dcp.BufferAck(1))  # it sends, but it does not read


@pytest.mark.parametrize("fault", ["stall", "slow"])
def test_a_live_stream_sends_nothing_at_once_on_a_connection_with_a_fault(node: NodeThread, fault: str):
    with producer(node.port, b"faulty") as raw:
        raw.send(dcp.StreamRequest(vbucket=1, start_seqno=0))
        write = [(b"fault-%d" % number, bytes(3000)) for number in range(3)]
        node.call(lambda: node.vbucket(1).documents.set(*write[0]))
        assert raw.until_quiet(), "it is live now"
        role = node.call(lambda: node.node.buckets.get("default").dcp_connections["faulty"].dcp)
        if fault == "stall":
            role.stalled_until = time.monotonic() + 3600
        else:
            role.slow_bytes_per_s = 1
        for key, value in write[1:]:
            node.call(lambda key=key, value=value: node.vbucket(1).documents.set(key, value))
        sent = [got.key for got in raw.until_quiet() if got.opcode == Opcode.DCP_MUTATION]
        assert len(sent) <= (fault == "slow")  # and then it waits for an hour
        role.slow_bytes_per_s, role.stalled_until, role._resume_at = 0, 0.0, 0.0
        node.call(role.schedule)
        sent += [got.key for got in raw.until_quiet() if got.opcode == Opcode.DCP_MUTATION]
        assert sent == [b"fault-1", b"fault-2"]
