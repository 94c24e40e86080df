"""A Spark session that just works, and the registration of ``format("dcp")`` in one that exists."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from upriver.spark.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    # A task's hand-over to Python is several times cheaper over a Unix socket than over TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    # Keep compiled kernels and connections when the stream pauses for a moment.
    "spark.python.worker.reuse": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def session(master: str = "local[*]", app: str = "upriver", settings: dict[str, str] | None = None) -> SparkSession:
    """A local session in which ``format("dcp")`` is registered, with Java and Python found or provided."""
    prepare()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(app)
    for name, value in (SETTINGS | (settings or {})).items():
        builder = builder.config(name, value)
    made: SparkSession = builder.getOrCreate()
    return register(made)


def register(spark: SparkSession) -> SparkSession:
    """Make ``format("dcp")`` known to a session, also a Spark Connect one; returns the session."""
    from upriver.spark.source import DcpSource

    spark.dataSource.register(DcpSource)
    return spark


def prepare() -> None:
    """Set the environment so that Spark, started later, finds a Java, and this Python for its workers."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if home := java_home():
        os.environ["JAVA_HOME"] = str(home)
