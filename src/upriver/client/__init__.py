"""The library that programs import, by way of ``upriver``: documents, seqnos and the change feed of a bucket.

``blocking`` and ``aio`` are the two sides of one door: the same names with the same parameters. ``options`` and
``reading`` say what can be asked for; ``changes`` what comes; ``positions``, ``checkpoints`` and ``groups`` where a
reader is, and how that is kept and shared. ``_requests`` are the conversations with nodes, ``_feed`` is the inside of a
feed; nobody outside of upriver imports them. The sockets are in ``net``.
"""
