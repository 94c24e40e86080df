"""``upriver tail``: the change feed on a terminal, or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.connecting import ConnectingCommand, connection_options, start_of
from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.client.changes import Change
    from upriver.client.options import ConnectOptions

_COLOURS = {"mutation": "green", "deletion": "red", "expiration": "magenta", "rollback": "bright_red"}


@click.command(cls=ConnectingCommand)
@connection_options
@click.option("--from", "start", default="beginning", show_default=True, help="beginning, now, or a checkpoint file.")
@click.option("--follow", "-f", is_flag=True, help="Wait for new changes at the end instead of stopping.")
@click.option("--scope", default="", help="Only this scope.")
@click.option("--collection", "collections", multiple=True, help="Only scope.collection; may be repeated.")
@click.option("--vbucket", "vbuckets", type=int, multiple=True, help="Only this vbucket; may be repeated.")
@click.option("--event", "events", multiple=True, help="Only these events, such as deletion; may be repeated.")
@click.option("--key", "key_prefix", default="", help="Only keys that start with this.")
@click.option("--keys-only", is_flag=True, help="Do not fetch values.")
@click.option("--xattrs", is_flag=True, help="Fetch extended attributes.")
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many changes.")
@click.option("--on-rollback", type=click.Choice(["emit", "fail", "rewind"]), default="emit", show_default=True,
              help="Print that history was rolled back, stop there, or begin again silently.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def tail(
    connect_to: ConnectOptions, start: str, follow: bool, vbuckets: tuple[int, ...], events: tuple[str, ...],
    key_prefix: str, keys_only: bool, limit: int | None, as_json: bool, **reading: Any,
) -> None:  # fmt: skip
    """Print the changes of the bucket at CONNECTION (couchbase://host, or host:port)."""
    from upriver.client.blocking import connect

    wanted, show = _filter(events, key_prefix.encode()), _as_json if as_json else _as_text
    reading |= {"start": start_of(start), "end": "forever" if follow else "now", "vbuckets": vbuckets or None}
    shown = 0
    with connect(connect_to) as db:
        for change in db.changes(content="keys" if keys_only else "values", **reading):
            if wanted(change):
                show(change)
                shown += 1
                if limit is not None and shown >= limit:
                    return


def _filter(events: tuple[str, ...], prefix: bytes) -> Callable[[Change], bool]:
    from upriver.cli.rendering import event_of
    from upriver.records.schema import Event

    if unknown := set(events) - {event.value for event in Event}:
        raise ConfigError(f"--event: there is no event {min(unknown)!r}; there are {', '.join(Event)}")

    def wanted(change: Change) -> bool:
        if events and event_of(change) not in events:
            return False
        return getattr(change, "key", prefix).startswith(prefix)

    return wanted


def _as_json(change: Change) -> None:
    from upriver.cli.rendering import to_json

    sys.stdout.write(json.dumps(to_json(change), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _as_text(change: Change) -> None:
    from upriver.cli.rendering import WIDTH, to_text

    where, what, rest = to_text(change)
    line = rest if len(rest) <= WIDTH else rest[: WIDTH - 1] + "…"
    click.echo(f"{where:>12}  {click.style(f'{what:<10}', fg=_COLOURS.get(what, 'cyan'))}  {line}")
