"""Names of scopes and collections come from a server: whatever they are, tables stay inside the lake."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from tests.lake.desks import Desk
from tests.lake.feeds import Feed
from upriver.lake import layout as lake
from upriver.lake.change_log import table_name

names = st.text(st.characters(codec="utf-8"), min_size=1)


def one(root: Path, scope: str, collection: str) -> Desk:
    desk = Desk(root)
    desk.feed = Feed(collections=(collection,))
    desk.feed.scope = scope
    desk.feed.put("a", {"n": 1}, collection)
    desk.commit()
    return desk


def test_a_collection_with_a_percent_sign_is_synced_and_any_delta_reader_opens_its_table(tmp_path) -> None:
    desk = one(tmp_path / "lake", "shop", "a%20b")
    desk.open()
    desk.feed.put("b", {"n": 2}, "a%20b")
    desk.commit()
    assert desk.tables.names() == ["shop.a%20b"]
    assert desk.read("shop.a%20b") == {"a": {"n": 1}, "b": {"n": 2}}
    place = Path(desk.root, "changes", lake.directory("shop.a%20b"))
    assert place.is_dir()
    assert DeltaTable(str(place)).to_pyarrow_table().num_rows == 2


def test_a_server_that_names_a_scope_after_a_path_writes_nothing_outside_the_lake(tmp_path) -> None:
    desk = one(tmp_path / "home" / "lake", "../../x", "y")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["lake"]
    assert desk.tables.names() == ["_unnamed.0x8"]
    assert desk.read("_unnamed.0x8") == {"a": {"n": 1}}


def test_the_longest_names_that_the_protocol_allows_have_tables(tmp_path) -> None:
    scope, collection = "s" * 251, "%" * 251
    desk = one(tmp_path / "lake", scope, collection)
    desk.open()
    assert desk.tables.names() == [f"{scope}.{collection}"]
    assert desk.read(f"{scope}.{collection}") == {"a": {"n": 1}}


def test_ordinary_names_keep_the_directories_that_they_always_had() -> None:
    for name in ("shop.orders", "_default._default", "My-Scope.$a_1", "_unnamed.0x9"):
        assert lake.directory(name) == name


@given(names, names)
def test_no_two_names_share_a_directory_and_none_leads_out_of_the_lake(one_name, other) -> None:
    place = lake.directory(one_name)
    assert "/" not in place
    assert place.strip(".")
    assert len(place.encode()) <= 255
    assert lake.collection_of(place) in (one_name, None)
    assert (place == lake.directory(other)) == (one_name == other)


@given(names, names, names, names)
def test_no_two_collections_share_a_table(scope, collection, other_scope, other_collection) -> None:
    same = table_name(scope, collection, 8) == table_name(other_scope, other_collection, 9)
    assert same <= ((scope, collection) == (other_scope, other_collection))
