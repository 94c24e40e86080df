"""The lake: tables that stay equal to a bucket, written and read without Spark.

Per collection there are a change log, a tail, a current table and, if wanted, a history, all plain Delta tables.

    upriver.lake.read("./lake", "shop.orders")          # the latest documents, as an Arrow table
    upriver.lake.view_sql("./lake", "shop.orders", ...) # the same as a SQL view
    upriver.lake.compare(options)                       # do the tables equal the bucket?

This package knows Arrow, delta-rs and the client, but no Spark. `upriver.spark` feeds it with batches. Importing it is
cheap: pyarrow and deltalake load when one of these functions is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upriver.lake.options import SyncKeywords, SyncOptions
    from upriver.lake.reading import collections, read, read_documents, read_history, view_sql
    from upriver.lake.sql import merge_sql
    from upriver.lake.verify.comparison import Comparison, TableView
    from upriver.lake.verify.judge import compare

# Where each public name lives; loaded when it is first used.
_EXPORTS = {
    "Comparison": "upriver.lake.verify.comparison",
    "SyncKeywords": "upriver.lake.options",
    "SyncOptions": "upriver.lake.options",
    "TableView": "upriver.lake.verify.comparison",
    "collections": "upriver.lake.reading",
    "compare": "upriver.lake.verify.judge",
    "merge_sql": "upriver.lake.sql",
    "read": "upriver.lake.reading",
    "read_documents": "upriver.lake.reading",
    "read_history": "upriver.lake.reading",
    "view_sql": "upriver.lake.reading",
}

__all__ = [
    "Comparison",
    "SyncKeywords",
    "SyncOptions",
    "TableView",
    "collections",
    "compare",
    "merge_sql",
    "read",
    "read_documents",
    "read_history",
    "view_sql",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'upriver.lake' has no attribute {name!r}")
    found: object = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = found
    return found
