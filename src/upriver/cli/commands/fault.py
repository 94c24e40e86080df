"""``upriver fault``: make a running node misbehave, to see what its consumers do.

Works on a node that was started with ``--enable-faults`` and an HTTP port.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from upriver.cli.management import DEFAULT_URL, Management

_WHERE = (
    click.option("--url", "--node", "url", help=f"The node's management port.  [default: {DEFAULT_URL}]"),
    click.option("--bucket", help="[default: the node's first]"),
    click.option("--username", envvar="UPRIVER_USERNAME"),
    click.option("--password", envvar="UPRIVER_PASSWORD", help="Better in UPRIVER_PASSWORD."),
)
_vbucket = click.option("--vbucket", type=click.IntRange(min=0), required=True)
_name = click.option("--name", default="", help="Name of the DCP connection.  [default: all of them]")


def _where(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_WHERE):
        command = option(command)
    return command


@click.group()
@_where
def fault(**where: str | None) -> None:
    """Make a running node misbehave, to test its consumers.

    The node must run with --enable-faults and a management port. What is done is printed as JSON.
    """
    click.get_current_context().obj = where


def _post(kind: str, where: dict[str, str | None], **arguments: Any) -> None:
    # The options may stand before the name of the fault or after it.
    before = click.get_current_context().obj
    said = {name: value or before[name] or "" for name, value in where.items()}
    node = Management(said["url"] or DEFAULT_URL, said["username"], said["password"])
    done = node.post_json("upriver", "faults", kind, content={"bucket": said["bucket"], **arguments})
    click.echo(json.dumps(done))


@fault.command(short_help="Drop a vbucket's last changes.")
@_vbucket
@click.option("--lose", type=click.IntRange(min=0), default=0, show_default=True,
              help="How many of the last changes are lost.")  # fmt: skip
@_where
def failover(vbucket: int, lose: int, **where: str | None) -> None:
    """Drop a vbucket's last changes and start a new branch of history."""
    _post("failover", where, vbucket=vbucket, lose=lose)


@fault.command(short_help="Take a vbucket back to a seqno.")
@_vbucket
@click.option("--seqno", type=click.IntRange(min=0), required=True, help="Where history branches off.")
@_where
def rollback(vbucket: int, seqno: int, **where: str | None) -> None:
    """Take a vbucket back to a seqno and start a new branch of history."""
    _post("rollback", where, vbucket=vbucket, seqno=seqno)


@fault.command()
@_vbucket
@_where
def purge(vbucket: int, **where: str | None) -> None:
    """Purge a vbucket's tombstones now."""
    _post("purge", where, vbucket=vbucket)


@fault.command("drop-connection")
@_name
@_where
def drop_connection(name: str, **where: str | None) -> None:
    """Cut DCP connections."""
    _post("drop-connection", where, name=name)


@fault.command()
@_name
@click.option("--seconds", type=click.IntRange(min=0), default=10, show_default=True)
@_where
def stall(name: str, seconds: int, **where: str | None) -> None:
    """Send nothing on DCP connections for a while."""
    _post("stall", where, name=name, seconds=seconds)


@fault.command()
@_name
@click.option("--bytes-per-second", type=click.IntRange(min=0), required=True, help="0: full speed again.")
@_where
def slow(name: str, bytes_per_second: int, **where: str | None) -> None:
    """Slow DCP connections down."""
    _post("slow", where, name=name, bytes_per_second=bytes_per_second)


@fault.command()
@_where
def crash(**where: str | None) -> None:
    """Kill the node as kill -9 would."""
    _post("crash", where)
