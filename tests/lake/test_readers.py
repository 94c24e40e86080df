"""Readers that know nothing of upriver see correct tables, before, during and after maintenance."""

from __future__ import annotations

import os
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.lake.feed_sync import FeedSync
from tests.lake.test_truth import normal
from upriver.errors import ConfigError
from upriver.lake import read, view_sql
from upriver.lake.apply.policy import MergePolicy
from upriver.lake.apply.upkeep import fold_log, fold_tail, vacuum
from upriver.lake.change_log import write_log
from upriver.lake.delta import LOG_HOURS


@pytest.fixture
def busy(tmp_path) -> FeedSync:
    """A table with rows in current, newer ones in the tail, and deletions in both."""
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=0, share=0.5, tail_files=4))
    for index in range(60):
        sync.feed.put(f"k{index}", {"n": index, "name": f"name {index}"})
    sync.commit()
    for index in range(0, 20, 2):
        sync.feed.put(f"k{index}", {"n": index + 0.5, "city": "Bern"})
        sync.feed.delete(f"k{index + 1}")
        sync.commit()
    return sync


def truth(sync: FeedSync) -> dict[str, object]:
    return {key: normal(value)["n"] for key, value in sync.feed.truth().items()}  # type: ignore[index]


def test_the_documented_view_in_duckdb_is_fresh(busy: FeedSync) -> None:
    tail = busy.orders.tail.delta.to_pyarrow_dataset()
    current = busy.orders.current.delta.to_pyarrow_dataset()
    assert busy.orders.tail.files()
    with duckdb.connect() as db:
        db.register("tail_table", tail)
        db.register("current_table", current)
        sql = view_sql(busy.root, "shop.orders", view="orders", tail="tail_table", current="current_table")
        db.execute(sql.replace("CREATE OR REPLACE VIEW", "CREATE OR REPLACE TEMP VIEW"))
        assert dict(db.execute("SELECT _key, n FROM orders").fetchall()) == truth(busy)


def test_current_alone_is_a_plain_table_that_two_readers_agree_on(busy: FeedSync) -> None:
    busy.orders.advance(busy.number - 1, force=True)
    delta = DeltaTable(busy.orders.current.uri)
    by_duckdb = duckdb.read_parquet(list(delta.file_uris()), union_by_name=True)
    assert dict(by_duckdb.project("_key, n").fetchall()) == truth(busy)
    by_arrow = delta.to_pyarrow_table()
    assert dict(zip(by_arrow["_key"].to_pylist(), by_arrow["n"].to_pylist(), strict=True)) == truth(busy)
    assert (delta.protocol().min_reader_version, delta.protocol().min_writer_version) == (1, 2)


def test_polars_reads_every_table_also_where_older_files_lack_a_column(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=0, target_rows=20))
    for index in range(60):
        sync.feed.put(f"k{index}", {"n": index})
    sync.commit()
    changed = next(key for key in (f"k{index}" for index in range(60)) if sync.feed.vbucket(key) == 1)
    sync.feed.put(changed, {"n": -1, "city": "Bern"})
    sync.commit()
    files = [set(pq.read_schema(path).names) for path in DeltaTable(sync.orders.current.uri).file_uris()]
    assert {"city" in names for names in files} == {False}  # the column is new, and waits in the tail
    sync.feed.fail_over(0, sync.feed.histories[0].seqno - 1)
    sync.commit()
    current = polars.read_delta(sync.orders.current.uri)
    assert current.select("n").sum().item() == 60 * 59 // 2
    assert current["city"].null_count() == 60
    fresh = polars.from_arrow(read(sync.root, "shop.orders"))
    assert dict(fresh.select("_key", "n").iter_rows()) == truth(sync)
    changes = polars.scan_delta(sync.orders.changes.uri)
    assert changes.filter(polars.col("voided")).collect().height == 1


def test_duckdb_reads_the_change_log(busy: FeedSync) -> None:
    files = list(DeltaTable(busy.orders.changes.uri).file_uris())
    assert duckdb.read_parquet(files).aggregate("count(*), max(batch)").fetchall() == [(60 + 20, 10)]


def test_a_reader_keeps_its_version_through_merges_folds_and_vacuum(busy: FeedSync) -> None:
    old = DeltaTable(busy.orders.current.uri)
    before = old.to_pyarrow_table().sort_by("_key")
    busy.orders.advance(busy.number - 1, force=True)
    fold_tail(busy.orders)
    fold_log(busy.orders)
    assert vacuum(busy.orders, retention_hours=24) == 0
    assert old.to_pyarrow_table().sort_by("_key").equals(before)
    assert vacuum(busy.orders, retention_hours=0) > 0
    with pytest.raises(FileNotFoundError):
        old.to_pyarrow_table()
    assert {row["_key"]: row["n"] for row in read(busy.root, "shop.orders").to_pylist()} == truth(busy)


