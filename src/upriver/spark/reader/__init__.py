"""Reading a bucket in Spark: the driver plans where each task begins and ends, executors read what was planned.

``planning`` is pure. ``driver`` asks the cluster, makes plans and packs them into tasks; ``executor`` reads the ranges
of one task on pooled connections; ``reports`` carries what tasks found back to the driver.
"""
