"""What real servers do on the wire, message by message, without sockets.

See docs/protocol/clients.md and docs/protocol/pitfalls.md.
"""

from __future__ import annotations

import pytest

from tests.support.scripted_producer import BRANCH, ELSEWHERE, HOME, Wire, config_json, deletion, marker, mutation
from upriver.errors import HistoryLost, RemoteProtocolError, Status, StatusError, UnknownCollection
from upriver.model import SEQNO_MAX, OnRollback
from upriver.protocol.feed.events import (
    CollectionChange,
    FeedRequest,
    FilterGone,
    RolledBack,
    SeqnoReached,
    VbucketDone,
)
from upriver.protocol.position import Position
from upriver.wire import Opcode, OtherResponse
from upriver.wire.constants import OsoFlag, StreamEndStatus, StreamFlag
from upriver.wire.messages.dcp import (
    DcpNoop,
    OsoSnapshot,
    Prepare,
    RollbackResponse,
    SeqnoAdvanced,
    SnapshotMarkerV20,
    SnapshotMarkerV22,
    StreamEnd,
    StreamRequest,
)
from upriver.wire.messages.events import CollectionBegun, SystemEvent

FROM_ZERO = {0: Position()}


def at(request: StreamRequest) -> dict[str, int]:
    return {"vbucket": request.vbucket, "opaque": request.opaque}


def opened(wire: Wire) -> StreamRequest:
    """Connect, and accept the stream of vbucket 0."""
    producer = wire.connect()
    [request] = producer.requests
    wire.says(producer.accepts(request))
    return request


def refusal(request: StreamRequest, status: Status, value: bytes = b"") -> bytes:
    return OtherResponse(Opcode.DCP_STREAM_REQ, status=status, value=value, opaque=request.opaque).encode()


def rollback(request: StreamRequest, seqno: int) -> bytes:
    return RollbackResponse(seqno, status=Status.ROLLBACK, opaque=request.opaque).encode()


def end(request: StreamRequest, status: int) -> bytes:
    return StreamEnd(status, **at(request)).encode()


@pytest.mark.parametrize("chop", [0, 1, 7, 24])
def test_rows_arrive_however_the_bytes_are_cut(chop: int) -> None:
    wire = Wire(chop=chop)
    request = opened(wire)
    wire.says(marker(request, 0, 3) + mutation(request, 1, b"a") + mutation(request, 2, b"b"))
    wire.says(deletion(request, 3, b"a"))
    assert wire.rows == [(0, 1, b"a"), (0, 2, b"b"), (0, 3, b"a")]
    assert wire.feed.positions()[0][:4] == (BRANCH, 3, 3, 3)


def test_markers_of_every_version_open_a_snapshot() -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(marker(request, 0, 1) + mutation(request, 1))
    wire.says(SnapshotMarkerV20(0, 2, 2, 2, 2, 0, **at(request)).encode() + mutation(request, 2))
    wire.says(SnapshotMarkerV22(2, 3, 4, 6, 4, 0, 0, 0, **at(request)).encode() + mutation(request, 4))
    assert wire.seqnos == [1, 2, 4]
    assert wire.feed.table.position(0).consistent_points == (0, 1, 2, 4)


def test_inside_a_snapshot_the_position_claims_all_of_it() -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(marker(request, 0, 10) + mutation(request, 10) + marker(request, 11, 100) + mutation(request, 50))
    assert wire.feed.positions()[0][:4] == (BRANCH, 50, 10, 100)


def test_messages_beyond_the_end_are_not_delivered_and_not_claimed() -> None:
    wire = Wire(FeedRequest(FROM_ZERO, ends={0: 2}))
    request = opened(wire)
    assert request.end_seqno == 2
    wire.says(marker(request, 0, 4) + b"".join(mutation(request, n) for n in (1, 2, 3, 4)))
    wire.says(end(request, StreamEndStatus.OK))
    assert wire.seqnos == [1, 2]
    assert wire.told == [VbucketDone(0)]
    assert wire.feed.done
    assert wire.feed.positions()[0][:4] == (BRANCH, 2, 0, 4)
    assert wire.feed.table.position(0).consistent_points == (0,)


def test_a_seqno_advanced_in_mid_snapshot_does_not_complete_it() -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(marker(request, 0, 100) + SeqnoAdvanced(40, **at(request)).encode())
    assert wire.feed.positions()[0][:4] == (BRANCH, 40, 0, 100)
    wire.says(SeqnoAdvanced(100, **at(request)).encode())
    assert wire.feed.positions()[0][:4] == (BRANCH, 100, 100, 100)
    assert wire.told == [SeqnoReached(0, 40), SeqnoReached(0, 100)]


