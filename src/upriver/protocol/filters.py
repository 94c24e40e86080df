"""Which collections a position speaks of: of all others, nothing has been read up to it.

Spark means collections by id. Ids are never used twice, so a collection that was dropped and made again is another one,
and new to every position. The client means them by name, so that it stays the same. The rules are the same for both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Key = int | str  # an id, or a name: "scope" of a scope, "scope.collection" of a collection


@dataclass(frozen=True, slots=True)
class Filter:
    """Everything; or a scope, with whatever collections it has and will have; or collections."""

    scope: Key | None = None
    collections: frozenset[Key] | None = None

    @property
    def everything(self) -> bool:
        return self.scope is None and self.collections is None

    @property
    def nothing(self) -> bool:
        """Collections were wanted, but none of them exists now."""
        return self.collections is not None and not self.collections

    def has(self, collection: Key, scope: Key | None) -> bool:
        """Whether a collection, which is in ``scope``, passes."""
        if self.collections is not None:
            return collection in self.collections
        return self.scope is None or scope == self.scope

    def covers(self, other: Filter, scope_of: Callable[[Key], Key | None]) -> bool:
        """Whether everything that passes the other one, now or later, passes this one, too."""
        if self.everything:
            return True
        if other.collections is not None:
            return all(self.has(each, scope_of(each)) for each in other.collections)
        return other.scope is not None and other.scope == self.scope

    def wire(self) -> bytes:
        """By ids: the value of a stream request that lets only this through."""
        if self.everything:
            return b""
        if self.scope is not None:
            return json.dumps({"scope": f"{self.scope:x}"}).encode()
        return json.dumps({"collections": self.text().split()}).encode()

    def text(self) -> str:
        """By ids: the form in an offset.

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
        """The filter that ``text`` made this of."""
        if text == "*":
            return cls()
        if text.startswith("s"):
            return cls(scope=int(text[1:], 16))
        return cls(collections=frozenset(int(number, 16) for number in text.split()))


EVERYTHING = Filter()


@dataclass(frozen=True, slots=True)
class Missing:
    """What a position lacks: all of ``filter`` but the collections ``without``."""

    filter: Filter
    without: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read, by ids, and the scope of each collection in the manifest."""

    filter: Filter = EVERYTHING
    scope_of: Mapping[int, int] = field(default_factory=dict)

    def has(self, one: Filter, collection: Key) -> bool:
        """Whether a collection passes a filter, as the manifest is now."""
        return one.has(collection, self._scope(collection))

    def missing(self, have: Filter) -> Missing | None:
        """What a position that has read ``have`` lacks; None if nothing.

        A scope or a bucket is asked for as such, and what the position has is left out on arrival: a list of ids could
        lack a collection that was made a moment ago.
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
        """Whether the bucket has all that ``one`` names. A scope without collections counts as gone: none was read."""
        if one.collections is not None:
            return one.collections <= self.scope_of.keys()
        return one.scope is None or one.scope in self.scope_of.values()

    def overlaps(self, missing: Missing, other: Filter) -> bool:
        """Whether some of what is missing was let through by ``other``; in doubt, yes."""
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
