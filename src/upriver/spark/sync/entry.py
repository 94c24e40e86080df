"""The doors of the table job, importing what they need only when they are opened."""

from __future__ import annotations

from typing import Any


def sync(spark: Any, options: Any, **run: Any) -> Any:
    """Keep the tables under ``options["to"]`` equal to a bucket (`run.sync`); with ``once``, bring them up to it."""
    from upriver.spark.sync.run import sync as run_sync

    return run_sync(spark, options, **run)


def read_table(spark: Any, lake: str, collection: str) -> Any:
    """The latest documents of a collection as a DataFrame: ``current`` with its tail on top, always fresh."""
    from upriver.lake.read import read_table as read

    return read(spark, lake, collection)


def merge_sql(target: str, dialect: str = "delta", **options: Any) -> str:
    """A ``MERGE`` statement for users with their own Delta or Iceberg JARs."""
    from upriver.lake.merge_sql import merge_sql as sql

    return sql(target, dialect, **options)
