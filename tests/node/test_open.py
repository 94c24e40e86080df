"""DCP_OPEN over a real socket: every rule of docs/protocol/open.md, and the commands of each role.

See docs/protocol/framing.md#malformed.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.node.raw import ALL, BASIC, Raw, frame, ready
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.wire import Opcode
from upriver.wire.constants import Feature
from upriver.wire.framing import Magic
from upriver.wire.messages import dcp, kv, session


def open_frame(flags: int = 1, name: bytes = b"n", value: bytes = b"", datatype: int = 0, extras: bytes = b"") -> bytes:
    return frame(
        Opcode.DCP_OPEN, extras=extras or bytes(4) + flags.to_bytes(4, "big"), key=name, value=value, datatype=datatype
    )


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(open_frame(extras=bytes(4)), Status.EINVAL, id="extras of four bytes"),
        pytest.param(open_frame(name=b""), Status.EINVAL, id="no name"),
        pytest.param(open_frame(name=b"x" * 252), Status.EINVAL, id="a name longer than a key"),
        pytest.param(open_frame(datatype=2), Status.EINVAL, id="datatype snappy"),
        pytest.param(open_frame(datatype=8), Status.EINVAL, id="datatype that does not exist"),
        pytest.param(open_frame(0x002 | 1), Status.EINVAL, id="notifier"),
        pytest.param(open_frame(0x010 | 1), Status.EINVAL, id="unused flag"),
        pytest.param(open_frame(0x080 | 1), Status.EINVAL, id="point in time recovery"),
        pytest.param(open_frame(0x400 | 1), Status.EINVAL, id="unknown flag"),
        pytest.param(open_frame(0x200), Status.EINVAL, id="skip deletes without producer"),
        pytest.param(open_frame(0x008 | 0x040 | 1), Status.EINVAL, id="both no-value flags"),
        pytest.param(open_frame(0x100 | 1), Status.EINVAL, id="deleted user xattrs without xattrs"),
        pytest.param(open_frame(datatype=1), Status.EINVAL, id="JSON without a value"),
        pytest.param(open_frame(value=b"{}"), Status.EINVAL, id="a value that is not declared JSON"),
        pytest.param(open_frame(value=b"{", datatype=1), Status.EINVAL, id="a value that is not JSON"),
        pytest.param(open_frame(value=b"[]", datatype=1), Status.EINVAL, id="a value that is not an object"),
        pytest.param(open_frame(value=b'{"x":1}', datatype=1), Status.EINVAL, id="an unknown property"),
        pytest.param(open_frame(value=b'{"consumer_name":"c"}', datatype=1), Status.EINVAL, id="consumer_name here"),
        pytest.param(open_frame(0, value=b'{"consumer_name":1}', datatype=1), Status.EINVAL, id="consumer_name 1"),
        pytest.param(open_frame(value=b"{}", datatype=1), Status.SUCCESS, id="an empty object"),
        pytest.param(open_frame(0x004 | 0x100 | 0x020 | 0x008 | 0x200 | 1), Status.SUCCESS, id="every flag that fits"),
        pytest.param(open_frame(0x040 | 1), Status.SUCCESS, id="no value with its datatype"),
    ],
)  # fmt: skip
def test_open_answers_with_the_first_rule_that_it_breaks(node: NodeThread, request_bytes: bytes, status: int):
    with ready(node.port) as raw:
        assert raw.ask(request_bytes).specific == status


def test_a_json_value_needs_json_in_hello(node: NodeThread):
    with ready(node.port, Feature.XERROR) as raw:
        assert raw.ask(open_frame(value=b"{}", datatype=1)).specific == Status.EINVAL


def test_a_second_open_is_refused_and_the_connection_stays_open(node: NodeThread):
    with ready(node.port) as raw:
        assert raw.ask(open_frame()).specific == Status.SUCCESS
        assert raw.ask(open_frame()).specific == Status.EINVAL
        assert raw.ask(session.Noop()).specific == Status.SUCCESS


def test_dcp_cannot_be_combined_with_unordered_execution(node: NodeThread):
    with ready(node.port, *BASIC, Feature.UNORDERED_EXECUTION) as raw:
        assert raw.ask(open_frame()).specific == Status.NOT_SUPPORTED


def test_open_without_a_bucket_is_refused(node: NodeThread):
    with Raw(node.port) as raw:
        raw.hello(*BASIC)
        assert raw.ask(open_frame()).specific == Status.NO_BUCKET
    with Raw(node.port) as raw:
        raw.send(open_frame())
        assert raw.is_closed(), "without extended errors there is no status for it"


def test_the_older_connection_of_a_name_is_closed(node: NodeThread):
    with ready(node.port) as old, ready(node.port) as new:
        assert old.ask(open_frame(name=b"same")).specific == Status.SUCCESS
        assert old.ask(dcp.StreamRequest(vbucket=0)).specific == Status.SUCCESS
        assert new.ask(open_frame(name=b"same")).specific == Status.SUCCESS
        assert old.is_closed()
        assert new.ask(dcp.StreamRequest(vbucket=0)).specific == Status.SUCCESS


def test_the_older_connection_gets_no_stream_end_and_its_commands_have_no_effect(node: NodeThread):
    with ready(node.port) as old, ready(node.port) as new:
        assert old.ask(open_frame(name=b"gone")).specific == Status.SUCCESS
        assert old.ask(dcp.StreamRequest(vbucket=3)).specific == Status.SUCCESS
        assert new.ask(open_frame(name=b"gone")).specific == Status.SUCCESS
        with contextlib.suppress(OSError):
            old.send(kv.Set(key=b"too late", value=b"v", vbucket=3))
        with pytest.raises(ConnectionError):
            old.receive()
        assert new.ask(kv.Get(b"too late", vbucket=3)).specific == Status.KEY_ENOENT


def test_a_name_is_free_again_when_its_connection_is_closed(node: NodeThread):
    for _ in range(3):
        with ready(node.port) as raw:
            assert raw.ask(open_frame(name=b"again")).specific == Status.SUCCESS
            assert raw.ask(dcp.StreamRequest(vbucket=0)).specific == Status.SUCCESS


def test_a_name_may_be_as_long_as_a_key(node: NodeThread):
    with ready(node.port) as raw:
        assert raw.ask(open_frame(name=b"x" * 251)).specific == Status.EINVAL
        assert raw.ask(open_frame(name=b"x" * 250)).specific == Status.SUCCESS
    with ready(node.port, *ALL) as raw:
        assert raw.ask(open_frame(name=b"x" * 251)).specific == Status.SUCCESS


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(open_frame(0x400 | 1), id="flags"),
        pytest.param(open_frame(value=b"{", datatype=1), id="value"),
    ],
)
def test_the_rules_of_the_request_come_before_those_of_the_connection(node: NodeThread, request_bytes: bytes):
    with ready(node.port, *BASIC, Feature.UNORDERED_EXECUTION) as raw:
        assert raw.ask(request_bytes).specific == Status.EINVAL


def test_a_dcp_connection_agrees_to_no_unordered_execution(node: NodeThread):
    with ready(node.port) as raw:
        assert raw.ask(open_frame(name=b"ordered")).specific == Status.SUCCESS
        answer = raw.ask(session.Hello(b"t", (*BASIC, Feature.UNORDERED_EXECUTION)))
        assert Feature.UNORDERED_EXECUTION.to_bytes(2, "big") not in [
            answer.value[at : at + 2] for at in range(0, len(answer.value), 2)
        ]


def test_open_switches_json_on(node: NodeThread):
    with ready(node.port, Feature.XERROR) as raw:
        written = frame(Opcode.SET, extras=bytes(8), key=b"json", value=b"{}", datatype=1)
        assert raw.ask(written).specific == Status.EINVAL
        assert raw.ask(open_frame(name=b"json")).specific == Status.SUCCESS
        assert raw.ask(written).specific == Status.SUCCESS


def test_a_dcp_connection_keeps_its_bucket_and_its_user(node: NodeThread):
    with ready(node.port) as raw:
        raw.ask(open_frame())
        assert raw.ask(session.SelectBucket(b"default")).specific == Status.NOT_SUPPORTED


def test_hello_after_open_changes_nothing_about_keys(node: NodeThread):
    with ready(node.port) as writer, ready(node.port) as raw:
        writer.ask(kv.Set(key=b"plain", value=b"v", vbucket=7))
        raw.ask(open_frame(name=b"hello-late"))
        raw.send(session.Hello(b"late", ALL))
        raw.response()
        raw.send(dcp.StreamRequest(vbucket=7))
        keys = [m.key for m in (raw.message() for _ in range(3)) if isinstance(m, dcp.DcpMutation)]
        assert keys == [b"plain"]


WRONG_ROLE = [
    pytest.param(frame(Opcode.DCP_ADD_STREAM, extras=bytes(4)), id="ADD_STREAM"),
    pytest.param(frame(Opcode.DCP_STREAM_END, extras=bytes(4)), id="STREAM_END"),
    pytest.param(frame(Opcode.DCP_SNAPSHOT_MARKER, extras=bytes(20)), id="SNAPSHOT_MARKER"),
    pytest.param(frame(Opcode.DCP_MUTATION, extras=bytes(7) + b"\1" + bytes(23), key=b"k"), id="MUTATION"),
    pytest.param(frame(Opcode.DCP_DELETION, extras=bytes(7) + b"\1" + bytes(10), key=b"k"), id="DELETION"),
    pytest.param(frame(Opcode.DCP_EXPIRATION, extras=bytes(7) + b"\1" + bytes(12), key=b"k"), id="EXPIRATION"),
    pytest.param(frame(Opcode.DCP_SET_VBUCKET_STATE, extras=b"\1"), id="SET_VBUCKET_STATE"),
    pytest.param(frame(Opcode.DCP_NOOP), id="NOOP"),
    pytest.param(frame(Opcode.DCP_COMMIT, extras=bytes(15) + b"\1", key=b"k"), id="COMMIT"),
    pytest.param(frame(Opcode.DCP_ABORT, extras=bytes(15) + b"\1", key=b"k"), id="ABORT"),
]


@pytest.mark.parametrize("request_bytes", WRONG_ROLE)
def test_what_only_a_producer_sends_ends_a_producer_connection(node: NodeThread, request_bytes: bytes):
    with ready(node.port) as raw:
        assert raw.ask(open_frame(name=b"role")).specific == Status.SUCCESS
        raw.send(request_bytes)
        assert raw.is_closed()


@pytest.mark.parametrize(
    "request_bytes",
    [
        *WRONG_ROLE,
        pytest.param(frame(Opcode.DCP_STREAM_REQ, extras=bytes(48)), id="STREAM_REQ"),
        pytest.param(frame(Opcode.DCP_CLOSE_STREAM), id="CLOSE_STREAM"),
        pytest.param(frame(Opcode.DCP_GET_FAILOVER_LOG), id="GET_FAILOVER_LOG"),
        pytest.param(frame(Opcode.DCP_BUFFER_ACK, extras=bytes(4)), id="BUFFER_ACK"),
        pytest.param(frame(Opcode.DCP_CONTROL, key=b"k", value=b"v"), id="CONTROL"),
        pytest.param(frame(Opcode.DCP_SEQNO_ACKNOWLEDGED, extras=bytes(8)), id="SEQNO_ACKNOWLEDGED"),
    ],
)
def test_dcp_commands_on_a_plain_connection_are_refused(node: NodeThread, request_bytes: bytes):
    with ready(node.port) as raw:
        assert raw.ask(request_bytes).specific == Status.EINVAL
        assert raw.ask(session.Noop()).specific == Status.SUCCESS


def test_an_answer_to_nothing_ends_the_connection(node: NodeThread):
    for opcode in (Opcode.GET, Opcode.DCP_SEQNO_ADVANCED, Opcode.DCP_OSO_SNAPSHOT):
        with ready(node.port) as raw:
            raw.ask(open_frame(name=b"answers"))
            raw.send(frame(opcode, magic=Magic.RESPONSE))
            assert raw.is_closed(), opcode
