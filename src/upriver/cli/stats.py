"""``upriver stats``: a group of a node's statistics, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from upriver.client.kv import KvConnection


@click.command()
@click.argument("node")
@click.argument("group", nargs=-1)
@click.option("--bucket", default="default", show_default=True)
@click.option("--username", default="", envvar="UPRIVER_USERNAME")
@click.option("--password", default="", envvar="UPRIVER_PASSWORD", help="Better in UPRIVER_PASSWORD.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(
    node: str, group: tuple[str, ...], bucket: str, username: str, password: str, as_json: bool
) -> None:  # fmt: skip
    """Show statistics of NODE (host:port, or couchbase://...), for example GROUP 'vbucket-seqno 12' or 'dcp'."""
    from upriver.client.kv import KvConnection
    from upriver.client.options import ConnectOptions

    target = node if "://" in node else f"couchbase://{node}"
    options = ConnectOptions.parse(target, bucket=bucket, username=username, password=password)
    with KvConnection(options.seeds[0], options) as connection:
        figures = dict(_read(connection, " ".join(group)))
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        _print_table(figures)


def _read(connection: KvConnection, group: str) -> Iterator[tuple[str, str]]:
    """One answer per figure; the one without a name is the last."""
    from upriver.wire.session import Stat

    answer = connection.ask(Stat(group.encode()))
    while key := getattr(answer, "key", b""):
        yield key.decode("utf-8", "replace"), getattr(answer, "value", b"").decode("utf-8", "replace")
        answer = connection.receive()


def _print_table(figures: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "value", box=None, show_header=False, pad_edge=False)
    for name, value in figures.items():
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)
