"""Collections inside one vbucket: the manifest as its own log tells it, and system events (``protocol.md`` 9.3, 9.5).

Active vbuckets turn a manifest into events; replicas learn the manifest from the events that they receive.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct, error
from typing import Any

import numpy as np

from upriver.errors import InvalidArguments, OutOfRange
from upriver.model import VbucketState
from upriver.store import kernels as k
from upriver.store.core import Core
from upriver.store.disk import Octets, Words
from upriver.store.manifest import Change, CollectionEntry, Event, Manifest, ScopeEntry
from upriver.wire.packed import Kind, Packed, pack, unpack

SCOPE_VALUE = Struct(">QI")  # manifest uid, scope id
COLLECTION_VALUE = Struct(">QII")  # ... and collection id
TTL_VALUE = Struct(">QIII")  # ... and max TTL
V0, V1 = 0, 1
EPOCH = Manifest()


class Collections(Core):
    """``manifest`` is what this vbucket knows, which may be older than the bucket's."""

    manifest: Manifest = EPOCH

    def describe(self) -> dict[str, Any]:
        fields = super().describe()
        fields["manifest"] = self.manifest.to_json().decode() if self.manifest != Manifest() else None
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
            uid, scope_id = SCOPE_VALUE.unpack_from(value)
            entry = None
            if event not in (Event.CREATE_SCOPE, Event.DROP_SCOPE):
                entry = self._entry(event, key, value, scope_id)
        except (ValueError, error) as failure:
            raise InvalidArguments(f"the system event at seqno {head.seqno} cannot be read") from failure
        self.manifest = _with_event(self.manifest, event, uid, ScopeEntry(scope_id, key.decode()), entry)
        self.manifest_uid = self.manifest.uid
        self._settle_change(event, entry, head.seqno)

    def _entry(self, event: Event, key: bytes, value: bytes, scope_id: int) -> CollectionEntry:
        collection_id = COLLECTION_VALUE.unpack_from(value)[2]
        known = self.manifest.collections.get(collection_id)
        max_ttl = TTL_VALUE.unpack_from(value)[3] if len(value) >= TTL_VALUE.size else None
        if event is Event.END_COLLECTION:
            return known or CollectionEntry(collection_id, "", scope_id)
        base = known or CollectionEntry(collection_id, key.decode(), scope_id)
        return replace(base, max_ttl=max_ttl)

    def _settle_change(self, event: Event, entry: CollectionEntry | None, seqno: int) -> None:
        """The collection table after an event at ``seqno``."""
        if entry is None:
            return
        known = self.collections[:, k.C_ID] == np.uint64(entry.id)
        if event is Event.END_COLLECTION:
            self.collections = self.collections[~known].copy()
            self.erasing = True
        elif event is Event.MODIFY_COLLECTION:
            self.collections[known, k.C_HIGH] = self.collections[known, k.C_VISIBLE] = seqno
        else:
            self.erasing = self.erasing or bool(known.any())
            row = np.array([[entry.id, 0, seqno, seqno, seqno]], np.uint64)
            self.collections = np.concatenate([self.collections[~known], row])

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
    """(event, version, key, value, collection id) of a change, as 9.5 lays them out."""
    event, scope, entry = change
    if entry is None:
        name = scope.name.encode() if event is Event.CREATE_SCOPE else b""
        return event, V0, name, SCOPE_VALUE.pack(uid, scope.id), 0
    if event is Event.END_COLLECTION:
        return event, V0, b"", COLLECTION_VALUE.pack(uid, scope.id, entry.id), entry.id
    name = entry.name.encode()
    if entry.max_ttl is None and event is Event.BEGIN_COLLECTION:
        return event, V0, name, COLLECTION_VALUE.pack(uid, scope.id, entry.id), entry.id
    return event, V1, name, TTL_VALUE.pack(uid, scope.id, entry.id, entry.max_ttl or 0), entry.id


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
