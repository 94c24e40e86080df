"""The inside of a feed, between the pure ``protocol/feed`` and the public client.

A ``Subscription`` is a cluster feed with names, filters and an ``Outbox`` of bundles for the caller. Two shells move
the bytes: ``Pump`` (threads, Spark) and ``AsyncChangeFeed`` (asyncio); ``LinkPolicy`` has the rules that they share.
``FeedBase`` is the common part of ``ChangeFeed`` and ``AsyncChangeFeed``. Programs import nothing from here.
"""
