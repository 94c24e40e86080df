"""The server: connections, commands, buckets, statistics, the management port, and membership in a cluster.

``server.Node`` opens the buckets and listens; ``connection.ClientConnection`` is one client; ``dispatch`` checks each
request and calls its handler in ``commands``, ``subdoc``, ``stats`` or ``access``. Runs on one asyncio loop: what
takes long runs in a thread. Nothing here decides how the protocol works: the rules are in ``protocol`` and ``wire``,
and what is written goes through ``store``.
"""
