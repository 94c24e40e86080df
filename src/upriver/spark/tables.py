"""Tables in Spark: those of a lake as DataFrames, and one table of your own connector kept equal to a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Literal, get_args

from upriver.errors import ConfigError, HistoryLost
from upriver.lake.sql import SqlDialect, ends_sql, merge_sql, reread_sql, rollback_sql, table_sql, wipe_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from upriver.lake.delta import Table

RollbackRepair = Literal["reread", "delete", "fail"]


def read_table(spark: SparkSession, lake: str | PathLike[str], collection: str) -> DataFrame:
    """The latest documents of a collection as a DataFrame: ``current`` with its tail on top, always fresh.

    Spark reads the Parquet files that the Delta tables name, without the Delta JAR. The tail is small: its keys are
    broadcast, so the large table is not shuffled.
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


def merge_batches(
    target: str,
    dialect: SqlDialect = "delta",
    *,
    source: Mapping[str, str] | None = None,
    on_rollback: RollbackRepair = "reread",
) -> Callable[[DataFrame, int], None]:
    """A function for ``foreachBatch`` on ``format("dcp")`` that keeps ``target`` with the session's own connector.

    ``source`` are the options of the stream. With ``reread``, vbuckets that rolled back are read again with them, and
    the table is right. ``delete`` only deletes what was lost; what it had overwritten is missing until it changes.
    ``fail`` stops the query. The function must get all rows of the stream, not only those of documents.
    """
    if on_rollback not in get_args(RollbackRepair):
        raise ConfigError(f"on_rollback {on_rollback!r}: valid are {', '.join(get_args(RollbackRepair))}")
    create = table_sql(target, dialect)
    if on_rollback == "reread" and not source:
        raise ConfigError(
            "merge_batches reads vbuckets again that rolled back: give it the options of the stream, "
            'source={"connection": ..., "bucket": ...}, or on_rollback="fail" or "delete"'
        )

    def apply(frame: DataFrame, batch_id: int) -> None:
        view = f"upriver_changes_{batch_id}"
        frame.persist()
        try:
            frame.createOrReplaceTempView(view)
            spark = frame.sparkSession
            spark.sql(create)
            _repair_rollbacks(spark, target, dialect, view, on_rollback, source or {})
            spark.sql(merge_sql(target, dialect, source=view))
            spark.sql(wipe_sql(target, dialect, source=view))
            spark.sql(f"DROP VIEW IF EXISTS {view}")
        finally:
            frame.unpersist()

    return apply


def _repair_rollbacks(
    spark: SparkSession,
    target: str,
    dialect: SqlDialect,
    view: str,
    on_rollback: RollbackRepair,
    source: Mapping[str, str],
) -> None:
    ends = {int(row[0]): int(row[1]) for row in spark.sql(ends_sql(source=view)).collect()}
    if not ends:
        return
    if on_rollback == "fail":
        vbucket = min(ends)
        raise HistoryLost(vbucket, ends[vbucket], 0)
    if on_rollback == "delete":
        spark.sql(rollback_sql(target, dialect, source=view))
        return
    again = spark.read.format("dcp").options(**_reread_options(source, ends)).load()
    again.persist()  # all statements must see the same rows
    try:
        again.createOrReplaceTempView(f"{view}_again")
        for statement in reread_sql(target, dialect, source=view, reread=f"{view}_again"):
            spark.sql(statement)
        spark.sql(f"DROP VIEW IF EXISTS {view}_again")
    finally:
        again.unpersist()


def _reread_options(source: Mapping[str, str], ends: Mapping[int, int]) -> dict[str, str]:
    """The options of the stream for a batch read of some vbuckets, from the beginning to these seqnos."""
    changed = {"startingoffsets", "endingoffsets", "vbuckets", "onrollback"}
    kept = {name: str(text) for name, text in source.items() if name.lower() not in changed}
    vbuckets = ",".join(str(vbucket) for vbucket in sorted(ends))
    return {**kept, "vbuckets": vbuckets, "endingOffsets": json.dumps({str(vb): end for vb, end in ends.items()})}
