"""What is read of a bucket, by ids: a position says up to where it has read *of which collections*.

Ids are never used twice, so a collection that was dropped and made again is another one, and new to every position.
When more is wanted than a position has, what is missing is read from the beginning up to the position (``missing``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from upriver.client.names import Names
from upriver.errors import ConfigError
from upriver.spark.options import ReadOptions


@dataclass(frozen=True, slots=True)
class Filter:
    """Everything; or a scope, with whatever collections it has and will have; or collections."""

    scope: int | None = None
    collections: frozenset[int] | None = None

    @property
    def everything(self) -> bool:
        return self.scope is None and self.collections is None

    @property
    def nothing(self) -> bool:
        """Names were given, but none of them exists now."""
        return self.collections is not None and not self.collections

    def wire(self) -> bytes:
        """The value of a stream request that lets only this through."""
        if self.everything:
            return b""
        if self.scope is not None:
            return json.dumps({"scope": f"{self.scope:x}"}).encode()
        return json.dumps({"collections": [f"{number:x}" for number in sorted(self.collections or ())]}).encode()

    def text(self) -> str:
        """As offsets have it.

        >>> Filter().text(), Filter(scope=8).text(), Filter(collections=frozenset({9, 10})).text()
        ('*', 's8', '9 a')
        """
        if self.everything:
            return "*"
        if self.scope is not None:
            return f"s{self.scope:x}"
        return " ".join(f"{number:x}" for number in sorted(self.collections or ()))

    @classmethod
    def of_text(cls, text: str) -> Filter:
        if text == "*":
            return cls()
        if text.startswith("s"):
            return cls(scope=int(text[1:], 16))
        return cls(collections=frozenset(int(number, 16) for number in text.split()))

    def has(self, collection: int, scope_of: Mapping[int, int]) -> bool:
        if self.collections is not None:
            return collection in self.collections
        return self.scope is None or scope_of.get(collection) == self.scope


@dataclass(frozen=True, slots=True)
class Missing:
    """What a position lacks: all of ``filter`` but the collections ``without``."""

    filter: Filter
    without: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read, and in which scope each collection is that the manifest has."""

    filter: Filter = field(default_factory=Filter)
    scope_of: Mapping[int, int] = field(default_factory=dict)

    def missing(self, have: Filter) -> Missing | None:
        """What a position that has read ``have`` lacks; None if nothing.

        A scope or a bucket is asked for as such, and what the position has is left out on arrival: a list of ids could
        lack a collection that was made a moment ago.
        """
        wanted = self.filter
        if have.everything or have == wanted:
            return None
        if wanted.collections is not None:
            new = frozenset(number for number in wanted.collections if not have.has(number, self.scope_of))
            return Missing(Filter(collections=new)) if new else None
        known = {*self.scope_of, *(have.collections or ())}
        return Missing(wanted, tuple(sorted(number for number in known if have.has(number, self.scope_of))))

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
            return any(other.has(number, self.scope_of) for number in missing.filter.collections)
        if other.scope is not None:
            return other.scope == missing.filter.scope
        inside = (number for number in other.collections or () if number not in missing.without)
        return any(self.scope_of.get(number, missing.filter.scope) == missing.filter.scope for number in inside)


EVERYTHING = Filter()


def resolve(options: ReadOptions, manifest: Mapping[str, Any], *, strict: bool) -> Wanted:
    """What the options name, by the ids of now; ``strict``: a name that does not exist is an error."""
    names = Names.of_manifest(manifest)
    scopes = {name: number for number, name in names.scopes.items()}
    scope_of = {number: scopes[scope] for number, (scope, _) in names.collections.items()}
    if options.collections:
        return Wanted(Filter(collections=_collections(options, names, strict)), scope_of)
    if not options.scope:
        return Wanted(EVERYTHING, scope_of)
    if options.scope not in scopes:
        if strict:
            raise ConfigError(f"no scope {options.scope}; there are {', '.join(sorted(scopes))}")
        return Wanted(Filter(collections=frozenset()), scope_of)
    return Wanted(Filter(scope=scopes[options.scope]), scope_of)


def _collections(options: ReadOptions, names: Names, strict: bool) -> frozenset[int]:
    wanted = {qualified(name, options.scope or "_default") for name in options.collections}
    if strict and (unknown := wanted - set(names.collections.values())):
        raise ConfigError(f"no collection {_listed(unknown)}; there are {_listed(names.collections.values())}")
    return frozenset(names.ids_of(wanted))


def _listed(paths: Iterable[tuple[str, str]]) -> str:
    return ", ".join(sorted(".".join(path) for path in paths))


def qualified(name: str, scope: str) -> tuple[str, str]:
    """Scope and collection of a name that may lack its scope.

    >>> qualified("shop.orders", "_default"), qualified("orders", "shop")
    (('shop', 'orders'), ('shop', 'orders'))
    """
    first, dot, second = name.partition(".")
    return (first, second) if dot else (scope, first)
