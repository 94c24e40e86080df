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
from upriver.store.collections.manifest import CollectionEntry, Event, Manifest, ScopeEntry
from upriver.store.collections.transition import Transition
from upriver.store.core import Core
from upriver.store.disk.file import Octets, Words
from upriver.store.log.memory import OpenSegment
from upriver.wire.keys import split_key
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, CollectionEvent, of_record
from upriver.wire.packed import RecordHead, RecordKind, pack, unpack

EPOCH = Manifest()


class Collections(Core):
    """``manifest`` is what this vbucket knows, which may be older than the bucket's."""

    manifest: Manifest = EPOCH
    _described: tuple[Manifest, str | int | None] = (EPOCH, None)  # the last one that was put down, and how

    def describe(self) -> dict[str, Any]:
        fields = super().describe()
        if self._described[0] is not self.manifest:
            self._described = self.manifest, self._manifest_on_disk()
        fields["manifest"] = self._described[1]
        return fields

    def _manifest_on_disk(self) -> str | int | None:
        """The uid of one that the bucket keeps; of any other, which a replica was told in events, all of it."""
        kept = self.shared.manifests.get(self.manifest.uid)
        if kept is not None and kept == self.manifest:
            self.manifest = kept
            return kept.uid
        return self.manifest.to_json().decode() if self.manifest != EPOCH else None

    def _restore(self, fields: dict[str, Any]) -> None:
        stored = fields.pop("manifest")
        if isinstance(stored, int):
            if stored not in self.shared.manifests:
                raise self.shared.disk.damaged(self.id, f"its manifest {stored:x} is missing or damaged")
            self.manifest = self.shared.manifests[stored]
        else:
            self.manifest = Manifest.parse(stored, partial=True) if stored else EPOCH
        super()._restore(fields)

    def apply_manifest(self, transition: Transition) -> None:
        """Bring the collections to those of the new manifest by events of our own."""
        first = self.high_seqno + 1
        for count, run in transition.pieces(first, self.memory.most_bytes) if transition.events else ():
            self._append_events(run, count)
        self.erasing = self.erasing or bool(transition.emptied)
        self.collections = transition.table(self.collections, first)
        for collection_id in transition.emptied if self.pending else ():
            self._forget_pending(collection_id)
        self.manifest = transition.new
        self.manifest_uid = transition.new.uid
        self.shared.note_dirty(self, 0)
        if transition.events:
            self.wake()

    def _append_events(self, run: Octets, count: int) -> None:
        """System events that have their seqnos; they are in no key index and never deduplicated."""
        segment = self._event_segment(run.size)
        used, high = segment.end, self.high_seqno
        segment.checkpoint.data[used : used + run.size] = run
        self.registers[k.USED] = used + run.size
        self.registers[k.FIRST] = high + 1
        self.registers[k.HIGH] = self.registers[k.VISIBLE] = high + count
        self._took_in(segment, used)

    def _event_segment(self, size: int) -> OpenSegment:
        segment = self._open_segment(size)
        if not self.memory.room(size, segment.end):
            self.close_segment()
            segment = self._begin_segment(size)
        return segment

    @property
    def lags_behind_manifest(self) -> bool:
        """An active vbucket that has not made the bucket's last change."""
        return self.state is VbucketState.ACTIVE and self.shared.manifest.uid > self.manifest.uid

    def adopt_manifest(self) -> None:
        """A vbucket that became active takes over what the bucket has decided meanwhile."""
        if self.shared.manifest.uid > self.manifest.uid:
            self.apply_manifest(self.shared.transition_from(self.manifest))

    def _take_event(self, run: Octets, at: int) -> int:
        head, key, value = unpack(run.data, at)
        if not self.high_seqno < head.seqno <= self.snap_end:
            raise OutOfRange(f"seqno {head.seqno} does not follow {self.high_seqno} in its snapshot")
        self.learn(head, key, value)
        self._write_event(head.extra >> 8, head.extra & 0xFF, key, value, head.collection_id, head.seqno)
        return at + head.size

    def learn(self, head: RecordHead, key: bytes, value: bytes) -> None:
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

    def _write_event(self, event: int, version: int, key: bytes, value: bytes, collection_id: int, seqno: int) -> None:
        """Append a system event; it is in no key index and never deduplicated."""
        record = pack(
            RecordKind.SYSTEM_EVENT,
            key,
            value,
            seqno=seqno,
            cas=0,
            collection_id=collection_id,
            extra=event << 8 | version,
        )
        size = len(record)
        segment = self._event_segment(size)
        used = segment.end
        segment.checkpoint.data[used : used + size] = np.frombuffer(record, np.uint8)
        self.registers[k.USED] = used + size
        self.registers[k.GAPS] += np.uint64(seqno != self.high_seqno + 1)
        self.registers[k.HIGH] = self.registers[k.VISIBLE] = self.registers[k.FIRST] = seqno
        self._took_in(segment, used)


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
