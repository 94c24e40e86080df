"""Reading a bucket in Spark: the driver plans where each task begins and ends, executors read what was planned.

``planning`` and ``packing`` are pure. ``offsets`` is what Spark's checkpoint keeps. ``driver`` asks the cluster, makes
plans and hears the reports of the tasks; ``executor`` reads the ranges of one task on pooled connections.
"""