def test_a_noop_in_the_middle_of_data_is_answered_at_once() -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(marker(request, 0, 2) + mutation(request, 1) + DcpNoop(opaque=10_000_001).encode() + mutation(request, 2))
    [answer] = wire.producers[HOME].seen_of(Opcode.DCP_NOOP)
    assert answer.opaque == 10_000_001
    assert wire.seqnos == [1, 2]


def test_data_that_trails_a_closed_stream_is_dropped_but_paid_for() -> None:
    wire = Wire(window=100)
    request = opened(wire)
    wire.says(marker(request, 0, 9) + mutation(request, 1))
    wire.feed.remember(0)
    wire.feed.refilter(b'{"collections":["8"]}', again=True)
    wire.tick()
    producer = wire.producers[HOME]
    again = producer.requests[-1]
    wire.says(mutation(request, 2) + marker(request, 10, 12) + mutation(request, 10))
    wire.says(producer.accepts(again) + mutation(request, 11) + marker(again, 0, 9) + mutation(again, 2))
    assert wire.seqnos == [1, 2]
    link = wire.feed.links[HOME]
    link.flush_acknowledgements()
    wire.settle()
    assert producer.acknowledged == link.charged


def test_going_back_for_a_collection_after_a_rollback_goes_to_a_point_of_the_new_branch() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 50, 50, 50, (10, 30))}))
    request = opened(wire)
    wire.says(marker(request, 51, 60) + mutation(request, 60))
    wire.feed.remember(0)
    producer = wire.producers[HOME]
    wire.says(end(request, StreamEndStatus.STATE_CHANGED))
    wire.says(rollback(producer.requests[-1], 40))
    request = producer.requests[-1]
    wire.says(producer.accepts(request, (9, 40), (BRANCH, 0)) + marker(request, 30, 70) + mutation(request, 70))
    wire.feed.refilter(b'{"collections":["8"]}', again=True)
    wire.tick()
    again = producer.requests[-1]
    assert (again.start_seqno, again.snap_start_seqno, again.snap_end_seqno, again.vbuuid) == (30, 30, 30, 9)


def test_every_charged_byte_is_acknowledged_once() -> None:
    wire = Wire(FeedRequest(FROM_ZERO, ends={0: 6}), window=200)
    request = opened(wire)
    value = {**at(request), "cas": 1}
    messages = [
        marker(request, 0, 9), mutation(request, 1, b"a", b"x" * 99), mutation(request, 2, b"b"), deletion(request, 3),
        SystemEvent.of(4, CollectionBegun("c", 1, 0, 9), **at(request)).encode(), mutation(request, 5),
        mutation(request, 7, b"beyond"), mutation(request, 8), SeqnoAdvanced(9, **at(request)).encode(),
        DcpNoop(opaque=1).encode(), end(request, StreamEndStatus.OK),
    ]  # fmt: skip
    wire.says(b"".join(messages))
    wire.feed.links[HOME].flush_acknowledgements()
    wire.settle()
    assert wire.producers[HOME].acknowledged == sum(map(len, messages)) - 24
    assert Prepare(1, 1, key=b"\0k", **value).encode()


def test_a_prepare_is_refused_because_it_was_not_requested() -> None:
    wire = Wire()
    request = opened(wire)
    prepare = Prepare(1, 1, key=b"\0k", cas=1, **at(request)).encode()
    with pytest.raises(RemoteProtocolError, match="Prepare was not asked for"):
        wire.says(marker(request, 0, 1) + prepare)
    assert wire.feed.links[HOME].charged == 44 + len(prepare) + 2


def test_a_rollback_is_told_before_the_new_branch() -> None:
    start = Position(BRANCH, 50, 50, 50, (10, 30))
    wire = Wire(FeedRequest({0: start}))
    producer = wire.connect()
    wire.says(rollback(producer.requests[0], 40))
    assert wire.told == [RolledBack(0, 30, BRANCH, 1)]
    retry = producer.requests[1]
    assert (retry.start_seqno, retry.snap_start_seqno, retry.snap_end_seqno, retry.vbuuid) == (30, 30, 30, BRANCH)
    wire.says(producer.accepts(retry, (7, 40), (BRANCH, 0)) + marker(retry, 30, 31) + mutation(retry, 31))
    assert wire.feed.positions()[0][:4] == (7, 31, 31, 31)