def test_old_entries_of_a_delta_log_are_removed_and_the_table_stays(busy: FeedSync) -> None:
    for number in range(60):  # past a checkpoint
        busy.feed.put("k40", {"n": number})
        busy.commit()
    entries = sorted(Path(busy.orders.changes.uri, "_delta_log").glob("*.json"))
    for path in entries:
        os.utime(path, (0, path.stat().st_mtime - 3600 * (LOG_HOURS + 1)))
    vacuum(busy.orders, retention_hours=24)
    left = sorted(Path(busy.orders.changes.uri, "_delta_log").glob("*.json"))
    assert 0 < len(left) < len(entries) - 40
    assert DeltaTable(busy.orders.changes.uri).to_pyarrow_table().num_rows == 60 + 20 + 60
    busy.open()
    busy.feed.put("k41", {"n": -1})
    busy.commit()
    assert {row["_key"]: row["n"] for row in read(busy.root, "shop.orders").to_pylist()} == truth(busy)


def test_folding_the_log_keeps_every_row(busy: FeedSync) -> None:
    before = busy.orders.changes.delta.to_pyarrow_table().sort_by("seqno")
    files = len(busy.orders.changes.files())
    assert fold_log(busy.orders) > 0
    assert len(busy.orders.changes.files()) < files
    after = busy.orders.changes.delta.to_pyarrow_table()
    keys = [("vbucket", "ascending"), ("seqno", "ascending")]
    assert after.sort_by(keys).equals(before.sort_by(keys))


def test_a_table_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no tables of 'shop\.none'"):
        read(str(tmp_path), "shop.none")


def test_files_that_another_tool_rewrote_are_rewritten_as_ours(busy: FeedSync) -> None:
    DeltaTable(busy.orders.current.uri).optimize.compact()
    DeltaTable(busy.orders.tail.uri).optimize.compact()
    busy.open()
    assert {row["_key"]: row["n"] for row in read(busy.root, "shop.orders").to_pylist()} == truth(busy)
    busy.feed.put("k40", {"n": -40})
    busy.commit()
    assert not [file for file in [*busy.orders.current.files(), *busy.orders.tail.files()] if file.foreign]
    assert {row["_key"]: row["n"] for row in read(busy.root, "shop.orders").to_pylist()} == truth(busy)


def test_a_log_that_another_tool_rewrote_between_two_commits_of_a_batch_loses_nothing(busy: FeedSync) -> None:
    busy.feed.fail_over(2, busy.feed.histories[2].seqno - 2)
    busy.commit()
    busy.feed.put("k40", {"n": -40})
    written = write_log(busy.feed.batch(), busy.root, busy.number)
    busy.orders.commit_log("app", busy.number, written.files["shop.orders"])  # the tables do not have it yet
    DeltaTable(busy.orders.changes.uri).optimize.compact()
    busy.open()
    busy.tables.prepare()
    busy.tables.apply(busy.number, written)
    assert not [file for file in busy.orders.changes.files() if file.foreign]
    assert {row["_key"]: row["n"] for row in read(busy.root, "shop.orders").to_pylist()} == truth(busy)


def test_a_document_deleted_in_a_merge_does_not_come_back_from_a_tail_file_that_stays(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=0, share=0.5, target_rows=50))
    keys = [f"k{index}" for index in range(100)]
    for key in keys:
        sync.feed.put(key, {"n": 0})
    sync.commit()
    assert len(sync.orders.current.files()) == 2
    low = [key for key in keys if sync.feed.vbucket(key) < 2]
    sync.feed.put(low[0], {"n": 1})
    sync.commit()
    assert sync.orders.tail.files()
    sync.feed.delete(low[0])
    for key in low[1:]:
        sync.feed.put(key, {"n": 2})
    sync.commit()
    merged = {file.lo: file.last_batch for file in sync.orders.current.files()}
    assert merged[0] == 2  # the half with the deletion was merged,
    assert merged[2] == 0  # and the other half not
    assert low[0] not in sync.read()
    fold_tail(sync.orders)
    assert sync.read() == {key: normal(value) for key, value in sync.feed.truth().items()}


def test_a_part_of_the_table_that_was_empty_at_first_takes_rows_later(tmp_path) -> None:
    sync = FeedSync(tmp_path / "lake", policy=MergePolicy(small_rows=2, target_rows=2))
    keys = {vbucket: [key for key in map(str, range(99)) if sync.feed.vbucket(key) == vbucket] for vbucket in range(4)}
    for key in keys[3][:8]:
        sync.feed.put(key, {"n": 1})
    sync.commit()
    sync.feed.put(keys[0][0], {"n": 2})
    sync.commit()
    assert sync.read()[keys[0][0]] == {"n": 2}


def test_rows_of_more_than_one_chunk_of_text_are_gathered(monkeypatch) -> None:
    from upriver.lake import files

    table = pa.table({"_key": ["a", "b", "c", "d"], "n": [1, 2, 3, 4], "_value": [b"x", None, b"", b"y"]})
    expected = files.gather(table, [3, 1, 1, 0])
    monkeypatch.setattr(files, "CHUNK_BYTES", 8)
    assert files.gather(table, [3, 1, 1, 0]).equals(expected)
