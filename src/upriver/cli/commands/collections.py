"""``upriver collections``: list, create, alter and drop the scopes and collections of a bucket on a running node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from upriver.cli.management import BUCKETS, Management, management_options
from upriver.errors import ConfigError

_bucket = click.option("--bucket", default="default", show_default=True)


@click.group()
def collections() -> None:
    """List, create, alter and drop scopes and collections; a path is SCOPE or SCOPE.COLLECTION."""


@collections.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
@_bucket
@management_options
def list_collections(bucket: str, as_json: bool, url: str, username: str, password: str) -> None:
    """List scopes and collections with their ids."""
    manifest = Management(url, username, password).get(*BUCKETS, bucket, "scopes")
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


@collections.command("create")
@click.argument("path")
@click.option(
    "--max-ttl",
    type=click.IntRange(-1, 2**31 - 1),
    default=0,
    help="Seconds that a document lives at most; 0: what the bucket says, -1: for ever.",
)
@_bucket
@management_options
def create(path: str, max_ttl: int, bucket: str, url: str, username: str, password: str) -> None:
    """Create a scope, or a collection.

    The scope of a new collection is created, too, if it is missing.
    """
    scope, collection = _split(path)
    node = Management(url, username, password)
    known = {each["name"] for each in node.get(*BUCKETS, bucket, "scopes")["scopes"]}
    if scope not in known or not collection:
        node.request("POST", *BUCKETS, bucket, "scopes", form={"name": scope})
    if collection:
        form = {"name": collection} | ({"maxTTL": max_ttl} if max_ttl else {})
        node.request("POST", *BUCKETS, bucket, "scopes", scope, "collections", form=form)
    click.echo(f"created {path}")


@collections.command("alter")
@click.argument("path")
@click.option("--max-ttl", type=click.IntRange(-1, 2**31 - 1), help="0: what the bucket says, -1: for ever.")
@click.option("--history/--no-history", default=None, help="Whether changes are kept for readers of history.")
@_bucket
@management_options
def alter(
    path: str, max_ttl: int | None, history: bool | None, bucket: str, url: str, username: str, password: str
) -> None:
    """Change a collection; what is not given stays as it is."""
    scope, collection = _split(path)
    if not collection or (max_ttl is None and history is None):
        raise ConfigError("give SCOPE.COLLECTION and --max-ttl, --history or --no-history")
    wanted = {"maxTTL": max_ttl, "history": None if history is None else str(history).lower()}
    form = {name: value for name, value in wanted.items() if value is not None}
    node = Management(url, username, password)
    node.request("PATCH", *BUCKETS, bucket, "scopes", scope, "collections", collection, form=form)
    click.echo(f"altered {path}")


@collections.command("drop")
@click.argument("path")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_bucket
@management_options
def drop(path: str, yes: bool, bucket: str, url: str, username: str, password: str) -> None:
    """Drop a collection, or a scope with all its collections."""
    scope, collection = _split(path)
    if not yes:
        click.confirm(f"Erase {path} of {bucket} with all its documents?", abort=True, err=True)
    below = ("collections", collection) if collection else ()
    Management(url, username, password).request("DELETE", *BUCKETS, bucket, "scopes", scope, *below)
    click.echo(f"dropped {path}")


def _split(path: str) -> tuple[str, str]:
    scope, dot, collection = path.partition(".")
    if not scope or "." in collection or (dot and not collection):
        raise ConfigError(f"{path!r} is not SCOPE or SCOPE.COLLECTION")
    return scope, collection
