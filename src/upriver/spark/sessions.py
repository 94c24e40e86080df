"""A Spark session with everything set up, and the registration of ``format("dcp")`` in an existing one."""

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
    # A Unix socket between the JVM and Python is several times cheaper per task than TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    # Workers keep compiled kernels and connections while a stream pauses.
    "spark.python.worker.reuse": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
# Documents of a sync do not pass through the JVM, so thorough compilation gains nothing: during a load it took as much
# CPU as reading the bucket.
QUICK_JAVA = "-XX:TieredStopAtLevel=1"


def session(master: str = "local[*]", app: str = "upriver", settings: dict[str, str] | None = None) -> SparkSession:
    """A local session that knows ``format("dcp")``; a Java is found or provided, and workers use this Python.

    ``settings`` are Spark's own, such as ``spark.ui.enabled``.
    """
    prepare()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    is_new = SparkContext._active_spark_context is None
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in (SETTINGS | (settings or {})).items():
        builder = builder.config(name, value)
    made: SparkSession = builder.getOrCreate()
    return made if is_new and _finds_format_itself() else register(made)


def sync_session(master: str, *, ui: bool = False) -> SparkSession:
    """The session for ``upriver sync``: the one that ``spark-submit`` has prepared, or one of our own."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from pyspark.sql import SparkSession

        return register(SparkSession.builder.getOrCreate())
    return session(master, settings={"spark.driver.extraJavaOptions": QUICK_JAVA, "spark.ui.enabled": str(ui).lower()})


def _finds_format_itself() -> bool:
    """Whether Spark's Python will find ``pyspark_dcp``; registering the format again would make Spark warn."""
    asked = os.environ.get("PYSPARK_DRIVER_PYTHON") or os.environ.get("PYSPARK_PYTHON")
    return asked == sys.executable and find_spec("pyspark_dcp") is not None


def register(spark: SparkSession) -> SparkSession:
    """Make ``format("dcp")`` known to a session, also one of Spark Connect; the same session."""
    from upriver.spark.source import DcpSource

    spark.dataSource.register(DcpSource)
    return spark


def prepare() -> None:
    """Set environment variables so that Spark finds a Java and uses this Python for its workers."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if home := java_home():
        os.environ["JAVA_HOME"] = str(home)
