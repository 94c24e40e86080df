"""``spark.read.format("dcp")``: what rows look like, and how far a DataFrame reads."""

from __future__ import annotations

import json
from datetime import UTC

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, StringType, StructType, VariantType

from tests.spark.spark_world import World, read
from upriver.records.schema import CHANGES
from upriver.spark.schema import KEY_COLUMNS, arrow_schema

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module", autouse=True)
def documents(shared: World):
    shared.put(3000)
    shared.db.set(b"text", "grün".encode())
    shared.db.set(b"broken", b"\xff\xfe")
    shared.db.set(b"gone", b"1")
    shared.db.delete(b"gone")


def test_rows_have_exactly_the_columns_of_the_change_schema(spark, shared):
    frame = read(spark, shared)
    assert frame.columns == CHANGES.names
    assert arrow_schema(frame.schema).equals(CHANGES)


def test_every_document_is_read_once_with_its_tombstones(spark, shared):
    events = {row["event"]: row["count"] for row in read(spark, shared).groupBy("event").count().collect()}
    assert events == {"mutation": 3002, "deletion": 1}


def test_a_row_tells_what_the_database_knows(spark, shared):
    row = read(spark, shared).where("key = cast('k7' as binary)").first()
    assert (row["event"], bytes(row["value"]), row["rev_seqno"], row["epoch"]) == ("mutation", b'{"n": 7}', 1, 0)
    assert (row["scope"], row["collection"], row["collection_id"]) == ("_default", "_default", 0)
    assert row["vbuuid"] == shared.db.failover_logs([row["vbucket"]])[row["vbucket"]].uuid
    assert row["snapshot_start"] <= row["seqno"] <= row["snapshot_end"]
    assert row["timestamp"].year >= 2024
    gone = read(spark, shared).where("key = cast('gone' as binary)").first()
    assert (gone["event"], gone["value"]) == ("deletion", None)


@pytest.mark.parametrize(("form", "kind"), [("binary", BinaryType), ("string", StringType), ("variant", VariantType)])
def test_values_come_in_the_form_that_was_asked_for(spark, shared, form, kind):
    frame = read(spark, shared, valueFormat=form)
    assert isinstance(frame.schema["value"].dataType, kind)
    one = frame.where("key = cast('k7' as binary)")
    if form == "variant":
        assert one.select(f.expr("variant_get(value, '$.n', 'int')")).first()[0] == 7
    else:
        assert one.select(f.col("value").cast("string")).first()[0] == '{"n": 7}'


def test_bytes_that_are_not_text_become_replacement_characters(spark, shared):
    frame = read(spark, shared, valueFormat="string").select(f.col("key").cast("string"), "value")
    found = dict(frame.where("key in ('text', 'broken')").collect())
    assert found == {"text": "grün", "broken": "\ufffd\ufffd"}


def test_values_become_a_struct_of_the_users_schema_and_null_where_they_do_not_fit(spark, shared):
    frame = read(spark, shared, valueSchema="n INT, missing STRING")
    assert isinstance(frame.schema["value"].dataType, StructType)
    live = frame.where("event = 'mutation'")
    assert live.select(f.sum("value.n")).first()[0] == sum(range(3000))
    assert live.where("value is null").count() == 2
    assert live.where("value_unfit is not null").count() == 2
    as_text = read(spark, shared, valueSchema="n STRING, missing MAP<STRING, VARIANT>", keyFormat="string")
    assert as_text.where("key = 'k7'").select("value.n").first()[0] == "7"


def test_a_read_of_some_vbuckets_reads_those(spark, shared):
    all_of_them = read(spark, shared, keysOnly="true")
    some = read(spark, shared, keysOnly="true", vbuckets="1,3-4")
    assert {row["vbucket"] for row in some.select("vbucket").distinct().collect()} == {1, 3, 4}
    assert some.count() == all_of_them.where("vbucket in (1, 3, 4)").count()
    with pytest.raises(PySparkException, match=r"vbuckets=99: the bucket has 0 to 15"):
        read(spark, shared, vbuckets="99").count()


