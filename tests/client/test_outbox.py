"""The outbox: positions of what was given, and changes that wait for the disk."""

from __future__ import annotations

from typing import Any

from tests.support.scripted_producer import BRANCH, HOME, Wire, marker, mutation
from upriver.client._feed.arrow import BatchMaker
from upriver.client._feed.outbox import Outbox
from upriver.client.blocking import Database
from upriver.client.changes import ObjectMaker, RolledBack
from upriver.client.names import Names
from upriver.errors import Status
from upriver.model import OnRollback
from upriver.protocol.feed.events import FeedEvent, FeedRequest
from upriver.protocol.position import Position
from upriver.wire.messages.dcp import RollbackResponse, StreamEnd
from upriver.wire.messages.events import CollectionBegun, SystemEvent


class Taking(Wire):
    """A wire whose events go into an outbox."""

    def __init__(self, make: Any, request: FeedRequest | None = None, **options: Any) -> None:
        super().__init__(request or FeedRequest({0: Position(), 1: Position()}))
        self.outbox = Outbox(self.feed, make(self.feed, Names()), linger_s=1.0, **options)
        self.producer = self.connect()
        self.requests = {request.vbucket: request for request in self.producer.requests}
        for request in self.producer.requests:
            self.says(self.producer.accepts(request))

    def _take(self, event: FeedEvent) -> None:
        self.outbox.add(event, self.now)

    def take_all(self) -> None:
        while (items := self.outbox.take(99.0)) is not None:
            self.outbox.given = len(items)

    def positions(self) -> dict[int, Position]:
        return self.outbox.positions()


def test_rows_wait_for_company_but_not_for_long() -> None:
    wire = Taking(BatchMaker)
    wire.says(marker(wire.requests[0], 0, 2) + mutation(wire.requests[0], 1))
    assert wire.outbox.take(0.0) is None
    assert wire.outbox.wait_s(0.25) == 0.75
    assert wire.positions()[0].seqno == 0
    items = wire.outbox.take(1.0)
    assert items is not None
    assert items[0].num_rows == 1


def test_a_position_covers_the_batch_that_was_given_and_nothing_after_it() -> None:
    wire = Taking(BatchMaker)
    wire.says(marker(wire.requests[0], 0, 9) + mutation(wire.requests[0], 1))
    assert wire.outbox.take(1.0)
    wire.outbox.given = 1
    wire.says(mutation(wire.requests[0], 2))
    assert wire.positions()[0][:4] == (BRANCH, 1, 0, 9)


def test_bytes_are_acknowledged_when_the_caller_comes_back() -> None:
    wire = Taking(BatchMaker)
    wire.says(marker(wire.requests[0], 0, 2) + mutation(wire.requests[0], 1, value=b"x" * 500))
    wire.outbox.take(1.0)
    link = wire.feed.links[HOME]
    before = link._freed + link.acknowledged
    wire.outbox.given = 1
    wire.outbox.take(1.0)
    assert link._freed + link.acknowledged == before + len(mutation(wire.requests[0], 1, value=b"x" * 500))


def test_between_two_changes_only_the_given_ones_count() -> None:
    wire = Taking(ObjectMaker)
    zero, one = wire.requests[0], wire.requests[1]
    wire.says(marker(zero, 0, 3) + marker(one, 0, 5) + mutation(zero, 1) + mutation(one, 5) + mutation(zero, 3))
    items = wire.outbox.take(0.0)
    assert items is not None
    assert [(c.vbucket, c.seqno) for c in items] == [(0, 1), (1, 5), (0, 3)]
    expected = [(1, 0), (1, 5), (3, 5)]
    for wire.outbox.given, reached in enumerate(expected, 1):
        assert tuple(p.seqno for p in wire.positions().values()) == reached
    assert wire.positions()[0][:4] == (BRANCH, 3, 3, 3)


def test_changes_that_are_not_on_disk_everywhere_are_held_back() -> None:
    wire = Taking(ObjectMaker, hold_unsafe=True)
    wire.says(marker(wire.requests[0], 0, 2) + mutation(wire.requests[0], 1) + mutation(wire.requests[0], 2))
    assert wire.outbox.take(0.0) is None
    assert wire.outbox.unsafe() == {0: BRANCH}
    wire.outbox.note_persisted({0: BRANCH}, {0: 1})
    assert wire.outbox.take(0.0) is None
    wire.outbox.note_persisted({0: BRANCH}, {0: 2})
    assert [c.seqno for c in wire.outbox.take(0.0) or ()] == [1, 2]


def test_what_was_held_back_and_then_lost_is_never_seen() -> None:
    for make in (ObjectMaker, BatchMaker):
        start = FeedRequest({0: Position(BRANCH, 1, 1, 1)})
        wire = Taking(make, start, hold_unsafe=True)
        request = wire.requests[0]
        wire.says(marker(request, 2, 3) + mutation(request, 2) + mutation(request, 3))
        for made in list(wire.outbox._maker.flush()):
            wire.outbox._enqueue(made)
        wire.says(StreamEnd(2, vbucket=0, opaque=request.opaque).encode())
        again = wire.producer.requests[-1]
        wire.says(RollbackResponse(1, status=Status.ROLLBACK, opaque=again.opaque).encode())
        items = wire.outbox.take(5.0)
        assert items is not None
        first = items[0]
        told = first.to_seqno if isinstance(first, RolledBack) else first.to_pylist()[0]["seqno"]
        assert told == 1


