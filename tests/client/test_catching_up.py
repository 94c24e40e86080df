"""A wider filter on an old position, while the node loses history or purges: the reader ends with the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import upriver
from tests.client.client_world import provoke, set_manifest
from tests.client.feed_model import Log, documents_of
from tests.client.losing_reader import until_persisted
from tests.support.by_id import ById
from upriver.client.blocking import Database, connect
from upriver.client.positions import Positions
from upriver.errors import HistoryLost
from upriver.testing import RunningNode, node

SMALL = 2000  # bytes of window: the node cannot be done before the reader is
KEYS = [b"%d" % n for n in range(40)]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningNode]:
    with node(vbuckets=2, enable_faults=True, lazy=True) as running:
        yield running


@pytest.fixture
def db(server: RunningNode) -> Iterator[Database]:
    with connect(server.connection_string, window_bytes=SMALL) as database:
        yield database


@pytest.fixture
def ids(db: Database) -> tuple[int, int]:
    """New collections a and b for each test."""
    uid = int(db.manifest()["uid"], 16) + 1
    set_manifest(db, uid, a=16 * uid, b=16 * uid + 1)
    return 16 * uid, 16 * uid + 1


def fill(db: Database, ids: tuple[int, int]) -> None:
    """Both collections, with tombstones among them that can be purged."""
    for number in ids:
        ById(db, number).set_many(dict.fromkeys(KEYS, b"v" * 900))
        for key in KEYS[:5]:
            ById(db, number).delete(key)
    for number in ids:
        ById(db, number).set_many(dict.fromkeys(KEYS[20:], b"w" * 900))


def read(db: Database, log: Log, meanwhile: Callable[[int], Any] = lambda n: None, **what: Any) -> Positions:
    with db.changes(end="now", **what) as feed:
        for n, change in enumerate(feed):
            log.take(change)
            meanwhile(n)
        return feed.positions()


def agrees(db: Database, log: Log, ids: tuple[int, int]) -> bool:
    ours = {at: value for at, value in log.documents().items() if at[0] in ids}
    return ours == documents_of(db, [(number, key) for number in ids for key in KEYS])


def purge(server: RunningNode) -> None:
    for vb in range(2):
        provoke(server.http_port, "purge", vbucket=vb)
    provoke(server.http_port, "drop-connection")


def test_a_rollback_of_what_was_lacking_brings_the_rest_again(
    server: RunningNode, db: Database, ids: tuple[int, int]
) -> None:
    """The reader undoes the whole vbucket; a feed that continued after its old position would lose documents."""
    fill(db, ids)
    log = Log()
    start = read(db, log, collections="shop.a")
    end = read(db, log, lambda n: purge(server) if n == 5 else None, start=start, scope="shop")
    assert log.rollbacks, "the purge did not matter"
    assert agrees(db, log, ids)
    assert all(end[vb].epoch == 1 for vb, _ in log.rollbacks)


def test_a_reader_that_stops_after_a_rollback_to_0_begins_at_the_beginning(
    server: RunningNode, db: Database, ids: tuple[int, int]
) -> None:
    fill(db, ids)
    log = Log()
    start = read(db, log, collections="shop.a")
    with db.changes(start=start, end="now", scope="shop") as feed:
        for n, change in enumerate(feed):
            log.take(change)
            if n == 5:
                purge(server)
            if log.rollbacks:
                break
        assert feed.catching_up
        stopped = Positions.from_json(feed.positions().to_json())
    read(db, log, start=stopped, scope="shop")
    assert agrees(db, log, ids)


def test_the_asynchronous_feed_brings_the_rest_again_too(
    server: RunningNode, db: Database, ids: tuple[int, int]
) -> None:
    fill(db, ids)
    log = Log()
    start = read(db, log, collections="shop.a")

    async def widen() -> None:
        async with upriver.aio.connect(server.connection_string, window_bytes=SMALL) as aio:
            batches = 0
            async for batch in aio.change_batches(start=start, end="now", scope="shop", rows=2):
                log.take(batch)
                batches += 1
                if batches == 1:
                    await asyncio.to_thread(purge, server)

    asyncio.run(widen())
    assert log.rollbacks, "the purge did not matter"
    assert agrees(db, log, ids)


def test_a_caller_that_gets_history_lost_can_resume_from_the_position(
    server: RunningNode, db: Database, ids: tuple[int, int]
) -> None:
    fill(db, ids)
    log = Log()
    at, met = read(db, log, collections="shop.a"), 0
    while True:
        with db.changes(start=at, end="now", scope="shop", on_rollback="fail") as feed:
            try:
                for n, change in enumerate(feed):
                    log.take(change)
                    if n == 5 and not met:
                        purge(server)
                break
            except HistoryLost as lost:
                met += 1
                log.undo(lost.vbucket, lost.to_seqno)
                at = feed.positions().rolled_back(lost.vbucket, lost.to_seqno)
    assert met
    assert agrees(db, log, ids)


def test_older_points_of_a_position_do_not_count_for_what_was_read_later(
    server: RunningNode, db: Database, ids: tuple[int, int]
) -> None:
    """A seqno at which the reader is consistent in a is not consistent in b, of which it has only newer versions."""
    a, b = ids
    log, start = Log(), None
    for n in range(4):
        ById(db, a).set_many(dict.fromkeys(KEYS[10 * n : 10 * n + 10], b"%d" % n))
        ById(db, b).set_many(dict.fromkeys(KEYS[:10], b"%d" % n))
        until_persisted(db)
        start = read(db, log, collections="shop.a", **({"start": start} if start else {}))
    assert start is not None
    start = read(db, log, start=start, scope="shop")
    for vb, high in db.high_seqnos().items():
        provoke(server.http_port, "rollback", vbucket=vb, seqno=high - 3)
    read(db, log, start=start, scope="shop")
    assert len(log.rollbacks) == 2
    assert agrees(db, log, ids)
