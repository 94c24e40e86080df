"""The SQL for users with their own connectors is SQL that Spark understands, and makes the table right.

Spark cannot MERGE without a connector's JARs, so DuckDB is the connector here: rows, and rows that are read again, come
from Spark, the statements run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import pytest

from tests.spark.spark_world import World, drain, stream
from tests.support.by_id import ById
from upriver.errors import ConfigError
from upriver.lake.reading import _VIEW
from upriver.lake.sql import (
    ends_sql,
    merge_sql,
    reread_sql,
    rollback_sql,
    table_sql,
    wipe_sql,
)
from upriver.spark.tables import merge_batches

pytestmark = pytest.mark.spark


def parse(spark, sql: str) -> str:
    return str(spark._jsparkSession.sessionState().sqlParser().parsePlan(sql).toString())


@pytest.mark.parametrize("dialect", ["delta", "iceberg"])
def test_merge_statements_parse(spark, dialect: str) -> None:
    assert parse(spark, merge_sql("lake.orders", dialect)).startswith("'MergeIntoTable")
    assert parse(spark, rollback_sql("lake.orders", dialect)).startswith("'MergeIntoTable")
    for statement in (wipe_sql("lake.orders", dialect), *reread_sql("lake.orders", dialect)):
        assert parse(spark, statement).startswith("'MergeIntoTable")
    assert "Aggregate" in parse(spark, ends_sql())
    assert "CreateTable" in parse(spark, table_sql("lake.orders", dialect))


def test_the_view_parses(spark) -> None:
    sql = _VIEW.format(name="v", tail="t", current="c", old="c.`a b`", new="n.`a b`")
    assert "CreateView" in parse(spark, sql)


def test_an_unknown_dialect_is_named() -> None:
    with pytest.raises(ConfigError, match="delta, iceberg"):
        merge_sql("t", "oracle")


def test_a_repair_that_needs_the_source_asks_for_it() -> None:
    with pytest.raises(ConfigError, match=r"give it the options of the stream, source="):
        merge_batches("t")
    with pytest.raises(ConfigError, match="reread, delete, fail"):
        merge_batches("t", on_rollback="ignore")


class Connector:
    """Stands between a frame of Spark and the statements about it, which DuckDB runs."""

    def __init__(self, spark: Any) -> None:
        self.spark, self.duck = spark, duckdb.connect()
        self.duck.sql("SET TimeZone = 'UTC'")

    def __call__(self, apply: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        return lambda frame, number: apply(Frame(self, frame), number)

    def sql(self, statement: str) -> Any:
        done = self.duck.sql(statement.replace(" BINARY", " BLOB").removesuffix(" USING iceberg"))
        return Rows(done.fetchall()) if done is not None else None

    @property
    def read(self) -> Any:
        return Read(self, self.spark.read)

    def table(self) -> dict[tuple[int, bytes], bytes]:
        rows = self.duck.sql("SELECT collection_id, key, value FROM mine").fetchall()
        found = {(number, bytes(key)): bytes(value) for number, key, value in rows}
        assert len(found) == len(rows)
        return found


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def collect(self) -> list[Any]:
        return self._rows


class Read:
    def __init__(self, connector: Connector, reader: Any) -> None:
        self._connector, self._reader = connector, reader

    def format(self, name: str) -> Read:
        return Read(self._connector, self._reader.format(name))

    def options(self, **options: str) -> Read:
        return Read(self._connector, self._reader.options(**options))

    def load(self) -> Frame:
        return Frame(self._connector, self._reader.load())


class Frame:
    def __init__(self, connector: Connector, frame: Any) -> None:
        self.sparkSession, self._frame = connector, frame

    def persist(self) -> None:
        self._rows = self._frame.toArrow()

    def createOrReplaceTempView(self, name: str) -> None:
        self.sparkSession.duck.register(name, self._rows)

    def unpersist(self) -> None:
        self._rows = None


def truth(world: World) -> dict[tuple[int, bytes], bytes]:
    """What the bucket holds, as a feed says it."""
    found: dict[tuple[int, bytes], Any] = {}
    for row in world.rows():
        number, vbucket = row["collection_id"], row["vbucket"]
        if row["event"] == "mutation":
            found[number, row["key"]] = vbucket, row["value"]
        elif row["event"] in ("collection_dropped", "collection_flushed"):
            found = {at: one for at, one in found.items() if (at[0], one[0]) != (number, vbucket)}
        else:
            found.pop((number, row["key"]), None)
    return {at: value for at, (_, value) in found.items()}


ORDERS = {"name": "orders", "uid": "9"}


def manifest(uid: int, *collections: dict[str, str]) -> dict[str, Any]:
    default = {"name": "_default", "uid": "0"}
    return {"uid": f"{uid:x}", "scopes": [{"name": "_default", "uid": "0", "collections": [default, *collections]}]}


def test_a_merged_table_is_right_after_rollbacks_drops_and_flushes(spark, world: World, tmp_path) -> None:
    connector = Connector(spark)
    apply = connector(merge_batches("mine", "iceberg", source=world.options()))

    def catch_up() -> None:
        drain(stream(spark, world), apply, tmp_path)
        assert connector.table() == truth(world)

    world.set_manifest(manifest(1, ORDERS))
    ById(world.db, 9).set_many({f"o{n}".encode(): b"1" for n in range(40)})
    world.put(300)
    catch_up()
    world.put(150, value='{"n": %d, "lost": 1}')
    for number in range(0, 40, 4):
        world.db.delete(f"k{200 + number}")
    catch_up()
    for vbucket in range(world.vbuckets):
        world.fault("failover", vbucket=vbucket, lose=20 + vbucket)
    world.put(5, "after")
    catch_up()
    world.put(40, value='{"n": %d}')
    world.set_manifest(manifest(2, {**ORDERS, "flush_uid": "2"}))
    ById(world.db, 9).set_many({f"o{n}".encode(): b"2" for n in range(20)})
    catch_up()
    world.set_manifest(manifest(3))
    catch_up()
    assert not any(number == 9 for number, _ in connector.table())
