"""``upriver fault``: make a running node misbehave, to see what its consumers do.

Works on a node that was started with ``--enable-faults``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from upriver.cli.admin.management import Management
from upriver.cli.connecting import ConnectingGroup, connection_options

if TYPE_CHECKING:
    from upriver.client.options import ConnectOptions

_vbucket = click.option("--vbucket", type=click.IntRange(min=0), required=True, help="Which vbucket.")
_name = click.option("--name", default="", help="Name of the DCP connection.  [default: all of them]")


@click.group(cls=ConnectingGroup)
def fault() -> None:
    """Make the node at CONNECTION misbehave, to test its consumers.

    The node must run with --enable-faults. Prints what was done as JSON.
    """


def _provoke(connect_to: ConnectOptions, kind: str, **arguments: str | int) -> None:
    node = Management.of(connect_to)
    done = node.post_json("upriver", "faults", kind, content={"bucket": connect_to.bucket, **arguments})
    click.echo(json.dumps(done))


@fault.command(short_help="Drop a vbucket's last changes.")
@connection_options
@_vbucket
@click.option("--lose", type=click.IntRange(min=0), default=0, show_default=True,
              help="How many of the last changes are lost.")  # fmt: skip
def failover(connect_to: ConnectOptions, vbucket: int, lose: int) -> None:
    """Drop a vbucket's last changes and start a new branch of history."""
    _provoke(connect_to, "failover", vbucket=vbucket, lose=lose)


@fault.command(short_help="Take a vbucket back to a seqno.")
@connection_options
@_vbucket
@click.option("--seqno", type=click.IntRange(min=0), required=True, help="Where history branches off.")
def rollback(connect_to: ConnectOptions, vbucket: int, seqno: int) -> None:
    """Take a vbucket back to a seqno and start a new branch of history."""
    _provoke(connect_to, "rollback", vbucket=vbucket, seqno=seqno)


@fault.command()
@connection_options
@_vbucket
def purge(connect_to: ConnectOptions, vbucket: int) -> None:
    """Purge a vbucket's tombstones now."""
    _provoke(connect_to, "purge", vbucket=vbucket)


@fault.command("drop-connection")
@connection_options
@_name
def drop_connection(connect_to: ConnectOptions, name: str) -> None:
    """Cut DCP connections."""
    _provoke(connect_to, "drop-connection", name=name)


@fault.command()
@connection_options
@_name
@click.option("--seconds", type=click.IntRange(min=0), default=10, show_default=True, help="For how long.")
def stall(connect_to: ConnectOptions, name: str, seconds: int) -> None:
    """Send nothing on DCP connections for a while."""
    _provoke(connect_to, "stall", name=name, seconds=seconds)


@fault.command()
@connection_options
@_name
@click.option("--bytes-per-second", type=click.IntRange(min=0), required=True, help="0: full speed again.")
def slow(connect_to: ConnectOptions, name: str, bytes_per_second: int) -> None:
    """Slow DCP connections down."""
    _provoke(connect_to, "slow", name=name, bytes_per_second=bytes_per_second)


@fault.command()
@connection_options
def crash(connect_to: ConnectOptions) -> None:
    """Kill the node as kill -9 would."""
    _provoke(connect_to, "crash")
