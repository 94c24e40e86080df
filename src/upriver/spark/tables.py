"""Tables of a lake as Spark DataFrames, without the Delta JAR."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from upriver.lake.delta import Table


def read_table(spark: SparkSession, lake: str | PathLike[str], collection: str) -> DataFrame:
    """The latest documents of a collection as a DataFrame: ``current`` with its tail on top, always fresh.

    Spark reads the Parquet files that the Delta tables name. The keys of the tail, which is small, are broadcast, so
    the large table is not shuffled.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.window import Window

    from upriver.lake.reading import open_fresh

    tail, current = open_fresh(lake, collection)
    new = _frame(spark, tail)
    current.refresh()
    newest = Window.partitionBy("_key").orderBy(f.desc("_epoch"), f.desc("_seqno"))
    new = new.withColumn("_rank", f.row_number().over(newest)).where("_rank = 1").drop("_rank")
    old = _frame(spark, current)
    rival = f.broadcast(new.select("_key", f.struct("_epoch", "_seqno").alias("_rival")))
    kept = old.join(rival, "_key", "left").where("_rival is null or struct(_epoch, _seqno) > _rival").drop("_rival")
    stale = f.broadcast(
        old.select("_key", f.struct("_epoch", "_seqno").alias("_rival")).join(
            f.broadcast(new.select("_key")), "_key", "semi"
        )
    )
    fresh = new.join(stale, "_key", "left").where("_rival is null or struct(_epoch, _seqno) >= _rival").drop("_rival")
    return kept.unionByName(fresh.select(*kept.columns)).where("not _deleted")


def _frame(spark: SparkSession, table: Table) -> DataFrame:
    """One Delta table as a DataFrame: its files, under its schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(table.schema())
    files = list(table.delta.file_uris())
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)