def test_what_is_on_disk_of_a_lost_branch_makes_nothing_of_the_new_one_safe() -> None:
    """The successor took over below what we have asked about, but above what we have: there is no rollback."""
    wire = Taking(ObjectMaker, FeedRequest({0: Position(BRANCH, 50, 50, 50)}), hold_unsafe=True)
    request = wire.requests[0]
    wire.outbox.note_persisted({0: BRANCH}, {0: 100})
    wire.says(StreamEnd(2, vbucket=0, opaque=request.opaque).encode())
    again = wire.producer.requests[-1]
    wire.says(wire.producer.accepts(again, (9, 60), (BRANCH, 0)) + marker(again, 50, 70) + mutation(again, 70))
    assert wire.outbox.take(0.0) is None
    assert wire.outbox.unsafe() == {0: 9}
    wire.outbox.note_persisted({0: BRANCH}, {0: 100})  # an answer that was on its way
    assert wire.outbox.take(0.0) is None
    wire.outbox.note_persisted({0: 9}, {0: 70})
    assert wire.outbox.take(0.0)


def test_news_of_collections_wait_like_any_other_change() -> None:
    for make in (ObjectMaker, BatchMaker):
        wire = Taking(make, hold_unsafe=True)
        request = wire.requests[0]
        event = SystemEvent.of(1, CollectionBegun("orders", 2, 0, 8), vbucket=0, opaque=request.opaque)
        wire.says(marker(request, 0, 1) + event.encode())
        assert wire.outbox.take(0.0) is None
        wire.outbox.note_persisted({0: BRANCH}, {0: 1})
        assert wire.outbox.take(0.0)


def test_after_a_silent_rewind_a_position_inside_the_batches_is_of_the_new_branch() -> None:
    """Consistent at 10 and 20; rewound to 10, it reads a snapshot that ends at 30, three rows at a time."""
    start = FeedRequest({0: Position(BRANCH, 10, 10, 10)}, on_rollback=OnRollback.REWIND)
    wire = Taking(lambda feed, names: BatchMaker(feed, names, rows=3), start)
    request = wire.requests[0]
    wire.says(marker(request, 11, 20) + b"".join(mutation(request, n) for n in range(11, 21)))
    wire.take_all()
    assert wire.positions()[0][:4] == (BRANCH, 20, 20, 20)
    wire.says(StreamEnd(2, vbucket=0, opaque=request.opaque).encode())
    wire.says(RollbackResponse(15, status=Status.ROLLBACK, opaque=wire.producer.requests[-1].opaque).encode())
    again = wire.producer.requests[-1]
    wire.says(wire.producer.accepts(again, (9, 15), (BRANCH, 0)) + marker(again, 10, 30))
    wire.says(b"".join(mutation(again, n) for n in range(11, 31)))
    items = wire.outbox.take(99.0) or []
    seen = []
    for wire.outbox.given, _ in enumerate(items, 1):
        seen.append(wire.positions()[0])
    assert seen[0][:4] == (9, 13, 10, 30)
    assert {position.snap_start for position in seen[:-1]} == {10}, "it was not consistent at 20 on this branch"
    assert seen[-1][:4] == (9, 30, 30, 30)


def test_points_of_a_branch_that_the_caller_has_not_heard_of_are_not_the_callers() -> None:
    wire = Taking(ObjectMaker, FeedRequest({0: Position(BRANCH, 10, 10, 10)}))
    request = wire.requests[0]
    wire.says(marker(request, 11, 30) + mutation(request, 25) + mutation(request, 30))
    wire.take_all()
    wire.says(StreamEnd(2, vbucket=0, opaque=request.opaque).encode())
    wire.says(RollbackResponse(22, status=Status.ROLLBACK, opaque=wire.producer.requests[-1].opaque).encode())
    again = wire.producer.requests[-1]
    wire.says(wire.producer.accepts(again, (9, 22), (BRANCH, 0)) + marker(again, 10, 20) + mutation(again, 20))
    wire.says(marker(again, 21, 24) + mutation(again, 24))
    assert 20 in wire.feed.table.position(0).consistent_points
    before = wire.outbox.positions()[0]
    assert before[:5] == (BRANCH, 30, 30, 30, (10,))
    wire.take_all()
    assert wire.outbox.positions()[0].points == (10, 20)


def test_a_caller_that_leaves_its_loop_and_comes_back_misses_nothing(db: Database) -> None:
    db.set_many({b"leave:%d" % n: b"x" for n in range(300)})
    everything = sorted((c.vbucket, c.seqno) for c in db.changes(end="now"))
    with db.change_batches(end="now", rows=10) as feed:
        found: list[tuple[int, int]] = []
        while len(found) < len(everything):
            for batch in feed:
                found += zip(batch["vbucket"].to_pylist(), batch["seqno"].to_pylist(), strict=True)
                assert sum(p.seqno for p in feed.positions().values()) == sum(reached(found).values())
                break
    assert sorted(found) == everything
    with db.changes(end="now") as feed:
        seen: list[tuple[int, int]] = []
        while len(seen) < len(everything):
            for change in feed:
                seen.append((change.vbucket, change.seqno))
                if len(seen) % 7 == 0:
                    break
            assert sum(p.seqno for p in feed.positions().values()) == sum(reached(seen).values())
    assert sorted(seen) == everything


def reached(changes: list[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for vb, seqno in changes:
        found[vb] = max(seqno, found.get(vb, 0))
    return found
