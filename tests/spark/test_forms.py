"""What a stream delivers besides plain documents: collections that come and go, and values in other forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import functions as f

from tests.spark.spark_world import Collected, World, drain, read, stream
from tests.support.by_id import ById

pytestmark = pytest.mark.spark

DEFAULT = {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]}
ORDERS = {"name": "orders", "uid": "9"}


def manifest(uid: int, *collections: dict[str, Any], shop: bool = True) -> dict[str, Any]:
    scopes = [DEFAULT, {"name": "shop", "uid": "8", "collections": list(collections)}] if shop else [DEFAULT]
    return {"uid": f"{uid:x}", "scopes": scopes}


def told(rows: Collected) -> set[tuple[Any, ...]]:
    """What the newest batch says of collections and scopes, and of how many vbuckets."""
    names = [(row["event"], row["scope"], row["collection"], row["collection_id"]) for row in rows.rows]
    rows.batches.clear()
    return {(*name, names.count(name)) for name in names}


def test_collections_and_scopes_come_and_go_as_rows(spark, world: World, tmp_path):
    """Every vbucket has the row, at its own seqno, before or after the documents that it concerns."""
    rows, frame = Collected(), stream(spark, world)
    world.set_manifest(manifest(1, ORDERS))
    ById(world.db, 9).set_many({f"o{n}".encode(): b"1" for n in range(40)})
    drain(frame, rows, tmp_path)
    assert told(rows) == {
        ("scope_created", "shop", None, None, 4),
        ("collection_created", "shop", "orders", 9, 4),
        ("mutation", "shop", "orders", 9, 40),
    }
    world.set_manifest(manifest(2, {**ORDERS, "maxTTL": 100}))
    drain(frame, rows, tmp_path)
    assert told(rows) == {("collection_modified", "shop", "orders", 9, 4)}
    world.set_manifest(manifest(3, {**ORDERS, "maxTTL": 100, "flush_uid": "3"}))
    drain(frame, rows, tmp_path)
    assert told(rows) == {("collection_flushed", "shop", "orders", 9, 4)}
    world.set_manifest(manifest(4, shop=False))
    drain(frame, rows, tmp_path)
    assert {(event, collection, count) for event, _, _, collection, count in told(rows)} == {
        ("collection_dropped", 9, 4),  # by its id: the wire carries no name any more
        ("scope_dropped", None, 4),
    }


def test_a_dropped_collection_that_was_filtered_for_ends_the_stream_in_order(spark, world: World, tmp_path):
    world.set_manifest(manifest(1, ORDERS, {"name": "items", "uid": "a"}))
    ById(world.db, 9).set_many({f"o{n}".encode(): b"1" for n in range(40)})
    rows, frame = Collected(), stream(spark, world, collections="shop.orders,shop.items")
    drain(frame, rows, tmp_path)
    assert sum(row["event"] == "mutation" for row in rows.rows) == 40
    world.set_manifest(manifest(2, {"name": "items", "uid": "a"}))
    ById(world.db, 10).set_many({f"i{n}".encode(): b"1" for n in range(20)})
    rows.batches.clear()
    drain(stream(spark, world, collections="shop.items"), rows, tmp_path)
    assert sum(row["event"] == "mutation" for row in rows.rows) == 20


@pytest.mark.parametrize(
    ("options", "expression"),
    [
        ({"valueFormat": "string"}, "int(get_json_object(value, '$.n'))"),
        ({"valueFormat": "variant"}, "variant_get(value, '$.n', 'int')"),
        ({"valueSchema": "n INT"}, "value.n"),
    ],
    ids=["string", "variant", "struct"],
)
def test_values_of_a_stream_come_in_the_form_that_was_asked_for(spark, world: World, tmp_path, options, expression):
    world.put(50)
    world.db.set(b"text", b"not json")
    world.db.set(b"gone", b"1")
    world.db.delete(b"gone")
    rows = Collected()
    frame = stream(spark, world, **options).selectExpr("event", "string(key) AS key", f"{expression} AS n")
    drain(frame, rows, tmp_path)
    assert {row["key"]: row["n"] for row in rows.rows} == {f"k{n}": n for n in range(50)} | {"text": None, "gone": None}


def test_a_table_is_streamed_as_well_as_read(spark, world: World, tmp_path):
    world.put(30)
    spark.sql(f"CREATE TABLE streamed USING dcp OPTIONS (connection '{world.connection_string}', valueFormat 'string')")
    try:
        rows = Collected()
        drain(spark.readStream.table("streamed"), rows, tmp_path)
        assert {row["value"] for row in rows.rows} == {f'{{"n": {n}}}' for n in range(30)}
        assert spark.table("streamed").count() == 30
    finally:
        spark.sql("DROP TABLE streamed")


DOCUMENT = {
    "n": 300,
    "s": 1.5,
    "at": "2026-01-31 12:00:00Z",
    "day": "2026-01-31",
    "m": {"a": 1},
    "d": 1.005,
    "deep": {"x": "no", "y": [1, "2"]},
}
SCHEMA = ("n TINYINT, s STRING, at TIMESTAMP, day DATE, m MAP<STRING, INT>, d DECIMAL(5,2), "
          "deep STRUCT<x: INT, y: ARRAY<STRING>>")  # fmt: skip


def test_a_document_is_read_as_from_json_reads_it(spark, world: World):
    world.db.set(b"document", json.dumps(DOCUMENT).encode())
    one = read(spark, world, valueSchema=SCHEMA).where("key = cast('document' as binary)")
    texts = spark.createDataFrame([(json.dumps(DOCUMENT),)], "t STRING")
    theirs = texts.select(f.from_json("t", SCHEMA).alias("value"))
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        assert one.first()["value"].asDict(recursive=True) == theirs.first()["value"].asDict(recursive=True)
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    assert json.loads(one.first()["value_unfit"]) == {"n": 300, "deep": DOCUMENT["deep"]}
