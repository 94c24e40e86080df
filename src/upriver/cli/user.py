"""``upriver user``: who may log in to a node, kept salted in its data directory."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from upriver.errors import ConfigError

_data = click.option("--data", type=click.Path(path_type=Path), required=True, help="The node's data directory.")


@click.group()
def user() -> None:
    """Manage the users of a node. A running node notices the change by itself."""


@user.command("add")
@click.argument("name")
@_data
@click.option("--password-stdin", is_flag=True, help="Read the password from the first line of standard input.")
def add(name: str, data: Path, password_stdin: bool) -> None:
    """Add a user, or give one a new password."""
    from upriver.node import users

    users.check_name(name)
    password = sys.stdin.readline().rstrip("\r\n") if password_stdin else _ask()
    if not password:
        raise ConfigError("the password is empty")
    is_new = users.add_user(data / users.Users.FILE_NAME, name, password)
    click.echo(f"{'added' if is_new else 'changed the password of'} {name}")


def _ask() -> str:
    return str(click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))


@user.command("remove")
@click.argument("name")
@_data
def remove(name: str, data: Path) -> None:
    """Remove a user. Connections that are logged in stay so."""
    from upriver.node import users

    users.remove_user(data / users.Users.FILE_NAME, name)
    click.echo(f"removed {name}")


@user.command("list")
@_data
def list_users(data: Path) -> None:
    """List the users, one per line."""
    from upriver.node import users

    for name in sorted(users.read_file(data / users.Users.FILE_NAME)):
        click.echo(name)