def test_two_rollbacks_in_a_row_go_further_back_each_time() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 50, 50, 50, (10, 30))}))
    producer = wire.connect()
    wire.says(rollback(producer.requests[0], 40))
    wire.says(rollback(producer.requests[1], 20))
    assert [event.to_seqno for event in wire.told if isinstance(event, RolledBack)] == [30, 10]
    wire.says(rollback(producer.requests[2], 10))  # makes no sense, but must not be asked for ever
    assert (producer.requests[3].start_seqno, producer.requests[3].vbuuid) == (0, 0)


def test_a_rollback_of_a_bounded_read_ends_where_the_new_branch_ends() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 50, 50, 50, (30,))}, ends={0: 60}))
    producer = wire.connect()
    wire.says(rollback(producer.requests[0], 40))
    assert producer.requests[1].flags & StreamFlag.TO_LATEST
    assert producer.requests[1].end_seqno == SEQNO_MAX


def test_a_bounded_read_of_a_branch_that_ended_early_does_not_wait_for_its_end() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 50, 50, 50)}, ends={0: 60}))
    producer = wire.connect()
    wire.says(producer.accepts(producer.requests[0], (7, 55), (BRANCH, 0)))
    assert producer.seen_of(Opcode.DCP_CLOSE_STREAM)
    assert producer.requests[1].flags & StreamFlag.TO_LATEST


def test_policy_fail_stops_at_a_rollback_and_says_where_to_go_on() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 50, 50, 50, (30,))}, on_rollback=OnRollback.FAIL))
    producer = wire.connect()
    with pytest.raises(HistoryLost, match="vbucket 0 lost history") as lost:
        wire.says(rollback(producer.requests[0], 40))
    assert (lost.value.to_seqno, lost.value.lost_branch) == (30, BRANCH)


def test_policy_rewind_goes_back_silently() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 50, 50, 50)}, on_rollback=OnRollback.REWIND))
    producer = wire.connect()
    wire.says(rollback(producer.requests[0], 40))
    assert wire.told == []
    assert producer.requests[1].start_seqno == 0


def test_a_branch_that_the_producer_never_saw_is_not_a_rollback_if_we_have_nothing_of_it() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 50, 50, 50)}))
    producer = wire.connect()
    wire.says(producer.accepts(producer.requests[0], (9, 50), (BRANCH, 0)))
    wire.says(end(producer.requests[0], StreamEndStatus.STATE_CHANGED))
    assert producer.requests[1].vbuuid == 9
    wire.says(rollback(producer.requests[1], 0))
    assert (producer.requests[2].vbuuid, producer.requests[2].start_seqno) == (BRANCH, 50)
    assert wire.told == []


def test_a_resumed_reader_hears_of_a_branch_that_was_lost_while_it_was_away() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 50, 50, 50)}, resumed=True))
    producer = wire.connect()
    wire.says(producer.accepts(producer.requests[0], (9, 70), (BRANCH, 0)))
    assert wire.told == [RolledBack(0, 50, BRANCH, 1)]


@pytest.mark.parametrize(
    "status",
    [
        StreamEndStatus.CLOSED, StreamEndStatus.STATE_CHANGED, StreamEndStatus.SLOW, StreamEndStatus.BACKFILL_FAIL,
        StreamEndStatus.ROLLBACK, StreamEndStatus.OK,
    ],
)  # fmt: skip
def test_whatever_ends_an_endless_stream_it_is_opened_again(status: StreamEndStatus) -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(marker(request, 0, 9) + mutation(request, 5) + end(request, status))
    again = wire.producers[HOME].requests[-1]
    assert again is not request
    assert (again.start_seqno, again.snap_start_seqno, again.snap_end_seqno, again.vbuuid) == (5, 0, 9, BRANCH)


def test_a_stream_that_ends_again_and_again_is_not_asked_for_in_a_hurry() -> None:
    wire = Wire()
    request = opened(wire)
    producer = wire.producers[HOME]
    for _ in range(4):
        wire.says(end(request, StreamEndStatus.STATE_CHANGED))
        wire.tick(10.0)
        request = producer.requests[-1]
        wire.says(producer.accepts(request))
    wire.says(end(request, StreamEndStatus.STATE_CHANGED))
    asked = len(producer.requests)
    wire.tick(0.01)
    assert len(producer.requests) == asked
    wire.tick(10.0)
    assert len(producer.requests) == asked + 1


