"""The options that `upriver sync` and `upriver verify` share: where the bucket is, where the tables are, and which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from upriver.cli.connecting import AnyCommand, Given, connection_arguments, in_environment, with_config

if TYPE_CHECKING:
    from upriver.lake.options import SyncOptions

_OPTIONS = (
    click.option("--to", "--lake", "to", metavar="DIR", help="Directory of the tables, or s3://, gs:// or hdfs://."),
    click.option("--collections", metavar="NAMES", help="Only these: scope.collection, separated by commas."),
    click.option("--scope", metavar="NAME", help="Only the collections of this scope."),
)


def lake_options(function: AnyCommand) -> AnyCommand:
    """Declare CONNECTION, how to connect, and which tables; ``sync_options`` reads them."""
    for declare in reversed(_OPTIONS):
        function = declare(function)
    return connection_arguments(function)


def sync_options(given: Given) -> SyncOptions:
    """Options of a sync, from the command line and the ``--config`` file."""
    from upriver.errors import ConfigError
    from upriver.lake.options import SyncOptions

    values = with_config(given)
    for name, value in in_environment().items():  # executors elsewhere have another environment
        if not (name == "password" and "password_file" in values):
            values.setdefault(name, value)
    if not (values.get("connection") and values.get("to")):
        raise click.UsageError("Give CONNECTION and --to, or a --config file that has them.")
    try:
        return SyncOptions.parse(values)
    except ConfigError as error:
        raise ConfigError(f"{given['config']}: {error}" if given.get("config") else str(error)) from error
