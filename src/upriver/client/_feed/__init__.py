"""The inside of a feed, between the pure ``protocol/feed`` and what people call.

A ``Subscription`` is a cluster feed with names, filters and an ``Outbox`` of bundles for the caller. Two shells move
the bytes: ``Pump`` (threads, Spark) and ``AsyncChangeFeed`` (asyncio); ``LinkPolicy`` has the rules that they share.
``FeedBase`` is what ``ChangeFeed`` and ``AsyncChangeFeed`` have in common. Users import nothing from here.
"""