def test_an_error_in_the_value_schema_names_the_field(spark, shared):
    with pytest.raises(AnalysisException, match=r"valueSchema: field 'name': 'STRNG' is no type"):
        read(spark, shared, valueSchema="name STRNG")


def test_without_values_the_wire_carries_none(spark, shared):
    frame = read(spark, shared, includeValue="false")
    assert frame.where("value is not null").count() == 0
    assert frame.count() == 3003


def test_keys_only_has_fewer_columns(spark, shared):
    frame = read(spark, shared, keysOnly="true")
    assert frame.columns == list(KEY_COLUMNS)
    assert frame.select("key").distinct().count() == 3003


def test_filters_work_though_the_source_pushes_none_down(spark, shared):
    assert read(spark, shared).where("vbucket = 3 and seqno < 10").count() == 9


def test_many_actions_read_the_same_range(spark, shared):
    frame = read(spark, shared).where("key like 'later%' or event = 'mutation'")
    before = frame.count()
    shared.put(50, "later")
    assert frame.count() == before
    assert frame.union(frame).count() == 2 * before
    assert read(spark, shared).where("event = 'mutation'").count() == before + 50


def test_a_range_is_read_from_and_to_any_offset(spark, shared):
    highs = shared.db.high_seqnos()
    start = {str(vb): 5 for vb in highs}
    end = {str(vb): 9 for vb in highs}
    frame = read(spark, shared, startingOffsets=json.dumps(start), endingOffsets=json.dumps(end))
    assert sorted(row["seqno"] for row in frame.collect()) == sorted(list(range(6, 10)) * len(highs))


def test_a_timestamp_leaves_out_what_is_older(spark, shared):
    moment = read(spark, shared).where("key = cast('text' as binary)").select("timestamp").first()[0]
    frame = read(spark, shared, startingOffsets=moment.astimezone(UTC).isoformat())  # Spark's are local ones
    keys = {bytes(row["key"]) for row in frame.collect()}
    assert {b"text", b"broken", b"gone"} <= keys
    assert b"k0" not in keys


def test_a_user_schema_chooses_the_form_of_values(spark, shared):
    wanted = read(spark, shared, valueFormat="string").schema
    frame = spark.read.format("dcp").schema(wanted).options(**shared.options()).load()
    assert frame.where("key = cast('k7' as binary)").select("value").first()[0] == '{"n": 7}'


def test_other_columns_are_refused_by_name(spark, shared):
    with pytest.raises(Exception, match="format dcp has the columns event, vbucket"):
        spark.read.format("dcp").schema("key BINARY, value BINARY").options(**shared.options()).load().count()


def test_sql_creates_a_table(spark, shared):
    where = f"connection '{shared.node.connection_string}'"
    spark.sql(f"CREATE TEMPORARY VIEW changes USING dcp OPTIONS ({where}, keysOnly 'true')")
    assert spark.sql("SELECT count(DISTINCT key) FROM changes WHERE event = 'deletion'").first()[0] == 1
    spark.sql(f"CREATE TABLE changes_table USING dcp OPTIONS ({where})")
    assert spark.table("changes_table").where("event = 'deletion'").count() == 1
    spark.sql("DROP TABLE changes_table")
    with pytest.raises(Exception, match="use passwordFile"):
        spark.sql(f"CREATE TABLE changes_table USING dcp OPTIONS ({where}, password 'x')")


def test_a_wrong_option_is_answered_in_the_error_that_users_see(spark, shared):
    with pytest.raises(Exception, match=r"no option 'startingoffset'; valid are .*startingOffsets"):
        read(spark, shared, startingOffset="latest").count()


def test_an_unreachable_node_is_named_with_host_and_port(spark):
    options = {"connection": "couchbase://127.0.0.1:1", "timeoutSeconds": "1"}
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1.*gave up after 1 s"):
        spark.read.format("dcp").options(**options).load().count()


def test_one_task_per_core_and_not_one_per_vbucket(spark, shared):
    assert read(spark, shared).rdd.getNumPartitions() <= 2
    assert read(spark, shared, partitions=8).rdd.getNumPartitions() <= 8
