"""Whatever is cut, lost or restarted: a reader that trusts its positions ends with the server's documents.

The server is a model, which deduplicates inside each snapshot as real servers do. The reader is the real feed.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.model_vbucket import ModelVbucket, Write, latest
from tests.support.scripted_producer import HOME, ScriptedProducer, Wire, deletion, marker, mutation
from upriver.errors import HistoryLost, Status
from upriver.model import Claim, OnRollback
from upriver.protocol.feed.events import FeedEvent, FeedRequest, FeedRows, RolledBack
from upriver.protocol.history import Accept
from upriver.protocol.position import Position
from upriver.wire.constants import StreamEndStatus
from upriver.wire.messages.dcp import RollbackResponse, StreamEnd, StreamRequest

KEYS = [b"a", b"b", b"c", b"d"]


class Server(ModelVbucket[bytes, bytes]):
    """A vbucket that streams over a wire."""

    def __init__(self) -> None:
        super().__init__()
        self.request: StreamRequest | None = None
        self.sent = self.end = 0
        self.pending: list[bytes] = []
        self._next_uuid = 2
        self._written = 0

    def write(self, key: bytes, deleted: bool) -> None:
        self._written += 1
        self.writes.append(Write(self.high + 1, key, None if deleted else b"v%d" % self._written))

    def answer(self, producer: ScriptedProducer, request: StreamRequest) -> bytes:
        wanted = Claim(request.vbuuid, request.start_seqno, request.snap_start_seqno, request.snap_end_seqno)
        decision = self.decide(wanted)
        if not isinstance(decision, Accept):
            return RollbackResponse(decision.seqno, status=Status.ROLLBACK, opaque=request.opaque).encode()
        self.request, self.sent, self.end, self.pending = request, request.start_seqno, request.start_seqno, []
        return producer.accepts(request, *[tuple(entry) for entry in self.log])

    def send(self, rows: int, snapshot: int) -> bytes:
        """Send at most so many rows, in snapshots of at most so many seqnos."""
        out = b""
        while rows > 0 and self.request:
            if not self.pending:
                if self.sent >= self.high:
                    break
                out += self._begin(snapshot)
            out += self.pending.pop(0)
            rows -= 1
            if not self.pending:
                self.sent = self.end
        return out

    def _begin(self, snapshot: int) -> bytes:
        request = self.request
        assert request is not None
        first = self.sent == request.start_seqno
        self.end = min(self.high, self.sent + max(1, snapshot))
        self.pending = [
            deletion(request, seqno, key) if value is None else mutation(request, seqno, key, value)
            for seqno, key, value, _ in latest(write for write in self.writes if self.sent < write.seqno <= self.end)
        ]
        return marker(request, request.snap_start_seqno if first else self.sent + 1, self.end)

    def fail_over(self, lose: int) -> None:
        """Lose the last writes, and the stream."""
        self.branch(self._next_uuid, max(0, self.high - lose))
        self._next_uuid += 1
        self.request, self.pending = None, []


class Reader(Wire):
    """A feed whose changes go into a table that remembers what each change overwrote."""

    def __init__(
        self, server: Server, saved: dict[str, Any] | None = None, policy: OnRollback = OnRollback.EMIT
    ) -> None:
        saved = saved or {"starts": {0: Position()}, "changes": []}
        self.changes: list[tuple[int, bytes, bytes | None]] = list(saved["changes"])
        super().__init__(FeedRequest(saved["starts"], on_rollback=policy), vbuckets=1)
        self.server = server

    def _take(self, event: FeedEvent) -> None:
        if isinstance(event, FeedRows):
            columns = event.rows.columns
            for row in range(event.rows.first, event.rows.last):
                if columns["event"][row]:
                    value = columns.value(row) if columns["event"][row] == 0x57 else None
                    self.changes.append((int(columns["seqno"][row]), columns.key(row), value))
        elif isinstance(event, RolledBack):
            self.changes = [change for change in self.changes if change[0] <= event.to_seqno]
        super()._take(event)

    def save(self) -> dict[str, Any]:
        return {"starts": self.feed.positions(), "changes": self.changes}

    @property
    def documents(self) -> dict[bytes, bytes]:
        latest = {key: value for _, key, value in sorted(self.changes, key=lambda change: change[0])}
        return {key: value for key, value in latest.items() if value is not None}

    def serve(self, rows: int = 0, snapshot: int = 1) -> None:
        """Let the server answer, and send a little."""
        if HOME not in self.feed.links:
            self.connect()
        producer = self.producers[HOME]
        for _ in range(60):
            self.tick(10.0)
            if not producer.requests:
                break
            self.says(self.server.answer(producer, producer.requests.pop(0)))
        self.says(self.server.send(rows, snapshot))

    def cut(self) -> None:
        self.feed.lost(HOME, self.now)
        self.server.request, self.server.pending = None, []

    def fail_over(self, lose: int, quietly: bool) -> None:
        request = self.server.request
        self.server.fail_over(lose)
        if quietly:
            self.cut()
        elif request and HOME in self.feed.links:
            self.says(StreamEnd(StreamEndStatus.STATE_CHANGED, vbucket=0, opaque=request.opaque).encode())


writes = st.tuples(st.just("write"), st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), min_size=1, max_size=6))
sends = st.tuples(st.just("send"), st.tuples(st.integers(0, 6), st.integers(1, 9)))
fails = st.tuples(st.just("fail over"), st.tuples(st.integers(0, 12), st.booleans()))
cuts, restarts = st.just(("cut", None)), st.just(("restart", None))
actions = st.lists(st.one_of(writes, writes, sends, sends, fails, cuts, restarts), max_size=25)


def play(reader: Reader, script: list[tuple[str, Any]]) -> Reader:
    for action, details in script:
        if action == "write":
            for key, deleted in details:
                reader.server.write(key, deleted)
        elif action == "send":
            reader.serve(*details)
        elif action == "fail over":
            reader.fail_over(*details)
        elif action == "cut":
            reader.cut()
        else:
            reader.cut()
            reader = Reader(reader.server, reader.save())
    return reader


@settings(max_examples=examples(300), deadline=None)
@given(actions)
def test_the_reader_ends_with_the_servers_documents(script: list[tuple[str, Any]]) -> None:
    reader = play(Reader(Server()), script)
    for _ in range(3):
        reader.serve(10_000, 10_000)
    assert reader.documents == reader.server.state()
    assert reader.feed.positions()[0].seqno == reader.server.high


@settings(max_examples=examples(100), deadline=None)
@given(actions)
def test_a_reader_that_is_stopped_by_a_rollback_can_go_on_where_it_is_told(script: list[tuple[str, Any]]) -> None:
    reader = Reader(Server(), policy=OnRollback.FAIL)
    for step in [*script, ("send", (10_000, 10_000)), ("send", (10_000, 10_000))]:
        for _ in range(40):
            try:
                play_one = [] if step[0] == "restart" else [step]
                play(reader, play_one)
                break
            except HistoryLost as lost:
                kept = [change for change in reader.changes if change[0] <= lost.to_seqno]
                at = reader.feed.table.position(0).rolled_back(lost.to_seqno)
                reader = Reader(reader.server, {"starts": {0: at}, "changes": kept}, OnRollback.FAIL)
                step = ("send", (10_000, 10_000))
    assert reader.documents == reader.server.state()


def test_the_example_of_the_design_document() -> None:
    """Stopped at 50 in a snapshot 1..100; a document of 30 was deduplicated by 80; the successor knows only 60."""
    server = Server()
    reader = Reader(server)
    for seqno in range(1, 101):
        server.write(b"precious" if seqno in (30, 80) else b"other%d" % seqno, False)
    reader.serve(rows=49, snapshot=100)  # 49 rows, because the one at 30 is not among them
    assert reader.feed.positions()[0][:4] == (1, 50, 0, 100)
    assert b"precious" not in reader.documents
    reader.fail_over(40, quietly=True)
    reader.serve(1000, 1000)
    assert reader.documents[b"precious"] == b"v30"
    assert reader.documents == server.state()


def test_a_claim_of_a_complete_snapshot_would_have_lost_the_document() -> None:
    """The same with the claim that other connectors make; shows that the test above can fail."""
    server = Server()
    reader = Reader(server)
    for seqno in range(1, 101):
        server.write(b"precious" if seqno in (30, 80) else b"other%d" % seqno, False)
    reader.serve(rows=49, snapshot=100)
    server.fail_over(40)
    liar = Reader(server, {"starts": {0: Position(1, 50, 50, 50)}, "changes": reader.changes})
    liar.serve(1000, 1000)
    assert b"precious" not in liar.documents
    assert b"precious" in server.state()


@pytest.mark.parametrize("lose", [0, 1, 5, 10])
def test_a_rollback_goes_to_a_point_where_the_reader_was_consistent(lose: int) -> None:
    server = Server()
    reader = Reader(server)
    for _ in range(5):
        server.write(b"a", False)
        server.write(b"b", False)
        reader.serve(10, 10)
    reader.fail_over(lose, quietly=True)
    reader.serve(10, 10)
    assert reader.documents == server.state()


def test_a_shorter_snapshot_after_a_resume_does_not_shorten_the_claim() -> None:
    """Resumed inside 1..100, the server goes on with 1..60: the write at 80 still hides the one at 30."""
    server = Server()
    reader = Reader(server)
    for seqno in range(1, 101):
        server.write(b"precious" if seqno in (30, 80) else b"other%d" % seqno, False)
    reader.serve(rows=49, snapshot=100)
    reader.cut()
    reader.serve(rows=10, snapshot=10)
    assert reader.feed.positions()[0][:4] == (1, 60, 0, 100)
    reader.fail_over(30, quietly=True)
    reader.serve(1000, 1000)
    assert reader.documents == server.state()
