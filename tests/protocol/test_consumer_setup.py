"""A consumer comes to its streams: every exchange of docs/protocol/messages.md and docs/protocol/consumer.md as a
transcript.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.protocol.consumer_talk import (
    ADD_OPAQUE,
    BRANCH,
    Store,
    Talk,
    marker,
    mutation,
    refusal,
    rolled_back,
    success,
)
from upriver.errors import RemoteProtocolError, Status
from upriver.model import SEQNO_MAX, VbucketState
from upriver.protocol.consumer.streams import Registry
from upriver.protocol.roles import WrongRole
from upriver.wire import Opcode, OtherResponse
from upriver.wire.constants import Dialect, StreamEndStatus
from upriver.wire.framing import Frame, Magic
from upriver.wire.messages.dcp import (
    AddStream,
    AddStreamResponse,
    BufferAck,
    CloseStream,
    DcpControl,
    DcpNoop,
    GetDcpFailoverLog,
    StreamEnd,
    StreamRequest,
)
from upriver.wire.messages.upr import UprStreamRequest


def control_answer(control: object, status: int = 0, opaque: int | None = None) -> OtherResponse:
    assert isinstance(control, DcpControl)
    return OtherResponse(Opcode.DCP_CONTROL, opaque=control.opaque if opaque is None else opaque, status=status)


# ------------------------------------------------------------------ negotiation (docs/protocol/consumer.md#negotiation)


def test_controls_go_one_at_a_time_in_their_order_and_the_stream_request_follows_the_last(store: Store) -> None:
    talk = Talk(store, consumer_name="me", window=1000)
    said, names = talk.say(AddStream(vbucket=0, opaque=ADD_OPAQUE)), []
    while isinstance(said[0], DcpControl):
        assert len(said) == 1
        names.append(said[0].key.decode())
        said = talk.say(control_answer(said[0]))
    assert names == [
        "enable_noop", "set_noop_interval", "set_priority", "supports_cursor_dropping_vulcan", "supports_hifi_MFU",
        "send_stream_end_on_client_close_stream", "enable_expiry_opcode", "enable_sync_writes", "consumer_name",
        "include_deleted_user_xattrs", "v7_dcp_status_codes", "flatbuffers_system_events", "max_marker_version",
        "connection_buffer_size",
    ]  # fmt: skip
    assert isinstance(said[0], StreamRequest)


def test_a_second_stream_needs_no_second_negotiation(talk: Talk) -> None:
    talk.open(0)
    assert isinstance(talk.say(AddStream(vbucket=1, opaque=7))[0], StreamRequest)


def test_streams_added_during_the_negotiation_all_start_after_it(talk: Talk) -> None:
    said = talk.say(AddStream(vbucket=0, opaque=7), AddStream(vbucket=1, opaque=8))
    assert [type(each) for each in said] == [DcpControl]
    assert [each.vbucket for each in talk.negotiate(said)] == [0, 1]


def test_a_fractional_noop_interval_that_is_refused_is_asked_for_in_whole_seconds(talk: Talk) -> None:
    first = talk.say(AddStream(vbucket=0))[0]
    interval = talk.say(control_answer(first))[0]
    assert isinstance(interval, DcpControl)
    assert interval.value == b"1.000000"
    again = talk.say(control_answer(interval, Status.EINVAL))[0]
    assert isinstance(again, DcpControl)
    assert (again.key, again.value) == (b"set_noop_interval", b"1")
    with pytest.raises(WrongRole):
        talk.say(control_answer(again, Status.EINVAL))


def test_a_producer_without_flow_control_is_no_partner(talk: Talk) -> None:
    talk.refused_controls["connection_buffer_size"] = Status.EINVAL
    with pytest.raises(WrongRole):
        talk.add()


def test_other_controls_may_be_refused(talk: Talk) -> None:
    for name in ("set_priority", "v7_dcp_status_codes", "flatbuffers_system_events", "enable_noop"):
        talk.refused_controls[name] = Status.EINVAL
    assert isinstance(talk.add(), StreamRequest)


def test_a_control_answer_with_another_opaque_ends_the_connection(talk: Talk) -> None:
    first = talk.say(AddStream(vbucket=0))[0]
    with pytest.raises(WrongRole):
        talk.say(control_answer(first, opaque=9999))


# ---------------------------------------------------------------------- refusals (docs/protocol/messages.md#add-stream)


def bare(said: Sequence[object]) -> tuple[int, int, int]:
    """Status and opaque of a refusal that carries no extras."""
    assert len(said) == 1
    assert isinstance(said[0], OtherResponse)
    return said[0].to, said[0].status, len(said[0].frame().extras)


@pytest.mark.parametrize(
    ("vbucket", "status"),
    [pytest.param(3, Status.NOT_MY_VBUCKET, id="missing"), pytest.param(2, Status.NOT_MY_VBUCKET, id="active here")],
)
def test_a_vbucket_that_cannot_be_consumed(talk: Talk, vbucket: int, status: Status) -> None:
    assert bare(talk.say(AddStream(vbucket=vbucket))) == (Opcode.DCP_ADD_STREAM, status, 0)


def test_a_stream_that_exists_on_this_connection(talk: Talk) -> None:
    talk.open(0)
    assert bare(talk.say(AddStream(vbucket=0))) == (Opcode.DCP_ADD_STREAM, Status.KEY_EEXISTS, 0)


def test_a_stream_that_exists_on_another_connection(store: Store) -> None:
    registry = Registry()
    one, other = Talk(store, registry), Talk(store, registry)
    one.open(0)
    assert bare(other.say(AddStream(vbucket=0))) == (Opcode.DCP_ADD_STREAM, Status.KEY_EEXISTS, 0)
    one.machine.receive_eof()
    assert isinstance(other.add(0), StreamRequest)


@pytest.mark.parametrize(
    "extras",
    [
        pytest.param(b"", id="no flags"),
        pytest.param(b"\0\0\0", id="short"),
        pytest.param(b"\0\0\0\x08", id="NoValue is retired"),
        pytest.param(b"\x80\0\0\0", id="unknown flag"),
    ],
)
def test_a_malformed_add_stream(talk: Talk, extras: bytes) -> None:
    frame = Frame(Magic.REQUEST, Opcode.DCP_ADD_STREAM, 0, 7, 0, 0, b"", extras, b"", b"")
    assert bare(talk.say(frame.encode()))[1] == Status.EINVAL


def test_a_queued_add_stream_that_fails_later_is_answered_with_four_zero_bytes(talk: Talk) -> None:
    said = talk.say(AddStream(vbucket=0, opaque=7))
    talk.store.bucket.set_state(0, VbucketState.ACTIVE)
    answer = talk.negotiate(said)[0]
    assert isinstance(answer, AddStreamResponse)
    assert (answer.status, answer.opaque) == (Status.NOT_MY_VBUCKET, 7)
    assert answer.frame().extras == bytes(4)


@pytest.mark.parametrize(
    "message",
    [
        StreamRequest(vbucket=0), UprStreamRequest(vbucket=0), DcpControl(b"enable_noop", b"true"), BufferAck(1),
        GetDcpFailoverLog(vbucket=0),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_what_is_for_producers_ends_the_connection(talk: Talk, message: object) -> None:
    with pytest.raises(WrongRole):
        talk.say(message)  # type: ignore[arg-type]


# ------------------------------------------------------------------ stream requests (docs/protocol/consumer.md#streams)


def test_an_empty_replica_asks_for_everything(talk: Talk) -> None:
    request = talk.add(0, flags=1)
    assert isinstance(request, StreamRequest)
    assert (request.flags, request.start_seqno, request.end_seqno, request.vbuuid) == (1, 0, SEQNO_MAX, 0)
    assert (request.snap_start_seqno, request.snap_end_seqno, request.value) == (0, 0, b'{"uid":"0"}')


def test_the_answer_to_add_stream_carries_the_streams_opaque_and_the_log_is_adopted(talk: Talk) -> None:
    request = talk.add()
    said = talk.say(success(request, ((7, 90), (5, 0))))
    assert [type(each) for each in said] == [AddStreamResponse]
    answer = said[0]
    assert isinstance(answer, AddStreamResponse)
    assert (answer.status, answer.opaque, answer.stream_opaque) == (0, ADD_OPAQUE, request.opaque)
    talk.store.bucket.flush()
    assert [tuple(entry) for entry in talk.vb().failover_log] == [(7, 90), (5, 0)]


def test_a_replica_resumes_where_it_stands_and_says_which_snapshot_it_is_in(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 5, opaque), *(mutation(n, opaque) for n in range(1, 6)))
    talk.say(marker(6, 20, opaque), mutation(6, opaque), mutation(7, opaque))
    talk.machine.receive_eof()
    request = Talk(talk.store).add()
    assert isinstance(request, StreamRequest)
    assert (request.start_seqno, request.vbuuid) == (7, BRANCH)
    assert (request.snap_start_seqno, request.snap_end_seqno) == (6, 20)


def test_a_complete_snapshot_is_claimed_as_a_point(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 2, opaque), mutation(1, opaque), mutation(2, opaque))
    talk.machine.receive_eof()
    request = Talk(talk.store).add()
    assert isinstance(request, StreamRequest)
    assert (request.start_seqno, request.snap_start_seqno, request.snap_end_seqno) == (2, 2, 2)


@pytest.mark.parametrize("status", [Status.ERANGE, Status.NOT_MY_VBUCKET, Status.ENOMEM, Status.ETMPFAIL])
def test_what_the_producer_refuses_is_passed_on_and_the_stream_may_be_added_again(talk: Talk, status: Status) -> None:
    answer = talk.say(refusal(talk.add(), status))[0]
    assert isinstance(answer, AddStreamResponse)
    assert (answer.status, answer.opaque) == (status, ADD_OPAQUE)
    assert isinstance(talk.add(), StreamRequest)


def test_rollbacks_in_a_row_are_obeyed_down_to_the_beginning(talk: Talk) -> None:
    opaque = talk.open(0)
    for end in (3, 6, 9):
        talk.say(marker(end - 2, end, opaque), *(mutation(n, opaque) for n in range(end - 2, end + 1)))
    talk.machine.receive_eof()
    again = Talk(talk.store)
    request, starts = again.add(), []
    for to in (6, 3, 0):
        (request,) = again.say(rolled_back(request, to))
        assert isinstance(request, StreamRequest)
        starts.append((request.start_seqno, request.opaque))
        assert again.vb().high_seqno == to
    assert [start for start, _ in starts] == [6, 3, 0]
    assert len({opaque for _, opaque in starts}) == 1
    assert isinstance(request, StreamRequest)
    assert request.vbuuid == 0
    assert again.say(success(request))[0].status == 0  # type: ignore[attr-defined]


def test_a_rollback_inside_a_snapshot_goes_back_to_where_it_began(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 3, opaque), mutation(1, opaque), mutation(3, opaque))
    talk.say(marker(4, 9, opaque, flags=5), mutation(5, opaque, b"k1"), mutation(9, opaque))
    talk.machine.receive_eof()
    again = Talk(talk.store)
    (request,) = again.say(rolled_back(again.add(), 7))
    assert isinstance(request, StreamRequest)
    assert request.start_seqno == again.vb().high_seqno == 3


def test_an_older_branch_at_the_same_seqno_is_tried_before_everything_is_thrown_away(talk: Talk) -> None:
    opaque = talk.open(0, log=((9, 2), (8, 0)))
    talk.say(marker(0, 2, opaque), mutation(1, opaque), mutation(2, opaque))
    talk.machine.receive_eof()
    again = Talk(talk.store)
    first = again.add()
    (second,) = again.say(rolled_back(first, 0))
    assert isinstance(first, StreamRequest)
    assert isinstance(second, StreamRequest)
    assert (first.vbuuid, second.vbuuid, second.start_seqno) == (9, 8, 2)
    (third,) = again.say(rolled_back(second, 0))
    assert isinstance(third, StreamRequest)
    assert (third.start_seqno, again.vb().item_count) == (0, 0)


def test_a_rollback_ends_the_streams_that_others_have_of_the_replica(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 2, opaque), mutation(1, opaque), mutation(2, opaque))
    talk.store.bucket.flush()
    source = talk.vb().stream(0)
    talk.machine.receive_eof()
    again = Talk(talk.store)
    again.say(rolled_back(again.add(), 0))
    events = []
    while (event := source.poll()) is not None:
        events.append(event)
    assert "STATE_CHANGED" in str(events[-1])


def test_a_producer_that_rolls_back_to_nowhere_gets_a_consumer_that_starts_over(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 2, opaque), mutation(1, opaque), mutation(2, opaque))
    talk.machine.receive_eof()
    again = Talk(talk.store)
    (request,) = again.say(rolled_back(again.add(), 2))
    assert isinstance(request, StreamRequest)
    assert request.start_seqno == 0


@pytest.mark.parametrize(
    "body",
    [pytest.param(b"", id="rollback without a seqno"), pytest.param(b"1234", id="rollback with half of one")],
)
def test_a_rollback_without_eight_bytes_ends_the_connection(talk: Talk, body: bytes) -> None:
    request = talk.add()
    frame = Frame(Magic.RESPONSE, Opcode.DCP_STREAM_REQ, 0x23, request.opaque, 0, 0, b"", b"", b"", body)
    with pytest.raises(RemoteProtocolError):
        talk.say(frame.encode())


@pytest.mark.parametrize("log", [b"", b"x" * 15, b"x" * 17])
def test_a_failover_log_that_is_none_ends_the_connection(talk: Talk, log: bytes) -> None:
    request = talk.add()
    frame = Frame(Magic.RESPONSE, Opcode.DCP_STREAM_REQ, 0, request.opaque, 0, 0, b"", b"", b"", log)
    with pytest.raises(RemoteProtocolError):
        talk.say(frame.encode())


def test_an_answer_to_a_request_that_was_never_made_ends_the_connection(talk: Talk) -> None:
    talk.open(0)
    with pytest.raises(WrongRole):
        talk.say(success(StreamRequest(opaque=4242)))


def test_a_vbucket_that_was_promoted_during_the_handshake_keeps_its_own_history(talk: Talk) -> None:
    request = talk.add()
    talk.store.bucket.set_state(0, VbucketState.ACTIVE)
    own = talk.vb().failover_log
    answer = talk.say(success(request, ((99, 0),)))[0]
    assert isinstance(answer, AddStreamResponse)
    assert answer.status == Status.NOT_MY_VBUCKET
    assert talk.vb().failover_log == own


# --------------------------------------------------------------------- closing (docs/protocol/messages.md#close-stream)


@pytest.mark.parametrize(("v7", "status"), [(True, Status.DCP_STREAM_NOT_FOUND), (False, Status.KEY_ENOENT)])
def test_closing_what_is_not_open(store: Store, v7: bool, status: Status) -> None:
    talk = Talk(store)
    if not v7:
        talk.refused_controls["v7_dcp_status_codes"] = Status.EINVAL
    talk.open(0)
    assert bare(talk.say(CloseStream(vbucket=1)))[1] == status


def test_a_closed_stream_swallows_what_is_late_until_its_end_and_may_then_be_added_again(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 9, opaque), mutation(1, opaque))
    closed = talk.say(CloseStream(vbucket=0, opaque=5))[0]
    assert isinstance(closed, OtherResponse)
    assert (closed.to, closed.status) == (Opcode.DCP_CLOSE_STREAM, 0)
    assert talk.say(mutation(2, opaque), mutation(3, opaque), marker(10, 12, opaque)) == []
    assert talk.say(StreamEnd(StreamEndStatus.CLOSED, vbucket=0, opaque=opaque)) == []
    assert talk.vb().high_seqno == 1
    assert isinstance(talk.add(), StreamRequest)


def test_a_closed_stream_does_not_keep_another_connection_from_the_vbucket(store: Store) -> None:
    registry = Registry()
    one, other = Talk(store, registry), Talk(store, registry)
    one.open(0)
    one.say(CloseStream(vbucket=0))
    assert isinstance(other.add(0), StreamRequest)


def test_a_stream_that_is_closed_during_its_handshake_never_comes_alive(talk: Talk) -> None:
    request = talk.add()
    talk.say(CloseStream(vbucket=0, opaque=5))
    assert talk.say(success(request)) == []
    assert talk.say(marker(0, 1, request.opaque), mutation(1, request.opaque)) == []
    assert talk.vb().high_seqno == 0


def test_noops_are_answered_at_any_time_with_their_opaque(talk: Talk) -> None:
    answer = talk.say(DcpNoop(opaque=10_000_001))[0]
    assert isinstance(answer, OtherResponse)
    assert (answer.to, answer.opaque, answer.status) == (Opcode.DCP_NOOP, 10_000_001, 0)


# ---------------------------------------------------------------------------- older dialect (docs/protocol/upr.md#both)


def upr(talk: Talk, vbucket: int = 0) -> UprStreamRequest:
    """A UPR stream request, after the producer has shown that it does not know DCP."""
    first = talk.say(AddStream(vbucket=vbucket, opaque=ADD_OPAQUE))[0]
    (modern,) = talk.say(control_answer(first, Status.UNKNOWN_COMMAND))
    assert isinstance(modern, StreamRequest)
    (older,) = talk.say(refusal(modern, Status.EINVAL))
    assert isinstance(older, UprStreamRequest)
    return older


def test_a_producer_without_controls_is_asked_in_the_older_dialect_from_then_on(talk: Talk) -> None:
    request = upr(talk)
    assert (request.start_seqno, request.end_seqno, request.vbuuid, request.high_seqno) == (0, SEQNO_MAX, 0, 0)
    talk.say(success(request))
    assert isinstance(talk.say(AddStream(vbucket=1))[0], UprStreamRequest)


def test_an_unknown_branch_is_a_rollback_to_the_beginning_in_the_older_dialect(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 1, opaque), mutation(1, opaque))
    talk.machine.receive_eof()
    again = Talk(talk.store)
    request = upr(again)
    assert (request.start_seqno, request.vbuuid) == (1, BRANCH)
    (from_start,) = again.say(refusal(request, Status.KEY_ENOENT))
    assert isinstance(from_start, UprStreamRequest)
    assert from_start.start_seqno == 0


def test_the_older_rollback_with_its_seqno_in_the_extras_is_understood(talk: Talk) -> None:
    opaque = talk.open(0)
    for n in (1, 2):
        talk.say(marker(n, n, opaque), mutation(n, opaque))
    talk.machine.receive_eof()
    again = Talk(talk.store)
    (request,) = again.say(rolled_back(upr(again), 1, Dialect.UPR))
    assert isinstance(request, UprStreamRequest)
    assert request.start_seqno == 1
