"""Spark: ``format("dcp")`` as a source and a sink, a session to use it in, and the sync that keeps a lake.

    spark = upriver.spark.session()
    changes = spark.readStream.format("dcp").option("connection", "couchbase://localhost").load()
    upriver.spark.sync(spark, connection="couchbase://localhost", to="./lake", once=True)
    upriver.spark.read_table(spark, "./lake", "_default._default")

``reader/`` plans and reads batches, ``values/`` shapes the ``value`` column, ``sync/`` feeds the tables of
`upriver.lake`. Importing this package is cheap: PySpark and Arrow load when one of these functions is called.
"""

from upriver.lake.sql import merge_sql
from upriver.spark.sessions import register, session
from upriver.spark.sync import sync
from upriver.spark.tables import merge_batches, read_table

__all__ = ["merge_batches", "merge_sql", "read_table", "register", "session", "sync"]
