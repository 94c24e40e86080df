"""Spark: ``format("dcp")`` as a source and a sink, and a session to use it in.

    spark = upriver.spark.session()
    changes = spark.readStream.format("dcp").option("connection", "couchbase://localhost").load()

Nothing of Spark is imported before one of these is called.
"""

from upriver.spark.sessions import register, session

__all__ = ["register", "session"]
