"""Statistics about scopes and collections, by name or by id (``protocol.md`` 10.10)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from upriver.errors import InvalidArguments, UnknownCollection, UnknownScope
from upriver.model import VbucketState
from upriver.node.stats.query import Figures, Query

if TYPE_CHECKING:
    from upriver.store.collections.manifest import CollectionEntry, Manifest, ScopeEntry

_HEX = re.compile(r"(0x)?([0-9a-fA-F]{1,8})", re.ASCII)


def hex_id(text: str) -> int:
    """An id as the statistics show it: hexadecimal, with or without 0x."""
    found = _HEX.fullmatch(text)
    if found is None:
        raise InvalidArguments(f"{text[:20]!r} is not an id: write up to 8 hexadecimal digits")
    return int(found[2], 16)


def _only(query: Query, what: str) -> str:
    if len(query.arguments) != 1:
        raise InvalidArguments(f"write one {what} behind the group")
    return query.arguments[0]


# ---------------------------------------------------------------------------------------------- collections


def collections(query: Query) -> Figures:
    """Counts per collection; with ``scope.collection`` behind the name only of that one."""
    manifest = query.bucket.store.manifest
    if query.arguments:
        return _collections(query, manifest, [manifest.find_collection(_only(query, "scope.collection"))])
    return _collections(query, manifest, list(manifest.collections.values()))


def collections_by_id(query: Query) -> Figures:
    manifest = query.bucket.store.manifest
    wanted = hex_id(_only(query, "collection id"))
    if wanted not in manifest.collections:
        raise UnknownCollection(f"no collection {wanted:x}")
    return _collections(query, manifest, [manifest.collections[wanted]])


def _collections(query: Query, manifest: Manifest, entries: list[CollectionEntry]) -> Figures:
    yield "manifest_uid", f"0x{manifest.uid:x}"
    counts = _items_by_collection(query)
    for entry in entries:
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
    """Counts per scope; with a name behind it only of that one."""
    manifest = query.bucket.store.manifest
    if query.arguments:
        return _scopes(query, manifest, [manifest.find_scope(_only(query, "scope"))])
    return _scopes(query, manifest, list(manifest.scopes.values()))


def scopes_by_id(query: Query) -> Figures:
    manifest = query.bucket.store.manifest
    wanted = hex_id(_only(query, "scope id"))
    if wanted not in manifest.scopes:
        raise UnknownScope(f"no scope {wanted:x}")
    return _scopes(query, manifest, [manifest.scopes[wanted]])


def _scopes(query: Query, manifest: Manifest, wanted: list[ScopeEntry]) -> Figures:
    counts = _items_by_collection(query)
    yield "manifest_uid", f"0x{manifest.uid:x}"
    for scope in wanted:
        inside = [entry.id for entry in manifest.collections.values() if entry.scope_id == scope.id]
        yield f"0x{scope.id:x}:collections", len(inside)
        yield f"0x{scope.id:x}:items", sum(counts.get(each, 0) for each in inside)
        yield f"0x{scope.id:x}:name", scope.name
