"""Change streams: every version of a document, from collections that keep them.

See docs/protocol/messages.md#snapshot-marker and docs/protocol/snapshots.md#promises.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import upriver
from tests.support.scripted_producer import BRANCH, Wire, marker, mutation
from tests.support.scripted_server import VBUCKETS, Behaviour, Peer, serving
from upriver.client.blocking import Database, connect
from upriver.client.changes import CollectionChanged, Mutation
from upriver.errors import NotSupported
from upriver.wire.constants import MarkerFlag, StreamEndStatus
from upriver.wire.messages.dcp import DcpControl, StreamEnd, StreamRequest
from upriver.wire.messages.events import CollectionBegun, SystemEvent

DISK = MarkerFlag.DISK | MarkerFlag.CHECKPOINT
HISTORY = DISK | MarkerFlag.HISTORY | MarkerFlag.MAY_CONTAIN_DUPLICATES
VERSIONS = [(1, b"a"), (2, b"b"), (3, b"a"), (5, b"a"), (6, b"b"), (7, b"a")]


def versions(request: StreamRequest, second_start: int) -> bytes:
    """The old documents with one version each, then history with every version."""
    out = marker(request, 0, 3, DISK) + mutation(request, 2, b"b", b"2") + mutation(request, 3, b"a", b"3")
    out += marker(request, second_start, 7, HISTORY)
    return out + b"".join(mutation(request, seqno, key, b"%d" % seqno) for seqno, key in VERSIONS[3:])


@pytest.mark.parametrize("second_start", [4, 0], ids=["ranges in a row", "ranges that overlap"])
def test_a_key_may_come_again_and_again_in_one_snapshot(second_start: int) -> None:
    wire = Wire()
    producer = wire.connect()
    [request] = producer.requests
    wire.says(producer.accepts(request) + versions(request, second_start))
    assert wire.rows == [(0, seqno, key) for seqno, key in VERSIONS[1:]]
    assert wire.feed.positions()[0][:4] == (BRANCH, 7, 7, 7)
    assert wire.feed.table.position(0).consistent_points[-2:] == (3, 7)


def test_in_the_middle_of_history_the_position_claims_all_of_it() -> None:
    wire = Wire()
    producer = wire.connect()
    [request] = producer.requests
    wire.says(producer.accepts(request) + marker(request, 0, 3, DISK) + mutation(request, 3))
    wire.says(marker(request, 4, 9, HISTORY) + mutation(request, 5, b"a") + mutation(request, 6, b"a"))
    assert wire.feed.positions()[0][:4] == (BRANCH, 6, 3, 9)


def speak(peer: Peer, request: StreamRequest) -> bytes:
    """All versions, and the event of a collection whose history was turned on."""
    at = {"vbucket": request.vbucket, "opaque": request.opaque}
    modified = SystemEvent.of(8, CollectionBegun("_default", 2, 0, 0, history=True, modified=True), flat=True, **at)
    told = versions(request, 4) + marker(request, 8, 8) + modified.encode()
    return peer.accepts(request) + told + StreamEnd(StreamEndStatus.OK, **at).encode()


ENDS = dict.fromkeys(range(VBUCKETS), 8)


def read_blocking(connection: str, **read: Any) -> list[Any]:
    with connect(connection) as db:
        return list(db.changes(end=ENDS, **read))


def read_async(connection: str, **read: Any) -> list[Any]:
    async def changes() -> list[Any]:
        async with upriver.aio.connect(connection) as db:
            return [change async for change in db.changes(end=ENDS, **read)]

    return asyncio.run(changes())


@pytest.mark.parametrize("read", [read_blocking, read_async])
def test_every_version_is_an_object_of_its_own(read: Any) -> None:
    asked: list[DcpControl] = []

    def listen(peer: Peer, request: StreamRequest) -> bytes:
        asked.extend(message for message in peer.seen if isinstance(message, DcpControl))
        return speak(peer, request)

    with serving(listen, Behaviour(11)) as connection:
        changes = [change for change in read(connection, history=True) if change.vbucket == 0]
    assert {(c.key, c.value) for c in asked} >= {(b"change_streams", b"true"), (b"flatbuffers_system_events", b"true")}
    found = [(c.seqno, c.key, c.value) for c in changes if isinstance(c, Mutation)]
    assert found == [(seqno, key, b"%d" % seqno) for seqno, key in VERSIONS[1:]]
    [news] = [c for c in changes if isinstance(c, CollectionChanged)]
    assert isinstance(news.content, CollectionBegun)
    assert (news.content.history, news.content.modified) == (True, True)


def test_a_server_that_keeps_no_history_says_so(db: Database) -> None:
    db.set("history", b"1")
    with pytest.raises(NotSupported, match=r"change_streams.*no history.* at 127\.0\.0\.1:"):
        list(db.changes(history=True, end="now"))
