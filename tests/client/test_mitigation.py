"""Waiting until changes are on disk everywhere: when it is off, when it waits, and what must not block it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.scripted_producer import BRANCH
from tests.support.scripted_server import SEQNOS, VBUCKETS, Behaviour, Peer, everything, serving
from upriver.client._feed.subscription import _chore
from upriver.client._requests.operations import Ask, Operations
from upriver.client.blocking import Database, connect
from upriver.client.options import ConnectOptions
from upriver.errors import ConnectFailed, NotMyVbucket
from upriver.protocol.topology import Address, parse_topology
from upriver.wire.message import Response
from upriver.wire.messages.cluster import ObserveSeqnoFailedOver, ObserveSeqnoResponse

ENDS = dict.fromkeys(range(VBUCKETS), SEQNOS)


class InMemory(Peer):
    bucket_type = b"ephemeral"


class Writing(Peer):
    """A node with a slow disk: each request finds five more seqnos persisted."""

    def _answer(self, message: Any) -> Any:
        self.persisted += 5
        return super()._answer(message)


def read(connection: str, **options: Any) -> list[Any]:
    with connect(connection) as db:
        return list(db.changes(end=ENDS, wait_for_disk=True, **options))


def test_changes_come_once_the_disk_has_them() -> None:
    with serving(everything, Behaviour(), make=Writing) as connection:
        assert len(read(connection)) == VBUCKETS * SEQNOS


def test_changes_that_are_never_written_are_never_told() -> None:
    never = serving(everything, Behaviour())
    with never as server, connect(server) as db, db.changes(end=ENDS, wait_for_disk=True) as feed:
        outbox = feed.subscription.outbox
        assert outbox is not None
        while feed.subscription.rows < VBUCKETS * SEQNOS:
            feed._round(None)
        for _ in range(5):
            feed._round(0.1)
        assert outbox.take(time.monotonic()) is None
        assert outbox.unsafe() == dict.fromkeys(range(VBUCKETS), BRANCH)
        assert {position.seqno for position in feed.positions().values()} == {0}


def test_a_bucket_without_a_disk_is_not_waited_for() -> None:
    with serving(everything, Behaviour(), make=InMemory, bucketCapabilities=["dcp"]) as connection:
        assert len(read(connection)) == VBUCKETS * SEQNOS


def test_a_bucket_that_only_lacks_views_is_waited_for() -> None:
    lacking = serving(everything, Behaviour(), bucketCapabilities=["dcp"])
    with lacking as connection, connect(connection) as db, db.changes(wait_for_disk=True) as feed:
        assert feed.subscription.read.wait_for_disk


HERE, THERE, DOWN = (Address(f"10.0.0.{n}", 11210) for n in (1, 2, 3))


def three_nodes() -> Operations:
    """Vbucket 0 is on two nodes, 1 also on one that is down, 2 on none."""
    nodes = [{"hostname": a.host, "services": {"kv": a.port}} for a in (HERE, THERE, DOWN)]
    server_map = {"serverList": [str(a) for a in (HERE, THERE, DOWN)], "vBucketMap": [[0, 1], [0, 2], [-1, -1]]}
    operations = Operations(ConnectOptions((HERE,)), (HERE,))
    operations._topology = parse_topology({"rev": 1, "nodesExt": nodes, "vBucketServerMap": server_map}, HERE.host)
    return operations


def answered(operation: Any, answers: dict[Address, list[Response]]) -> Any:
    """Run the operation with these answers; nodes that are not listed cannot be reached."""
    try:
        step = next(operation)
        while True:
            assert isinstance(step, Ask)
            if step.address in answers:
                step = operation.send(answers[step.address])
            else:
                step = operation.throw(ConnectFailed("down"))
    except StopIteration as done:
        return done.value


def test_a_node_that_cannot_be_asked_makes_only_its_own_vbuckets_unknown() -> None:
    observed = [ObserveSeqnoResponse(0, vb, BRANCH, 70 + vb, 90) for vb in (0, 1)]
    replica = [ObserveSeqnoResponse(0, 0, BRANCH, 60, 90)]
    found = answered(three_nodes().persisted(dict.fromkeys((0, 1, 2), BRANCH)), {HERE: observed, THERE: replica})
    assert found == {0: 60, 1: 0, 2: 0}


def test_a_copy_on_another_branch_has_none_of_ours() -> None:
    observed = [ObserveSeqnoResponse(0, 0, BRANCH, 70, 90)]
    for other in (ObserveSeqnoFailedOver(1, 0, 9, 80, 90, BRANCH, 50), ObserveSeqnoResponse(0, 0, 9, 80, 90)):
        assert answered(three_nodes().persisted({0: BRANCH}), {HERE: observed, THERE: [other]}) == {0: 0}


def test_nothing_that_a_chore_meets_ends_the_feed() -> None:
    def fails(error: Exception) -> Any:
        raise error
        yield

    for error in (ConnectFailed("down"), NotMyVbucket("nobody owns it")):
        assert list(_chore(fails(error))) == []
    with pytest.raises(ZeroDivisionError):
        list(_chore(fails(ZeroDivisionError())))


def test_documents_are_sent_again_when_the_connection_breaks(db: Database, fault: Any) -> None:
    documents = {b"broken:%d" % n: b"x" * 1000 for n in range(2000)}
    connection = next(iter(db._connections.values()))
    connection._socket.shutdown(2)
    db.set_many(documents)
    assert db.get("broken:1999").value == b"x" * 1000
