"""A position records its filter: a wider filter reads what it adds from the beginning and loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import upriver
from tests.client.client_world import keys_of, set_manifest
from tests.support.by_id import ById
from upriver.cli import cli
from upriver.client.blocking import Database, connect
from upriver.client.checkpoints import FileCheckpoint
from upriver.client.groups import Group, SharedFile
from upriver.client.names import beyond, covers, filter_from_json, filter_to_json, named
from upriver.client.positions import Positions
from upriver.errors import CorruptCheckpoint
from upriver.protocol.filters import Filter
from upriver.protocol.position import Position
from upriver.testing import RunningNode, node

A, B, C = 0x10, 0x11, 0x12
KEYS = {name: {b"%s:%d" % (name.encode(), n) for n in range(12)} for name in ("a", "b", "c", "d")}


@pytest.fixture(scope="module")
def shop() -> Iterator[RunningNode]:
    """Collections a and b of scope shop, and documents of the default collection (d)."""
    with node(vbuckets=4, lazy=True) as running:
        with connect(running.connection_string) as db:
            set_manifest(db, 1, a=A, b=B)
            for name, number in (("a", A), ("b", B), ("d", 0)):
                ById(db, number).set_many(dict.fromkeys(KEYS[name], b"{}"))
        yield running


@pytest.fixture
def shop_db(shop: RunningNode) -> Iterator[Database]:
    with connect(shop.connection_string) as db:
        yield db


@pytest.fixture
def store(tmp_path: Path) -> FileCheckpoint:
    return FileCheckpoint(tmp_path / "c.json")


def read(db: Database, store: Any, **what: Any) -> set[bytes]:
    """The changes up to now, saved at the end; none may come twice."""
    with db.changes(checkpoint=store, end="now", **what) as feed:
        keys = [change.key for change in feed if hasattr(change, "key")]
        feed.confirm()
    assert len(keys) == len(set(keys))
    return set(keys)


def test_another_collection_on_the_same_checkpoint_is_read_from_the_beginning(
    shop_db: Database, store: FileCheckpoint
) -> None:
    assert read(shop_db, store, collections="shop.a") == KEYS["a"]
    assert read(shop_db, store, collections=("shop.a", "shop.b")) == KEYS["b"]
    assert read(shop_db, store, collections=("shop.a", "shop.b")) == set()


@pytest.mark.parametrize(
    ("first", "then", "new"),
    [
        ({"collections": "shop.a"}, {}, KEYS["b"] | KEYS["d"]),
        ({"collections": "shop.a"}, {"scope": "shop"}, KEYS["b"]),
        ({"scope": "shop"}, {"scope": "_default"}, KEYS["d"]),
        ({"scope": "shop"}, {}, KEYS["d"]),
        ({"collections": "shop.a"}, {"collections": "shop.b"}, KEYS["b"]),
        ({"scope": "shop"}, {"collections": ("shop.a", "_default._default")}, KEYS["d"]),
    ],
)  # fmt: skip
def test_whatever_the_wider_filter_lets_pass_is_read(
    shop_db: Database, store: FileCheckpoint, first: dict[str, Any], then: dict[str, Any], new: set[bytes]
) -> None:
    read(shop_db, store, **first)
    assert read(shop_db, store, **then) == new
    assert read(shop_db, store, **then) == set()


def test_a_narrower_filter_goes_on_where_the_wider_one_was(shop_db: Database, store: FileCheckpoint) -> None:
    read(shop_db, store)
    assert read(shop_db, store, scope="shop") == set()
    assert read(shop_db, store, collections="shop.a") == set()
    assert read(shop_db, store, scope="shop") == KEYS["b"], "of b, nobody knows whether it changed meanwhile"


def test_the_asynchronous_client_reads_what_is_new_too(shop: RunningNode, store: FileCheckpoint) -> None:
    async def keys(**what: Any) -> set[bytes]:
        async with (
            upriver.aio.connect(shop.connection_string) as db,
            db.changes(checkpoint=store, end="now", **what) as feed,
        ):
            found = set()
            async for change in feed:  # a loop that is left goes on where it was
                found |= keys_of([change])
                break
            async for change in feed:
                found |= keys_of([change])
            await feed.confirm()
            return found

    assert asyncio.run(keys(collections="shop.a")) == KEYS["a"]
    assert asyncio.run(keys(scope="shop")) == KEYS["b"]
    assert asyncio.run(keys(scope="shop")) == set()


def test_a_reader_that_stops_while_it_catches_up_begins_with_that_again(
    shop_db: Database, store: FileCheckpoint
) -> None:
    read(shop_db, store, collections="shop.a")
    with shop_db.changes(checkpoint=store, end="now", scope="shop") as feed:
        for _ in feed:
            assert feed.catching_up
            feed.confirm()
            break
    assert read(shop_db, store, scope="shop") == KEYS["b"]


def test_a_group_remembers_what_each_vbucket_was_read_for(shop_db: Database, tmp_path: Path) -> None:
    group = Group(SharedFile(tmp_path / "group.json"))
    group.beat(4)
    assert read(shop_db, group, collections="shop.a") == KEYS["a"]
    halves = [read(shop_db, group, scope="shop", vbuckets=half) for half in ((0, 1), (2, 3))]
    assert halves[0] | halves[1] == KEYS["b"]
    assert read(shop_db, group, scope="shop") == set()


def test_a_collection_made_after_the_reader_began_is_seen_by_its_scope(shop: RunningNode, tmp_path: Path) -> None:
    with node(vbuckets=4, lazy=True) as running, connect(running.connection_string) as db:
        set_manifest(db, 1, a=A)
        ById(db, A).set_many(dict.fromkeys(KEYS["a"], b"{}"))
        store = FileCheckpoint(tmp_path / "c.json")
        assert read(db, store, scope="shop") == KEYS["a"]
        set_manifest(db, 2, a=A, c=C)
        ById(db, C).set_many(dict.fromkeys(KEYS["c"], b"{}"))
        assert read(db, store, scope="shop") == KEYS["c"]


def test_a_checkpoint_of_the_version_before_still_loads(shop_db: Database, store: FileCheckpoint) -> None:
    read(shop_db, store, collections="shop.a")
    saved = json.loads(store.path.read_text())
    del saved["filter"]
    store.path.write_text(json.dumps({**saved, "version": 1}))
    found = store.load()
    assert found is not None
    assert {at.filter for at in found.values()} == {None}
    assert read(shop_db, store, collections="shop.a") == set()


def run(connection: str, out: Path, *arguments: str) -> set[str]:
    """The keys that a run of dump added."""
    before = set(out.glob("part-*"))
    result = CliRunner().invoke(cli, ["dump", connection, "--out", str(out), "--json", *arguments])
    assert result.exit_code == 0, result.output
    tables = [pq.read_table(part, columns=["key"]) for part in set(out.glob("part-*")) - before]
    return {key.decode() for table in tables for key in table["key"].to_pylist() if key}


def test_dump_of_another_collection_into_the_same_directory_has_its_past(shop: RunningNode, tmp_path: Path) -> None:
    out, connection = tmp_path / "dump", shop.connection_string
    assert run(connection, out, "--collection", "shop.a") == {key.decode() for key in KEYS["a"]}
    wider = ("--collection", "shop.a", "--collection", "shop.b", "--part-rows", "3")
    assert run(connection, out, *wider) == {key.decode() for key in KEYS["b"]}
    assert run(connection, out, *wider) == set()
    assert run(connection, out) == {key.decode() for key in KEYS["d"]}


def test_a_part_of_a_dump_is_on_disk_before_the_checkpoint_names_it(
    shop: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    run(shop.connection_string, tmp_path / "dump", "--collection", "shop.a")
    names = [Path(path).name.split(".")[0] for path in synced]
    behind = names[names.index("part-000001") :]  # before, only the checkpoint that knows of no parts
    assert behind.index("dump") < behind.index("checkpoint")


names = st.sampled_from([("s", "a"), ("s", "b"), ("t", "a"), ("_default", "_default")])
filters = st.one_of(
    st.builds(named, st.sampled_from(["", "s", "t"])), st.builds(lambda c: named("", map(".".join, c)), st.sets(names))
)


def has(one: Filter, path: tuple[str, str]) -> bool:
    return one.has(".".join(path), path[0])


@given(filters, filters, st.sets(names))
def test_what_a_filter_lets_pass_is_what_it_had_and_what_it_lacked(new: Filter, old: Filter, there: Any) -> None:
    wanted = {path for path in there if has(new, path)}
    lacked = beyond(new, old, there)
    read = {path for path in there if has(old, path) or (lacked and has(lacked, path))}
    assert wanted <= read
    assert not covers(old, new) or lacked is None
    assert filter_from_json(json.loads(json.dumps(filter_to_json(new)))) == new


def test_positions_compare_by_what_was_read_too() -> None:
    here = Position(7, 5, 5, 5)
    narrow = Positions({0: here._replace(filter=Filter("shop"))})
    wide = Positions({0: here._replace(filter=Filter())})
    assert narrow <= wide
    assert not wide <= narrow
    mixed = wide.merged(Positions({1: here._replace(filter=Filter("shop"))}))
    again = Positions.from_json(json.loads(json.dumps(mixed.to_json())))
    assert again.by_vbucket == mixed.by_vbucket
    for wrong in ({"collections": 3}, {"scope": 1}, 7):
        with pytest.raises(CorruptCheckpoint):
            Positions.from_json({**wide.to_json(), "filter": wrong})
