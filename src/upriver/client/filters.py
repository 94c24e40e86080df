"""Filters by name, as the client's checkpoints keep them: a collection that is made again stays the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from upriver.protocol.filters import Filter, Key

DEFAULT = "_default"
Path = tuple[str, str]


def path_of(name: str) -> Path:
    """Scope and collection of ``scope.collection``, or of a collection in the default scope.

    >>> path_of("shop.orders"), path_of("orders")
    (('shop', 'orders'), ('_default', 'orders'))
    """
    scope, _, collection = name.rpartition(".")
    return scope or DEFAULT, collection


def named(scope: str = "", names: Iterable[str] = ()) -> Filter:
    """The filter of one scope, or of some collections; of everything without either."""
    collections = frozenset(".".join(path_of(name)) for name in names)
    return Filter(scope or None, collections or None)


def covers(one: Filter, other: Filter) -> bool:
    """Whether everything that passes ``other``, now or later, passes ``one``."""
    return one.covers(other, _scope_of)


def beyond(wanted: Filter, had: Filter, existing: Iterable[Path]) -> Filter | None:
    """What passes ``wanted`` and not ``had``, as a filter; None for nothing of what exists."""
    if covers(had, wanted):
        return None
    if wanted.scope and all(_scope_of(name) != wanted.scope for name in had.collections or ()):
        return wanted
    names: Iterable[Key] = map(".".join, existing) if wanted.collections is None else wanted.collections
    passing = (name for name in names if wanted.has(name, _scope_of(name)) and not had.has(name, _scope_of(name)))
    return Filter(collections=found) if (found := frozenset(passing)) else None


def filter_to_json(found: Filter) -> dict[str, Any]:
    """The form in a checkpoint."""
    if found.scope:
        return {"scope": found.scope}
    return {"collections": sorted(map(str, found.collections))} if found.collections else {}


def filter_from_json(value: Any) -> Filter:
    """The filter that ``filter_to_json`` made this of; ``ValueError`` if it is none."""
    names, scope = value.get("collections", []), value.get("scope", "")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or type(scope) is not str:
        raise ValueError(f"{value!r} is not a filter")
    return named(scope, names)


def _scope_of(collection: Key) -> str:
    return path_of(str(collection))[0]
