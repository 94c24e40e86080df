"""Filters: which collections a position covers. Of all other collections, nothing has been read.

Spark identifies collections by id. Ids are never reused, so a collection that is dropped and created again is a new
one to every position. The client identifies them by name, so such a collection stays the same. Both share these rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Key = int | str  # an id, or a name: "scope" of a scope, "scope.collection" of a collection


@dataclass(frozen=True, slots=True)
class Filter:
    """Everything; or a scope, with all collections that it has now or later; or a set of collections."""

    scope: Key | None = None
    collections: frozenset[Key] | None = None

    @property
    def everything(self) -> bool:
        return self.scope is None and self.collections is None

    @property
    def nothing(self) -> bool:
        """Whether the filter names collections, but none of them exists now."""
        return self.collections is not None and not self.collections

    def has(self, collection: Key, scope: Key | None) -> bool:
        """Whether a collection of ``scope`` passes."""
        if self.collections is not None:
            return collection in self.collections
        return self.scope is None or scope == self.scope

    def covers(self, other: Filter, scope_of: Callable[[Key], Key | None]) -> bool:
        """Whether everything that passes ``other``, now or later, passes this filter too."""
        if self.everything:
            return True
        if other.collections is not None:
            return all(self.has(each, scope_of(each)) for each in other.collections)
        return other.scope is not None and other.scope == self.scope

    def wire(self) -> bytes:
        """The value of a stream request for this filter; only for filters by id."""
        if self.everything:
            return b""
        if self.scope is not None:
            return json.dumps({"scope": f"{self.scope:x}"}).encode()
        return json.dumps({"collections": self.text().split()}).encode()

    def text(self) -> str:
        """The filter as an offset stores it; only for filters by id.

        >>> Filter().text(), Filter(scope=8).text(), Filter(collections=frozenset({9, 10})).text()
        ('*', 's8', '9 a')
        """
        if self.everything:
            return "*"
        if self.scope is not None:
            return f"s{self.scope:x}"
        return " ".join(f"{number:x}" for number in sorted(self.collections or (), key=int))

    @classmethod
    def of_text(cls, text: str) -> Filter:
        """The inverse of ``text``."""
        if text == "*":
            return cls()
        if text.startswith("s"):
            return cls(scope=int(text[1:], 16))
        return cls(collections=frozenset(int(number, 16) for number in text.split()))


EVERYTHING = Filter()


@dataclass(frozen=True, slots=True)
class Missing:
    """What a position lacks: all of ``filter`` except the collections ``without``."""

    filter: Filter
    without: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The filter to read with, by ids, and the scope of each collection in the manifest."""

    filter: Filter = EVERYTHING
    scope_of: Mapping[int, int] = field(default_factory=dict)

    def has(self, one: Filter, collection: Key) -> bool:
        """Whether a collection passes a filter, according to the current manifest."""
        return one.has(collection, self._scope(collection))

    def missing(self, have: Filter) -> Missing | None:
        """What a position that was reached with ``have`` lacks; None if nothing.

        A whole scope or bucket is requested as such, and what the position has already is dropped on arrival: a list
        of ids could miss a collection that was created a moment ago.
        """
        wanted = self.filter
        if have.covers(wanted, self._scope):
            return None
        if wanted.collections is not None:
            return Missing(
                Filter(collections=frozenset(each for each in wanted.collections if not self.has(have, each)))
            )
        known = {*self.scope_of, *(int(each) for each in have.collections or ())}
        return Missing(wanted, tuple(sorted(number for number in known if self.has(have, number))))

    def exists(self, one: Filter) -> bool:
        """Whether all that ``one`` names exists. A scope without collections counts as gone: nothing of it was read."""
        if one.collections is not None:
            return one.collections <= self.scope_of.keys()
        return one.scope is None or one.scope in self.scope_of.values()

    def overlaps(self, missing: Missing, other: Filter) -> bool:
        """Whether ``other`` lets some of what is missing through; if in doubt, yes."""
        if other.everything or missing.filter.everything:
            return True
        if missing.filter.collections is not None:
            return any(self.has(other, each) for each in missing.filter.collections)
        if other.scope is not None:
            return other.scope == missing.filter.scope
        inside = (each for each in other.collections or () if each not in missing.without)
        return any(self._scope(each) in (None, missing.filter.scope) for each in inside)

    def _scope(self, collection: Key) -> int | None:
        return self.scope_of.get(int(collection))
