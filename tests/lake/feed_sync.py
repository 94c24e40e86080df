"""A sync in miniature, without Spark: a made-up feed and the tables that follow it, batch by batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.lake.feeds import Feed
from upriver.lake import read_documents
from upriver.lake.apply.policy import MergePolicy, TableOptions
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.layout import Lake
from upriver.lake.tables import Tables


class FeedSync:
    """A feed and the tables that follow it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = str(root)
        self.feed = Feed(collections=("orders", "users"))
        self.options = TableOptions(**{"vbuckets": 4, "policy": MergePolicy(small_rows=0), **options})
        self.number = 0
        self.open()

    def open(self, **more: Any) -> None:
        """Open the tables anew, as a new process would."""
        self.tables = Tables(Lake(self.root), "app", self.options, **more)

    def commit(self) -> None:
        written = write_log(self.feed.batch(), self.root, self.number)
        self.tables.apply(self.number, WrittenFiles.from_tasks([written.to_json()]))
        self.number += 1

    def change_half(self) -> list[int]:
        """Write twenty documents, then new versions of every other one; return the high seqnos in between."""
        for index in range(20):
            self.feed.put(f"k{index}", {"n": index})
        self.commit()
        between = [history.seqno for history in self.feed.histories]
        for index in range(0, 20, 2):
            self.feed.put(f"k{index}", {"n": -1})
        self.commit()
        return between

    def read(self, name: str = "shop.orders") -> dict[str, Any]:
        return read_documents(self.root, name)

    @property
    def orders(self) -> Any:
        return self.tables.collection("shop.orders")
