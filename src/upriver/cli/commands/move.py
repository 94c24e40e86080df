"""``upriver move``: hand vbuckets over from one node to another while clients keep writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from upriver.cli.connecting import connection_string
from upriver.cli.progress import progress_bar
from upriver.cli.ranges import parse_ranges
from upriver.errors import ConfigError

_NO_MAP = (
    "note: {source} and {target} are not members of a cluster, so their cluster maps are as before: each names itself "
    "for every vbucket. Clients must be told where to go; with `upriver cluster` they follow by themselves."
)


@click.command()
@click.argument("source", required=False)
@click.option("--vbucket", "vbuckets", required=True, help="Which, like 0-511,600.")
@click.option("--to", "target", required=True, help="The node that takes over.")
@click.option("--data", type=click.Path(path_type=Path), help="Directory of the cluster that both are members of.")
@click.option("--bucket", default="default", show_default=True, envvar="UPRIVER_BUCKET")
@click.option("--username", default="", envvar="UPRIVER_USERNAME")
@click.option("--password", default="", envvar="UPRIVER_PASSWORD", help="Better in UPRIVER_PASSWORD.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def move(source: str | None, vbuckets: str, target: str, data: Path | None, as_json: bool, **options: Any) -> None:
    """Move vbuckets from the node SOURCE to the node --to, by takeover.

    In a cluster (--data) the vbuckets leave whichever members have them, and every node gets the new map. Between two
    nodes that are no members this command is the third party that carries the bytes; run it again if it is interrupted.
    Nobody tells clients then: the cluster map of each node still names that node for everything.
    """
    wanted = parse_ranges(vbuckets)
    if (source is None) == (data is None):
        raise ConfigError("give either the node to move from, or --data DIRECTORY of a cluster")
    with progress_bar("moving", len(wanted), quiet=as_json, unit="vbuckets") as advance:
        if data is not None:
            moved = _in_cluster(data, wanted, target, options, advance)
        else:
            assert source is not None
            moved = _between_nodes(source, target, wanted, options, advance)
    if as_json:
        click.echo(json.dumps({"moved": moved, "map_updated": data is not None}))
        return
    others = len(wanted) - moved
    click.echo(f"moved {moved} of {len(wanted)} vbuckets" + (f"; {others} were there already" if others else ""))
    if data is None:
        click.echo(_NO_MAP.format(source=source, target=target), err=True)


def _in_cluster(data: Path, wanted: list[int], target: str, options: dict[str, Any], advance: Any) -> int:
    from upriver.cluster.manager import Manager
    from upriver.cluster.plan import Move

    manager = Manager(data, options["username"], options["password"])
    state = manager.catch_up()
    to = state.index(target)
    if wanted[-1] >= len(state.owners):
        raise ConfigError(f"there is no vbucket {wanted[-1]}: the last is {len(state.owners) - 1}")
    moves = [Move(vb, state.owners[vb][0], to) for vb in wanted if state.owners[vb][0] not in (to, -1)]
    manager.move_all(moves, lambda done, total, each: advance(done, 1))
    return len(moves)


def _between_nodes(source: str, target: str, wanted: list[int], options: dict[str, Any], advance: Any) -> int:
    from upriver.client.options import ConnectOptions
    from upriver.cluster.mover import Moved, Mover
    from upriver.net.aio import run

    ends = [ConnectOptions.parse(connection_string(each), **options) for each in (source, target)]
    outcomes: list[Moved] = []

    def on_moved(vb: int, outcome: Moved) -> None:
        outcomes.append(outcome)
        advance(len(outcomes), 1)

    run(Mover(ends[0], ends[1]).move_all(wanted, on_moved))
    return outcomes.count(Moved.MOVED)
