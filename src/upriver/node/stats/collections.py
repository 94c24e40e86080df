"""Statistics of scopes and collections, by name or by id (docs/protocol/session.md#stats)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from upriver.errors import InvalidArguments, StatusError, UnknownCollection, UnknownScope
from upriver.model import VbucketState
from upriver.node.stats.query import Figures, Query, hex_id

if TYPE_CHECKING:
    from upriver.store.collections.manifest import CollectionEntry, ScopeEntry

Entry = TypeVar("Entry", "CollectionEntry", "ScopeEntry")


def collections(query: Query) -> Figures:
    """Figures of every collection, or of the one whose ``scope.collection`` follows the group's name."""
    manifest = query.bucket.store.manifest
    return _collections(query, _by_name(query, manifest.collections, manifest.find_collection))


def collections_by_id(query: Query) -> Figures:
    return _collections(query, [_by_id(query, query.bucket.store.manifest.collections, UnknownCollection)])


def scopes(query: Query) -> Figures:
    """Figures of every scope, or of the one whose name follows the group's."""
    manifest = query.bucket.store.manifest
    return _scopes(query, _by_name(query, manifest.scopes, manifest.find_scope))


def scopes_by_id(query: Query) -> Figures:
    return _scopes(query, [_by_id(query, query.bucket.store.manifest.scopes, UnknownScope)])


def _by_name(query: Query, entries: Mapping[int, Entry], find: Callable[[str], Entry]) -> Iterable[Entry]:
    return [find(_only_argument(query))] if query.arguments else list(entries.values())


def _by_id(query: Query, entries: Mapping[int, Entry], unknown: type[StatusError]) -> Entry:
    wanted = hex_id(_only_argument(query))
    if wanted not in entries:
        raise unknown(f"there is no id {wanted:x}")
    return entries[wanted]


def _only_argument(query: Query) -> str:
    if len(query.arguments) != 1:
        raise InvalidArguments("write one name or id after the group")
    return query.arguments[0]


def _collections(query: Query, wanted: Iterable[CollectionEntry]) -> Figures:
    manifest, items = query.bucket.store.manifest, _items_by_collection(query)
    yield "manifest_uid", f"0x{manifest.uid:x}"
    for entry in wanted:
        prefix = f"0x{entry.scope_id:x}:0x{entry.id:x}:"
        yield prefix + "items", items[entry.id]
        yield prefix + "name", entry.name
        yield prefix + "scope_name", manifest.scopes[entry.scope_id].name
        if entry.max_ttl is not None:
            yield prefix + "maxTTL", entry.max_ttl


def _scopes(query: Query, wanted: Iterable[ScopeEntry]) -> Figures:
    manifest, items = query.bucket.store.manifest, _items_by_collection(query)
    yield "manifest_uid", f"0x{manifest.uid:x}"
    for scope in wanted:
        inside = [entry.id for entry in manifest.collections.values() if entry.scope_id == scope.id]
        yield f"0x{scope.id:x}:collections", len(inside)
        yield f"0x{scope.id:x}:items", sum(items[each] for each in inside)
        yield f"0x{scope.id:x}:name", scope.name


def _items_by_collection(query: Query) -> Counter[int]:
    items: Counter[int] = Counter()
    for vb in query.bucket.store.existing():
        if vb.state is VbucketState.ACTIVE:
            for collection_id in vb.collection_ids():
                items[collection_id] += vb.collection_item_count(collection_id)
    return items


def collections_details(query: Query) -> Figures:
    """Figures of every collection in every vbucket, or in the one whose number follows the group's name."""
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
