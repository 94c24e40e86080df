"""Tables that stay equal to a bucket: a change log, a tail and a current table per collection, all plain Delta.

The table layer (``lake`` to ``apply``) knows Arrow and delta-rs but not Spark; ``job`` feeds it micro-batches.
"""
