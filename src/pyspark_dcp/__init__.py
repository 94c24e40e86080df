"""Spark finds ``format("dcp")`` here: it looks for a ``DefaultSource`` in modules whose names begin with ``pyspark_``.

Spark imports all such modules when it first meets an unknown format, and one that fails hides all others. So this one
imports PySpark's base classes and nothing else that is heavy.
"""

from upriver.spark.sessions import register
from upriver.spark.source import DcpSource as DefaultSource

__all__ = ["DefaultSource", "register"]
