"""Found by Spark: a module whose name begins with ``pyspark_`` and that has a ``DefaultSource`` registers itself.

Importing it costs nothing but PySpark's own base classes, because Spark imports every such module at the first
unknown format, and one that fails hides all others.
"""

from upriver.spark.session import register
from upriver.spark.source import DcpSource as DefaultSource

__all__ = ["DefaultSource", "register"]
