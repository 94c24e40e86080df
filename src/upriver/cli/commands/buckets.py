"""``upriver buckets``: list, create and drop the buckets of a running node."""

from __future__ import annotations

import json

import click

from upriver.cli.management import BUCKETS, Management, management_options


@click.group()
def buckets() -> None:
    """List, create and drop buckets."""


@buckets.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@management_options
def list_buckets(url: str, username: str, password: str, as_json: bool) -> None:
    """List the buckets."""
    found = Management(url, username, password).get(*BUCKETS)
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


@buckets.command("create")
@click.argument("name")
@click.option("--vbuckets", type=click.IntRange(1, 65535), help="How many vbuckets.  [default: the node's]")
@management_options
def create(name: str, vbuckets: int | None, url: str, username: str, password: str) -> None:
    """Create a bucket."""
    form = {"name": name} | ({"numVBuckets": vbuckets} if vbuckets else {})
    Management(url, username, password).request("POST", *BUCKETS, form=form)
    click.echo(f"created {name}")


@buckets.command("drop")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@management_options
def drop(name: str, yes: bool, url: str, username: str, password: str) -> None:
    """Drop a bucket and erase its data."""
    if not yes:
        click.confirm(f"Erase the bucket {name} with all its data?", abort=True, err=True)
    Management(url, username, password).request("DELETE", *BUCKETS, name)
    click.echo(f"dropped {name}")
