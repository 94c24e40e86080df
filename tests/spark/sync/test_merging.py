"""The SQL for users with their own connectors is SQL that Spark understands."""

from __future__ import annotations

import pytest

from upriver.errors import ConfigError
from upriver.spark.tables.merging import merge_sql, rollback_sql, table_sql
from upriver.spark.tables.read import _VIEW

pytestmark = pytest.mark.spark


def parse(spark, sql: str) -> str:
    return str(spark._jsparkSession.sessionState().sqlParser().parsePlan(sql).toString())


@pytest.mark.parametrize("dialect", ["delta", "iceberg"])
def test_merge_statements_parse(spark, dialect: str) -> None:
    assert parse(spark, merge_sql("lake.orders", dialect)).startswith("'MergeIntoTable")
    assert parse(spark, rollback_sql("lake.orders", dialect)).startswith("'MergeIntoTable")
    assert "CreateTable" in parse(spark, table_sql("lake.orders", dialect))


def test_the_view_parses(spark) -> None:
    sql = _VIEW.format(name="v", tail="t", current="c", old="c.`a b`", new="n.`a b`")
    assert "CreateView" in parse(spark, sql)


def test_an_unknown_dialect_is_named() -> None:
    with pytest.raises(ConfigError, match="delta, iceberg"):
        merge_sql("t", "oracle")
