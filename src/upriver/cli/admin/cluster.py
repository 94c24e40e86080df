"""``upriver cluster``: start a cluster of local processes or of given nodes, and manage it."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.admin.management import Management
from upriver.cli.connecting import ConnectingGroup, connect_options, login, login_options, split_options
from upriver.cli.progress import progress_bar
from upriver.lake.report import counted

if TYPE_CHECKING:
    from upriver.cluster.local import LocalCluster
    from upriver.cluster.manager import Manager
    from upriver.cluster.nodes import NodeReport
    from upriver.cluster.plan import ClusterState, Member

_DATA = click.option(
    "--data", type=click.Path(path_type=Path), default="cluster", show_default=True, help="Directory of the cluster."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_HOST_AND_PORTS = re.compile(r"(.+):(\d+):(\d+)")


def _cluster_options(function: Callable[..., None]) -> Callable[..., None]:
    """Declare the options of every command on a cluster; the function gets ``manager`` and ``as_json``."""

    @wraps(function)
    def run(data: Path, **given: Any) -> None:
        from upriver.cluster.manager import Manager

        who, rest = split_options(given)
        function(manager=Manager(data, *login(who)), **rest)

    return _DATA(_JSON(login_options(run)))


@click.group(cls=ConnectingGroup)
def cluster() -> None:
    """Run and manage a cluster."""


# ---------------------------------------------------------------------------------------------- start


@cluster.command(short_help="Start nodes and keep their map up to date.")
@_DATA
@click.option("--nodes", default=3, show_default=True, type=click.IntRange(1, 64), help="How many nodes.")
@click.option("--replicas", default=1, show_default=True, type=click.IntRange(0, 3), help="Of each vbucket.")
@click.option("--vbuckets", default=1024, show_default=True, type=click.IntRange(1, 65535), help="Of the bucket.")
@click.option("--bucket", default="default", show_default=True, help="Created at the first start.")
@click.option("--member", "members", multiple=True, metavar="NODE", help="A node that already runs; may be repeated.")
@click.option("--restart", is_flag=True, help="Restart nodes that die.")
@click.option("--enable-faults", is_flag=True, help="Allow `upriver fault`, for testing consumers.")
@click.option("--lazy", is_flag=True, help="Sync less often: faster, survives kill -9 but perhaps not a power failure.")
@login_options
def start(
    data: Path, nodes: int, replicas: int, vbuckets: int, bucket: str, members: tuple[str, ...], restart: bool,
    enable_faults: bool, lazy: bool, **who: Any,
) -> None:  # fmt: skip
    """Start nodes and keep their map up to date until Ctrl-C; a cluster in --data is resumed as it was.

    With --member no process is started: the nodes it names (couchbase://HOST:PORT or HOST:PORT), which must run with
    `upriver serve --member`, become the cluster.
    """
    from upriver.cluster.collections import answering
    from upriver.cluster.local import local_cluster
    from upriver.cluster.manager import STATE_FILE, Manager

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    username, password = user = login(who)
    if not members:
        with local_cluster(
            nodes, replicas, vbuckets, bucket=bucket, data=data, username=username, password=password,
            enable_faults=enable_faults, lazy=lazy,
        ) as running:  # fmt: skip
            _watch(running.manager, stop, partial(_look_after, running, restart))
        return
    manager = Manager(data, *user)
    if not (data / STATE_FILE).exists():
        manager.create(bucket, [_member(each, who) for each in members], vbuckets, replicas)
    with answering(manager.answer_proposals):
        _watch(manager, stop)


def _member(node: str, who: dict[str, Any]) -> Member:
    """A node by its connection, which knows its management port, or as HOST:KV-PORT:MANAGEMENT-PORT."""
    from upriver.cluster.plan import Member

    if ports := _HOST_AND_PORTS.fullmatch(node):
        return Member(ports[1], int(ports[2]), int(ports[3]))
    options = connect_options({**who, "connection": node})
    return Member(options.seeds[0].host, options.seeds[0].port, Management.of(options).port)


def _ready(state: ClusterState) -> None:
    click.echo("ready couchbase://" + ",".join(str(member) for member in state.members))
    sys.stdout.flush()


def _watch(manager: Manager, stop: threading.Event, first: Callable[[], None] = lambda: None) -> None:
    """Run the manager every second. Report a node that waits for others once, and again when that changes."""
    _ready(manager.watch())
    told: dict[int, list[int]] = {}
    while not stop.wait(1.0):
        first()
        manager.watch()
        for number, needs in manager.waits.items():
            if told.get(number) != needs:
                others = ", ".join(map(str, needs))
                click.echo(f"node {number} has crashed and waits for node {others}, which may have more", err=True)
        told = manager.waits
        while manager.notes:
            click.echo(manager.notes.pop(0), err=True)


def _look_after(running: LocalCluster, restart: bool) -> None:
    for number, node in enumerate(running.nodes):
        if node.has_died:
            click.echo(f"node {number} ({node.member}) died with exit code {node.process.exit_code}", err=True)
            node.forget()
            if restart:
                node.start()


# ---------------------------------------------------------------------------------------------- status


@cluster.command(short_help="Show the nodes and what each owns.")
@_cluster_options
def status(manager: Manager, as_json: bool) -> None:
    """Show the nodes, what each owns, and how far replicas are behind."""
    state, reports = manager.state, manager.node_reports()
    waiting = manager.waiting(reports)
    rows = [_node_row(state, number, reports, waiting.get(number)) for number in range(len(state.members))]
    if as_json:
        click.echo(json.dumps({"bucket": state.bucket, "revision": state.revision, "nodes": rows}, indent=2))
        return
    _print_nodes(state, rows)


def _node_row(
    state: ClusterState, number: int, reports: dict[int, NodeReport], needs: list[int] | None
) -> dict[str, Any]:
    report = reports.get(number)
    word = "away" if report is None else "ok" if report.is_member else "waiting for its map"
    if needs:  # it crashed, and those nodes may have durable writes that it lost
        word = f"waiting for node {', '.join(map(str, needs))}"
    if report is not None and report.is_member and report.version != state.lineage.version:
        word = f"has revision {report.revision}"
    leads = Counter(member for chain in state.owners for member in chain[:1])
    follows = Counter(member for chain in state.owners for member in chain[1:])
    synced = Counter(member for row in state.synced for member in row)
    return {
        "node": number, "address": str(state.members[number]), "management": state.members[number].mgmt,
        "status": word, "active": leads[number], "replica": follows[number], "replica_complete": synced[number],
        "lag": _lag(state, number, reports),
    }  # fmt: skip


def _lag(state: ClusterState, number: int, reports: dict[int, NodeReport]) -> int | None:
    """How many seqnos the node's replicas are behind their actives; None if the node does not answer."""
    if number not in reports:
        return None
    behind = 0
    for vb, chain in enumerate(state.owners):
        lead = reports.get(chain[0])
        if number in chain[1:] and lead is not None and vb in lead.vbuckets:
            own = reports[number].vbuckets.get(vb)
            behind += max(0, lead.vbuckets[vb].high_seqno - (own.high_seqno if own else 0))
    return behind


def _print_nodes(state: ClusterState, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    sizes = f"{len(state.owners)} vbuckets, {counted(state.replicas, 'replica')}"
    title = f"{state.bucket}: {sizes}, revision {state.revision}"
    table = Table("node", "address", "status", "active", "replica", "complete", "lag", title=title)
    for row in rows:
        color = "green" if row["status"] == "ok" else "red"
        lag = "?" if row["lag"] is None else f"{row['lag']:,}"
        table.add_row(
            str(row["node"]), row["address"], f"[{color}]{row['status']}[/]", str(row["active"]), str(row["replica"]),
            str(row["replica_complete"]), lag,
        )  # fmt: skip
    Console().print(table)


# ---------------------------------------------------------------------------------------------- commands


def _report(manager: Manager, as_json: bool, said: str, **facts: Any) -> None:
    state = manager.state
    if as_json:
        leads = Counter(chain[0] for chain in state.owners)
        active = {str(member): leads[n] for n, member in enumerate(state.members)}
        click.echo(json.dumps({"revision": state.revision, "active": active, **facts}))
    else:
        click.echo(f"{said}; the map is at revision {state.revision}")


@cluster.command(short_help="Promote the replicas of a node that is gone.")
@click.argument("node")
@click.option("--force", is_flag=True, help="Even if durable writes may be lost.")
@_cluster_options
def failover(manager: Manager, node: str, force: bool, as_json: bool) -> None:
    """Promote the replicas of NODE (its number or HOST:PORT), which is gone."""
    before = manager.state
    after = manager.fail_over(node, force=force)
    promoted = sum(old[0] != new[0] for old, new in zip(before.owners, after.owners, strict=True))
    said = f"promoted the replicas of {counted(promoted, 'vbucket')}"
    _report(manager, as_json, said, promoted=promoted)


@cluster.command(short_help="Make a running node part of the cluster.")
@click.argument("connection")
@_DATA
@_JSON
@login_options
def add(connection: str, data: Path, as_json: bool, **who: Any) -> None:
    """Make the node at CONNECTION, which runs with `upriver serve --member`, part of the cluster.

    It owns nothing until `upriver cluster rebalance` moves vbuckets to it.
    """
    from upriver.cluster.manager import Manager

    manager, member = Manager(data, *login(who)), _member(connection, who)
    manager.add(member)
    nodes = len(manager.state.members)
    said = f"{member} is a member, one of {nodes}, and owns nothing until `upriver cluster rebalance`"
    _report(manager, as_json, said, nodes=nodes)


@cluster.command(short_help="Move everything off a node and forget it.")
@click.argument("node")
@_cluster_options
def remove(manager: Manager, node: str, as_json: bool) -> None:
    """Move everything off NODE (its number or HOST:PORT) and forget it."""
    with progress_bar("moving", len(manager.state.owners), quiet=as_json, unit="vbuckets") as advance:
        manager.remove(node, lambda done, total, move: advance(done * len(manager.state.owners) // total, 1))
    nodes = len(manager.state.members)
    _report(manager, as_json, f"removed node {node}; the cluster has {counted(nodes, 'node')}", nodes=nodes)


@cluster.command()
@_cluster_options
def rebalance(manager: Manager, as_json: bool) -> None:
    """Spread the vbuckets evenly over the nodes that answer."""
    with progress_bar("moving", 1000, quiet=as_json, unit="vbuckets") as advance:
        count = manager.rebalance(None, lambda done, total, move: advance(1000 * done // total, 1))
    _report(manager, as_json, f"moved {counted(count, 'vbucket')}", moved=count)
