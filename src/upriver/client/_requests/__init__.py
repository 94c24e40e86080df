"""What a client asks of a cluster: conversations as generators, which the shells for threads and asyncio carry out.

``operations`` has them all, with retries and cluster maps; ``bulk_set`` writes many documents at once; ``connections``
opens the connections that they go over. Nobody outside of upriver imports from here.
"""
