"""The server: connections, commands, buckets, statistics, the management port, and membership in a cluster.

``server.Node`` opens the buckets and listens; ``connection.ClientConnection`` is one client; ``dispatch`` checks each
request and calls its handler in ``commands``, ``subdoc``, ``stats`` or ``access``. Everything runs on one asyncio loop;
long work runs in threads. The rules of the protocol are in ``protocol`` and ``wire``, and every write goes through
``store``.
"""
