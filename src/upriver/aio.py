"""The client for asyncio: the methods of ``upriver.connect`` with the same names and parameters, to be awaited.

async with upriver.aio.connect("couchbase://localhost", "travel") as db:
    await db.set("greeting", b'{"hello": "world"}')
    async for change in db.changes(end="now"):
        ...
"""

from upriver.client._feed.aio_feed import AsyncChangeFeed
from upriver.client.aio import AsyncCollection, AsyncDatabase, connect

__all__ = ["AsyncChangeFeed", "AsyncCollection", "AsyncDatabase", "connect"]
