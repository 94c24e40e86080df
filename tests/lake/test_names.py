"""Names of scopes and collections come from a server: whatever they are, tables stay inside the lake."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from tests.lake.feed_sync import FeedSync
from tests.lake.feeds import Feed
from upriver.lake import layout as lake
from upriver.lake.change_log import table_name

names = st.text(st.characters(codec="utf-8"), min_size=1)


def one(root: Path, scope: str, collection: str) -> FeedSync:
    sync = FeedSync(root)
    sync.feed = Feed(collections=(collection,))
    sync.feed.scope = scope
    sync.feed.put("a", {"n": 1}, collection)
    sync.commit()
    return sync


def test_a_collection_with_a_percent_sign_is_synced_and_any_delta_reader_opens_its_table(tmp_path) -> None:
    sync = one(tmp_path / "lake", "shop", "a%20b")
    sync.open()
    sync.feed.put("b", {"n": 2}, "a%20b")
    sync.commit()
    assert sync.tables.names() == ["shop.a%20b"]
    assert sync.read("shop.a%20b") == {"a": {"n": 1}, "b": {"n": 2}}
    place = Path(sync.root, "changes", lake.directory("shop.a%20b"))
    assert place.is_dir()
    assert DeltaTable(str(place)).to_pyarrow_table().num_rows == 2


def test_a_server_that_names_a_scope_after_a_path_writes_nothing_outside_the_lake(tmp_path) -> None:
    sync = one(tmp_path / "home" / "lake", "../../x", "y")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["lake"]
    assert sync.tables.names() == ["_unnamed.0x8"]
    assert sync.read("_unnamed.0x8") == {"a": {"n": 1}}


def test_the_longest_names_that_the_protocol_allows_have_tables(tmp_path) -> None:
    scope, collection = "s" * 251, "%" * 251
    sync = one(tmp_path / "lake", scope, collection)
    sync.open()
    assert sync.tables.names() == [f"{scope}.{collection}"]
    assert sync.read(f"{scope}.{collection}") == {"a": {"n": 1}}


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
