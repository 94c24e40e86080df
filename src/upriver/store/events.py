"""Collections inside one vbucket: the manifest as its own log tells it, and system events (``protocol.md`` 9.3, 9.5).

Active vbuckets turn a manifest into events; replicas learn the manifest from the events that they receive.
"""

from __future__ import annotations

from struct import error
from typing import Any

import numpy as np

from upriver.errors import InvalidArguments, InvalidMessage, OutOfRange
from upriver.model import VbucketState
from upriver.store import kernels as k
from upriver.store.core import Core
from upriver.store.disk import Octets, Words
from upriver.store.manifest import Change, CollectionEntry, Event, Manifest, ScopeEntry
from upriver.wire.events import (
    CollectionBegun,
    CollectionEnded,
    CollectionEvent,
    ScopeCreated,
    ScopeDropped,
    of_record,
    to_record,
)
from upriver.wire.keys import split_key
from upriver.wire.packed import Kind, Packed, pack, unpack

EPOCH = Manifest()


class Collections(Core):
    """``manifest`` is what this vbucket knows, which may be older than the bucket's."""

    manifest: Manifest = EPOCH
    _described: tuple[Manifest, str | None] = (EPOCH, None)  # the last one that was put down, and how

    def describe(self) -> dict[str, Any]:
        fields = super().describe()
        if self._described[0] is not self.manifest:
            known = self.manifest
            self._described = known, known.to_json().decode() if known != EPOCH else None
        fields["manifest"] = self._described[1]
        return fields

    def _restore(self, fields: dict[str, Any]) -> None:
        stored = fields.pop("manifest")
        self.manifest = Manifest.parse(stored, partial=True) if stored else Manifest()
        super()._restore(fields)

    def apply_manifest(self, new: Manifest) -> None:
        """Bring the collections to ``new`` by events of our own; all but the last carry the old uid."""
        if self.state is not VbucketState.ACTIVE:
            return
        old = self.manifest
        changes = list(old.changes(new))
        for index, change in enumerate(changes):
            uid = new.uid if index == len(changes) - 1 else old.uid
            self._write_event(*_described(change, uid), self.high_seqno + 1)
            self._settle_change(change.event, change.collection, self.high_seqno)
        self.manifest = new
        self.manifest_uid = new.uid
        if changes:
            self.wake()

    def adopt_manifest(self) -> None:
        """A vbucket that became active takes over what the bucket has decided meanwhile."""
        if self.shared.manifest.uid > self.manifest.uid:
            self.apply_manifest(self.shared.manifest)

    def _take_event(self, run: Octets, at: int) -> int:
        head, key, value = unpack(run.data, at)
        if not self.high_seqno < head.seqno <= self.snap_end:
            raise OutOfRange(f"seqno {head.seqno} does not follow {self.high_seqno} in its snapshot")
        self.learn(head, key, value)
        self._write_event(head.extra >> 8, head.extra & 0xFF, key, value, head.collection_id, head.seqno)
        return at + head.size

    def learn(self, head: Packed, key: bytes, value: bytes) -> None:
        """Take a system event from the log or from a producer into the manifest and the collection table."""
        try:
            event = Event(head.extra >> 8)
            content = of_record(event, head.extra & 0xFF, key, value)
        except (ValueError, error, InvalidMessage) as failure:
            raise InvalidArguments(f"the system event at seqno {head.seqno} cannot be read") from failure
        scope, entry = ScopeEntry(content.scope_id, key.decode()), self._entry(content)
        self.manifest = _with_event(self.manifest, event, content.manifest_uid, scope, entry)
        self.manifest_uid = self.manifest.uid
        self._settle_change(event, entry, head.seqno)

    def _entry(self, content: CollectionEvent) -> CollectionEntry | None:
        if isinstance(content, CollectionEnded):
            known = self.manifest.collections.get(content.collection_id)
            return known or CollectionEntry(content.collection_id, "", content.scope_id)
        if isinstance(content, CollectionBegun):
            flags = content.max_ttl, content.history, content.metered, content.flush_uid or None
            return CollectionEntry(content.collection_id, content.name, content.scope_id, *flags)
        return None

    def _settle_change(self, event: Event, entry: CollectionEntry | None, seqno: int) -> None:
        """The collection table after an event at ``seqno``."""
        if entry is None:
            return
        known = self.collections[:, k.C_ID] == np.uint64(entry.id)
        if event is not Event.MODIFY_COLLECTION and self.pending:
            self._forget_pending(entry.id)
        if event is Event.END_COLLECTION:
            self.collections = self.collections[~known].copy()
            self.erasing = True
        elif event is Event.MODIFY_COLLECTION:
            self.collections[known, k.C_HIGH] = self.collections[known, k.C_VISIBLE] = seqno
        else:
            self.erasing = self.erasing or bool(known.any())
            row = np.array([[entry.id, 0, seqno, seqno, seqno]], np.uint64)
            self.collections = np.concatenate([self.collections[~known], row])

    def _forget_pending(self, collection_id: int) -> None:
        """Durable writes of a collection that is dropped or flushed end with it: nobody can commit them any more."""
        for wire_key in [key for key in self.pending if split_key(key)[0] == collection_id]:
            del self.pending[wire_key]

    def _write_event(
        self, event: int, version: int, key: bytes, value: bytes, collection_id: int, seqno: int
    ) -> None:
        """Append a system event; it is in no key index and never deduplicated."""
        record = pack(
            Kind.SYSTEM_EVENT, key, value, seqno=seqno, cas=0, collection_id=collection_id, extra=event << 8 | version
        )
        size = len(record)
        segment = self._open_segment(size)
        if not self.memory.room(size, segment.end):
            self.close_segment()
            segment = self._begin_segment(size)
        used = segment.end
        segment.checkpoint.data[used : used + size] = np.frombuffer(record, np.uint8)
        self.registers[k.USED] = used + size
        self.registers[k.GAPS] += np.uint64(seqno != self.high_seqno + 1)
        self.registers[k.HIGH] = self.registers[k.VISIBLE] = self.registers[k.FIRST] = seqno
        self._took_in(segment, used)


def _described(change: Change, uid: int) -> tuple[int, int, bytes, bytes, int]:
    """(event, version, key, value, collection id) of a change."""
    event, scope, entry = change
    if entry is None:
        made = ScopeCreated(scope.name, uid, scope.id) if event is Event.CREATE_SCOPE else ScopeDropped(uid, scope.id)
        return *to_record(made), 0
    if event is Event.END_COLLECTION:
        return *to_record(CollectionEnded(uid, scope.id, entry.id)), entry.id
    flags = entry.max_ttl, entry.history, entry.metered, entry.flush_uid or 0
    begun = CollectionBegun(entry.name, uid, scope.id, entry.id, *flags, modified=event is Event.MODIFY_COLLECTION)
    return *to_record(begun), entry.id


def _with_event(
    manifest: Manifest, event: Event, uid: int, scope: ScopeEntry, entry: CollectionEntry | None
) -> Manifest:
    scopes, collections = dict(manifest.scopes), dict(manifest.collections)
    if event is Event.CREATE_SCOPE:
        scopes[scope.id] = scope
    elif event is Event.DROP_SCOPE:
        scopes.pop(scope.id, None)
    elif event is Event.END_COLLECTION and entry is not None:
        collections.pop(entry.id, None)
    elif entry is not None:
        collections[entry.id] = entry
    return Manifest(uid, scopes, collections)


def default_table() -> Words:
    """The collection table of a vbucket that has seen no event."""
    return np.zeros((1, k.C_WORDS), np.uint64)
