"""Collections by name: paths, filters, and the way between names and ids.

Filters by name are what checkpoints keep: a collection that is dropped and created again stays the same. ``Names``
finds the names for ids in a feed; ``CollectionIds`` finds the ids for names that a caller uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from upriver.errors import RemoteProtocolError, UnknownCollection
from upriver.protocol.filters import Filter, Key
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, CollectionEvent, ScopeCreated

if TYPE_CHECKING:
    from upriver.client._requests.operations import Operation, Operations

DEFAULT = "_default"
Path = tuple[str, str]
T = TypeVar("T")


def path_of(name: str) -> Path:
    """Scope and collection of ``scope.collection``, or of a collection in the default scope.

    >>> path_of("shop.orders"), path_of("orders")
    (('shop', 'orders'), ('_default', 'orders'))
    """
    scope, _, collection = name.rpartition(".")
    return scope or DEFAULT, collection


def named(scope: str = "", names: Iterable[str] = ()) -> Filter:
    """The filter for one scope or for some collections; for everything if neither is given."""
    collections = frozenset(".".join(path_of(name)) for name in names)
    return Filter(scope or None, collections or None)


def covers(one: Filter, other: Filter) -> bool:
    """Whether everything that passes ``other``, now or later, passes ``one``."""
    return one.covers(other, _scope_of)


def beyond(wanted: Filter, had: Filter, existing: Iterable[Path]) -> Filter | None:
    """A filter for what passes ``wanted`` but not ``had``; None if nothing that exists does."""
    if covers(had, wanted):
        return None
    if wanted.scope and all(_scope_of(name) != wanted.scope for name in had.collections or ()):
        return wanted
    names: Iterable[Key] = map(".".join, existing) if wanted.collections is None else wanted.collections
    passing = (name for name in names if wanted.has(name, _scope_of(name)) and not had.has(name, _scope_of(name)))
    return Filter(collections=found) if (found := frozenset(passing)) else None


def filter_to_json(found: Filter) -> dict[str, Any]:
    """The filter as a checkpoint stores it."""
    if found.scope:
        return {"scope": found.scope}
    return {"collections": sorted(map(str, found.collections))} if found.collections else {}


def filter_from_json(value: Any) -> Filter:
    """The inverse of ``filter_to_json``; ``ValueError`` if the value is not a filter."""
    names, scope = value.get("collections", []), value.get("scope", "")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or type(scope) is not str:
        raise ValueError(f"{value!r} is not a filter")
    return named(scope, names)


def _scope_of(collection: Key) -> str:
    return path_of(str(collection))[0]


class Names:
    """Names by id, from a manifest and from the collection events of a feed.

    Ids are never reused, so names are never removed.
    """

    def __init__(self, collections: Mapping[int, Path] | None = None, scopes: Mapping[int, str] | None = None) -> None:
        self.collections: dict[int, Path] = dict(collections or {0: (DEFAULT, DEFAULT)})
        self.scopes: dict[int, str] = dict(scopes or {0: DEFAULT})

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any]) -> Names:
        try:
            scopes = {int(scope["uid"], 16): str(scope["name"]) for scope in manifest["scopes"]}
            collections = {
                int(collection["uid"], 16): (str(scope["name"]), str(collection["name"]))
                for scope in manifest["scopes"]
                for collection in scope["collections"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the collections manifest is not usable: {error!r}", "value") from error
        return cls(collections, scopes)

    def note(self, event: CollectionEvent) -> None:
        """Take the names from a collection event."""
        if isinstance(event, ScopeCreated):
            self.scopes[event.scope_id] = event.name
        elif isinstance(event, CollectionBegun):
            scope = self.scopes.get(event.scope_id, f"0x{event.scope_id:x}")
            self.collections[event.collection_id] = scope, event.name

    def path(self, event: CollectionEvent) -> tuple[str | None, str | None]:
        """The scope and the collection that an event is about."""
        if isinstance(event, CollectionBegun | CollectionEnded):
            return self.collections.get(event.collection_id, (self.scopes.get(event.scope_id), None))
        return self.scopes.get(event.scope_id), None

    def ids_of(self, paths: set[Path]) -> set[int]:
        return {number for number, path in self.collections.items() if path in paths}


class CollectionIds:
    """Ids by name. An id is looked up when its name is first used, and again when a node no longer knows the id.

    A collection that is dropped and created again gets a new id.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._known: dict[str, int] = {}

    def within(self, name: str, make: Callable[[int], Operation[T]]) -> Operation[T]:
        """Run ``make`` with the collection's id; ``UnknownCollection`` or ``UnknownScope`` if it does not exist."""
        known = self._known.get(name)
        if known is not None:
            try:
                return (yield from make(known))
            except UnknownCollection:
                self._known.pop(name, None)
        found = self._known[name] = yield from self._operations.collection_id(name)
        return (yield from make(found))
