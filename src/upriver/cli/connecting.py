"""The arguments that tell a command where its bucket or node is: CONNECTION, login, TLS, and a ``--config`` file.

A command declares them with ``connection_options`` and gets ``ConnectOptions``. In order of precedence: the command
line, the ``?query`` of the connection string, ``UPRIVER_...`` in the environment, the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from upriver.client.options import ConnectOptions
    from upriver.client.positions import Positions

Given = dict[str, Any]  # options by name; None where the command line does not have one
AnyCommand = Callable[..., Any]

_LOGIN = (
    click.option("--username", metavar="NAME", help="Or UPRIVER_USERNAME."),
    click.option("--password", metavar="TEXT", help="Safer in UPRIVER_PASSWORD."),
    click.option("--password-file", metavar="FILE", help="File that holds the password."),
    click.option("--config", metavar="FILE", help="TOML file with any of these options, under their own names."),
)
_OPTIONS = (
    click.option("--bucket", metavar="NAME", help="Or UPRIVER_BUCKET.  [default: default]"),
    *_LOGIN[:-1],
    click.option("--ca-file", metavar="FILE", help="PEM file of the authority that signed the nodes' certificates."),
    click.option("--client-cert", metavar="FILE", help="PEM file of your certificate."),
    click.option("--client-key", metavar="FILE", help="PEM file of its private key."),
    click.option("--network", type=click.Choice(["auto", "default", "external"]), help="Which addresses to use."),
    _LOGIN[-1],
)
NAMES = (
    "connection", "bucket", "username", "password", "password_file", "ca_file", "client_cert", "client_key", "network",
    "config",
)  # fmt: skip


_CONNECTION_HELP = ("CONNECTION", "couchbase://host or host:port; couchbases://host for TLS.")


class ConnectingCommand(click.Command):
    """A command with CONNECTION, which may be in the ``--config`` file instead.

    CONNECTION is the first argument. If it is left out, an empty one is inserted, so that the others keep their places.
    The help lists the options of the connection in a separate section.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        path = given.get("config")
        if isinstance(path, str) and read_config(path).get("connection") and self._leaves_out_connection(given):
            args = ["", *args]
        return super().parse_args(ctx, args)

    def _leaves_out_connection(self, given: Mapping[str, Any]) -> bool:
        others = [each for each in self.params if isinstance(each, click.Argument) and each.name != "connection"]
        if any(each.required and not _is_given(given.get(str(each.name))) for each in others):
            return True
        first = given.get("connection")
        return any(each.nargs < 0 for each in others) and isinstance(first, str) and "://" not in first

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        connecting: list[tuple[str, str]] = []
        for each in self.get_params(ctx):
            shown = _CONNECTION_HELP if each.name == "connection" else each.get_help_record(ctx)
            if shown is not None and (isinstance(each, click.Option) or each.name == "connection"):
                (connecting if each.name in NAMES else own).append(shown)
        for title, records in (("Options", own), ("Connection", connecting)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class ConnectingGroup(click.Group):
    """A group whose commands are ``ConnectingCommand``."""

    command_class = ConnectingCommand


def _is_given(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, tuple) and len(value) > 0)


def connection_arguments(function: AnyCommand) -> AnyCommand:
    """Declare CONNECTION and the options that say how to connect; the function gets each of ``NAMES``."""
    for declare in reversed((click.argument("connection", required=False), *_OPTIONS)):
        function = declare(function)
    return function


def login_options(function: AnyCommand) -> AnyCommand:
    """Declare the login options only, for commands that find their nodes in a directory."""
    for declare in reversed(_LOGIN):
        function = declare(function)
    return function


def connection_options(function: AnyCommand) -> AnyCommand:
    """Declare the same as ``connection_arguments``; the function gets them as ``connect_to: ConnectOptions``."""

    @wraps(function)
    def run(**given: Any) -> Any:
        connecting, rest = split_options(given)
        return function(connect_to=connect_options(connecting), **rest)

    return connection_arguments(run)


def split_options(given: Given) -> tuple[Given, Given]:
    """How to connect, and the rest."""
    return {n: v for n, v in given.items() if n in NAMES}, {n: v for n, v in given.items() if n not in NAMES}


def connect_options(given: Given) -> ConnectOptions:
    """Where and how to connect, from the command line, the environment and the file."""
    from upriver.client.options import ConnectOptions

    values = with_config(given)
    if not values.get("connection"):
        raise click.UsageError("Missing argument 'CONNECTION': write couchbase://host or host:port, or use --config.")
    known = {name: values[name] for name in values.keys() & _known_names() if name != "password_file"}
    return ConnectOptions.parse(known.pop("connection"), **{**known, "password": _password(values)})


def login(given: Given) -> tuple[str, str]:
    """User name and password, from the command line, the environment and the file; empty if there are none."""
    values = with_config(given)
    environment = in_environment()
    username = values.get("username") or environment.get("username", "")
    return username, _password(values) or environment.get("password", "")


def _password(values: Given) -> str | None:
    from upriver.client.options import password_of

    return password_of(values.get("password", ""), values.get("password_file", ""), "password_file") or None


def with_config(given: Given) -> Given:
    """The given options, completed by the ``--config`` file; CONNECTION as a connection string."""
    said = {name: value for name, value in given.items() if name != "config" and value not in (None, "")}
    file = read_config(given["config"]) if given.get("config") else {}
    above = said.keys() | in_environment().keys() | _in_query(said.get("connection") or file.get("connection", ""))
    if above & {"password", "password_file"}:
        above |= {"password", "password_file"}
    found = {name: value for name, value in file.items() if name not in above} | said
    if "connection" in found:
        found["connection"] = connection_string(found["connection"])
    return found


def in_environment() -> dict[str, str]:
    """Options from the environment, for instance ``UPRIVER_BUCKET``."""
    found = {name: os.environ.get(f"UPRIVER_{name.upper()}") for name in NAMES}
    return {name: value for name, value in found.items() if value and name not in ("connection", "config")}


def _in_query(connection: str) -> set[str]:
    return {word.partition("=")[0] for word in connection.partition("?")[2].split("&")}


def read_config(path: str) -> Given:
    """A TOML file: options under their own names, those of the connection also in a table ``[connection]``."""
    from upriver.errors import ConfigError

    try:
        found = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config: {path}: {error}") from error
    table = found.get("connection", "")
    if isinstance(table, dict):
        if unknown := sorted(table.keys() - _known_names()):
            raise ConfigError(f"--config: {path}: unknown option {unknown[0]!r} in [connection]")
        found = {**{name: value for name, value in found.items() if name != "connection"}, **table}
    if not isinstance(found.get("connection", ""), str):
        raise ConfigError(f"--config: {path}: connection is not a text like 'couchbase://host'")
    return found


def _known_names() -> set[str]:
    from dataclasses import fields

    from upriver.client.options import ConnectOptions

    return {each.name for each in fields(ConnectOptions)} - {"seeds", "tls"} | {"connection", "password_file"}


def connection_string(given: str) -> str:
    """A connection string; ``host:port`` alone means ``couchbase://``."""
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


def parse_ranges(text: str) -> list[int]:
    """Vbuckets as people write them: the numbers, in order and once each.

    >>> parse_ranges("7,0-2")
    [0, 1, 2, 7]
    """
    from upriver.errors import ConfigError

    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"{text!r} does not name vbuckets; write 7 or 0-511 or 0-511,600")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)
