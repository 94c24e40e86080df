"""Statistics of vbuckets and of single documents (docs/protocol/session.md#stats)."""

from __future__ import annotations

import json

from upriver.errors import InvalidArguments, StoreError
from upriver.model import DEFAULT_COLLECTION, Document
from upriver.node.stats.query import Figures, Query, hex_id, shown_high_seqno, vbucket_number
from upriver.store import VBucket, record_on_disk


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


# ---------------------------------------------------------------------------------------------- one document


def key(query: Query) -> Figures:
    """A document of the default collection, or of the ``scope.collection`` that follows the vbucket."""
    return _document(*_find_document(query, _collection_by_path(query)))


def key_by_id(query: Query) -> Figures:
    return _document(*_find_document(query, _collection_by_id(query)))


def vkey(query: Query) -> Figures:
    """As ``key``, and whether the document on disk is the same."""
    return _compared(*_find_document(query, _collection_by_path(query)))


def vkey_by_id(query: Query) -> Figures:
    return _compared(*_find_document(query, _collection_by_id(query)))


def _collection_by_path(query: Query) -> int:
    if len(query.arguments) < 3:
        return DEFAULT_COLLECTION
    return query.bucket.store.manifest.find_collection(query.arguments[2]).id


def _collection_by_id(query: Query) -> int:
    return hex_id(query.arguments[2]) if len(query.arguments) > 2 else DEFAULT_COLLECTION


def _find_document(query: Query, collection_id: int) -> tuple[VBucket, Document]:
    if not 2 <= len(query.arguments) <= 3:
        raise InvalidArguments("write KEY VBUCKET [COLLECTION] after the group")
    vb = query.bucket.store.vbucket(vbucket_number(query.arguments[1]))
    return vb, vb.documents.get(query.arguments[0].encode(), collection_id)


def _document(vb: VBucket, document: Document) -> Figures:
    yield "key_is_dirty", document.seqno > vb.persisted_seqno
    yield "key_exptime", document.expiry
    yield "key_flags", document.flags
    yield "key_cas", document.cas
    yield "key_vb_state", vb.state.name.lower()
    yield "key_is_resident", True  # the operating system caches the file, so a read is as fast


def _compared(vb: VBucket, document: Document) -> Figures:
    yield from _document(vb, document)
    yield "key_valid", "dirty" if document.seqno > vb.persisted_seqno else _compare_with_disk(vb, document)


def _compare_with_disk(vb: VBucket, document: Document) -> str:
    try:
        head, _, value = record_on_disk(vb, document.seqno)
    except StoreError:
        return "ram_but_not_disk"
    return "valid" if (head.cas, value) == (document.cas, document.value) else "length_mismatch"
