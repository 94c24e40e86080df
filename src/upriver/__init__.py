"""upriver: the Database Change Protocol end to end.

    with upriver.connect("couchbase://localhost", bucket="travel") as db:    # upriver.aio.connect: the same for asyncio
        orders = db.collection("shop.orders")
        orders.set("o1", b"{}")
        for change in db.changes(collections=["shop.orders"], end="now"):
            ...

Everything that a program needs is an attribute of this package; ``dir(upriver)`` lists it. Errors are in
``upriver.errors``, tables in ``upriver.lake``, Spark is in ``upriver.spark``, and a node for tests in
``upriver.testing``. Importing it is cheap: numba, pyarrow and pyspark load only when a function that needs them runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from upriver.version import __version__

if TYPE_CHECKING:
    from upriver import aio, errors, lake, spark, testing
    from upriver.client._feed.blocking_feed import ChangeFeed
    from upriver.client.blocking import Collection, Database, connect
    from upriver.client.changes import Change, CollectionChanged, Deletion, Mutation, RolledBack
    from upriver.client.checkpoints import BucketCheckpoint, CheckpointStore, FileCheckpoint, SqliteCheckpoint
    from upriver.client.groups import Group, read_as_member
    from upriver.client.options import ConnectKeywords, ConnectOptions
    from upriver.client.positions import Positions
    from upriver.client.reading import Content, FeedKeywords
    from upriver.client.shared_values import SharedDocument, SharedFile, SharedRow
    from upriver.client.telemetry import FeedMetrics
    from upriver.model import Document, FailoverLog, OnRollback
    from upriver.protocol.position import Position

_MODULES = ("aio", "errors", "lake", "spark", "testing")

# The module of each public name; loaded when the name is first used.
_EXPORTS = {
    "BucketCheckpoint": "upriver.client.checkpoints",
    "Change": "upriver.client.changes",
    "ChangeFeed": "upriver.client._feed.blocking_feed",
    "CheckpointStore": "upriver.client.checkpoints",
    "Collection": "upriver.client.blocking",
    "CollectionChanged": "upriver.client.changes",
    "ConnectKeywords": "upriver.client.options",
    "ConnectOptions": "upriver.client.options",
    "Content": "upriver.client.reading",
    "Database": "upriver.client.blocking",
    "Deletion": "upriver.client.changes",
    "Document": "upriver.model",
    "FailoverLog": "upriver.model",
    "FeedKeywords": "upriver.client.reading",
    "FeedMetrics": "upriver.client.telemetry",
    "FileCheckpoint": "upriver.client.checkpoints",
    "Group": "upriver.client.groups",
    "Mutation": "upriver.client.changes",
    "OnRollback": "upriver.model",
    "Position": "upriver.protocol.position",
    "Positions": "upriver.client.positions",
    "RolledBack": "upriver.client.changes",
    "SharedDocument": "upriver.client.shared_values",
    "SharedFile": "upriver.client.shared_values",
    "SharedRow": "upriver.client.shared_values",
    "SqliteCheckpoint": "upriver.client.checkpoints",
    "connect": "upriver.client.blocking",
    "read_as_member": "upriver.client.groups",
}

__all__ = [
    "BucketCheckpoint", "Change", "ChangeFeed", "CheckpointStore", "Collection", "CollectionChanged", "ConnectKeywords",
    "ConnectOptions", "Content", "Database", "Deletion", "Document", "FailoverLog", "FeedKeywords", "FeedMetrics",
    "FileCheckpoint", "Group", "Mutation", "OnRollback", "Position", "Positions", "RolledBack",
    "SharedDocument", "SharedFile", "SharedRow", "SqliteCheckpoint", "__version__", "aio", "connect", "errors", "lake",
    "read_as_member", "spark", "testing",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"upriver.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'upriver' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
