"""Statistics of vbuckets: states, seqnos, failover logs and counts (docs/protocol/session.md#stats)."""

from __future__ import annotations

import json

from upriver.node.stats.query import Figures, Query, shown_high_seqno


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
        yield prefix + "ht_memory", vb.keys.overlay.nbytes  # keys that the index on disk lacks
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


def uuid(query: Query) -> Figures:
    yield "uuid", query.bucket.uuid
