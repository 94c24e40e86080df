"""Spark: ``format("dcp")`` as a source and a sink, a session to use it in, and tables that stay equal to a bucket.

    spark = upriver.spark.session()
    changes = spark.readStream.format("dcp").option("connection", "couchbase://localhost").load()
    upriver.spark.sync(spark, {"connection": "couchbase://localhost", "to": "./lake", "once": True})
    upriver.spark.read_table(spark, "./lake", "_default._default")

Nothing of Spark is imported before one of these is called.
"""

from upriver.spark.session import register, session
from upriver.spark.sync.entry import merge_sql, read_table, sync

__all__ = ["merge_sql", "read_table", "register", "session", "sync"]
