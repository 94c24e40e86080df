"""``upriver replicate``: carry the changes of one cluster to another, as the third party between them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.connecting import ConnectingCommand, connect_options, connection_arguments, parse_ranges

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from upriver.cluster.third_party import ReplicationProgress, ThirdParty


@click.command(cls=ConnectingCommand)
@connection_arguments
@click.argument("target")
@click.option("--vbuckets", help="Only these, such as 0-511,600.  [default: all]")
@click.option("--demote", is_flag=True, help="Make the target's active vbuckets replicas; undoes what only they have.")
@click.option("--once", is_flag=True, help="Stop when the target has everything that the source has.")
@click.option("--lag", "show_lag", is_flag=True, help="Show how far each vbucket is behind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per second.")
def replicate(
    target: str, vbuckets: str | None, demote: bool, once: bool, show_lag: bool, as_json: bool, **connecting: Any
) -> None:
    """Stream the vbuckets of CONNECTION into replicas at TARGET until Ctrl-C.

    The target asks for the streams itself and resumes where it stopped, or rolls back if its history has diverged. This
    process only forwards bytes, unchanged, in both directions. The connection options apply to both ends.
    """
    from upriver.cluster.third_party import ThirdParty
    from upriver.net.aio import run

    source, sink = connect_options(connecting), connect_options({**connecting, "connection": target})
    third = ThirdParty(source, sink, parse_ranges(vbuckets) if vbuckets else None, demote=demote)
    try:
        with _display(as_json, show_lag) as show:
            run(_run(third, show, once))
    except KeyboardInterrupt:
        pass
    finally:
        third.close()


async def _run(third: ThirdParty, show: Callable[[ReplicationProgress], None], once: bool) -> None:
    try:
        await third.run(show, once=once)
    except* Exception as errors:  # a task group wraps what went wrong
        raise errors.exceptions[0] from None


def summary(progress: ReplicationProgress, lag_of_each: bool) -> dict[str, Any]:
    lag = progress.lag
    found: dict[str, Any] = {
        "vbuckets": len(progress.source), "streaming": len(progress.streaming), "seqnos": sum(progress.source.values()),
        "lag": sum(lag.values()), "bytes": progress.bytes_passed, "reconnects": progress.reconnects,
    }  # fmt: skip
    if lag_of_each:
        found["lag_of"] = {str(vb): behind for vb, behind in lag.items()}
    return found


@contextmanager
def _display(as_json: bool, show_lag: bool) -> Iterator[Callable[[ReplicationProgress], None]]:
    if as_json:
        yield lambda progress: click.echo(json.dumps(summary(progress, show_lag)))
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(TextColumn("replicating"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    task = bar.add_task("connecting")
    began = time.monotonic()
    console = Console(stderr=True)
    with _whole_lines(console), Live(bar, console=console, refresh_per_second=4) as live:

        def show(progress: ReplicationProgress) -> None:
            facts = summary(progress, False)
            rate = facts["bytes"] / max(1e-9, time.monotonic() - began) / 1e6
            text = f"{facts['streaming']}/{facts['vbuckets']} streams, {facts['lag']:,} behind, {rate:,.1f} MB/s"
            bar.update(task, total=max(1, facts["seqnos"]), completed=facts["seqnos"] - facts["lag"], description=text)
            live.update(Group(bar, _lag_table(progress)) if show_lag else bar)

        yield show


@contextmanager
def _whole_lines(console: Console) -> Iterator[None]:
    """End the last line even without a terminal; ``Live`` does so only with one."""
    try:
        yield
    finally:
        if not console.is_terminal:
            console.line()


def _lag_table(progress: ReplicationProgress) -> Table:
    from rich.table import Table

    table = Table("vbucket", "source", "passed", "lag")
    worst = sorted(progress.lag.items(), key=lambda entry: -entry[1])[:20]
    for vb, behind in worst:
        table.add_row(str(vb), str(progress.source[vb]), str(progress.passed.get(vb, 0)), str(behind))
    return table