def test_not_my_vbucket_sends_us_where_the_new_map_says() -> None:
    wire = Wire()
    producer = wire.connect()
    wire.says(refusal(producer.requests[0], Status.NOT_MY_VBUCKET, config_json(rev=2, owners={0: 1})))
    assert wire.feed.wanted() == {ELSEWHERE}
    other = wire.connect(ELSEWHERE, config_json(rev=2, owners={0: 1}))
    assert [request.vbucket for request in other.requests] == [0]


@pytest.mark.parametrize("status", [Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM, Status.KEY_EEXISTS])
def test_a_temporary_refusal_is_tried_again_after_a_while(status: Status) -> None:
    wire = Wire()
    producer = wire.connect()
    wire.says(refusal(producer.requests[0], status))
    assert len(producer.requests) == 1
    wire.tick(6.0)
    assert len(producer.requests) == 2


FINAL = [Status.EINVAL, Status.EACCESS, Status.ERANGE, Status.NOT_SUPPORTED, Status.UNKNOWN_SCOPE]


@pytest.mark.parametrize("status", FINAL)
def test_a_final_refusal_names_vbucket_node_and_status(status: Status) -> None:
    wire = Wire()
    producer = wire.connect()
    with pytest.raises(StatusError, match=r"vbucket 0 at 10\.0\.0\.1:11210") as refused:
        wire.says(refusal(producer.requests[0], status))
    assert refused.value.status == status


def test_a_filter_whose_collection_is_gone_waits_for_its_name_to_come_back() -> None:
    wire = Wire(FeedRequest(FROM_ZERO, value=b'{"collections":["8"]}', follow=True))
    request = opened(wire)
    wire.says(marker(request, 0, 9) + mutation(request, 9) + end(request, StreamEndStatus.FILTER_EMPTY))
    assert wire.told == [FilterGone(0)]
    wire.tick(60.0)
    assert len(wire.producers[HOME].requests) == 1
    wire.feed.refilter(b'{"collections":["9"]}')
    wire.tick()
    again = wire.producers[HOME].requests[-1]
    assert (again.value, again.start_seqno) == (b'{"collections":["9"]}', 9)


def test_an_unknown_collection_is_an_error_to_a_reader_that_does_not_follow() -> None:
    wire = Wire(FeedRequest(FROM_ZERO, value=b'{"collections":["8"]}'))
    producer = wire.connect()
    with pytest.raises(UnknownCollection):
        wire.says(refusal(producer.requests[0], Status.UNKNOWN_COLLECTION))


def test_an_out_of_order_snapshot_moves_the_position_only_at_its_end() -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(OsoSnapshot(OsoFlag.START, **at(request)).encode())
    wire.says(mutation(request, 7, b"a") + mutation(request, 3, b"b"))
    assert wire.feed.positions()[0].seqno == 0
    wire.says(SeqnoAdvanced(12, **at(request)).encode() + OsoSnapshot(OsoFlag.END, **at(request)).encode())
    assert wire.feed.positions()[0][:4] == (BRANCH, 12, 12, 12)
    assert wire.seqnos == [7, 3]


def test_an_out_of_order_snapshot_cut_short_on_a_lost_branch_is_a_rollback() -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(OsoSnapshot(OsoFlag.START, **at(request)).encode() + mutation(request, 7))
    wire.feed.lost(HOME, wire.now)
    producer = wire.connect()
    [again] = producer.requests
    assert again.start_seqno == 0
    wire.says(producer.accepts(again, (9, 5), (BRANCH, 0)))
    assert wire.told == [RolledBack(0, 0, BRANCH, 1)]


def test_an_out_of_order_snapshot_cut_short_on_the_same_branch_is_a_rollback_too() -> None:
    """Its documents may have been deleted, and the tombstones purged, before the next attempt."""
    wire = Wire()
    request = opened(wire)
    wire.says(OsoSnapshot(OsoFlag.START, **at(request)).encode() + mutation(request, 7))
    assert wire.feed.positions()[0][:4] == (BRANCH, 0, 0, 7)
    wire.feed.lost(HOME, wire.now)
    assert wire.feed.positions()[0][:4] == (BRANCH, 0, 0, 7)
    producer = wire.connect()
    [again] = producer.requests
    assert (again.start_seqno, again.snap_start_seqno, again.snap_end_seqno) == (0, 0, 0)
    wire.says(producer.accepts(again))
    assert wire.told == [RolledBack(0, 0, BRANCH, 1)]
    assert wire.feed.positions()[0][:4] == (BRANCH, 0, 0, 0)


