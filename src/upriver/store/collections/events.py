"""The collections of one vbucket: its manifest, and the system events in its history.

Active vbuckets turn a manifest into events; replicas learn the manifest from the events that they receive.

See docs/protocol/collections.md.
"""

from __future__ import annotations

from struct import error
from typing import TYPE_CHECKING

import numpy as np

from upriver.errors import InvalidArguments, InvalidMessage, OutOfRange
from upriver.model import VbucketState
from upriver.store import registers as r
from upriver.store.collections.manifest import CollectionEntry, Manifest, ManifestEvent, ScopeEntry
from upriver.store.collections.transition import Transition
from upriver.store.disk.file import Octets, Words
from upriver.wire.keys import split_key
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, CollectionEvent, of_record
from upriver.wire.packed import RecordHead, RecordKind, pack, unpack

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

EPOCH = Manifest()


class Collections:
    """The collections of one vbucket. Its ``manifest`` may be older than the bucket's."""

    __slots__ = ("_field", "_vb", "manifest")

    def __init__(self, vbucket: VBucket) -> None:
        self._vb = vbucket
        self.manifest = EPOCH
        self._field: tuple[Manifest, str | int | None] = (EPOCH, None)  # a manifest, and its form in the record

    def manifest_field(self) -> str | int | None:
        """The manifest as the vbucket's record has it.

        That is the uid of a manifest that the bucket keeps, or all of one that a replica learned from events.
        """
        if self._field[0] is not self.manifest:
            kept = self._vb.shared.manifests.get(self.manifest.uid)
            if kept is not None and kept == self.manifest:
                self.manifest = kept
                self._field = kept, kept.uid
            else:
                self._field = self.manifest, self.manifest.to_json().decode() if self.manifest != EPOCH else None
        return self._field[1]

    def restore(self, field: str | int | None) -> None:
        """The inverse of ``manifest_field``."""
        shared = self._vb.shared
        if isinstance(field, int):
            if field not in shared.manifests:
                raise shared.disk.damaged(self._vb.id, f"its manifest {field:x} is missing or damaged")
            self.manifest = shared.manifests[field]
        else:
            self.manifest = Manifest.parse(field, partial=True) if field else EPOCH

    @property
    def lags_behind(self) -> bool:
        """Whether this is an active vbucket with a manifest older than the bucket's."""
        vb = self._vb
        return vb.state is VbucketState.ACTIVE and vb.shared.manifest.uid > self.manifest.uid

    def adopt_manifest(self) -> None:
        """Bring a vbucket that became active up to the bucket's manifest."""
        shared = self._vb.shared
        if shared.manifest.uid > self.manifest.uid:
            self.apply_manifest(shared.transition_from(self.manifest))

    def apply_manifest(self, transition: Transition) -> None:
        """Apply the new manifest and write its system events."""
        vb = self._vb
        first = vb.high_seqno + 1
        for count, run in transition.pieces(first, vb.memory.most_bytes) if transition.events else ():
            self._append_events(run, vb.high_seqno + 1, vb.high_seqno + count)
        vb.erasing = vb.erasing or bool(transition.emptied)
        vb.replace_collection_table(transition.table(vb.collection_table, first))
        for collection_id in transition.emptied if vb.pending else ():
            self._forget_pending(collection_id)
        self.manifest = transition.new
        vb.shared.note_dirty(vb, 0)
        if transition.events:
            vb.wake()

    def receive_event(self, run: Octets, at: int) -> int:
        """Apply a system event among replicated records; returns where the next record begins."""
        vb = self._vb
        head, key, value = unpack(run.data, at)
        if not vb.high_seqno < head.seqno <= vb.snap_end:
            raise OutOfRange(f"seqno {head.seqno} does not follow {vb.high_seqno} in its snapshot")
        self.learn(head, key, value)
        collection = head.collection_id
        record = pack(RecordKind.SYSTEM_EVENT, key, value, seqno=head.seqno, collection_id=collection, extra=head.extra)
        vb.registers[r.GAPS] += np.uint64(head.seqno != vb.high_seqno + 1)
        self._append_events(np.frombuffer(record, np.uint8), head.seqno, head.seqno)
        return at + head.size

    def _append_events(self, run: Octets, first: int, last: int) -> None:
        """Append system events with seqnos; they are in no key index and never deduplicated."""
        vb = self._vb
        segment = vb.open_segment_with_room(run.size)
        used = segment.end
        segment.checkpoint.data[used : used + run.size] = run
        vb.registers[r.USED] = used + run.size
        vb.registers[r.FIRST] = first
        vb.registers[r.HIGH] = vb.registers[r.VISIBLE] = last
        vb.appended(segment, used)

    def learn(self, head: RecordHead, key: bytes, value: bytes) -> None:
        """Update manifest and collection table from a system event of the log or of a producer."""
        try:
            event = ManifestEvent(head.extra >> 8)
            content = of_record(event, head.extra & 0xFF, key, value)
        except (ValueError, error, InvalidMessage) as failure:
            raise InvalidArguments(f"the system event at seqno {head.seqno} cannot be read") from failure
        scope, entry = ScopeEntry(content.scope_id, key.decode()), self._entry(content)
        self.manifest = _with_event(self.manifest, event, content.manifest_uid, scope, entry)
        if entry is not None:
            self._change_table(event, entry, head.seqno)

    def _entry(self, content: CollectionEvent) -> CollectionEntry | None:
        if isinstance(content, CollectionEnded):
            known = self.manifest.collections.get(content.collection_id)
            return known or CollectionEntry(content.collection_id, "", content.scope_id)
        if isinstance(content, CollectionBegun):
            flags = content.max_ttl, content.history, content.metered, content.flush_uid or None
            return CollectionEntry(content.collection_id, content.name, content.scope_id, *flags)
        return None

    def _change_table(self, event: ManifestEvent, entry: CollectionEntry, seqno: int) -> None:
        """Update the collection table for an event at ``seqno``."""
        vb = self._vb
        table = vb.collection_table
        known = table[:, r.C_ID] == np.uint64(entry.id)
        if event is not ManifestEvent.MODIFY_COLLECTION and vb.pending:
            self._forget_pending(entry.id)
        if event is ManifestEvent.END_COLLECTION:
            vb.replace_collection_table(table[~known].copy())
            vb.erasing = True
        elif event is ManifestEvent.MODIFY_COLLECTION:
            table[known, r.C_HIGH] = table[known, r.C_VISIBLE] = seqno
        else:
            vb.erasing = vb.erasing or bool(known.any())
            row = np.array([[entry.id, 0, seqno, seqno, seqno]], np.uint64)
            vb.replace_collection_table(np.concatenate([table[~known], row]))

    def _forget_pending(self, collection_id: int) -> None:
        """Forget pending durable writes of a dropped or flushed collection: they can no longer be committed."""
        pending = self._vb.pending
        for wire_key in [key for key in pending if split_key(key)[0] == collection_id]:
            del pending[wire_key]


def _with_event(
    manifest: Manifest, event: ManifestEvent, uid: int, scope: ScopeEntry, entry: CollectionEntry | None
) -> Manifest:
    scopes, collections = dict(manifest.scopes), dict(manifest.collections)
    if event is ManifestEvent.CREATE_SCOPE:
        scopes[scope.id] = scope
    elif event is ManifestEvent.DROP_SCOPE:
        scopes.pop(scope.id, None)
    elif event is ManifestEvent.END_COLLECTION and entry is not None:
        collections.pop(entry.id, None)
    elif entry is not None:
        collections[entry.id] = entry
    return Manifest(uid, scopes, collections)


def default_table() -> Words:
    """The collection table of a vbucket that has seen no event."""
    return np.zeros((1, r.C_WORDS), np.uint64)
