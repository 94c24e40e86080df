"""``upriver move``: hand vbuckets over from one node to another while clients keep writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.connecting import ConnectingCommand, connect_options, connection_arguments, login, parse_ranges
from upriver.cli.progress import Advance, progress_bar
from upriver.errors import ConfigError
from upriver.lake.report import counted

if TYPE_CHECKING:
    from upriver.client.options import ConnectOptions

_NO_MAP = (
    "note: {source} and {target} are not members of a cluster, so their cluster maps do not change: each names "
    "itself for every vbucket. Tell clients where to go; with `upriver cluster` they follow by themselves."
)


@click.command(cls=ConnectingCommand)
@connection_arguments
@click.option("--vbucket", "vbuckets", required=True, help="Which vbuckets, such as 0-511,600.")
@click.option("--to", "target", required=True, help="The node that takes over.")
@click.option("--data", type=click.Path(path_type=Path), help="Directory of the cluster that both are members of.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def move(vbuckets: str, target: str, data: Path | None, as_json: bool, **connecting: Any) -> None:
    """Move vbuckets from the node at CONNECTION to the node --to, by takeover.

    In a cluster (--data) the vbuckets leave the members that own them, and every node gets the new map. Between two
    nodes that are in no cluster, this command carries the bytes itself; run it again if it is interrupted. Clients are
    not told of such a move: the cluster map of each node still names that node for every vbucket.
    """
    wanted = parse_ranges(vbuckets)
    if data is not None and connecting["connection"]:
        raise ConfigError("give either the node to move from, or --data DIRECTORY of a cluster")
    with progress_bar("moving", len(wanted), quiet=as_json, unit="vbuckets") as advance:
        if data is not None:
            moved = _in_cluster(data, wanted, target, login(connecting), advance)
        else:
            ends = connect_options(connecting), connect_options({**connecting, "connection": target})
            moved = _between_nodes(*ends, wanted, advance)
    if as_json:
        click.echo(json.dumps({"moved": moved, "map_updated": data is not None}))
        return
    others = len(wanted) - moved
    click.echo(
        f"moved {moved} of {counted(len(wanted), 'vbucket')}" + (f"; {others} were there already" if others else "")
    )
    if data is None:
        click.echo(_NO_MAP.format(source=ends[0].seeds[0], target=ends[1].seeds[0]), err=True)


def _in_cluster(data: Path, wanted: list[int], target: str, user: tuple[str, str], advance: Advance) -> int:
    from upriver.cluster.manager import Manager
    from upriver.cluster.plan import Move

    manager = Manager(data, *user)
    state = manager.catch_up()
    to = state.index(target)
    if wanted[-1] >= len(state.owners):
        raise ConfigError(f"there is no vbucket {wanted[-1]}: the last is {len(state.owners) - 1}")
    moves = [Move(vb, state.owners[vb][0], to) for vb in wanted if state.owners[vb][0] not in (to, -1)]
    manager.move_all(moves, lambda done, total, each: advance(done, 1))
    return len(moves)


def _between_nodes(source: ConnectOptions, target: ConnectOptions, wanted: list[int], advance: Advance) -> int:
    from upriver.cluster.mover import MoveOutcome, Mover
    from upriver.net.aio import run

    outcomes: list[MoveOutcome] = []

    def on_moved(vb: int, outcome: MoveOutcome) -> None:
        outcomes.append(outcome)
        advance(len(outcomes), 1)

    run(Mover(source, target).move_all(wanted, on_moved))
    return outcomes.count(MoveOutcome.MOVED)
