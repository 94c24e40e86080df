"""The arguments by which every command that reads or writes a bucket finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from upriver.client.blocking import Database
    from upriver.client.positions import Positions

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS = (
    click.argument("connection"),
    click.option("--bucket", envvar="UPRIVER_BUCKET", help="Default: default."),
    click.option("--username", envvar="UPRIVER_USERNAME"),
    click.option("--password", envvar="UPRIVER_PASSWORD", help="Better in UPRIVER_PASSWORD."),
    click.option("--ca-file", help="PEM file of the authority that signed the nodes' certificates."),
    click.option("--client-cert", help="PEM file of our own certificate."),
    click.option("--client-key", help="PEM file of its private key."),
    click.option("--network", type=click.Choice(["auto", "default", "external"]), help="Which addresses to use."),
)
NAMES = ("connection", "bucket", "username", "password", "ca_file", "client_cert", "client_key", "network")


def connection_options(command: F) -> F:
    """Adds CONNECTION and the options that say how to connect."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """How to connect, and the rest."""
    return {n: options[n] for n in NAMES}, {n: value for n, value in options.items() if n not in NAMES}


def open_database(connecting: dict[str, Any]) -> Database:
    from upriver import connect

    given = {name: value for name, value in connecting.items() if name != "connection"}
    return connect(connection_string(connecting["connection"]), **given)


def connection_string(given: str) -> str:
    """host:port is enough; everything else is said by couchbase:// and couchbases://."""
    return given if "://" in given else f"couchbase://{given}"


def start_of(given: str) -> str | Positions:
    """The value of --from: "beginning", "now", or a checkpoint file."""
    from upriver.client.checkpoints import FileCheckpoint
    from upriver.errors import ConfigError

    if given in ("beginning", "now"):
        return given
    found = FileCheckpoint(given).load()
    if found is None:
        raise ConfigError(f"--from: {given!r} is neither 'beginning', 'now' nor a checkpoint file")
    return found
