"""DCP_CONTROL over a real socket: every key of docs/protocol/open.md#controls with its values and errors, and what it
changes.
"""

from __future__ import annotations

import pytest

from tests.node.raw import ALL, BASIC, Raw, frame, ready
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.model import Datatype
from upriver.wire import Opcode
from upriver.wire.constants import Feature, OpenFlag
from upriver.wire.messages import dcp, kv

OK, EINVAL, NO = Status.SUCCESS, Status.EINVAL, Status.NOT_SUPPORTED


def producer(port: int, *features: int, flags: int = OpenFlag.PRODUCER, name: bytes = b"controls") -> Raw:
    raw = ready(port, *(features or ALL))
    assert raw.ask(dcp.Open(0, flags, name)).specific == OK
    return raw


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("enable_noop", "true", OK),
        ("enable_noop", "false", OK),
        ("enable_noop", "whatever", OK),
        ("set_noop_interval", "20", OK),
        ("set_noop_interval", "0.1", OK),
        ("set_noop_interval", "0.05", EINVAL),
        ("set_noop_interval", "0", EINVAL),
        ("set_noop_interval", "-1", EINVAL),
        ("set_noop_interval", "nan", EINVAL),
        ("set_noop_interval", "soon", EINVAL),
        ("connection_buffer_size", "1048576", OK),
        ("connection_buffer_size", "0", OK),
        ("connection_buffer_size", "4294967295", OK),
        ("connection_buffer_size", "4294967296", EINVAL),
        ("connection_buffer_size", "-1", EINVAL),
        ("connection_buffer_size", "1k", EINVAL),
        ("stream_buffer_size", "1", NO),
        ("set_priority", "high", OK),
        ("set_priority", "medium", OK),
        ("set_priority", "low", OK),
        ("set_priority", "urgent", EINVAL),
        ("set_priority", "HIGH", EINVAL),
        ("force_value_compression", "true", OK),
        ("force_value_compression", "no", OK),
        ("supports_cursor_dropping", "true", OK),
        ("supports_cursor_dropping_vulcan", "x", OK),
        ("supports_hifi_MFU", "true", OK),
        ("supports_hifi_mfu", "true", EINVAL),
        ("send_stream_end_on_client_close_stream", "true", OK),
        ("send_stream_end_on_client_close_stream", "other", OK),
        ("enable_expiry_opcode", "true", OK),
        ("enable_expiry_opcode", "false", OK),
        ("enable_stream_id", "true", OK),
        ("enable_stream_id", "false", EINVAL),
        ("enable_sync_writes", "true", OK),
        ("enable_sync_writes", "1", EINVAL),
        ("consumer_name", "replica_1", OK),
        ("enable_out_of_order_snapshots", "true", OK),
        ("enable_out_of_order_snapshots", "true_with_seqno_advanced", OK),
        ("enable_out_of_order_snapshots", "false", EINVAL),
        ("include_deleted_user_xattrs", "true", EINVAL),
        ("v7_dcp_status_codes", "true", OK),
        ("v7_dcp_status_codes", "no", EINVAL),
        ("flatbuffers_system_events", "true", OK),
        ("flatbuffers_system_events", "no", EINVAL),
        ("change_streams", "true", NO),
        ("change_streams", "no", EINVAL),
        ("max_marker_version", "2.2", OK),
        ("max_marker_version", "2.0", EINVAL),
        ("cache_transfer", "true", NO),
        ("backfill_order", "round-robin", OK),
        ("backfill_order", "sequential", OK),
        ("backfill_order", "random", EINVAL),
        ("enable_ext_metadata", "true", EINVAL),
        ("enable_value_compression", "true", EINVAL),
        ("enable_collections", "true", EINVAL),
        ("no_such_key", "true", EINVAL),
    ],
)
def test_a_control_is_answered_as_the_table_says(node: NodeThread, key: str, value: str, status: Status):
    with producer(node.port) as raw:
        assert raw.ask(dcp.DcpControl(key.encode(), value.encode())).specific == status


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(frame(Opcode.DCP_CONTROL, value=b"true"), id="no key"),
        pytest.param(frame(Opcode.DCP_CONTROL, key=b"enable_noop"), id="no value"),
        pytest.param(frame(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true", extras=bytes(4)), id="extras"),
        pytest.param(frame(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true", datatype=1), id="datatype JSON"),
    ],
)
def test_a_malformed_control_is_invalid(node: NodeThread, request_bytes: bytes):
    with producer(node.port) as raw:
        assert raw.ask(request_bytes).specific == EINVAL


def test_forced_compression_needs_snappy_at_open(node: NodeThread):
    with producer(node.port, *BASIC) as raw:
        assert raw.ask(dcp.DcpControl(b"force_value_compression", b"true")).specific == EINVAL


def test_newer_markers_need_collections(node: NodeThread):
    with producer(node.port, *BASIC) as raw:
        assert raw.ask(dcp.DcpControl(b"max_marker_version", b"2.2")).specific == NO


def test_the_probe_for_deleted_user_xattrs_tells_what_open_said(node: NodeThread):
    flags = OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETED_USER_XATTRS
    with producer(node.port, flags=flags) as raw:
        assert raw.ask(dcp.DcpControl(b"include_deleted_user_xattrs", b"true")).specific == OK
        assert raw.ask(dcp.DcpControl(b"include_deleted_user_xattrs", b"false")).specific == EINVAL


@pytest.mark.parametrize(("first", "second"), [("enable_stream_id", "enable_sync_writes"),
                                               ("enable_sync_writes", "enable_stream_id")])  # fmt: skip
def test_stream_ids_and_sync_writes_exclude_each_other(node: NodeThread, first: str, second: str):
    with producer(node.port) as raw:
        assert raw.ask(dcp.DcpControl(first.encode(), b"true")).specific == OK
        assert raw.ask(dcp.DcpControl(second.encode(), b"true")).specific == NO


def test_the_error_says_what_is_wrong_in_json(node: NodeThread):
    with producer(node.port) as raw:
        answer = raw.ask(dcp.DcpControl(b"backfill_order", b"random"))
        assert (answer.datatype, answer.value) == (1, b'{"error":{"context":"the order is round-robin or sequential"}}')


def test_controls_reach_the_right_connection(node: NodeThread):
    with producer(node.port, name=b"a") as one, producer(node.port, name=b"b") as other:
        one.ask(dcp.DcpControl(b"enable_stream_id", b"true"))
        assert one.ask(dcp.DcpControl(b"enable_sync_writes", b"true")).specific == NO
        assert other.ask(dcp.DcpControl(b"enable_sync_writes", b"true")).specific == OK


def test_a_consumer_name_with_sync_writes_makes_replica_markers(node: NodeThread):
    with producer(node.port, *BASIC, name=b"v2") as raw:
        for key, value in ((b"enable_noop", b"true"), (b"consumer_name", b"me"), (b"enable_sync_writes", b"true")):
            assert raw.ask(dcp.DcpControl(key, value)).specific == OK
        node.call(lambda: node.vbucket(3).documents.set(b"k", b"v"))
        raw.send(dcp.StreamRequest(vbucket=3))
        raw.message()
        assert isinstance(raw.message(), dcp.SnapshotMarkerV20)


def test_hello_with_and_without_snappy_are_distinguished(node: NodeThread):
    with producer(node.port, *BASIC, Feature.SNAPPY) as raw:
        assert raw.ask(dcp.DcpControl(b"force_value_compression", b"true")).specific == OK


def test_streams_keep_the_options_that_they_were_created_with(node: NodeThread):
    with producer(node.port, flags=OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES) as raw:
        raw.ask(dcp.DcpControl(b"enable_noop", b"true"))
        assert raw.ask(dcp.StreamRequest(vbucket=6)).specific == OK
        for key in (b"force_value_compression", b"enable_sync_writes"):
            assert raw.ask(dcp.DcpControl(key, b"true")).specific == OK
        assert raw.ask(dcp.StreamRequest(vbucket=7)).specific == OK
        with ready(node.port, *ALL) as writer:
            for vbucket in (6, 7):
                writer.ask(kv.Set(key=b"\0key", value=b"a" * 1000, vbucket=vbucket))
        seen: dict[int, int] = {}
        while len(seen) < 2:
            got = raw.receive()
            if got.opcode == Opcode.DCP_MUTATION:
                seen[got.specific] = got.datatype
        assert seen == {6: 0, 7: Datatype.SNAPPY}


def test_the_window_also_applies_to_streams_that_are_already_open(node: NodeThread):
    with producer(node.port) as raw, ready(node.port, *ALL) as writer:
        raw.ask(dcp.DcpControl(b"enable_noop", b"true"))
        assert raw.ask(dcp.StreamRequest(vbucket=5)).specific == OK
        assert raw.ask(dcp.DcpControl(b"connection_buffer_size", b"1")).specific == OK
        writer.ask(kv.Set(key=b"\0key", value=b"v", vbucket=5))
        assert raw.receive().opcode == Opcode.DCP_SNAPSHOT_MARKER
        assert raw.is_silent()
        raw.send(dcp.BufferAck(44))
        assert raw.receive().opcode == Opcode.DCP_MUTATION
