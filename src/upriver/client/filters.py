"""Which collections are read, as part of a position: a seqno says nothing about a collection that was not read.

Collections and scopes are meant by name, so that one which is dropped and made again stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

DEFAULT = "_default"
Path = tuple[str, str]


def path_of(name: str) -> Path:
    """Scope and collection of ``scope.collection``, or of a collection in the default scope.

    >>> path_of("shop.orders"), path_of("orders")
    (('shop', 'orders'), ('_default', 'orders'))
    """
    scope, _, collection = name.rpartition(".")
    return scope or DEFAULT, collection


@dataclass(frozen=True, slots=True)
class Filter:
    """One scope, or some collections; neither means everything."""

    scope: str = ""
    collections: frozenset[Path] = frozenset()

    @classmethod
    def of(cls, scope: str, names: Iterable[str]) -> Filter:
        return cls(scope, frozenset(map(path_of, names)))

    def has(self, path: Path) -> bool:
        """Whether a collection passes."""
        return path in self.collections or path[0] == self.scope or not (self.scope or self.collections)

    def covers(self, other: Filter) -> bool:
        """Whether everything that passes the other one, now or later, passes this one, too."""
        if not (self.scope or self.collections):
            return True
        if other.scope:
            return other.scope == self.scope
        return bool(other.collections) and all(map(self.has, other.collections))

    def beyond(self, other: Filter, existing: Iterable[Path]) -> Filter | None:
        """What passes this one and not the other, as a filter; None for nothing of what exists."""
        if other.covers(self):
            return None
        if self.scope and all(path[0] != self.scope for path in other.collections):
            return self
        wanted = self.collections or filter(self.has, existing)
        found = frozenset(path for path in wanted if not other.has(path))
        return Filter(collections=found) if found else None

    def __str__(self) -> str:
        if self.scope:
            return f"scope {self.scope}"
        return ", ".join(sorted(".".join(path) for path in self.collections)) or "everything"

    def to_json(self) -> dict[str, Any]:
        if self.scope:
            return {"scope": self.scope}
        return {"collections": sorted(".".join(path) for path in self.collections)} if self.collections else {}

    @classmethod
    def from_json(cls, value: Any) -> Filter:
        """``ValueError`` if it is none."""
        names, scope = value.get("collections", []), value.get("scope", "")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or type(scope) is not str:
            raise ValueError(f"{value!r} is not a filter")
        return cls.of(scope, names)
