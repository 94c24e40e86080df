"""The door of the lake: what can be imported from `upriver.lake`, at what cost, and how its options are typed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import upriver.lake
from tests.lake.feed_sync import FeedSync
from upriver.errors import ConfigError
from upriver.lake.history import HistoryTable


def test_importing_the_lake_loads_neither_arrow_nor_delta_nor_spark() -> None:
    heavy = "{'pyarrow', 'deltalake', 'pyspark', 'numpy', 'numba'}"
    script = f"import sys, upriver.lake, upriver.spark; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_exported_name_is_there() -> None:
    assert all(getattr(upriver.lake, name) for name in upriver.lake.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = upriver.lake.nothing


def test_the_typed_keywords_are_the_options() -> None:
    keywords, options = upriver.lake.SyncKeywords.__annotations__, fields(upriver.lake.SyncOptions)
    assert list(keywords) == [option.name for option in options]


def test_options_can_be_changed_one_by_one() -> None:
    options = upriver.lake.SyncOptions(connection="couchbase://db", to="lake")
    assert options.with_(collections="a.b, a.c", once=True).collections == ("a.b", "a.c")


def test_tables_are_read_without_spark(tmp_path: Path) -> None:
    sync = FeedSync(tmp_path / "lake")
    between = sync.change_half()
    assert between
    assert upriver.lake.collections(tmp_path / "lake") == ["shop.orders"]
    everything = upriver.lake.read(tmp_path / "lake", "shop.orders")
    assert everything.num_rows == 20
    parts = [upriver.lake.read(sync.root, "shop.orders", vbuckets=(vb, vb)).num_rows for vb in range(4)]
    assert sum(parts) == 20
    sync.feed.delete("k1")
    sync.commit()
    assert upriver.lake.read(sync.root, "shop.orders").num_rows == 19
    with pytest.raises(ConfigError, match=r"no history of 'shop\.orders'"):
        upriver.lake.read_history(sync.root, "shop.orders")
    HistoryTable(sync.orders).advance(force=True)
    versions = upriver.lake.read_history(sync.root, "shop.orders")
    assert versions.num_rows == 30
    assert versions.column("_valid_to").null_count == 19
