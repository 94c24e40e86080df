"""The collections manifest: parsed, checked, compared (docs/protocol/collections.md). Pure; immutable.

``changes`` lists the differences between two manifests in the documented order; vbuckets write them as system events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import orjson

from upriver.errors import CannotApplyManifest, InvalidArguments, UnknownCollection, UnknownScope

DEFAULT_NAME = "_default"
MAX_TTL = 0x7FFF_FFFF
_NAME = re.compile(r"(?!\$)[A-Za-z0-9_\-%$]{1,251}\Z")
_HEX = re.compile(r"[0-9a-fA-F]+\Z")
_RESERVED = range(1, 8)
MOST = 1000  # collections, and scopes, besides the default ones: the limit of the real server


class ManifestEvent(IntEnum):
    """System events (docs/protocol/collections.md#system-events). A flush is another BEGIN_COLLECTION."""

    BEGIN_COLLECTION = 0
    END_COLLECTION = 1
    CREATE_SCOPE = 3
    DROP_SCOPE = 4
    MODIFY_COLLECTION = 5


@dataclass(frozen=True, slots=True)
class CollectionEntry:
    """One collection of a manifest."""

    id: int
    name: str
    scope_id: int = 0
    max_ttl: int | None = None
    history: bool = False
    metered: bool = False
    flush_uid: int | None = None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.name, "uid": f"{self.id:x}"}
        if self.max_ttl is not None:
            out["maxTTL"] = self.max_ttl
        if self.history:
            out["history"] = True
        if self.metered:
            out["metered"] = True
        if self.flush_uid is not None:
            out["flush_uid"] = f"{self.flush_uid:x}"
        return out


@dataclass(frozen=True, slots=True)
class ScopeEntry:
    """One scope of a manifest."""

    id: int
    name: str


class ManifestChange(NamedTuple):
    """One system event that a manifest causes."""

    event: ManifestEvent
    scope: ScopeEntry
    collection: CollectionEntry | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Scopes and collections by id."""

    uid: int = 0
    scopes: dict[int, ScopeEntry] = field(default_factory=lambda: {0: ScopeEntry(0, DEFAULT_NAME)})
    collections: dict[int, CollectionEntry] = field(default_factory=lambda: {0: CollectionEntry(0, DEFAULT_NAME)})

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview | str, *, partial: bool = False) -> Manifest:
        """Parse a manifest; ``InvalidArguments`` names the broken rule.

        ``partial``: the state of a replica between two events of one manifest, with the old uid and new content.
        """
        try:
            raw = orjson.loads(data)
        except orjson.JSONDecodeError as failure:
            raise InvalidArguments(f"the manifest is not JSON: {failure}") from failure
        return _Parser().manifest(raw, partial)

    def to_json(self) -> bytes:
        inside: dict[int, list[Any]] = {number: [] for number in self.scopes}
        for entry in self.collections.values():
            if entry.scope_id in inside:  # a replica may know a collection without its scope
                inside[entry.scope_id].append(entry.to_json())
        scopes = [
            {"name": scope.name, "uid": f"{scope.id:x}", "collections": inside[scope.id]}
            for scope in self.scopes.values()
        ]
        return orjson.dumps({"uid": f"{self.uid:x}", "scopes": scopes})

    def find_scope(self, path: str) -> ScopeEntry:
        """By ``scope`` or ``scope.anything``; an empty name is the default scope."""
        parts = path.split(".")
        if len(parts) > 2:
            raise InvalidArguments(f"the path {path!r} has more than one '.'")
        name = parts[0] or DEFAULT_NAME
        for scope in self.scopes.values():
            if scope.name == name:
                return scope
        raise UnknownScope(f"no scope {name!r}")

    def find_collection(self, path: str) -> CollectionEntry:
        """By ``scope.collection``; empty names are the default ones."""
        if path.count(".") != 1:
            raise InvalidArguments(f"the path {path!r} must have exactly one '.'")
        scope = self.find_scope(path)
        name = path.split(".")[1] or DEFAULT_NAME
        for entry in self.collections.values():
            if entry.scope_id == scope.id and entry.name == name:
                return entry
        raise UnknownCollection(f"no collection {name!r} in scope {scope.name!r}")

    def check_successor(self, new: Manifest) -> None:
        """Raise ``CannotApplyManifest`` if ``new`` must not follow this manifest."""
        self._check_counts(new)
        if new.uid < self.uid:
            raise CannotApplyManifest(f"manifest uid {new.uid:x} is lower than the current {self.uid:x}")
        if new.uid == self.uid and new != self:
            raise CannotApplyManifest(f"manifest uid {new.uid:x} is taken by other content")
        for scope_id, scope in new.scopes.items():
            if scope_id in self.scopes and self.scopes[scope_id].name != scope.name:
                raise CannotApplyManifest(f"scope {scope_id:x} cannot change its name")
        for collection_id, entry in new.collections.items():
            old = self.collections.get(collection_id)
            if old is not None and (old.name, old.scope_id) != (entry.name, entry.scope_id):
                raise CannotApplyManifest(f"collection {collection_id:x} cannot change its name or scope")

    def _check_counts(self, new: Manifest) -> None:
        """Counts may not grow beyond the limit; those above it already may stay or shrink."""
        counts = {
            "collections": (len(self.collections), len(new.collections)),
            "scopes": (len(self.scopes), len(new.scopes)),
        }
        for what, (now, then) in counts.items():
            if then - 1 > MOST and then > now:
                raise CannotApplyManifest(f"{then - 1} {what} besides _default; a bucket can have {MOST}")

    def changes(self, new: Manifest) -> Iterator[ManifestChange]:
        """The changes that turn this manifest into ``new``, in the order of docs/protocol/collections.md#applying."""
        for collection_id, entry in self.collections.items():
            if collection_id not in new.collections:
                scope = self.scopes.get(entry.scope_id) or ScopeEntry(entry.scope_id, "")
                yield ManifestChange(ManifestEvent.END_COLLECTION, scope, entry)
        for scope_id, scope in new.scopes.items():
            if scope_id not in self.scopes:
                yield ManifestChange(ManifestEvent.CREATE_SCOPE, scope)
        for collection_id, entry in new.collections.items():
            if collection_id not in self.collections:
                yield ManifestChange(ManifestEvent.BEGIN_COLLECTION, new.scopes[entry.scope_id], entry)
        yield from self._alterations(new)
        for scope_id, scope in self.scopes.items():
            if scope_id not in new.scopes:
                yield ManifestChange(ManifestEvent.DROP_SCOPE, scope)

    def _alterations(self, new: Manifest) -> Iterator[ManifestChange]:
        common = [(old, new.collections[old.id]) for old in self.collections.values() if old.id in new.collections]
        for old, entry in common:
            if (old.max_ttl, old.history, old.metered) != (entry.max_ttl, entry.history, entry.metered):
                yield ManifestChange(ManifestEvent.MODIFY_COLLECTION, new.scopes[entry.scope_id], entry)
        for old, entry in common:
            if old.flush_uid != entry.flush_uid:
                yield ManifestChange(ManifestEvent.BEGIN_COLLECTION, new.scopes[entry.scope_id], entry)


