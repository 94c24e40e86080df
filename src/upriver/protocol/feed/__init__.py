"""A change feed over all nodes of a cluster, as pure machines.

``ClusterFeed`` decides which streams are open where, and what a rollback, a move or a lost connection means.
``NodeLink`` is the reading end of one DCP connection. ``PositionTable`` has the positions of all vbuckets while rows
come in bulk. No sockets, no clock, no log: the shells in ``client/_feed`` move the bytes and say what time it is.
"""