@pytest.mark.parametrize(("saved", "told"), [(Position(BRANCH, 0, 0, 7), True), (Position(BRANCH), False)])
def test_a_reader_that_died_in_an_out_of_order_snapshot_is_told_to_undo_it(saved: Position, told: bool) -> None:
    wire = Wire(FeedRequest({0: saved}, resumed=True))
    opened(wire)
    assert wire.told == ([RolledBack(0, 0, BRANCH, 1)] if told else [])


def test_a_marker_without_a_row_is_nothing_to_undo() -> None:
    wire = Wire()
    wire.says(marker(opened(wire), 0, 100))
    assert wire.feed.positions()[0][:4] == (BRANCH, 0, 0, 0)


def test_a_lost_connection_resumes_inside_the_snapshot() -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(marker(request, 0, 9) + mutation(request, 4) + mutation(request, 5)[:30])
    wire.feed.lost(HOME, wire.now)
    producer = wire.connect()
    [again] = producer.requests
    assert (again.start_seqno, again.snap_start_seqno, again.snap_end_seqno) == (4, 0, 9)
    wire.says(producer.accepts(again) + marker(again, 0, 12) + mutation(again, 5) + mutation(again, 12))
    assert wire.seqnos == [4, 5, 12]
    assert wire.feed.positions()[0][:4] == (BRANCH, 12, 12, 12)


def test_a_peer_that_says_nothing_for_two_noop_intervals_is_dead() -> None:
    wire = Wire()
    opened(wire)
    assert wire.feed.silent(wire.now + 39.0) == []
    assert wire.feed.silent(wire.now + 41.0) == [HOME]


def test_collection_events_are_events_and_move_the_position() -> None:
    wire = Wire()
    request = opened(wire)
    event = SystemEvent.of(1, CollectionBegun("orders", 2, 0, 8), **at(request))
    wire.says(marker(request, 0, 1) + event.encode())
    [told] = wire.told
    assert isinstance(told, CollectionChange)
    assert told.message.content() == CollectionBegun("orders", 2, 0, 8)
    assert wire.feed.positions()[0][:4] == (BRANCH, 1, 1, 1)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(lambda r: mutation(r, 1), id="a mutation before any snapshot"),
        pytest.param(lambda r: marker(r, 0, 3) + mutation(r, 4), id="a seqno beyond its snapshot"),
        pytest.param(lambda r: marker(r, 0, 3) + mutation(r, 2) + mutation(r, 2), id="a seqno twice"),
        pytest.param(lambda r: marker(r, 0, 3) + SeqnoAdvanced(4, **at(r)).encode(), id="an advance beyond it"),
        pytest.param(lambda r: SeqnoAdvanced(4, **at(r)).encode(), id="an advance before any snapshot"),
        pytest.param(lambda r: mutation(StreamRequest(vbucket=3, opaque=99), 1), id="a stream that nobody opened"),
        pytest.param(lambda r: b"\xff" * 24, id="garbage"),
    ],
)
def test_a_producer_that_breaks_its_promise_is_found_out(script) -> None:  # type: ignore[no-untyped-def]
    wire = Wire()
    request = opened(wire)
    with pytest.raises(RemoteProtocolError):
        wire.says(script(request))


def test_a_vbucket_that_has_moved_is_left_even_if_its_stream_never_ends() -> None:
    wire = Wire()
    request = opened(wire)
    wire.says(marker(request, 0, 9) + mutation(request, 5))
    producer = wire.producers[HOME]
    producer.config = config_json(rev=2, owners={0: 1})
    wire.tick(10.0)
    assert producer.seen_of(Opcode.DCP_CLOSE_STREAM)
    assert wire.feed.wanted() == {ELSEWHERE}
    other = wire.connect(ELSEWHERE, producer.config)
    [again] = other.requests
    assert (again.start_seqno, again.snap_start_seqno, again.snap_end_seqno) == (5, 0, 9)
    wire.says(mutation(request, 6))
    wire.says(other.accepts(again) + marker(again, 0, 9) + mutation(again, 6), ELSEWHERE)
    assert wire.seqnos == [5, 6]


def test_a_map_that_is_known_already_changes_nothing() -> None:
    wire = Wire()
    request = opened(wire)
    for _ in range(3):
        wire.tick(10.0)
    assert len(wire.producers[HOME].seen_of(Opcode.GET_CLUSTER_CONFIG)) == 4
    wire.says(marker(request, 0, 1) + mutation(request, 1))
    assert wire.seqnos == [1]