class _Parser:
    """Walks the JSON of a manifest and checks that ids and names are unique."""

    def __init__(self) -> None:
        self.scopes: dict[int, ScopeEntry] = {}
        self.collections: dict[int, CollectionEntry] = {}
        self._names: set[tuple[int, str]] = set()  # (scope, name); of a scope itself: (-1, name)

    def manifest(self, raw: Any, partial: bool) -> Manifest:
        uid = _hex(_member(raw, "uid", str), 16)
        for scope in _member(raw, "scopes", list):
            self._scope(scope, uid)
        if 0 not in self.scopes:
            raise InvalidArguments("the default scope is missing")
        parsed = Manifest(uid, self.scopes, self.collections)
        if uid == 0 and parsed != Manifest() and not partial:
            raise InvalidArguments("uid 0 is the manifest with only the default collection")
        return parsed

    def _scope(self, raw: Any, manifest_uid: int) -> None:
        scope = ScopeEntry(_id(raw), _name(raw))
        if (scope.id == 0) != (scope.name == DEFAULT_NAME):
            raise InvalidArguments("scope 0 is _default, and no other")
        if scope.id in self.scopes or (-1, scope.name) in self._names:
            raise InvalidArguments(f"scope {scope.name} ({scope.id:x}) is there twice")
        self.scopes[scope.id] = scope
        self._names.add((-1, scope.name))
        for collection in _member(raw, "collections", list):
            self._collection(collection, scope.id, manifest_uid)

    def _collection(self, raw: Any, scope_id: int, manifest_uid: int) -> None:
        entry = CollectionEntry(
            _id(raw), _name(raw), scope_id, _max_ttl(raw), _flag(raw, "history"), _flag(raw, "metered"),
            _hex(_member(raw, "flush_uid", str), 16) if "flush_uid" in raw else None,
        )  # fmt: skip
        if entry.id == 0 and (entry.name != DEFAULT_NAME or scope_id != 0):
            raise InvalidArguments("collection 0 is _default in the default scope, and no other")
        if entry.name == DEFAULT_NAME and entry.id != 0:
            raise InvalidArguments("_default is the name of collection 0")
        if entry.flush_uid is not None and entry.flush_uid > manifest_uid:
            raise InvalidArguments(f"flush_uid {entry.flush_uid:x} is above the manifest uid {manifest_uid:x}")
        if entry.id in self.collections or (scope_id, entry.name) in self._names:
            raise InvalidArguments(f"collection {entry.name} ({entry.id:x}) is there twice")
        self.collections[entry.id] = entry
        self._names.add((scope_id, entry.name))


def _member(raw: Any, name: str, kind: type) -> Any:
    if not isinstance(raw, dict) or name not in raw:
        raise InvalidArguments(f"the manifest lacks {name!r}")
    value = raw[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidArguments(f"{name!r} must be of type {kind.__name__}")
    return value


def _hex(text: str, digits: int) -> int:
    if not _HEX.match(text) or len(text) > digits:
        raise InvalidArguments(f"{text!r} is not a hex number of at most {digits} digits")
    return int(text, 16)


def _id(raw: Any) -> int:
    number = _hex(_member(raw, "uid", str), 8)
    if number in _RESERVED:
        raise InvalidArguments(f"id {number} is reserved")
    return number


def _name(raw: Any) -> str:
    name: str = _member(raw, "name", str)
    if not _NAME.match(name):
        raise InvalidArguments(f"the name {name!r} breaks the rules")
    return name


def _flag(raw: Any, name: str) -> bool:
    return bool(_member(raw, name, bool)) if name in raw else False


def _max_ttl(raw: Any) -> int | None:
    if "maxTTL" not in raw:
        return None
    value: int = _member(raw, "maxTTL", int)
    if not 0 <= value <= MAX_TTL:
        raise InvalidArguments(f"maxTTL {value} is outside 0..{MAX_TTL}")
    return value
