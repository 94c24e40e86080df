"""``upriver buckets``: list, create and drop the buckets of a running node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from upriver.cli.admin.management import BUCKETS, Management
from upriver.cli.connecting import ConnectingGroup, connection_options

if TYPE_CHECKING:
    from upriver.client.options import ConnectOptions


@click.group(cls=ConnectingGroup)
def buckets() -> None:
    """List, create and drop buckets."""


@buckets.command("list")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_buckets(connect_to: ConnectOptions, as_json: bool) -> None:
    """List the buckets of the node at CONNECTION."""
    found = Management.of(connect_to).get(*BUCKETS)
    rows = [
        {"name": each["name"], "items": each["basicStats"]["itemCount"], "vbuckets": each["numVBuckets"],
         "memory_bytes": each["basicStats"]["memUsed"], "disk_bytes": each["basicStats"]["diskUsed"]}
        for each in found
    ]  # fmt: skip
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    _print_table(rows)


def _print_table(rows: list[dict[str, object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("bucket", "items", "vbuckets", "memory", "disk")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


@buckets.command("create", short_help="Create a bucket.")
@connection_options
@click.argument("name")
@click.option("--vbuckets", type=click.IntRange(1, 65535), help="How many vbuckets.  [default: the node's]")
def create(connect_to: ConnectOptions, name: str, vbuckets: int | None) -> None:
    """Create the bucket NAME at the node at CONNECTION."""
    form = {"name": name} | ({"numVBuckets": vbuckets} if vbuckets else {})
    Management.of(connect_to).request("POST", *BUCKETS, form=form)
    click.echo(f"created {name}")


@buckets.command("drop", short_help="Drop a bucket and erase its data.")
@connection_options
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def drop(connect_to: ConnectOptions, name: str, yes: bool) -> None:
    """Drop the bucket NAME of the node at CONNECTION and erase its data."""
    if not yes:
        click.confirm(f"Erase the bucket {name} with all its data?", abort=True, err=True)
    Management.of(connect_to).request("DELETE", *BUCKETS, name)
    click.echo(f"dropped {name}")
