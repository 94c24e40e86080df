"""``upriver collections``: list, create, alter and drop the scopes and collections of a bucket on a running node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.admin.management import BUCKETS, Management
from upriver.cli.connecting import ConnectingGroup, connection_options
from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.client.options import ConnectOptions


@click.group(cls=ConnectingGroup)
def collections() -> None:
    """List, create, alter and drop scopes and collections. A PATH is SCOPE or SCOPE.COLLECTION."""


@collections.command("list", short_help="List scopes and collections.")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def list_collections(connect_to: ConnectOptions, as_json: bool) -> None:
    """List the scopes and collections of a bucket, with their ids."""
    manifest = Management.of(connect_to).get(*BUCKETS, connect_to.bucket, "scopes")
    if as_json:
        click.echo(json.dumps(manifest, indent=2))
        return
    rows = [row for scope in manifest["scopes"] for row in _rows(scope)]
    width = max(len(path) for path, _ in rows)
    for path, facts in rows:
        click.echo(f"{path:<{width}}  {facts}".rstrip())


def _rows(scope: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if not scope["collections"]:
        yield scope["name"], "(no collections)"
    for each in scope["collections"]:
        ttl = {None: "", -1: "  no max TTL"}.get(each.get("maxTTL"), f"  max TTL {each.get('maxTTL')} s")
        yield f"{scope['name']}.{each['name']}", f"0x{each['uid']}{ttl}"


@collections.command("create", short_help="Create a scope or a collection.")
@connection_options
@click.argument("path")
@click.option(
    "--max-ttl",
    type=click.IntRange(-1, 2**31 - 1),
    default=0,
    help="Seconds until a document expires, at most; 0: as the bucket says, -1: never.",
)
def create(connect_to: ConnectOptions, path: str, max_ttl: int) -> None:
    """Create a scope, or a collection together with its scope if that is missing. PATH is SCOPE or SCOPE.COLLECTION."""
    scope, collection = _split(path)
    node, bucket = Management.of(connect_to), connect_to.bucket
    known = {each["name"] for each in node.get(*BUCKETS, bucket, "scopes")["scopes"]}
    if scope not in known or not collection:
        node.request("POST", *BUCKETS, bucket, "scopes", form={"name": scope})
    if collection:
        form = {"name": collection} | ({"maxTTL": max_ttl} if max_ttl else {})
        node.request("POST", *BUCKETS, bucket, "scopes", scope, "collections", form=form)
    click.echo(f"created {path}")


@collections.command("alter", short_help="Change a collection.")
@connection_options
@click.argument("path", metavar="SCOPE.COLLECTION")
@click.option("--max-ttl", type=click.IntRange(-1, 2**31 - 1), help="0: as the bucket says, -1: never.")
@click.option("--history/--no-history", default=None, help="Whether to keep changes for readers of history.")
def alter(connect_to: ConnectOptions, path: str, max_ttl: int | None, history: bool | None) -> None:
    """Change a collection; settings that are not given stay as they are."""
    scope, collection = _split(path)
    if not collection or (max_ttl is None and history is None):
        raise ConfigError("give SCOPE.COLLECTION and --max-ttl, --history or --no-history")
    wanted = {"maxTTL": max_ttl, "history": None if history is None else str(history).lower()}
    form = {name: value for name, value in wanted.items() if value is not None}
    where = (*BUCKETS, connect_to.bucket, "scopes", scope, "collections", collection)
    Management.of(connect_to).request("PATCH", *where, form=form)
    click.echo(f"altered {path}")


@collections.command("drop", short_help="Drop a collection or a scope.")
@connection_options
@click.argument("path")
@click.option("--yes", is_flag=True, help="Do not ask.")
def drop(connect_to: ConnectOptions, path: str, yes: bool) -> None:
    """Drop a collection, or a scope with all its collections."""
    scope, collection = _split(path)
    if not yes:
        click.confirm(f"Erase {path} of {connect_to.bucket} with all its documents?", abort=True, err=True)
    below = ("collections", collection) if collection else ()
    Management.of(connect_to).request("DELETE", *BUCKETS, connect_to.bucket, "scopes", scope, *below)
    click.echo(f"dropped {path}")


def _split(path: str) -> tuple[str, str]:
    scope, dot, collection = path.partition(".")
    if not scope or "." in collection or (dot and not collection):
        raise ConfigError(f"{path!r} is not SCOPE or SCOPE.COLLECTION")
    return scope, collection
