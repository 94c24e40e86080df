"""A Spark session that just works, and the registration of ``format("dcp")`` in one that exists."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
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
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    is_new = SparkContext._active_spark_context is None
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in (SETTINGS | (settings or {})).items():
        builder = builder.config(name, value)
    made: SparkSession = builder.getOrCreate()
    return made if is_new and _finds_it_by_itself() else register(made)


def _finds_it_by_itself() -> bool:
    """Spark asks the Python that it starts for modules named ``pyspark_*``, and finds ``pyspark_dcp``. Registering the
    format once more makes it warn that something was replaced."""
    asked = os.environ.get("PYSPARK_DRIVER_PYTHON") or os.environ.get("PYSPARK_PYTHON")
    return asked == sys.executable and find_spec("pyspark_dcp") is not None


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
