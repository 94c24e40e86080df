"""A bucket in miniature that emits rows of the change feed, loses history when told to, and knows what is true."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson
import pyarrow as pa

from upriver.records.schema import CHANGES

BASE_NS = 1_700_000_000_000_000_000


@dataclass
class History:
    """One vbucket: its documents at every seqno, newest last."""

    seqno: int = 0
    epoch: int = 0
    vbuuid: int = 1
    branches: list[tuple[int, int]] = field(default_factory=lambda: [(1, 0)])  # oldest first
    states: list[tuple[int, dict[str, dict[str, bytes]]]] = field(default_factory=lambda: [(0, {})])


class Feed:
    """Writes go in, rows come out in the order of the feed."""

    def __init__(self, vbuckets: int = 4, collections: tuple[str, ...] = ("orders",)) -> None:
        self.vbuckets = vbuckets
        self.histories = [History() for _ in range(vbuckets)]
        self.scope = "shop"
        self.ids = {name: 8 + index for index, name in enumerate(collections)}
        self.pending: list[dict[str, object]] = []
        self.stored: list[dict[str, object]] = []  # every change that no failover lost
        self.clock = 0

    def vbucket(self, key: str) -> int:
        return zlib.crc32(key.encode()) % self.vbuckets

    def put(self, key: str, value: bytes | dict[str, object], collection: str = "orders", json: bool = True) -> None:
        data = value if isinstance(value, bytes) else orjson.dumps(value)
        self._write(self.vbucket(key), collection, key, data, int(json))

    def delete(self, key: str, collection: str = "orders") -> None:
        self._write(self.vbucket(key), collection, key, None, 0)

    def _write(self, vbucket: int, collection: str, key: str, value: bytes | None, datatype: int) -> None:
        history = self.histories[vbucket]
        documents = copy.deepcopy(history.states[-1][1])
        mine = documents.setdefault(collection, {})
        if value is None:
            mine.pop(key, None)
        else:
            mine[key] = value
        self._next(history, documents)
        event = "deletion" if value is None else "mutation"
        self._emit(event, vbucket, collection=collection, key=key.encode(), value=value, datatype=datatype)

    def _next(self, history: History, documents: dict[str, dict[str, bytes]]) -> None:
        history.seqno += 1
        self.clock += 1
        history.states.append((history.seqno, documents))

    def drop(self, collection: str) -> None:
        """Drop a collection in every vbucket, and create it again under a new id."""
        for vbucket, history in enumerate(self.histories):
            documents = copy.deepcopy(history.states[-1][1])
            documents.pop(collection, None)
            self._next(history, documents)
            self._emit("collection_dropped", vbucket, collection=collection)
        self.ids[collection] = max(self.ids.values()) + 1

    def fail_over(self, vbucket: int, seqno: int) -> None:
        """Lose everything of a vbucket above ``seqno``, as a failover does."""
        history = self.histories[vbucket]
        history.states = [state for state in history.states if state[0] <= seqno]
        history.seqno = history.states[-1][0]
        self.stored = [row for row in self.stored if row["vbucket"] != vbucket or row["seqno"] <= seqno]  # type: ignore[operator]
        history.epoch += 1
        history.vbuuid += 1
        history.branches.append((history.vbuuid, history.seqno))
        self._emit("rollback", vbucket)

    def _emit(self, event: str, vbucket: int, **given: object) -> None:
        history = self.histories[vbucket]
        row: dict[str, object] = dict.fromkeys(CHANGES.names)
        row |= {
            "event": event,
            "vbucket": vbucket,
            "seqno": history.seqno,
            "epoch": history.epoch,
            "vbuuid": history.vbuuid,
        }
        if event != "rollback":
            cas = BASE_NS + self.clock * 1_000_000_000
            row |= {
                "scope": self.scope,
                "collection_id": self.ids[str(given["collection"])],
                "cas": cas,
                "timestamp": datetime.fromtimestamp(cas / 1e9, UTC),
                "expiry": 0,
                "rev_seqno": 1,
                "flags": 0,
            }
        self.pending.append(row | given)
        if event != "rollback":
            self.stored.append(row | given)

    def batch(self) -> list[pa.RecordBatch]:
        """Everything that happened since the last call."""
        rows, self.pending = self.pending, []
        return [pa.RecordBatch.from_pylist(rows, schema=CHANGES)] if rows else []

    def scan(self, vbuckets: Iterable[int]) -> list[pa.RecordBatch]:
        """What a stream from the beginning sends: the newest change of every key, and nothing of rollbacks."""
        last = {(row["collection_id"], row["key"]): row for row in self.stored if row["vbucket"] in set(vbuckets)}
        rows = sorted(last.values(), key=lambda row: (row["vbucket"], row["seqno"]))
        return [pa.RecordBatch.from_pylist([row | {"epoch": 0} for row in rows], schema=CHANGES)] if rows else []

    def truth(self, collection: str = "orders") -> dict[str, bytes]:
        return {
            key: value for history in self.histories for key, value in history.states[-1][1].get(collection, {}).items()
        }
