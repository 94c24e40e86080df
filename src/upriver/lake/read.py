"""Reading the tables: always fresh (current with its tail on top), with or without Spark, and the same as SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import ConfigError
from upriver.lake.apply.merge import latest, settle
from upriver.lake.columns import Document, row_schema, shape_of, spill, to_document
from upriver.lake.files import Piece, read_pieces
from upriver.lake.layout import Lake


def read_arrow(lake: str, name: str, *, deleted: bool = False, span: tuple[int, int] | None = None) -> pa.Table:
    """The latest documents of a collection as an Arrow table, whatever has been merged so far.

    ``span`` limits it to a stretch of vbuckets.

    The tail is looked at before ``current``: a merge in between then shows a row twice, never not at all, and of the
    two the winner is taken.
    """
    home = Lake(lake)
    tail, current = home.table("tail", name), home.table("current", name)
    if not tail.exists or not current.exists:
        raise ConfigError(f"{lake} has no tables of '{name}' yet; it has {', '.join(home.names()) or 'none'}")
    waiting = tail.pieces()
    current.refresh()
    schema = row_schema(shape_of(current.schema()))
    news = latest(_read(tail.uri, waiting, schema, span))
    old = _read(current.uri, current.pieces(), schema, span)
    old, news = settle(old, news)
    whole = pa.concat_tables([old, news])
    return whole if deleted else whole.filter(pc.invert(whole.column("_deleted")))


def _read(root: str, pieces: Sequence[Piece], schema: pa.Schema, span: tuple[int, int] | None) -> pa.Table:
    here = [piece for piece in pieces if span is None or piece.overlaps(*span)]
    return read_pieces(root, here, schema, span=span, adapt=spill)


def read_documents(lake: str, name: str) -> dict[str, Document | bytes]:
    """The documents themselves, by key."""
    table = read_arrow(lake, name)
    shape = shape_of(table.schema)
    return {row["_key"]: to_document(row, shape) for row in table.to_pylist()}


def read_table(spark: Any, lake: str, name: str) -> Any:
    """The latest documents of a collection as a Spark DataFrame, fresh, with no JAR and no shuffle of the large part.

    Spark reads the Parquet files that the Delta snapshots name; keys in the (small) tail are broadcast.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.window import Window

    home = Lake(lake)
    tail, current = home.table("tail", name), home.table("current", name)
    if not tail.exists or not current.exists:
        raise ConfigError(f"{lake} has no tables of '{name}' yet; it has {', '.join(home.names()) or 'none'}")
    news = spark_table(spark, tail)
    current.refresh()
    newest = Window.partitionBy("_key").orderBy(f.desc("_epoch"), f.desc("_seqno"))
    news = news.withColumn("_rank", f.row_number().over(newest)).where("_rank = 1").drop("_rank")
    old = spark_table(spark, current)
    rival = f.broadcast(news.select("_key", f.struct("_epoch", "_seqno").alias("_rival")))
    kept = old.join(rival, "_key", "left").where("_rival is null or struct(_epoch, _seqno) > _rival").drop("_rival")
    stale = f.broadcast(
        old.select("_key", f.struct("_epoch", "_seqno").alias("_rival")).join(
            f.broadcast(news.select("_key")), "_key", "semi"
        )
    )
    fresh = news.join(stale, "_key", "left").where("_rival is null or struct(_epoch, _seqno) >= _rival").drop("_rival")
    return kept.unionByName(fresh.select(*kept.columns)).where("not _deleted")


def spark_table(spark: Any, table: Any) -> Any:
    """One Delta table as Spark sees it without the Delta JAR: its files, under the table's own schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(table.schema())
    files = list(table.delta.file_uris())
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)


_VIEW = """\
CREATE OR REPLACE VIEW {name} AS
WITH news AS (
  SELECT * FROM (
    SELECT *, row_number() OVER (PARTITION BY _key ORDER BY _epoch DESC, _seqno DESC) AS _rank FROM {tail}
  ) AS ranked WHERE _rank = 1
)
SELECT {old} FROM {current} AS c LEFT JOIN news AS n ON n._key = c._key
WHERE NOT c._deleted
  AND (n._key IS NULL OR c._epoch > n._epoch OR (c._epoch = n._epoch AND c._seqno > n._seqno))
UNION ALL
SELECT {new} FROM news AS n LEFT JOIN {current} AS c ON n._key = c._key
WHERE NOT n._deleted
  AND (c._key IS NULL OR n._epoch > c._epoch OR (n._epoch = c._epoch AND n._seqno >= c._seqno))
"""


def view_sql(lake: str, name: str, *, view: str, tail: str, current: str, quote: str = '"') -> str:
    """A view of the fresh table, in SQL that DuckDB and Spark share but for how they quote names (`` ` `` in Spark).

    ``tail`` and ``current`` are whatever names the two tables in that engine, such as
    ``delta_scan('lake/tail/shop.orders')``.
    """
    columns = Lake(lake).table("current", name).schema().names
    lists = {alias: ", ".join(f"{alias}.{quote}{column}{quote}" for column in columns) for alias in ("c", "n")}
    return _VIEW.format(name=view, tail=tail, current=current, old=lists["c"], new=lists["n"])
