"""Schemas change under a running sync, and nothing is lost or refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.lake.desks import Desk
from upriver.errors import ConfigError
from upriver.lake import read
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.options import ColumnType


def test_a_new_field_becomes_a_column_and_old_rows_have_null(desk: Desk) -> None:
    desk.feed.put("a", {"n": 1})
    desk.commit()
    desk.feed.put("b", {"n": 2, "city": "Bern"})
    desk.commit()
    rows = {row["_key"]: row for row in read(desk.root, "shop.orders").to_pylist()}
    assert (rows["a"]["city"], rows["b"]["city"]) == (None, "Bern")


def test_integers_widen_to_doubles_in_the_whole_table_but_none_is_rounded(desk: Desk) -> None:
    desk.feed.put("a", {"n": 1})
    desk.feed.put("large", {"n": 2**53 + 1})
    desk.commit()
    desk.feed.put("b", {"n": 2.5})
    desk.commit()
    assert desk.orders.shape["n"] is ColumnType.DOUBLE
    plain = desk.orders.current.delta.to_pyarrow_table()
    assert plain.schema.field("n").type == pa.float64()
    assert desk.read() == {"a": {"n": 1}, "b": {"n": 2.5}, "large": {"n": 2**53 + 1}}


def test_what_fits_no_column_is_kept_beside_it(desk: Desk) -> None:
    desk.feed.put("a", {"n": 1})
    desk.commit()
    desk.feed.put("b", {"n": "one", "bad name": True})
    desk.feed.put("c", b"\x00\xffbinary", json=False)
    desk.feed.put("d", b"[1, 2]")
    desk.commit()
    assert desk.read() == {"a": {"n": 1}, "b": {"n": "one", "bad name": True}, "c": b"\x00\xffbinary", "d": b"[1, 2]"}


def test_a_field_that_waited_in_rest_moves_into_its_column_when_its_part_is_rewritten(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=MergePolicy(small_rows=10**6), max_columns=1)
    desk.feed.put("a", {"n": 1, "m": 5})
    desk.feed.put("z", {"n": 1, "m": 5})
    desk.commit()
    assert list(desk.orders.shape) == ["m"]
    desk.options = type(desk.options)(vbuckets=4, policy=desk.options.policy, max_columns=9)
    desk.open()
    desk.feed.put("z", {"n": 2, "m": 6})
    desk.commit()
    row = next(row for row in read(desk.root, "shop.orders").to_pylist() if row["_key"] == "a")
    assert (row["m"], row["n"], row["_rest"]) == (5, 1, None)


def test_a_given_schema_is_kept_and_the_rest_stays_json(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", shapes={"shop.orders": {"n": ColumnType.STRING}})
    desk.feed.put("a", {"n": "x", "other": 1})
    desk.commit()
    assert desk.orders.shape == {"n": ColumnType.STRING}
    assert desk.read() == {"a": {"n": "x", "other": 1}}


def test_columns_given_later_are_added_and_a_type_that_cannot_change_is_refused(tmp_path) -> None:
    desk = Desk(tmp_path / "lake")
    desk.feed.put("a", {"n": 1, "name": "x"})
    desk.commit()
    desk.options = Desk(
        tmp_path / "other", shapes={"shop.orders": {"n": ColumnType.DOUBLE, "late": ColumnType.STRING}}
    ).options
    desk.open()
    desk.feed.put("b", {"n": 2, "late": "y", "more": True})
    desk.commit()
    assert desk.orders.shape == {"n": ColumnType.DOUBLE, "name": ColumnType.STRING, "late": ColumnType.STRING}
    assert desk.read() == {"a": {"n": 1, "name": "x"}, "b": {"n": 2, "late": "y", "more": True}}
    desk.options = Desk(tmp_path / "other", shapes={"shop.orders": {"name": ColumnType.BIGINT}}).options
    desk.open()
    desk.feed.put("c", {"n": 3})
    with pytest.raises(ConfigError, match="'name' is string in the table"):
        desk.commit()


def test_deletions_can_be_marked_instead(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", keep_deleted=True, policy=MergePolicy(small_rows=10**6))
    desk.feed.put("a", {"n": 1})
    desk.feed.put("b", {"n": 1})
    desk.commit()
    desk.feed.delete("a")
    desk.commit()
    plain = {row["_key"]: row["_deleted"] for row in desk.orders.current.delta.to_pyarrow_table().to_pylist()}
    assert plain == {"a": True, "b": False}
    assert set(desk.read()) == {"b"}
