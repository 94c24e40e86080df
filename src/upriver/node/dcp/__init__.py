"""The shells around the DCP machines: they move bytes, schedule turns and log; the rules are in ``protocol``.

``producer`` and ``consumer`` are the two roles of a client's connection, ``live`` gives a bucket's live streams their
turns, and ``replicator`` consumes vbuckets from other nodes.
"""
