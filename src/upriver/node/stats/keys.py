"""Statistics of one document: ``key KEY VBUCKET`` and ``vkey``, which also says whether disk and memory agree."""

from __future__ import annotations

from upriver.errors import InvalidArguments, StoreError
from upriver.model import DEFAULT_COLLECTION, Document
from upriver.node.stats.query import Figures, Query, hex_id, vbucket_number
from upriver.store import VBucket, record_on_disk


def key(query: Query) -> Figures:
    """A document of the default collection, or of the ``scope.collection`` that follows the vbucket."""
    vb, document = _found(query, _by_path(query))
    return _figures(vb, document)


def key_by_id(query: Query) -> Figures:
    vb, document = _found(query, _by_id(query))
    return _figures(vb, document)


def vkey(query: Query) -> Figures:
    return _checked(*_found(query, _by_path(query)))


def vkey_by_id(query: Query) -> Figures:
    return _checked(*_found(query, _by_id(query)))


def _by_path(query: Query) -> int:
    if len(query.arguments) < 3:
        return DEFAULT_COLLECTION
    return query.bucket.store.manifest.find_collection(query.arguments[2]).id


def _by_id(query: Query) -> int:
    return hex_id(query.arguments[2]) if len(query.arguments) > 2 else DEFAULT_COLLECTION


def _found(query: Query, collection_id: int) -> tuple[VBucket, Document]:
    if not 2 <= len(query.arguments) <= 3:
        raise InvalidArguments("write: KEY VBUCKET [COLLECTION] behind the group")
    vb = query.bucket.store.vbucket(vbucket_number(query.arguments[1]))
    return vb, vb.documents.get(query.arguments[0].encode(), collection_id)


def _figures(vb: VBucket, document: Document) -> Figures:
    yield "key_is_dirty", document.seqno > vb.persisted_seqno
    yield "key_exptime", document.expiry
    yield "key_flags", document.flags
    yield "key_cas", document.cas
    yield "key_vb_state", vb.state.name.lower()
    yield "key_is_resident", True  # the system caches the file, so a read takes no longer


def _checked(vb: VBucket, document: Document) -> Figures:
    yield from _figures(vb, document)
    yield "key_valid", "dirty" if document.seqno > vb.persisted_seqno else _on_disk(vb, document)


def _on_disk(vb: VBucket, document: Document) -> str:
    try:
        head, _, value = record_on_disk(vb, document.seqno)
    except StoreError:
        return "ram_but_not_disk"
    return "valid" if (head.cas, value) == (document.cas, document.value) else "length_mismatch"
