"""``df.write.format("dcp")``: documents written from Spark, again and again."""

from __future__ import annotations

import time

import pytest
from pyspark.sql import functions as f

from tests.spark.spark_world import PATIENCE_S, World, drain, forget_commits, read, stream, wait_until
from upriver.errors import KeyNotFound
from upriver.testing import node

pytestmark = pytest.mark.spark


def documents(spark, count=100, value="x"):
    return spark.range(count).select(
        f.concat(f.lit("d"), f.col("id").cast("string")).alias("key"), f.lit(value).alias("value")
    )


def write(frame, world: World, **options):
    frame.write.format("dcp").mode("append").options(**world.options(**options)).save()


def test_upserts_are_written_and_written_again(spark, world: World):
    write(documents(spark), world)
    write(documents(spark, value="y"), world)
    assert world.state() == {f"d{n}".encode(): b"y" for n in range(100)}


def test_an_event_column_deletes_and_a_deletion_of_nothing_is_fine(spark, world: World):
    write(documents(spark), world)
    gone = documents(spark, 150).where("key like 'd%0'").withColumn("event", f.lit("deletion"))
    write(gone, world)
    write(gone, world)
    assert len(world.state()) == 90
    told = documents(spark, 1, "z").withColumn("event", f.lit("rollback"))
    write(told, world)
    assert b"d0" not in world.state()


def test_the_last_of_several_rows_of_a_document_counts(spark, world: World):
    rows = [("k", str(n)) for n in range(50)]
    write(spark.createDataFrame(rows, "key STRING, value STRING").coalesce(1), world)
    assert world.state() == {b"k": b"49"}


def test_an_insert_that_is_replayed_succeeds_and_one_that_collides_fails(spark, world: World):
    write(documents(spark, 20), world, operation="insert")
    write(documents(spark, 20), world, operation="insert")
    with pytest.raises(Exception, match=r"documents were refused: .*KEY_EEXISTS"):
        write(documents(spark, 20, "other"), world, operation="insert")
    assert set(world.state().values()) == {b"x"}


def test_replace_needs_the_document_and_its_cas(spark, world: World):
    with pytest.raises(Exception, match="KEY_ENOENT"):
        write(documents(spark, 1), world, operation="replace")
    cas = world.db.set(b"d0", b"first")
    right = documents(spark, 1, "second").withColumn("cas", f.lit(cas))
    write(right, world, operation="replace")
    write(right, world, operation="replace")  # a replay: its own success is recognised
    assert world.state() == {b"d0": b"second"}
    with pytest.raises(Exception, match="KEY_EEXISTS"):
        write(documents(spark, 1, "third").withColumn("cas", f.lit(cas)), world, operation="replace")


def test_documents_expire_when_their_ttl_is_over(spark, world: World):
    write(documents(spark, 2).withColumn("ttl", f.lit(1)), world)
    assert read(spark, world).where("key = cast('d0' as binary)").first()["expiry"] - time.time() < 3

    def expired() -> bool:
        try:
            world.db.get(b"d0")
        except KeyNotFound:
            return True
        return False

    wait_until(expired)


def test_collections_are_chosen_by_column_or_option(spark, world: World):
    world.set_manifest(
        {
            "uid": "1",
            "scopes": [
                {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
                {
                    "name": "shop",
                    "uid": "8",
                    "collections": [{"name": "orders", "uid": "9"}, {"name": "carts", "uid": "a"}],
                },
            ],
        }
    )
    by_column = (
        documents(spark, 10)
        .withColumn("scope", f.lit("shop"))
        .withColumn("collection", f.when(f.col("key") < "d5", "orders").otherwise("carts"))
    )
    write(by_column, world)
    write(documents(spark, 3), world, collection="shop.carts")
    counts = read(spark, world).where("event = 'mutation'").groupBy("collection").count().collect()
    assert {row["collection"]: row["count"] for row in counts} == {"orders": 5, "carts": 8}


def test_refused_documents_go_to_a_table_of_dead_letters(spark, world: World, tmp_path):
    mixed = (
        documents(spark, 10)
        .withColumn("scope", f.lit("_default"))
        .withColumn("collection", f.when(f.col("key") < "d5", "_default").otherwise("missing"))
    )
    write(mixed, world, onError="deadletter", deadLetter=tmp_path / "dead")
    assert len(world.state()) == 5
    dead = spark.read.parquet(str(tmp_path / "dead")).collect()
    assert {bytes(row["key"]) for row in dead} == {b"d5", b"d6", b"d7", b"d8", b"d9"}
    assert "no collection _default.missing" in dead[0]["reason"]


def test_a_stream_with_metadata_is_a_replica(spark, world: World, tmp_path):
    """CAS, revision, flags and expiry are the source's, also after a replay of the last batch."""
    world.put(300)
    world.put(100)
    world.db.set(b"short", b"1", expiry=int(time.time()) + 10_000)
    world.db.delete(b"k5")
    with node(vbuckets=2, lazy=True) as running, World(running) as target:
        frame = stream(spark, world)
        for _ in range(2):
            writer = frame.writeStream.format("dcp").options(**target.options(withMeta="true"))
            query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
            assert query.awaitTermination(PATIENCE_S)
            forget_commits(tmp_path)
        keep = ("event", "value", "cas", "rev_seqno", "flags", "expiry", "datatype")
        copied, original = ({row["key"]: [row[name] for name in keep] for row in w.rows()} for w in (target, world))
        assert copied == original


def test_overwriting_is_refused_with_the_mode_to_use(spark, world: World):
    with pytest.raises(Exception, match=r'mode\("append"\)'):
        documents(spark, 1).write.format("dcp").mode("overwrite").options(**world.options()).save()


def test_missing_columns_are_named_before_anything_is_written(spark, world: World):
    with pytest.raises(Exception, match="needs the columns key, value; missing: value"):
        write(documents(spark).drop("value"), world)
    with pytest.raises(Exception, match="missing: cas, rev_seqno"):
        write(documents(spark), world, withMeta="true")


def test_source_to_sink_and_back_is_the_same(spark, world: World, tmp_path):
    world.put(200)
    with node(vbuckets=8, lazy=True) as running, World(running) as target:
        write(read(spark, world), target)
        assert target.state() == world.state()
        drain(stream(spark, target), lambda frame, batch: None, tmp_path)
