"""``upriver.spark.sync`` on a real node: load, follow, lose history, drop collections, be compared."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

import upriver.spark
from tests.spark.spark_world import PATIENCE_S, World
from tests.spark.sync.lakes import DEFAULT, LakeWorld
from tests.support.by_id import ById
from upriver.client.blocking import connect
from upriver.errors import ConfigError, UpriverError
from upriver.lake import compare, read, read_documents
from upriver.lake.journal import Journal
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.protocol.offsets import Offset
from upriver.spark.sync.plan import explain
from upriver.spark.sync.run import first_cause
from upriver.testing import node

pytestmark = pytest.mark.spark


def test_a_first_load_fills_both_tables_and_the_next_run_continues(spark, lake: LakeWorld) -> None:
    lake.world.put(3000, value='{"n": %d, "name": "x"}')
    live = lake.sync(spark)
    assert live.rows == 3000
    lake.assert_equal()
    current = DeltaTable(f"{lake.lake}/current/{DEFAULT}")
    assert duckdb.read_parquet(list(current.file_uris())).aggregate("count(*), sum(n)").fetchall() == [
        (3000, 3000 * 2999 // 2)
    ]
    changes = DeltaTable(f"{lake.lake}/changes/{DEFAULT}").to_pyarrow_table()
    assert changes.num_rows == 3000
    for number in range(0, 3000, 100):
        lake.world.db.delete(f"k{number}")
    lake.world.put(10, "new", '{"n": %d, "late": true}')
    assert lake.sync(spark).rows == 40
    lake.assert_equal()
    assert lake.sync(spark).rows == 0


def test_spark_reads_the_fresh_table_without_jars(spark, lake: LakeWorld) -> None:
    lake.world.put(2000)
    lake.sync(spark)
    lake.world.put(50, value='{"n": %d, "twice": 1}')
    lake.sync(spark)
    assert read(lake.lake, DEFAULT).num_rows == 2000
    frame = upriver.spark.read_table(spark, lake.lake, DEFAULT)
    assert frame.count() == 2000
    assert frame.where("twice = 1").count() == 50


def test_lost_history_is_repaired_whatever_was_lost(spark, lake: LakeWorld) -> None:
    lake.world.put(400)
    lake.sync(spark)
    for round_ in range(3):
        lake.world.put(200, value='{"n": %d, "round": ' + str(round_) + "}")
        lake.world.db.delete(f"k{300 + round_}")
        lake.sync(spark)
        for vbucket in range(lake.world.vbuckets):
            lake.world.fault("failover", vbucket=vbucket, lose=7 * (round_ + 1) + vbucket)
        lake.world.put(5, f"after{round_}")
        live = lake.sync(spark)
        assert sum(batch.rollbacks for batch in live.batches) == lake.world.vbuckets
        lake.assert_equal()


def test_a_crash_between_two_runs_costs_the_next_one_only_what_was_lost(spark, lake: LakeWorld) -> None:
    """The cron pattern: a run ends with a batch, and the next must know that its tables were consistent there."""
    lake.world.put(400)
    lake.sync(spark)
    for vbucket in range(lake.world.vbuckets):
        lake.world.fault("failover", vbucket=vbucket, lose=0)
    lake.world.put(8, "after")
    live = lake.sync(spark)
    assert live.rows == 8
    assert sum(batch.rollbacks for batch in live.batches) == 0
    lake.assert_equal()


def test_tombstones_purged_while_away_are_swept(spark, lake: LakeWorld) -> None:
    lake.world.put(300)
    lake.sync(spark)
    for number in range(0, 300, 3):
        lake.world.db.delete(f"k{number}")
    for vbucket in range(lake.world.vbuckets):
        lake.world.fault("purge", vbucket=vbucket)
    lake.world.put(10, "later")
    lake.sync(spark)
    lake.assert_equal()


def manifest(uid: str, *collections: tuple[str, str]) -> dict[str, object]:
    default = {"name": "_default", "uid": "0"}
    named = [{"name": name, "uid": identity} for name, identity in collections]
    return {"uid": uid, "scopes": [{"name": "_default", "uid": "0", "collections": [default, *named]}]}


def test_a_collection_that_was_dropped_and_created_again_starts_empty(spark, lake: LakeWorld) -> None:
    world = lake.world
    world.set_manifest(manifest("1", ("orders", "8"), ("users", "9")))
    world.db.collection("orders").set_many({b"o%d" % n: b'{"n": 1}' for n in range(50)})
    world.db.collection("users").set_many({b"u%d" % n: b'{"n": 1}' for n in range(30)})
    lake.sync(spark)
    assert len(read_documents(lake.lake, "_default.orders")) == 50
    world.set_manifest(manifest("2", ("users", "9")))
    world.set_manifest(manifest("3", ("orders", "a"), ("users", "9")))
    with connect(world.node.connection_string) as fresh:
        fresh.collection("orders").set_many({b"o%d" % n: b'{"n": 2}' for n in range(5)})
        lake.sync(spark)
    assert read_documents(lake.lake, "_default.orders") == {f"o{n}": {"n": 2} for n in range(5)}
    assert len(read_documents(lake.lake, "_default.users")) == 30


def test_a_sync_with_more_collections_loads_their_past(spark, lake: LakeWorld) -> None:
    """Also one vbucket at a time. A collection that is left out stays as it is, and is right again once it is added."""
    world = lake.world
    world.set_manifest(manifest("1", ("a", "8"), ("b", "9")))
    ById(world.db, 8).set_many({b"a%d" % n: b'{"n": 1}' for n in range(20)})
    ById(world.db, 9).set_many({b"b%d" % n: b'{"n": 1}' for n in range(30)})
    world.put(10)
    lake.sync(spark, collections="a")
    planned = {one["name"]: one["plan"] for one in explain(SyncOptions.parse(lake.options()))["tables"]}
    assert planned["_default.b"] == "load all of it into new tables"
    lake.sync(spark, collections="a,b", max_rows=20)
    assert len(read_documents(lake.lake, "_default.a")) == 20
    assert len(read_documents(lake.lake, "_default.b")) == 30
    lake.sync(spark)
    assert len(read_documents(lake.lake, DEFAULT)) == 10
    lake.sync(spark, collections="a")
    ById(world.db, 9).delete(b"b1")
    ById(world.db, 8).set(b"a20", b"{}")
    lake.sync(spark, collections="a")
    for vbucket in range(world.vbuckets):
        world.fault("purge", vbucket=vbucket)
    lake.sync(spark)
    assert len(read_documents(lake.lake, "_default.a")) == 21
    assert len(read_documents(lake.lake, "_default.b")) == 29
    assert all(found.equal for found in compare(SyncOptions.parse(lake.options()), rounds=1))


def test_a_following_sync_stops_between_batches(spark, lake: LakeWorld) -> None:
    lake.world.put(100)
    stop, seen = threading.Event(), []

    def watch(live) -> None:
        if live.batches and not seen:
            seen.append(True)
            lake.world.put(50, "more")
        caught_up = live.rows >= 150 and live.lag == 0  # rows are counted a moment before Spark tells of their batch
        if caught_up or time.time() - live.started > PATIENCE_S:
            stop.set()

    live = upriver.spark.sync(spark, stop=stop, on_progress=watch, **lake.options(once=False, every="200ms"))
    assert live.rows == 150
    assert live.lag == 0
    assert Journal(lake.lake).lags()  # for the report
    lake.assert_equal()


def test_deletions_reach_current_itself_when_a_run_ends_and_within_the_limit_while_it_follows(
    spark, lake: LakeWorld
) -> None:
    from deltalake import DeltaTable

    def rows() -> int:
        return int(DeltaTable(f"{lake.lake}/current/{DEFAULT}").count())

    lazy = {"share": 1000.0, "max_staleness": ""}
    lake.world.db.set_many({b"k%d" % n: b'{"n": 1}' for n in range(9_000)})  # too many for a small table
    lake.sync(spark, **lazy)
    for n in range(5):
        lake.world.db.delete(f"k{n}")
    lake.sync(spark, **lazy)
    assert rows() == 8_995
    stop, seen = threading.Event(), []

    def watch(live) -> None:
        if not seen:
            seen.append(True)
            lake.world.db.delete("k7")
        if rows() == 8_994 or time.time() - live.started > PATIENCE_S:
            stop.set()

    following = lake.options(once=False, every="200ms", share=1000.0, max_staleness="2s")
    upriver.spark.sync(spark, stop=stop, on_progress=watch, **following)
    assert rows() == 8_994
    lake.assert_equal()


def test_a_frame_of_the_plain_source_can_be_applied_too(spark, lake: LakeWorld) -> None:
    from upriver.spark.sync.job import Applier

    lake.world.put(500)
    options = SyncOptions.parse(lake.options())
    settings = Lake(lake.lake).create_or_check("default", lake.world.vbuckets)
    apply = Applier(options, settings["id"], lake.world.vbuckets)
    frame = spark.readStream.format("dcp").options(**lake.world.options()).load()
    query = frame.writeStream.foreachBatch(apply).option("checkpointLocation", Lake(lake.lake).checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    lake.assert_equal()


def test_large_steps_run_on_executors(spark, lake: LakeWorld) -> None:
    from upriver.lake.apply.policy import MergePolicy, TableOptions
    from upriver.lake.tables import Tables
    from upriver.spark.sync.executors import spark_runner

    lake.world.put(2000)
    lake.sync(spark)
    options = TableOptions(MergePolicy(inline_rows=10, target_rows=300), vbuckets=lake.world.vbuckets)
    run = spark_runner(spark, options)
    tables = Tables(Lake(lake.lake), Lake(lake.lake).settings()["id"], options, run=run)
    collection = tables.collection(DEFAULT)
    for _ in range(2):  # the first cuts it into parts, the second has several tasks
        collection.advance(tables.last_batch(), force=True)
    assert len(collection.current.files()) == lake.world.vbuckets
    lake.assert_equal()


def test_verify_names_what_differs(spark, lake: LakeWorld) -> None:
    lake.world.put(200)
    lake.sync(spark)
    table = DeltaTable(f"{lake.lake}/current/{DEFAULT}")
    table.delete("_key = 'k7'")
    table.update(updates={"n": "-1"}, predicate="_key = 'k8'")
    found = lake.verify()[0]
    assert (found.missing, found.extra, found.different) == (["k7"], [], ["k8"])


def test_a_lake_of_another_bucket_is_refused(spark, lake: LakeWorld) -> None:
    lake.world.put(10)
    lake.sync(spark)
    with pytest.raises(ConfigError, match="holds tables of bucket 'default'"):
        Lake(lake.lake).create_or_check("other", lake.world.vbuckets)


@pytest.mark.parametrize("runs", [1, 2])
def test_tables_without_their_checkpoint_are_refused(spark, lake: LakeWorld, runs: int) -> None:
    """Also after one run: its batch 0 is not the batch 0 of a new checkpoint."""
    for _ in range(runs):
        lake.world.put(10, value='{"n": %d}')
        lake.sync(spark)
    shutil.rmtree(f"{lake.lake}/_upriver/checkpoint")
    lake.world.put(52, "more")
    with pytest.raises(UpriverError, match="checkpoint"):
        lake.sync(spark)


def test_a_lake_does_not_follow_another_bucket_of_the_same_name_unless_told_to(spark, lake: LakeWorld) -> None:
    lake.world.put(100)
    lake.sync(spark)
    with node(vbuckets=4, lazy=True) as running, World(running) as world:
        other = LakeWorld(world, Path(lake.lake))
        world.put(30, "k", '{"other": %d}')
        with pytest.raises(ConfigError, match=r"with uuid .* created again, or it is of another cluster. --adopt"):
            other.sync(spark)
        lake.assert_equal()
        other.sync(spark, adopt=True)
        other.assert_equal()
        world.put(5, "more")
        other.sync(spark)
        other.assert_equal()


def test_the_cause_of_a_spark_error_is_its_last_line_of_ours() -> None:
    text = "[STREAM_FAILED] x\nTraceback\nupriver.errors.ConfigError: no such bucket\n\tat org.apache"
    assert first_cause(text) == "ConfigError: no such bucket"
    text = "[STREAM_FAILED] x\nTraceback :\n  File x\nTypeError: int() of None\nJVM stacktrace:\nE: y"
    assert first_cause(text) == "TypeError: int() of None"
    assert first_cause("[STREAM_FAILED] only this") == "[STREAM_FAILED] only this"


def test_every_batch_notes_what_is_committed(spark, lake: LakeWorld) -> None:
    """With it, ``verify`` tells a change that is late from one that is lost."""
    lake.world.put(100)
    lake.sync(spark)
    told = json.loads((Path(lake.lake) / "_upriver" / "offsets.json").read_text())
    highs = lake.world.db.high_seqnos()
    assert told["batch"] == 0
    assert told["filter"] == {"scope": "", "collections": []}
    assert [place.seqno for place in Offset.from_json(told["offset"]).positions] == [highs[vb] for vb in range(4)]
