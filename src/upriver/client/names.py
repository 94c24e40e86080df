"""Names of scopes and collections by id, kept up to date by the feed's own collection events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upriver.errors import RemoteProtocolError
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, CollectionEvent, ScopeCreated

Path = tuple[str, str]


class Names:
    """What a manifest said, and what events have changed since. Ids are never used twice, so names never go away."""

    def __init__(self, collections: Mapping[int, Path] | None = None, scopes: Mapping[int, str] | None = None) -> None:
        self.collections: dict[int, Path] = dict(collections or {0: ("_default", "_default")})
        self.scopes: dict[int, str] = dict(scopes or {0: "_default"})
        self.flushes: dict[int, int] = {}

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
