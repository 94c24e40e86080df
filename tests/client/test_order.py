"""Rows of a vbucket come in order over any connection, and no position is ahead of its batch."""

from __future__ import annotations

import json
from typing import Any

from tests.support.scripted_producer import (
    BRANCH,
    ELSEWHERE,
    HOME,
    ScriptedProducer,
    Wire,
    config_json,
    marker,
    mutation,
)
from upriver.client._feed.arrow import BatchMaker
from upriver.client._feed.outbox import Outbox
from upriver.client.changes import ObjectMaker
from upriver.client.names import Names
from upriver.errors import Status
from upriver.protocol.feed.events import FeedEvent, FeedRequest
from upriver.protocol.position import Position
from upriver.protocol.topology import Address, parse_topology
from upriver.wire.constants import OsoFlag
from upriver.wire.messages.dcp import OsoSnapshot, RollbackResponse, StreamEnd
from upriver.wire.messages.events import CollectionBegun, SystemEvent


class Batches(Wire):
    """A wire whose events go into an outbox of Arrow batches."""

    def __init__(self, request: FeedRequest | None = None, rows: int = 1000) -> None:
        super().__init__(request or FeedRequest({0: Position(), 1: Position()}))
        self.outbox = Outbox(self.feed, BatchMaker(self.feed, Names(), rows), linger_s=1.0)

    def _take(self, event: FeedEvent) -> None:
        self.outbox.add(event, self.now)

    def move(self, vbucket: int, to: Address, rev: int) -> None:
        """Use a newer map, in which another node owns the vbucket."""
        owners = {vbucket: [HOME, ELSEWHERE].index(to)}
        self.feed.use(parse_topology(json.loads(config_json(rev=rev, owners=owners)), HOME.host))
        self.tick()

    def changes_in(self, producer: ScriptedProducer, address: Address, seqno: int) -> None:
        """Accept the producer's newest stream, and send one change."""
        request = producer.requests[-1]
        self.says(producer.accepts(request), address)
        self.says(marker(request, seqno - 1, seqno) + mutation(request, seqno), address)

    def batches(self) -> list[list[tuple[int, int]]]:
        found = []
        while (items := self.outbox.take(99.0)) is not None:
            for self.outbox.given, item in enumerate(items, 1):
                found.append(list(zip(item["vbucket"].to_pylist(), item["seqno"].to_pylist(), strict=True)))
        return found

    def position(self) -> Position:
        return self.outbox.positions()[0]


def test_a_vbucket_that_moves_away_and_back_comes_in_order() -> None:
    wire = Batches(FeedRequest({0: Position()}))
    home, elsewhere = wire.connect(HOME), wire.connect(ELSEWHERE)
    wire.changes_in(home, HOME, 1)
    wire.move(0, ELSEWHERE, rev=2)
    wire.changes_in(elsewhere, ELSEWHERE, 2)
    wire.move(0, HOME, rev=3)
    wire.changes_in(home, HOME, 3)
    assert [row for batch in wire.batches() for row in batch] == [(0, 1), (0, 2), (0, 3)]
    assert wire.position()[:4] == (BRANCH, 3, 3, 3)


def test_a_vbucket_that_moves_to_a_connection_with_rows_of_others_comes_in_order() -> None:
    wire = Batches()
    home, elsewhere = wire.connect(HOME), wire.connect(ELSEWHERE)
    zero, one = home.requests
    wire.says(home.accepts(zero) + home.accepts(one))
    wire.move(1, ELSEWHERE, rev=2)
    wire.changes_in(elsewhere, ELSEWHERE, 1)
    wire.says(marker(zero, 0, 1) + mutation(zero, 1))
    wire.move(0, ELSEWHERE, rev=3)
    wire.changes_in(elsewhere, ELSEWHERE, 2)
    rows = [row for batch in wire.batches() for row in batch]
    assert [seqno for vbucket, seqno in rows if vbucket == 0] == [1, 2]


def stopped_after_first(wire: Batches) -> Position:
    """What a reader may claim if it was given one batch and then stopped."""
    assert wire.outbox.take(99.0)
    wire.outbox.given = 1
    return wire.position()


def opened(request: FeedRequest | None = None, **options: Any) -> tuple[Batches, Any]:
    wire = Batches(request or FeedRequest({0: Position()}), **options)
    producer = wire.connect()
    [stream] = producer.requests
    wire.says(producer.accepts(stream))
    return wire, stream


def test_a_position_does_not_claim_the_collection_event_behind_its_batch() -> None:
    wire, request = opened()
    event = SystemEvent.of(2, CollectionBegun("orders", 2, 0, 8), vbucket=0, opaque=request.opaque)
    wire.says(marker(request, 0, 2) + mutation(request, 1) + event.encode())
    assert stopped_after_first(wire)[:4] == (BRANCH, 1, 0, 2)


def test_a_position_does_not_go_back_before_the_caller_hears_of_the_rollback() -> None:
    wire, request = opened(FeedRequest({0: Position(BRANCH, 10, 10, 10)}))
    wire.says(marker(request, 11, 12) + mutation(request, 11) + mutation(request, 12))
    wire.says(StreamEnd(2, vbucket=0, opaque=request.opaque).encode())
    again = wire.producers[HOME].requests[-1]
    wire.says(RollbackResponse(0, status=Status.ROLLBACK, opaque=again.opaque).encode())
    assert stopped_after_first(wire)[:4] == (BRANCH, 12, 12, 12)
    assert wire.outbox.positions()[0].epoch == 0


def test_a_position_does_not_claim_rows_that_wait_behind_its_batch() -> None:
    """The first rows fill a batch, which takes the columns; one row of the same read is left in them."""
    wire, request = opened(rows=1000)
    many = 3000  # so many that they are not copied out of the columns
    filled = b"".join(mutation(request, n) for n in range(1, many + 1))
    wire.says(marker(request, 0, many) + filled + marker(request, many, many + 1) + mutation(request, many + 1))
    wire.says(marker(request, many + 1, many + 2) + mutation(request, many + 2))
    claimed = seen = 0
    while (items := wire.outbox.take(99.0)) is not None:
        for wire.outbox.given, item in enumerate(items, 1):
            seen, claimed = item["seqno"].to_pylist()[-1], wire.position().seqno
            assert claimed <= seen
    assert (claimed, seen) == (many + 2, many + 2)


def test_objects_come_in_order_too() -> None:
    wire = Batches(FeedRequest({0: Position()}))
    wire.outbox = Outbox(wire.feed, ObjectMaker(wire.feed, Names()))
    home, elsewhere = wire.connect(HOME), wire.connect(ELSEWHERE)
    wire.changes_in(home, HOME, 1)
    wire.move(0, ELSEWHERE, rev=2)
    wire.changes_in(elsewhere, ELSEWHERE, 2)
    wire.move(0, HOME, rev=3)
    wire.changes_in(home, HOME, 3)
    found = []
    while (items := wire.outbox.take(0.0)) is not None:
        found += [change.seqno for change in items]
        wire.outbox.given = len(items)
    assert found == [1, 2, 3]


def test_a_position_inside_an_out_of_order_snapshot_says_that_something_of_it_was_given() -> None:
    """However the rows are cut into batches: a reader that dies there must be told to undo them."""
    wire, request = opened(rows=1)
    wire.says(OsoSnapshot(OsoFlag.START, vbucket=0, opaque=request.opaque).encode())
    wire.says(mutation(request, 9, b"a") + mutation(request, 4, b"b") + mutation(request, 6, b"c"))
    claimed = stopped_after_first(wire)
    assert (claimed.seqno, claimed.snap_end) == (0, 9)
