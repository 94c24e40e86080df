"""The client against a real node: what can be read, and what it survives."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import upriver
from tests.client.client_world import keys_of, read_keys, read_until, set_manifest
from upriver.client._requests.operations import Ask, Operation
from upriver.client.blocking import Database, connect
from upriver.client.changes import CollectionChanged, Deletion, Mutation
from upriver.errors import ConnectFailed, KeyNotFound, UnknownCollection
from upriver.model import vbucket_of
from upriver.testing import RunningNode, node
from upriver.wire.constants import Opcode, PathFlag
from upriver.wire.messages.subdoc import SubdocMutation

Fault = Callable[..., Any]


@pytest.fixture(scope="module")
def shop() -> Any:
    """A separate node, because manifests cannot go back."""
    with node(vbuckets=4, lazy=True) as running, connect(running.connection_string) as database:
        yield database


def test_documents_are_written_read_and_removed(db: Database) -> None:
    cas = db.set("doc", b'{"a": 1}')
    assert (db.get("doc").value, db.get("doc").cas) == (b'{"a": 1}', cas)
    db.delete("doc")
    with pytest.raises(KeyNotFound, match="vbucket"):
        db.get("doc")


def test_from_now_means_only_what_comes_after(db: Database) -> None:
    db.set("before", b"1")
    with db.changes(start="now") as feed:
        db.set("after", b"2")
        assert read_keys(feed, {b"after"}) == {b"after"}


def test_to_now_ends_there_and_a_position_goes_on(db: Database) -> None:
    db.set("now:1", b"1")
    with db.changes(end="now") as feed:
        assert b"now:1" in keys_of(feed)
        saved = feed.positions()
    db.set("now:2", b"2")
    assert keys_of(db.changes(start=saved, end="now")) == {b"now:2"}
    assert keys_of(db.changes(start=saved, end=saved)) == set()


def test_a_position_between_two_changes_covers_exactly_what_was_given(db: Database) -> None:
    db.set_many({b"mid:%d" % n: b"x" for n in range(100)})
    everything = [(c.vbucket, c.seqno) for c in db.changes(end="now")]
    for stop in (1, 7, 50, len(everything) - 1):
        with db.changes(end="now") as feed:
            seen = []
            for change in feed:
                seen.append((change.vbucket, change.seqno))
                if len(seen) == stop:
                    break
            saved = feed.positions()
        rest = [(c.vbucket, c.seqno) for c in db.changes(start=saved, end="now")]
        assert sorted(seen + rest) == sorted(everything)


def test_keys_only_come_without_values(db: Database) -> None:
    db.set("keys:only", b"some value")
    found = {c.key: c.value for c in db.changes(end="now", content="keys") if isinstance(c, Mutation)}
    assert found[b"keys:only"] is None
    batch = next(iter(db.change_batches(end="now", content="metadata")))
    assert batch["value"].null_count == batch.num_rows


def test_values_may_travel_compressed(db: Database) -> None:
    db.set("compressible", b"abc" * 1000)
    found = {c.key: c.value for c in db.changes(end="now", compressed=True) if isinstance(c, Mutation)}
    assert found[b"compressible"] == b"abc" * 1000


def test_batches_have_about_as_many_rows_as_asked_for(db: Database) -> None:
    db.set_many({b"rows:%d" % n: b"x" for n in range(300)})
    sizes = [batch.num_rows for batch in db.change_batches(end="now", rows=20)]
    assert max(sizes) < 40


def test_a_collection_is_followed_when_it_is_created_again(shop: Database) -> None:
    set_manifest(shop, 1, orders=0x10, carts=0x11)
    shop.collection("shop.orders").set("order:1", b"1")
    shop.set("elsewhere", b"1")
    with shop.changes(collections="shop.orders") as feed:
        assert read_keys(feed, {b"order:1"}) == {b"order:1"}
        set_manifest(shop, 2, carts=0x11)
        set_manifest(shop, 3, carts=0x11, orders=0x12)
        shop.collection("shop.orders").set("order:2", b"2")
        found = read_until(feed, lambda changes: b"order:2" in keys_of(changes))
    assert keys_of(found) == {b"order:2"}
    events = [c.collection for c in found if isinstance(c, CollectionChanged)]
    assert set(events) == {"orders"}
    assert {c.scope for c in found if isinstance(c, Mutation)} == {"shop"}


def test_one_of_several_collections_is_followed_without_missing_anything(shop: Database) -> None:
    uid = int(shop.manifest()["uid"], 16)
    set_manifest(shop, uid + 1, left=0x20, right=0x21)
    with shop.changes(collections=("shop.left", "shop.right")) as feed:
        list(feed.items(idle_s=0.3))
        set_manifest(shop, uid + 2, left=0x20)
        shop.collection("shop.left").set("left:1", b"1")
        assert b"left:1" in read_keys(feed, {b"left:1"})
        set_manifest(shop, uid + 3, left=0x20, right=0x22)
        shop.collection("shop.right").set("right:2", b"2")
        assert b"right:2" in read_keys(feed, {b"right:2"})


def test_a_position_saved_while_one_of_several_collections_is_gone_misses_nothing_of_the_next(shop: Database) -> None:
    uid = int(shop.manifest()["uid"], 16)
    set_manifest(shop, uid + 1, stays=0x50, goes=0x51)
    names = ("shop.stays", "shop.goes")
    with shop.changes(collections=names) as feed:
        list(feed.items(idle_s=0.3))
        set_manifest(shop, uid + 2, stays=0x50)
        feed.subscription._filter_at = time.monotonic() + 3600  # it does not hear of the new one before it dies
        list(feed.items(idle_s=0.3))
        set_manifest(shop, uid + 3, stays=0x50, goes=0x52)
        for n in range(20):
            shop.collection("shop.goes").set(f"came:{n}", b"1")
            shop.collection("shop.stays").set(f"stayed:{n}", b"1")
        stayed = {b"stayed:%d" % n for n in range(20)}
        assert read_keys(feed, stayed) == stayed
        saved = feed.positions()
    found = keys_of(shop.changes(collections=names, start=saved, end="now"))
    assert {b"came:%d" % n for n in range(20)} <= found


def test_a_scope_includes_collections_that_come_later(shop: Database) -> None:
    uid = int(shop.manifest()["uid"], 16)
    set_manifest(shop, uid + 1, first=0x30)
    with shop.changes(scope="shop", start="now") as feed:
        list(feed.items(idle_s=0.2))
        set_manifest(shop, uid + 2, first=0x30, second=0x31)
        shop.collection("shop.second").set("in second", b"1")
        assert read_keys(feed, {b"in second"}) == {b"in second"}


def test_an_unknown_collection_is_an_error_with_its_name(shop: Database) -> None:
    with pytest.raises(UnknownCollection, match=r"shop\.nope"):
        list(shop.changes(collections="shop.nope"))


def test_changes_wait_until_they_are_on_disk(db: Database) -> None:
    with db.changes(start="now", wait_for_disk=True) as feed:
        db.set("safe", b"1")
        assert read_keys(feed, {b"safe"}) == {b"safe"}
        assert feed.subscription.read.wait_for_disk


def test_a_dropped_connection_is_made_again_and_nothing_is_lost(db: Database, fault: Fault) -> None:
    with db.changes(start="now") as feed:
        db.set("drop:1", b"1")
        assert read_keys(feed, {b"drop:1"}) == {b"drop:1"}
        fault("drop-connection")
        db.set("drop:2", b"2")
        assert read_keys(feed, {b"drop:2"}) == {b"drop:2"}
        assert feed.metrics().reconnects >= 1


def test_a_node_that_falls_silent_is_left_and_found_again(server: RunningNode, fault: Fault) -> None:
    with connect(server.connection_string, noop_interval_s=0.4) as db, db.changes(start="now") as feed:
        list(feed.items(idle_s=0.2))
        fault("stall", seconds=60)
        db.set("stall:1", b"1")
        assert read_keys(feed, {b"stall:1"}) == {b"stall:1"}
        assert feed.metrics().reconnects >= 1
        assert "silent" in str(feed.subscription.reconnects.last_error)


def test_a_slow_caller_is_not_taken_for_a_dead_node(server: RunningNode) -> None:
    with connect(server.connection_string, noop_interval_s=1.0) as db, db.changes(start="now") as feed:
        list(feed.items(idle_s=0.2))
        db.set("slow:1", b"1")
        time.sleep(3.0)  # longer than the node may be silent
        assert read_keys(feed, {b"slow:1"}) == {b"slow:1"}
        assert feed.metrics().reconnects == 0


def test_a_killed_node_is_waited_for() -> None:
    with node(vbuckets=4) as running, connect(running.connection_string) as db:
        db.set("kill:1", b"1")
        with db.changes() as feed:
            assert b"kill:1" in read_keys(feed, {b"kill:1"})
            again = threading.Thread(target=running.restart, kwargs={"kill": True})
            again.start()
            again.join()
            db.set("kill:2", b"2")
            assert b"kill:2" in read_keys(feed, {b"kill:2"})


def test_the_window_bounds_what_a_caller_that_takes_nothing_is_sent(server: RunningNode) -> None:
    window = 50_000
    with connect(server.connection_string, window_bytes=window) as db, db.change_batches(rows=5) as feed:
        db.set_many({b"window:%d" % n: b"x" * 1000 for n in range(500)})
        batches = feed.items()
        next(batches)
        for _ in range(20):
            feed._round(None)
        [link] = feed.feed.links.values()
        assert link.charged <= link.acknowledged + window + 2_000
        rows, deadline = 0, time.monotonic() + 60
        while rows < 400 and time.monotonic() < deadline:
            rows += sum(batch.num_rows for batch in feed.items(idle_s=0.3))
        assert rows >= 400


def test_no_node_is_said_with_host_and_port() -> None:
    with pytest.raises(ConnectFailed, match=r"no node could be reached: cannot connect to 127\.0\.0\.1:1"):
        connect("couchbase://127.0.0.1:1")


def test_the_async_client_does_the_same(server: RunningNode, fault: Fault) -> None:
    async def scenario() -> None:
        async with upriver.aio.connect(server.connection_string) as db:
            await db.set("async:1", b"1")
            assert (await db.get("async:1")).value == b"1"
            await asyncio.gather(*(db.set(f"async:{n}", b"x") for n in range(50)))
            feed = db.changes(end="now")
            keys = {change.key async for change in feed if isinstance(change, Mutation)}
            assert {f"async:{n}".encode() for n in range(50)} <= keys
            rows = sum([batch.num_rows async for batch in db.change_batches(end="now")])
            assert rows > 50
            saved = feed.positions()
            await db.delete("async:1")
            fresh = db.changes(start=saved, end="now")
            changes = [change async for change in fresh]
            assert [type(change) for change in changes] == [Deletion]
            assert [change async for change in db.changes(start="now", idle_s=0.1)] == []

    asyncio.run(scenario())


def test_the_async_client_reconnects_and_hears_of_rollbacks(server: RunningNode, fault: Fault) -> None:
    async def scenario() -> None:
        async with upriver.aio.connect(server.connection_string) as db:
            await db.set_many({b"again:%d" % n: b"x" for n in range(50)})
            last = (await db.high_seqnos())[0]
            async with db.changes() as feed:
                kinds = set()
                async for change in feed:
                    kinds.add(type(change).__name__)
                    if isinstance(change, upriver.RolledBack):
                        break
                    if (change.vbucket, change.seqno) == (0, last):
                        await asyncio.to_thread(fault, "failover", vbucket=0, lose=2)
                        await asyncio.to_thread(fault, "drop-connection")
                assert kinds >= {"Mutation", "RolledBack"}

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_position_between_two_batches_covers_exactly_what_was_given(db: Database) -> None:
    db.set_many({b"between:%d" % n: b"x" for n in range(100)})

    def places(batch: Any) -> list[tuple[int, int]]:
        return list(zip(batch["vbucket"].to_pylist(), batch["seqno"].to_pylist(), strict=True))

    everything = sorted(place for batch in db.change_batches(end="now") for place in places(batch))
    for stop in (1, 2, 5, 9):
        seen = []
        with db.change_batches(end="now", rows=10) as feed:
            for count, batch in enumerate(feed, 1):
                seen += places(batch)
                if count == stop:
                    break
            saved = feed.positions()
        rest = [place for batch in db.change_batches(start=saved, end="now") for place in places(batch)]
        assert sorted(seen + rest) == everything
        assert {vb: max((s for v, s in seen if v == vb), default=0) for vb in saved} == {
            vb: position.seqno for vb, position in saved.items()
        }


def test_an_expired_document_is_an_event_of_its_own(db: Database) -> None:
    db.set("expiring", b"soon gone", expiry=1)
    time.sleep(2.1)
    with pytest.raises(KeyNotFound):
        db.get("expiring")
    for as_event in (True, False):
        found = [c for c in db.changes(end="now", expiry_events=as_event) if getattr(c, "key", b"") == b"expiring"]
        assert [c.expired for c in found if isinstance(c, Deletion)] == [as_event]


def test_a_reader_that_missed_purged_deletions_starts_again_unless_it_does_not_care(db: Database, fault: Fault) -> None:
    db.set_many({b"purge:%d" % n: b"x" for n in range(50)})
    with db.changes(end="now") as feed:
        keys_of(feed)
        saved = feed.positions()
    for n in range(50):
        db.delete(f"purge:{n}")
    for vb in range(db.topology.vbuckets):
        fault("purge", vbucket=vb)
    again = [type(c).__name__ for c in db.changes(start=saved, end="now")]
    careless = [type(c).__name__ for c in db.changes(start=saved, end="now", ignore_purged_tombstones=True)]
    assert "RolledBack" in again
    assert "RolledBack" not in careless


def test_extended_attributes_come_in_a_map_of_their_own(db: Database) -> None:
    vb = vbucket_of(b"attributed", db.topology.vbuckets)
    upsert = SubdocMutation.under(Opcode.SUBDOC_DICT_UPSERT)
    message = upsert(4, PathFlag.XATTR, key=b"\0attributed", value=b'note"hi"', vbucket=vb)

    def operation() -> Operation[None]:
        answers = yield Ask(db.topology.nodes[0], [message])
        assert answers[0].status == 0, answers

    db.set("attributed", b'{"body": 1}')
    db.run(operation())
    [change] = [c for c in db.changes(end="now", xattrs=True) if getattr(c, "key", b"") == b"attributed"]
    assert isinstance(change, Mutation)
    assert (change.value, change.xattrs) == (b'{"body": 1}', {"note": b'"hi"'})
    [plain] = [c for c in db.changes(end="now") if getattr(c, "key", b"") == b"attributed"]
    assert isinstance(plain, Mutation)
    assert (plain.value, plain.xattrs) == (b'{"body": 1}', None)
    table = next(iter(db.change_batches(end="now", xattrs=True, vbuckets=[vb])))
    attributes = dict(zip(table["key"].to_pylist(), table["xattrs"].to_pylist(), strict=True))
    assert attributes[b"attributed"] == [("note", b'"hi"')]


def test_a_filter_that_lets_nothing_pass_still_moves_the_position(db: Database) -> None:
    db.set_many({b"filtered:%d" % n: b"x" for n in range(100)})
    with db.changes(end="now", where=lambda change: False) as feed:
        assert keys_of(feed) == set()
        saved = feed.positions()
    assert keys_of(db.changes(start=saved, end="now")) == set()
    assert keys_of(db.changes(end="now", where=lambda change: change.key == b"filtered:7")) == {b"filtered:7"}
