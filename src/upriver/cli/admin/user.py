"""``upriver user``: who may log in to a node, and what they may do.

Users are kept in the node's data directory, their passwords as salted hashes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from upriver.errors import ConfigError

_data = click.option("--data", type=click.Path(path_type=Path), required=True, help="The node's data directory.")
_roles = click.option(
    "--role", "roles", multiple=True, metavar="ROLE",
    help="admin, or a role for a bucket: 'data_reader[travel]', 'data_reader[*]'. `upriver user roles` lists them. "
    "May be given several times.",
)  # fmt: skip


@click.group()
def user() -> None:
    """Manage the users of a node. A running node notices changes by itself."""


@user.command("add")
@click.argument("name")
@_data
@_roles
@click.option("--password-stdin", is_flag=True, help="Read the password from the first line of standard input.")
def add(name: str, data: Path, roles: tuple[str, ...], password_stdin: bool) -> None:
    """Add a user, or give one a new password.

    Without --role a new user is an administrator, and an existing user keeps their roles.
    """
    from upriver.node.access import users
    from upriver.node.access.roles import Access

    users.check_name(name)
    Access.parse(roles)  # check this before asking for a password
    password = sys.stdin.readline().rstrip("\r\n") if password_stdin else _ask()
    if not password:
        raise ConfigError("the password is empty")
    path = data / users.Users.FILE_NAME
    is_new = users.add_user(path, name, password, roles=roles)
    granted = ", ".join(users.read_file(path)[name].access.names())
    click.echo(f"{'added' if is_new else 'changed the password of'} {name} ({granted})")


def _ask() -> str:
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask for the password on; use --password-stdin")
    return str(click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))


@user.command("remove")
@click.argument("name")
@_data
def remove(name: str, data: Path) -> None:
    """Remove a user. Their open connections lose every right within a second."""
    from upriver.node.access import users

    users.remove_user(data / users.Users.FILE_NAME, name)
    click.echo(f"removed {name}")


@user.command("list")
@_data
@click.option("--roles", "with_roles", is_flag=True, help="Show what each may do.")
@click.option("--json", "as_json", is_flag=True, help="For programs: names and their roles.")
def list_users(data: Path, with_roles: bool, as_json: bool) -> None:
    """List the users, one per line."""
    from upriver.node.access import users

    if not data.is_dir():
        raise ConfigError(f"--data: there is no directory {data}")
    found = {name: each.access.names() for name, each in sorted(users.read_file(data / users.Users.FILE_NAME).items())}
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, roles in found.items():
        click.echo(f"{name}: {', '.join(roles)}" if with_roles else name)


@user.command("grant")
@click.argument("name")
@_data
@_roles
def grant(name: str, data: Path, roles: tuple[str, ...]) -> None:
    """Replace the roles of a user. Open connections follow within a second."""
    from upriver.node.access import users

    if not roles:
        raise ConfigError("say which roles the user gets: --role 'data_reader[travel]'")
    users.set_roles(data / users.Users.FILE_NAME, name, roles)
    click.echo(f"{name}: {', '.join(roles)}")


@user.command("roles")
def list_roles() -> None:
    """List the roles and what each allows. All but admin are for a bucket: ROLE[BUCKET], or ROLE[*] for all."""
    from upriver.node.access.roles import ROLES

    for role, (_, meaning) in ROLES.items():
        click.echo(f"{role:<20} {meaning}")
