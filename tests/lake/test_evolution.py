"""Schemas change under a running sync, and nothing is lost or refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.lake.feed_sync import FeedSync
from upriver.errors import ConfigError
from upriver.lake import read
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.options import ColumnType


def test_a_new_field_becomes_a_column_and_old_rows_have_null(sync: FeedSync) -> None:
    sync.feed.put("a", {"n": 1})
    sync.commit()
    sync.feed.put("b", {"n": 2, "city": "Bern"})
    sync.commit()
    rows = {row["_key"]: row for row in read(sync.root, "shop.orders").to_pylist()}
    assert (rows["a"]["city"], rows["b"]["city"]) == (None, "Bern")


def test_integers_widen_to_doubles_in_the_whole_table_but_none_is_rounded(sync: FeedSync) -> None:
    sync.feed.put("a", {"n": 1})
    sync.feed.put("large", {"n": 2**53 + 1})
    sync.commit()
    sync.feed.put("b", {"n": 2.5})
    sync.commit()
    assert sync.orders.shape["n"] is ColumnType.DOUBLE
    plain = sync.orders.current.delta.to_pyarrow_table()
    assert plain.schema.field("n").type == pa.float64()
    assert sync.read() == {"a": {"n": 1}, "b": {"n": 2.5}, "large": {"n": 2**53 + 1}}


def test_what_fits_no_column_is_kept_beside_it(sync: FeedSync) -> None:
    sync.feed.put("a", {"n": 1})
    sync.commit()
    sync.feed.put("b", {"n": "one", "bad name": True})
    sync.feed.put("c", b"\x00\xffbinary", json=False)
    sync.feed.put("d", b"[1, 2]")
    sync.commit()
    assert sync.read() == {"a": {"n": 1}, "b": {"n": "one", "bad name": True}, "c": b"\x00\xffbinary", "d": b"[1, 2]"}


def test_a_field_that_waited_in_rest_moves_into_its_column_when_its_part_is_rewritten(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=10**6), max_columns=1)
    sync.feed.put("a", {"n": 1, "m": 5})
    sync.feed.put("z", {"n": 1, "m": 5})
    sync.commit()
    assert list(sync.orders.shape) == ["m"]
    sync.options = type(sync.options)(vbuckets=4, policy=sync.options.policy, max_columns=9)
    sync.open()
    sync.feed.put("z", {"n": 2, "m": 6})
    sync.commit()
    row = next(row for row in read(sync.root, "shop.orders").to_pylist() if row["_key"] == "a")
    assert (row["m"], row["n"], row["_rest"]) == (5, 1, None)


def test_a_given_schema_is_kept_and_the_rest_stays_json(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", shapes={"shop.orders": {"n": ColumnType.STRING}})
    sync.feed.put("a", {"n": "x", "other": 1})
    sync.commit()
    assert sync.orders.shape == {"n": ColumnType.STRING}
    assert sync.read() == {"a": {"n": "x", "other": 1}}


def test_columns_given_later_are_added_and_a_type_that_cannot_change_is_refused(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake")
    sync.feed.put("a", {"n": 1, "name": "x"})
    sync.commit()
    sync.options = FeedSync(
        tmp_path / "other", shapes={"shop.orders": {"n": ColumnType.DOUBLE, "late": ColumnType.STRING}}
    ).options
    sync.open()
    sync.feed.put("b", {"n": 2, "late": "y", "more": True})
    sync.commit()
    assert sync.orders.shape == {"n": ColumnType.DOUBLE, "name": ColumnType.STRING, "late": ColumnType.STRING}
    assert sync.read() == {"a": {"n": 1, "name": "x"}, "b": {"n": 2, "late": "y", "more": True}}
    sync.options = FeedSync(tmp_path / "other", shapes={"shop.orders": {"name": ColumnType.BIGINT}}).options
    sync.open()
    sync.feed.put("c", {"n": 3})
    with pytest.raises(ConfigError, match="'name' is string in the table"):
        sync.commit()


def test_deletions_can_be_marked_instead(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", keep_deleted=True, policy=MergePolicy(small_rows=10**6))
    sync.feed.put("a", {"n": 1})
    sync.feed.put("b", {"n": 1})
    sync.commit()
    sync.feed.delete("a")
    sync.commit()
    plain = {row["_key"]: row["_deleted"] for row in sync.orders.current.delta.to_pyarrow_table().to_pylist()}
    assert plain == {"a": True, "b": False}
    assert set(sync.read()) == {"b"}
