"""Names and ids of collections: ``Names`` for what a feed brings, ``CollectionIds`` for what a caller asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from upriver.client._requests.operations import Operation, Operations
from upriver.errors import RemoteProtocolError, UnknownCollection
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, CollectionEvent, ScopeCreated

Path = tuple[str, str]
T = TypeVar("T")


class Names:
    """Names by id: what a manifest said, and what events of the feed have changed since.

    An id is never used twice, so no name goes away.
    """

    def __init__(self, collections: Mapping[int, Path] | None = None, scopes: Mapping[int, str] | None = None) -> None:
        self.collections: dict[int, Path] = dict(collections or {0: ("_default", "_default")})
        self.scopes: dict[int, str] = dict(scopes or {0: "_default"})

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
        """Learn from an event of the feed."""
        if isinstance(event, ScopeCreated):
            self.scopes[event.scope_id] = event.name
        elif isinstance(event, CollectionBegun):
            scope = self.scopes.get(event.scope_id, f"0x{event.scope_id:x}")
            self.collections[event.collection_id] = scope, event.name

    def path(self, event: CollectionEvent) -> tuple[str | None, str | None]:
        """Scope and collection that an event is about."""
        if isinstance(event, CollectionBegun | CollectionEnded):
            return self.collections.get(event.collection_id, (self.scopes.get(event.scope_id), None))
        return self.scopes.get(event.scope_id), None

    def ids_of(self, paths: set[Path]) -> set[int]:
        return {number for number, path in self.collections.items() if path in paths}


class CollectionIds:
    """Ids by name, looked up when a name is first used, and again when a node no longer knows the id.

    A collection that was dropped and created again has another id.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._known: dict[str, int] = {}

    def within(self, name: str, make: Callable[[int], Operation[T]]) -> Operation[T]:
        """What ``make`` asks with the collection's id; ``UnknownCollection`` or ``UnknownScope`` if there is none."""
        known = self._known.get(name)
        if known is not None:
            try:
                return (yield from make(known))
            except UnknownCollection:
                self._known.pop(name, None)
        found = self._known[name] = yield from self._operations.collection_id(name)
        return (yield from make(found))
