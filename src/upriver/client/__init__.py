"""The client library, imported by programs as ``upriver``: documents, seqnos and the change feed of a bucket.

``blocking`` and ``aio`` have the same methods with the same parameters. ``options`` says how to connect, ``reading``
what to read; ``changes`` has what a feed yields; ``positions``, ``checkpoints`` and ``groups`` say where a reader is,
and keep and share that. ``_requests`` has the requests to nodes, ``_feed`` the inside of a feed; programs import
neither. The sockets are in ``net``.
"""
