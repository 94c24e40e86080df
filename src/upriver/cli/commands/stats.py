"""``upriver stats``: a group of the nodes' statistics, as tables or as JSON."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("node")
@click.argument("group", nargs=-1)
@click.option("--bucket", default="default", show_default=True)
@click.option("--username", envvar="UPRIVER_USERNAME")
@click.option("--password", envvar="UPRIVER_PASSWORD", help="Better in UPRIVER_PASSWORD.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(
    node: str, group: tuple[str, ...], bucket: str, username: str | None, password: str | None, as_json: bool
) -> None:
    """Show statistics of NODE (host:port, or couchbase://...), for example GROUP 'vbucket-seqno 12' or 'dcp'."""
    from upriver import connect

    target = node if "://" in node else f"couchbase://{node}"
    with connect(target, bucket, username=username, password=password) as database:
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
