"""``upriver fault``: make a running node misbehave, to see what its consumers do.

Works on a node that was started with ``--enable-faults`` and an HTTP port.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from base64 import b64encode
from typing import Any

import click

from upriver.errors import UpriverError


@click.group()
@click.option("--node", default="http://127.0.0.1:8091", show_default=True, help="The node's management address.")
@click.option("--bucket", default="", help="Bucket, if not the node's first one.")
@click.option("--username", default="")
@click.option("--password", default="", envvar="UPRIVER_PASSWORD")
def fault(**options: str) -> None:
    """Make a running node misbehave, to test its consumers."""
    click.get_current_context().obj = options


def _post(ctx: click.Context, kind: str, **arguments: Any) -> None:
    options = ctx.obj
    content = json.dumps({"bucket": options["bucket"], **arguments}).encode()
    headers = {"Content-Type": "application/json"}
    if options["username"]:
        secret = b64encode(f"{options['username']}:{options['password']}".encode()).decode()
        headers["Authorization"] = f"Basic {secret}"
    url = f"{options['node'].rstrip('/')}/upriver/faults/{kind}"
    if not url.startswith(("http://", "https://")):
        raise UpriverError(f"{options['node']} is not an http address")
    request = urllib.request.Request(url, content, headers, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            click.echo(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise UpriverError(f"the node refused: {error.read().decode() or error.reason}") from error
    except OSError as error:
        raise UpriverError(f"no node answers at {options['node']}: {error}") from error


@fault.command()
@click.option("--vbucket", type=int, required=True)
@click.option("--lose", default=0, show_default=True, help="How many of the last changes are lost.")
@click.pass_context
def failover(ctx: click.Context, vbucket: int, lose: int) -> None:
    """Drop a vbucket's last changes and start a new branch of history."""
    _post(ctx, "failover", vbucket=vbucket, lose=lose)


@fault.command()
@click.option("--vbucket", type=int, required=True)
@click.option("--seqno", type=int, required=True, help="Where history branches off.")
@click.pass_context
def rollback(ctx: click.Context, vbucket: int, seqno: int) -> None:
    """Take a vbucket back to a seqno and start a new branch of history."""
    _post(ctx, "rollback", vbucket=vbucket, seqno=seqno)


@fault.command()
@click.option("--vbucket", type=int, required=True)
@click.pass_context
def purge(ctx: click.Context, vbucket: int) -> None:
    """Purge a vbucket's tombstones now."""
    _post(ctx, "purge", vbucket=vbucket)


@fault.command("drop-connection")
@click.option("--name", default="", help="Name of the DCP connection.  [default: all of them]")
@click.pass_context
def drop_connection(ctx: click.Context, name: str) -> None:
    """Cut DCP connections."""
    _post(ctx, "drop-connection", name=name)


@fault.command()
@click.option("--name", default="", help="Name of the DCP connection.  [default: all of them]")
@click.option("--seconds", default=10, show_default=True)
@click.pass_context
def stall(ctx: click.Context, name: str, seconds: int) -> None:
    """Send nothing on DCP connections for a while."""
    _post(ctx, "stall", name=name, seconds=seconds)


@fault.command()
@click.option("--name", default="", help="Name of the DCP connection.  [default: all of them]")
@click.option("--bytes-per-second", type=int, required=True, help="0: full speed again.")
@click.pass_context
def slow(ctx: click.Context, name: str, bytes_per_second: int) -> None:
    """Slow DCP connections down."""
    _post(ctx, "slow", name=name, bytes_per_second=bytes_per_second)


@fault.command()
@click.pass_context
def crash(ctx: click.Context) -> None:
    """Kill the node as kill -9 would."""
    _post(ctx, "crash")
