"""Requests of a client to a cluster: operations as generators, which the blocking and the asyncio client run.

``operations`` has all of them, with retries and cluster maps. ``bulk_set`` writes many documents at once.
``connections`` opens the connections. Programs import nothing from here.
"""
