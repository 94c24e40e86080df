"""The transition of vbuckets from an older manifest to a new one, computed once for all of them.

A thousand vbuckets with a thousand events each are a million records. So the records are laid out once, without
seqnos, and each vbucket only fills its seqnos into a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from upriver.store import registers as r
from upriver.store.collections.manifest import CollectionEntry, Manifest, ManifestChange, ManifestEvent
from upriver.store.disk.file import Octets, Words
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, ScopeCreated, ScopeDropped, to_record
from upriver.wire.packed import AT_SEQNO, RecordKind, pack

_SEQNO_BYTES = np.arange(AT_SEQNO, AT_SEQNO + 8)


class Transition:
    """From ``old`` to ``new``, as events; all but the last carry the old uid (docs/protocol/collections.md#applying).

    ``emptied`` are the collections whose documents are removed: those that are dropped or flushed.
    """

    def __init__(self, old: Manifest, new: Manifest) -> None:
        self.old, self.new = old, new
        changes = list(old.changes(new))
        self.events = len(changes)
        self._lay_out(changes)
        touched = [(at, change) for at, change in enumerate(changes) if change.collection is not None]
        begun = {_id(change): at for at, change in touched if change.event is ManifestEvent.BEGIN_COLLECTION}
        self._rows: Words = np.array([[number, 0, at, at, at] for number, at in begun.items()], np.uint64)
        self._altered = [(at, _id(change)) for at, change in touched if change.event is ManifestEvent.MODIFY_COLLECTION]
        self.emptied = {_id(change) for _, change in touched if change.event is ManifestEvent.END_COLLECTION}
        self.emptied |= begun.keys() & old.collections.keys()
        self._emptied: Words = np.array(sorted(self.emptied), np.uint64)

    def _lay_out(self, changes: list[ManifestChange]) -> None:
        last = len(changes) - 1
        uids = self.old.uid, self.new.uid
        records = [_record(change, uids[at == last]) for at, change in enumerate(changes)]
        self._run: Octets = np.frombuffer(b"".join(records), np.uint8)
        self._ends: npt.NDArray[np.int64] = np.cumsum([len(record) for record in records], dtype=np.int64)
        self._seqnos_at = np.concatenate([[0], self._ends])[:-1, None] + _SEQNO_BYTES

    def pieces(self, first: int, most_bytes: int) -> Iterator[tuple[int, Octets]]:
        """(count, run) of the records, with seqnos from ``first``; a run has at most ``most_bytes``, or one record."""
        run = self._run.copy()
        seqnos = np.arange(first, first + self.events, dtype="<u8")
        run[self._seqnos_at] = seqnos.view(np.uint8).reshape(-1, 8)
        done, begin = 0, 0
        while done < self.events:
            fitting = int(np.searchsorted(self._ends, begin + most_bytes, side="right"))
            upto = max(done + 1, fitting)
            end = int(self._ends[upto - 1])
            yield upto - done, run[begin:end]
            done, begin = upto, end

    def table(self, before: Words, first: int) -> Words:
        """The collection table of a vbucket after the events, the first of which has seqno ``first``."""
        after = before
        if self.emptied:
            after = before[~np.isin(before[:, r.C_ID], self._emptied)]
        if self._altered:
            after = self._alter(after.copy(), first)
        if self._rows.size:
            fresh = self._rows.copy()
            fresh[:, [r.C_HIGH, r.C_START, r.C_VISIBLE]] += np.uint64(first)
            after = np.concatenate([after, fresh])
        return after

    def _alter(self, table: Words, first: int) -> Words:
        place = {number: row for row, number in enumerate(table[:, r.C_ID].tolist())}
        for at, number in self._altered:
            if number in place:
                table[place[number], [r.C_HIGH, r.C_VISIBLE]] = first + at
        return table


def _id(change: ManifestChange) -> int:
    assert change.collection is not None
    return change.collection.id


def _record(change: ManifestChange, uid: int) -> bytes:
    event, version, key, value = to_record(_content(change, uid))
    collection_id = change.collection.id if change.collection is not None else 0
    return pack(
        RecordKind.SYSTEM_EVENT, key, value, seqno=0, cas=0, collection_id=collection_id, extra=event << 8 | version
    )


def _content(change: ManifestChange, uid: int) -> ScopeCreated | ScopeDropped | CollectionBegun | CollectionEnded:
    event, scope, entry = change
    if entry is None:
        return (
            ScopeCreated(scope.name, uid, scope.id)
            if event is ManifestEvent.CREATE_SCOPE
            else ScopeDropped(uid, scope.id)
        )
    if event is ManifestEvent.END_COLLECTION:
        return CollectionEnded(uid, scope.id, entry.id)
    return _begun(entry, uid, scope.id, modified=event is ManifestEvent.MODIFY_COLLECTION)


def _begun(entry: CollectionEntry, uid: int, scope_id: int, modified: bool) -> CollectionBegun:
    flags = entry.max_ttl, entry.history, entry.metered, entry.flush_uid or 0
    return CollectionBegun(entry.name, uid, scope_id, entry.id, *flags, modified=modified)
