"""What the options of a read name, by the ids that the manifest has now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from upriver.client.names import Names
from upriver.errors import ConfigError
from upriver.protocol.filters import EVERYTHING, Filter, Wanted
from upriver.spark.options import ReadOptions


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
