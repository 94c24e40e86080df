"""An out-of-order first load: what the node sends, and what a reader may claim meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.client_world import provoke, set_manifest
from tests.client.reader_table import Table
from tests.support.by_id import ById
from upriver.client.blocking import Database, connect
from upriver.net.blocking import Pipe
from upriver.testing import RunningNode, node
from upriver.wire import Context, FrameSplitter, Opcode, decode
from upriver.wire.messages.dcp import DcpMutation, OsoSnapshot, SnapshotMarker

SMALL, DOCUMENTS, READ = 0x50, 100, {"collections": "shop.small", "out_of_order": True}


@pytest.fixture(scope="module")
def shop() -> Iterator[RunningNode]:
    """A collection so small that reading it out of order pays (below 0.5 %), on disk and not in memory."""
    with node(vbuckets=4, lazy=True, enable_faults=True) as running:
        with connect(running.connection_string) as db:
            set_manifest(db, 1, small=SMALL)
            db.set_many({b"other:%d" % n: b"o" for n in range(240 * DOCUMENTS)})
            ById(db, SMALL).set_many({b"small:%d" % n: b"s" * 300 for n in range(DOCUMENTS)})
        running.restart()
        yield running


def received(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All bytes that the feed's sockets receive."""
    found: list[bytes] = []
    read_into = Pipe.read_into

    def recorded(pipe: Pipe, buffer: memoryview) -> int:
        size = read_into(pipe, buffer)
        found.append(bytes(buffer[: max(0, size)]))
        return size

    monkeypatch.setattr(Pipe, "read_into", recorded)
    return found


def test_the_node_sends_a_small_collection_out_of_order(shop: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = received(monkeypatch)
    with connect(shop.connection_string) as db:
        with db.changes(end="now", **READ) as feed:
            keys = {change.key for change in feed if hasattr(change, "key")}
            reached = feed.positions()
        assert keys == {b"small:%d" % n for n in range(DOCUMENTS)}
        assert {vb: position.seqno for vb, position in reached.items()} == db.high_seqnos()
        assert list(db.changes(start=reached, end="now", **READ)) == []
    messages = [decode(frame, Context(collections=True)) for frame in FrameSplitter().receive(b"".join(wire))]
    kinds = [m.opcode for m in messages if m.vbucket == 0 and isinstance(m, DcpMutation | OsoSnapshot | SnapshotMarker)]
    assert kinds[0] == kinds[-1] == Opcode.DCP_OSO_SNAPSHOT
    assert set(kinds[1:-1]) == {Opcode.DCP_MUTATION}


def read_and_die(connection: str, path: Path, batches: int) -> None:
    """Take some batches of documents, each with its position, and die without warning in the middle of a snapshot."""
    table = Table(path)
    with (
        connect(connection, window_bytes=3000) as db,
        db.change_batches(checkpoint=table.checkpoint, rows=5, **READ) as feed,
    ):
        for batch in feed:
            table.take(batch, feed)
            batches -= "mutation" in batch["event"].to_pylist()
            if batches <= 0 and unfinished(table):  # how batches are cut is a matter of time: one may end a snapshot
                os.kill(os.getpid(), signal.SIGKILL)


def unfinished(table: Table) -> set[int]:
    """The vbuckets of which the reader has documents but may claim nothing yet."""
    saved = table.checkpoint.load()
    assert saved is not None
    return {vb for (vb,) in table.sql.execute("SELECT DISTINCT vb FROM changes") if saved[vb].seqno == 0}


def finish(db: Database, path: Path) -> Table:
    table = Table(path)
    with db.change_batches(checkpoint=table.checkpoint, end="now", **READ) as feed:
        for batch in feed:
            table.take(batch, feed)
    return table


@pytest.mark.parametrize("lose", [0, 20], ids=["same branch", "history lost"])
def test_a_reader_killed_in_the_middle_begins_that_snapshot_again(shop: RunningNode, tmp_path: Path, lose: int) -> None:
    fork = multiprocessing.get_context("fork")
    for batches in (1, 4, 6):  # of at most 9 documents: 60 are left when history was lost twice
        path = tmp_path / f"{batches}.db"
        reader = fork.Process(target=read_and_die, args=(shop.connection_string, path, batches), daemon=True)
        reader.start()
        reader.join(60)
        assert reader.exitcode == -signal.SIGKILL
        began = unfinished(Table(path))
        assert began, "it should have died inside a snapshot"
        if lose:
            provoke(shop.http_port, "failover", vbucket=min(began), lose=lose)
        with connect(shop.connection_string) as db:
            table = finish(db, path)
            there = {c.key: c.value for c in db.changes(end="now", collections="shop.small") if hasattr(c, "value")}
        assert table.documents() == there
        assert len(there) >= DOCUMENTS - 3 * lose
        assert set(table.rollbacks) == {(vb, 0) for vb in began}, "what it had may be gone, with its tombstones"
