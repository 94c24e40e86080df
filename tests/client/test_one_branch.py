"""Feeds of one branch, as tasks of a micro-batch read them, and connections that pass from feed to feed."""

from __future__ import annotations

from itertools import count

from tests.support.scripted_producer import BRANCH, HOME, Wire, marker, mutation
from upriver.errors import Status
from upriver.protocol.feed.events import FeedRequest
from upriver.protocol.position import Position
from upriver.wire import Opcode
from upriver.wire.messages.dcp import RollbackResponse, StreamEnd, StreamRequest


def ended(request: StreamRequest) -> bytes:
    return StreamEnd(0, vbucket=request.vbucket, opaque=request.opaque).encode()


def planned(*vbuckets: int) -> FeedRequest:
    """From seqno 5 to 7 of one branch."""
    starts = {vb: Position(BRANCH, 5, 5, 5) for vb in vbuckets}
    return FeedRequest(starts, dict.fromkeys(vbuckets, 7), branches=dict.fromkeys(vbuckets, BRANCH))


def test_a_vbucket_whose_history_has_forked_is_left_alone():
    wire = Wire(planned(0))
    node = wire.connect()
    wire.says(node.accepts(node.requests[0], (0xEEEE, 6), (BRANCH, 0)))
    assert wire.feed.left == {0}
    assert wire.feed.done
    assert node.seen_of(Opcode.DCP_CLOSE_STREAM)
    wire.says(marker(node.requests[0], 5, 7) + mutation(node.requests[0], 6))  # was on its way already
    assert wire.rows == []


def test_a_refusal_is_left_to_the_caller_and_does_not_roll_the_position_back():
    wire = Wire(planned(0))
    node = wire.connect()
    wire.says(RollbackResponse(3, status=Status.ROLLBACK, opaque=node.requests[0].opaque).encode())
    assert wire.feed.refused == {0}
    assert wire.feed.done
    assert wire.feed.positions()[0].seqno == 5


def test_an_older_branch_is_read_on_when_the_planned_one_is_on_top():
    """The end is a seqno of the newer branch, so it will be reached; no second request is sent."""
    old = FeedRequest({0: Position(0x1111, 5, 5, 5)}, {0: 7}, branches={0: BRANCH})
    wire = Wire(old)
    node = wire.connect()
    wire.says(node.accepts(node.requests[0], (BRANCH, 5), (0x1111, 0)))
    wire.says(marker(node.requests[0], 5, 7) + mutation(node.requests[0], 6) + mutation(node.requests[0], 7))
    wire.says(ended(node.requests[0]))
    assert [seqno for _, seqno, _ in wire.rows] == [6, 7]
    assert wire.feed.done
    assert not wire.feed.left


def test_a_connection_passes_from_one_feed_to_the_next_and_late_data_finds_no_new_owner():
    opaques = count(1)
    first, second = Wire(planned(0), opaques=opaques), Wire(planned(0), opaques=opaques)
    node = first.connect()
    request = node.requests[0]
    assert first.feed.release(HOME) is None  # its stream is open
    first.says(node.accepts(request) + marker(request, 5, 7) + mutation(request, 6) + ended(request))
    link = first.feed.release(HOME)
    assert link is not None
    second.producers[HOME] = node
    second.feed.adopt(HOME, link, 0.0)
    second.tick()
    second.settle()
    again = node.requests[1]
    assert again.opaque != request.opaque
    assert again.start_seqno == 5
    second.says(node.accepts(again) + marker(again, 5, 7) + mutation(again, 7) + ended(again))
    assert [seqno for _, seqno, _ in second.rows] == [7]
    assert second.feed.done
