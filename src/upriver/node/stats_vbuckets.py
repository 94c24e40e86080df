"""Statistics about vbuckets and collections: their seqnos, histories and counts (``protocol.md`` 10.10)."""

from __future__ import annotations

import json

from upriver.model import VbucketState
from upriver.node.stats_query import Figures, Query, shown_high_seqno

# ---------------------------------------------------------------------------------------------- vbuckets


def vbucket(query: Query) -> Figures:
    for vb in query.vbuckets():
        yield f"vb_{vb.id}", vb.state.name.lower()


def vbucket_seqno(query: Query) -> Figures:
    for vb in query.vbuckets():
        prefix = f"vb_{vb.id}:"
        snap_start, snap_end = vb.snapshot
        yield prefix + "high_seqno", shown_high_seqno(vb)
        yield prefix + "abs_high_seqno", vb.high_seqno
        yield prefix + "last_persisted_seqno", vb.persisted_seqno
        yield prefix + "uuid", vb.uuid
        yield prefix + "purge_seqno", vb.purge_seqno
        yield prefix + "last_persisted_snap_start", min(snap_start, vb.persisted_seqno)
        yield prefix + "last_persisted_snap_end", snap_end if vb.persisted_seqno == snap_end else vb.persisted_seqno
        yield prefix + "high_prepared_seqno", vb.high_prepared_seqno
        yield prefix + "high_completed_seqno", vb.high_completed_seqno
        yield prefix + "max_visible_seqno", vb.max_visible_seqno


def vbucket_details(query: Query) -> Figures:
    for vb in query.vbuckets():
        prefix = f"vb_{vb.id}:"
        yield f"vb_{vb.id}", vb.state.name.lower()
        yield prefix + "num_items", vb.item_count
        yield prefix + "num_deletes", vb.tombstone_count
        yield prefix + "queue_size", vb.high_seqno - vb.persisted_seqno
        yield prefix + "queue_memory", vb.memory.unflushed_bytes
        yield prefix + "ht_memory", vb.keys.overlay.nbytes  # the keys that the index on disk does not know yet
        yield prefix + "ht_item_memory", sum(checkpoint.data.nbytes for checkpoint in vb.memory.checkpoints)
        yield prefix + "num_checkpoints", len(vb.memory.checkpoints)
        yield prefix + "uuid", vb.uuid
        yield prefix + "purge_seqno", vb.purge_seqno
        yield prefix + "high_seqno", shown_high_seqno(vb)
        yield prefix + "max_visible_seqno", vb.max_visible_seqno
        yield prefix + "persistence_seqno", vb.persisted_seqno
        yield prefix + "high_prepared_seqno", vb.high_prepared_seqno
        yield prefix + "high_completed_seqno", vb.high_completed_seqno
        yield prefix + "max_cas", vb.max_cas
        yield prefix + "topology", json.dumps(vb.topology)
        yield prefix + "might_contain_xattrs", query.bucket.has_xattrs


def failovers(query: Query) -> Figures:
    for vb in query.vbuckets():
        prefix = f"vb_{vb.id}:"
        yield prefix + "num_entries", len(vb.failover_log)
        yield prefix + "num_erroneous_entries_erased", 0
        for index, entry in enumerate(vb.failover_log):
            yield f"{prefix}{index}:id", entry.uuid
            yield f"{prefix}{index}:seq", entry.seqno


# ---------------------------------------------------------------------------------------------- collections


def collections(query: Query) -> Figures:
    """Counts per collection; with ``scope.collection`` behind the name only of that one."""
    manifest = query.bucket.store.manifest
    wanted = manifest.find_collection(query.arguments[0]).id if query.arguments else None
    yield "manifest_uid", f"0x{manifest.uid:x}"
    counts = _items_by_collection(query)
    for entry in manifest.collections.values():
        if wanted in (None, entry.id):
            prefix = f"0x{entry.scope_id:x}:0x{entry.id:x}:"
            yield prefix + "items", counts.get(entry.id, 0)
            yield prefix + "name", entry.name
            yield prefix + "scope_name", manifest.scopes[entry.scope_id].name
            if entry.max_ttl is not None:
                yield prefix + "maxTTL", entry.max_ttl


def _items_by_collection(query: Query) -> dict[int, int]:
    counts: dict[int, int] = {}
    for vb in query.bucket.store.existing():
        if vb.state is VbucketState.ACTIVE:
            for collection_id in vb.collection_ids():
                counts[collection_id] = counts.get(collection_id, 0) + vb.collection_item_count(collection_id)
    return counts


def collections_details(query: Query) -> Figures:
    manifest = query.bucket.store.manifest
    for vb in query.vbuckets():
        yield f"vb_{vb.id}:manifest:uid", f"0x{vb.manifest_uid:x}"
        for collection_id in vb.collection_ids():
            prefix = f"vb_{vb.id}:0x{collection_id:x}:"
            entry = manifest.collections.get(collection_id)
            if entry is not None:
                yield prefix + "name", entry.name
                yield prefix + "scope", f"0x{entry.scope_id:x}"
            yield prefix + "items", vb.collection_item_count(collection_id)
            yield prefix + "high_seqno", vb.collection_high_seqno(collection_id)


def scopes(query: Query) -> Figures:
    manifest = query.bucket.store.manifest
    counts = _items_by_collection(query)
    yield "manifest_uid", f"0x{manifest.uid:x}"
    for scope in manifest.scopes.values():
        inside = [entry.id for entry in manifest.collections.values() if entry.scope_id == scope.id]
        yield f"0x{scope.id:x}:collections", len(inside)
        yield f"0x{scope.id:x}:items", sum(counts.get(each, 0) for each in inside)
        yield f"0x{scope.id:x}:name", scope.name


def uuid(query: Query) -> Figures:
    yield "uuid", query.bucket.uuid
