"""``upriver stats``: a group of the nodes' statistics, as tables or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from upriver.cli.connecting import ConnectingCommand, connection_options

if TYPE_CHECKING:
    from upriver.client.options import ConnectOptions


@click.command(cls=ConnectingCommand)
@connection_options
@click.argument("group", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(connect_to: ConnectOptions, group: tuple[str, ...], as_json: bool) -> None:
    """Show a group of statistics of each node, such as: dcp, or: vbucket-seqno 12."""
    from upriver.client.blocking import connect

    with connect(connect_to) as database:
        by_node = database.stats(" ".join(group))
    if as_json:
        click.echo(json.dumps(by_node, indent=2))
        return
    for name, figures in by_node.items():
        _print_table(name, figures)


def _print_table(node: str, figures: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "value", title=node, title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, value in figures.items():
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)
