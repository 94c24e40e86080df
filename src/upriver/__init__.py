"""upriver: the Database Change Protocol end to end.

Importing this package is cheap: numba, pyarrow and pyspark load only when a function that needs them runs.
"""

__version__ = "0.1.0"
