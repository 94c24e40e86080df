"""The ``upriver`` command. Subcommands load when they are called, so that ``--help`` answers at once.

To add a command, write it as a click command in ``cli/commands`` or ``cli/admin`` and add one line to ``GROUPS``: its
name, where it is (``module:attribute``), its one-line help, and the extra that installs what it needs, if any.
"""

from __future__ import annotations

import errno
import sys
from importlib import import_module
from typing import IO, Any, NamedTuple

import click

from upriver import __version__
from upriver.errors import UpriverError


class LazyCommand(NamedTuple):
    """Where a command is, what it does in one line, and which extra it needs."""

    target: str
    help: str
    extra: str = ""


GROUPS = {
    "Read and write a bucket": {
        "tail": LazyCommand("commands.tail:tail", "Print the changes of a bucket."),
        "dump": LazyCommand("commands.dump:dump", "Write the changes of a bucket to Parquet or JSON lines."),
        "load": LazyCommand("commands.load:load", "Write documents from files into a bucket."),
        "inspect": LazyCommand("commands.inspect:inspect", "Show vbuckets, seqnos, failover logs and lag."),
    },
    "Keep tables equal to a bucket": {
        "sync": LazyCommand("commands.sync:sync", "Keep lake tables equal to a bucket.", "spark"),
        "verify": LazyCommand("commands.verify:verify", "Compare lake tables with a bucket.", "spark"),
    },
    "Run nodes": {
        "serve": LazyCommand("admin.serve:serve", "Run a node."),
        "user": LazyCommand("admin.user:user", "Manage the users of a node."),
        "buckets": LazyCommand("admin.buckets:buckets", "List, create and drop buckets."),
        "collections": LazyCommand(
            "admin.collections:collections", "List, create, alter and drop scopes and collections."
        ),
        "stats": LazyCommand("admin.stats:stats", "Show the statistics of a node."),
        "fault": LazyCommand("admin.fault:fault", "Make a running node misbehave, to test its consumers."),
    },
    "Run clusters": {
        "cluster": LazyCommand("admin.cluster:cluster", "Run a cluster: failover, add, remove, rebalance."),
        "move": LazyCommand("admin.move:move", "Hand vbuckets over to another node."),
        "replicate": LazyCommand("admin.replicate:replicate", "Carry the changes of one cluster to another."),
    },
    "Learn more": {
        "demo": LazyCommand("commands.demo:demo", "Run the whole pipeline on this machine.", "spark"),
        "wire": LazyCommand("commands.wire:wire", "Take frames of the protocol apart."),
        "compile": LazyCommand("commands.compile:compile_kernels", "Compile the kernels now, not at the first start."),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class CommandFailed(click.ClickException):
    """One clear line in red on stderr; exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.secho(f"upriver: {self.message}", fg="red", err=True, file=file)


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].target.partition(":")
        try:
            command = getattr(import_module(f"upriver.cli.{module}"), attribute)
        except ModuleNotFoundError as error:
            raise CommandFailed(_missing(cmd_name, error)) from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, command.help) for name, command in commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UpriverError as error:
            if ctx.params.get("debug"):
                raise
            raise CommandFailed(str(error) or type(error).__name__) from error
        except OSError as error:
            if ctx.params.get("debug") or error.errno == errno.EPIPE:  # click exits quietly: nobody reads the pipe
                raise
            raise CommandFailed(_about_file(error)) from error


def _about_file(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def _missing(name: str, error: ModuleNotFoundError) -> str:
    extra = COMMANDS[name].extra
    if extra:
        return f"'{name}' needs more packages ({error.name} is missing): pip install 'upriver[{extra}]'"
    return f"'{name}' is not part of this version ({error.name} is missing)"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="upriver")
@click.option("--debug", is_flag=True, envvar="UPRIVER_DEBUG", help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Every change of a database that speaks DCP, from the wire to a Spark table."""


def main() -> None:
    """The entry point of the ``upriver`` script."""
    cli.main(prog_name="upriver", args=sys.argv[1:])
