"""A change feed over all nodes of a cluster, as pure machines.

``ClusterFeed`` decides which streams are open where, and what a rollback, a move or a lost connection means.
``NodeLink`` is the reading end of one DCP connection. ``PositionTable`` keeps the positions of all vbuckets while rows
are read in bulk. No sockets, clocks or logging: the shells in ``client/_feed`` move the bytes and pass in the time.
"""
