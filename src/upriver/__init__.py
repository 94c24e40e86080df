"""upriver: the Database Change Protocol end to end.

Importing this package is cheap: numba, pyarrow and pyspark load only when a function that needs them runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upriver.client.aio import AsyncDatabase, connect
    from upriver.client.blocking import Database
    from upriver.client.blocking import connect as connect_blocking
    from upriver.client.changes import Change, CollectionChanged, Deletion, Mutation, RolledBack
    from upriver.client.checkpoints import BucketCheckpoint, FileCheckpoint, SqliteCheckpoint
    from upriver.client.options import ConnectOptions
    from upriver.client.positions import Positions
    from upriver.client.reading import ReadOptions

__version__ = "0.1.0"

# Where each public name lives; loaded when it is first asked for.
_EXPORTS = {
    "AsyncDatabase": "upriver.client.aio",
    "BucketCheckpoint": "upriver.client.checkpoints",
    "Change": "upriver.client.changes",
    "CollectionChanged": "upriver.client.changes",
    "ConnectOptions": "upriver.client.options",
    "Database": "upriver.client.blocking",
    "Deletion": "upriver.client.changes",
    "FileCheckpoint": "upriver.client.checkpoints",
    "Mutation": "upriver.client.changes",
    "Positions": "upriver.client.positions",
    "ReadOptions": "upriver.client.reading",
    "RolledBack": "upriver.client.changes",
    "SqliteCheckpoint": "upriver.client.checkpoints",
    "connect": "upriver.client.aio",
    "connect_blocking": "upriver.client.blocking",
}

__all__ = [
    "AsyncDatabase", "BucketCheckpoint", "Change", "CollectionChanged", "ConnectOptions", "Database", "Deletion",
    "FileCheckpoint", "Mutation", "Positions", "ReadOptions", "RolledBack", "SqliteCheckpoint", "__version__",
    "connect", "connect_blocking",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'upriver' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), "connect" if name == "connect_blocking" else name)


def __dir__() -> list[str]:
    return sorted(__all__)
