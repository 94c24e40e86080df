"""A model reader that applies changes, rollbacks, drops and flushes, as objects or batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.support.by_id import ById
from upriver.cli.rendering import event_of
from upriver.client.blocking import Database, collection_names
from upriver.client.changes import Deletion, Mutation, RolledBack
from upriver.errors import KeyNotFound

_DOCUMENTS = ("mutation", "deletion", "expiration")
_GONE = ("collection_dropped", "collection_flushed")
Documents = dict[tuple[int, bytes], bytes]


class Log:
    """Changes by vbucket and seqno, so that any of them can be undone; documents are computed from them."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], tuple[int, bytes | None, bytes | None]] = {}
        self.rollbacks: list[tuple[int, int]] = []

    def take(self, item: Any) -> None:
        """A change, or a batch of them."""
        if isinstance(item, tuple):
            self._take_change(item)
            return
        for row in item.to_pylist():
            self._note(row["event"], row["vbucket"], row["seqno"], row["collection_id"], row["key"], row["value"])

    def _take_change(self, change: Any) -> None:
        if isinstance(change, RolledBack):
            self.undo(change.vbucket, change.to_seqno)
        elif isinstance(change, Mutation | Deletion):
            value = getattr(change, "value", None)
            self._note(event_of(change), change.vbucket, change.seqno, change.collection_id, change.key, value)
        else:
            number = getattr(change.content, "collection_id", -1)
            self._note(event_of(change), change.vbucket, change.seqno, number, None, None)

    def _note(self, event: str, vb: int, seqno: int, number: int, key: bytes | None, value: bytes | None) -> None:
        if event == "rollback":
            self.undo(vb, seqno)
        elif event in _DOCUMENTS:
            self._entries[vb, seqno] = number, key, value if event == "mutation" else None
        elif event in _GONE:
            self._entries[vb, seqno] = number, None, None

    def undo(self, vb: int, above: int) -> None:
        self.rollbacks.append((vb, above))
        self._entries = {at: e for at, e in self._entries.items() if at[0] != vb or at[1] <= above}

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Read only these collections from now on; forget the others, which would become stale."""
        kept = set(numbers)
        self._entries = {at: e for at, e in self._entries.items() if e[0] in kept}

    def documents(self) -> Documents:
        found: Documents = {}
        for (_, _), (number, key, value) in sorted(self._entries.items(), key=lambda entry: entry[0]):
            if key is None:
                found = {at: held for at, held in found.items() if at[0] != number}
            elif value is None:
                found.pop((number, key), None)
            else:
                found[number, key] = value
        return found


def documents_of(db: Database, keys: Iterable[tuple[int, bytes]]) -> Documents:
    """The documents according to key-value requests, in collections that exist."""
    existing, found = collection_names(db), {}
    for number, key in keys:
        if number in existing:
            try:
                found[number, key] = ById(db, number).get(key).value
            except KeyNotFound:
                continue
    return found
