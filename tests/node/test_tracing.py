"""Server durations in the framing extras of answers, for clients that asked HELLO for tracing.

See docs/protocol/framing.md#framing-extras and docs/protocol/session.md#hello.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from tests.node.raw import ALL, Raw, frame, ready
from tests.support.node_thread import NodeThread, eventually
from upriver.errors import Status
from upriver.wire import Frame, Magic, Opcode
from upriver.wire.constants import Feature
from upriver.wire.framing import decode_duration
from upriver.wire.messages import cluster, dcp, kv, session

TRACED = (*ALL, Feature.TRACING)


@pytest.fixture
def raw(node: NodeThread) -> Iterator[Raw]:
    with ready(node.port, *TRACED) as made:
        yield made


def duration_us(answer: Frame) -> float:
    assert answer.magic is Magic.ALT_RESPONSE
    assert (len(answer.framing), answer.framing[0]) == (3, 0x02)
    return decode_duration(int.from_bytes(answer.framing[1:], "big"))


def test_hello_itself_is_answered_plainly_and_says_that_tracing_is_on(node: NodeThread):
    with Raw(node.port) as raw:
        answer = raw.ask(session.Hello(b"t", (Feature.TRACING,)))
        assert (answer.magic, answer.value) == (Magic.RESPONSE, b"\0\x0f")
        assert raw.ask(session.Noop()).magic is Magic.ALT_RESPONSE
        assert raw.ask(session.Hello(b"t", ())).magic is Magic.RESPONSE
        assert raw.ask(session.Noop()).magic is Magic.RESPONSE


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param(kv.Set(key=b"\0traced", value=b"v"), Status.SUCCESS, id="set"),
        pytest.param(kv.Get(b"\0nobody"), Status.KEY_ENOENT, id="a miss"),
        pytest.param(frame(Opcode.GETK, key=b"\0there"), Status.SUCCESS, id="with a key"),
        pytest.param(frame(Opcode.GET, key=b"\0there"), Status.SUCCESS, id="get"),
        pytest.param(frame(Opcode.GET, extras=b"x", key=b"\0k"), Status.EINVAL, id="malformed"),
        pytest.param(frame(0xEE), Status.UNKNOWN_COMMAND, id="unknown"),
        pytest.param(kv.Get(b"\0k", vbucket=999), Status.NOT_MY_VBUCKET, id="not ours"),
        pytest.param(cluster.Observe((cluster.ObservedKey(0, b"\0there"),)), Status.SUCCESS, id="observe"),
    ],
)
def test_every_answer_says_how_long_it_took_and_is_otherwise_the_same(node: NodeThread, request_, status):  # type: ignore[no-untyped-def]
    with ready(node.port, *ALL) as plain, ready(node.port, *TRACED) as raw:
        plain.ask(kv.Set(key=b"\0there", value=b"v", flags=7))
        usual, traced = plain.ask(request_), raw.ask(request_)
        assert 0 <= duration_us(traced) < 60e6
        shape = (usual.specific, usual.opaque, usual.datatype, usual.key, len(usual.extras), usual.value)
        assert shape[0] == status
        assert (traced.specific, traced.opaque, traced.datatype, traced.key, len(traced.extras), traced.value) == shape


def test_the_duration_includes_the_time_that_a_request_waited(raw: Raw, node: NodeThread):
    with ready(node.port) as admin:
        assert admin.ask(frame(Opcode.STOP_PERSISTENCE)).specific == Status.SUCCESS
        seqno = struct.unpack(">Q", raw.ask(kv.Set(key=b"\0waits", value=b"v")).extras[8:])[0]
        raw.send(cluster.SeqnoPersistence(seqno))
        waits = node.node.buckets.get("default").waits
        eventually(lambda: node.call(lambda: bool(waits._waiting)))  # from here on the request waits
        assert raw.is_silent(0.3)
        admin.ask(frame(Opcode.START_PERSISTENCE))
    assert duration_us(raw.receive()) >= 250_000


def test_a_statistic_whose_name_is_too_long_for_the_short_header_is_sent_plainly(raw: Raw, node: NodeThread):
    name = b"n" * 245
    with ready(node.port, *ALL) as other:
        other.ask(dcp.Open(0, 1, name))
        raw.send(session.Stat(b"dcp"))
        seen: dict[Magic, bytes] = {}
        while (got := raw.receive()).key:
            seen[got.magic] = got.key
        assert name in seen[Magic.RESPONSE]
        duration_us(got)


def test_streams_are_granted_in_the_longer_form_and_their_messages_stay_as_they_are(raw: Raw):
    raw.ask(dcp.Open(0, 1, b"traced"))
    raw.ask(dcp.DcpControl(b"enable_noop", b"true"))
    raw.send(dcp.StreamRequest(vbucket=4, end_seqno=0))
    duration_us(raw.receive())
    assert raw.receive().magic is Magic.REQUEST
