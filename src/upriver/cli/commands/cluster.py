"""``upriver cluster``: nodes that share one map, on this machine or given by address."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.progress import progress_bar
from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.cluster.local import LocalCluster
    from upriver.cluster.manager import Manager
    from upriver.cluster.nodes import NodeReport
    from upriver.cluster.plan import ClusterState, Member

_DATA = click.option(
    "--data", type=click.Path(path_type=Path), default="cluster", show_default=True, help="Directory of the cluster."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_USER = (
    click.option("--username", default="", envvar="UPRIVER_USERNAME"),
    click.option("--password", default="", envvar="UPRIVER_PASSWORD", help="Better in UPRIVER_PASSWORD."),
)


def _cluster_options(command: Any) -> Any:
    for option in (*_USER, _JSON, _DATA):
        command = option(command)
    return command


def _manager(data: Path, username: str, password: str) -> Manager:
    from upriver.cluster.manager import Manager

    return Manager(data, username, password)


@click.group()
def cluster() -> None:
    """Run a cluster, and look after one."""


# ---------------------------------------------------------------------------------------------- start


@cluster.command(short_help="Start nodes and keep their map up to date.")
@_DATA
@click.option("--nodes", default=3, show_default=True, type=click.IntRange(1, 64))
@click.option("--replicas", default=1, show_default=True, type=click.IntRange(0, 3))
@click.option("--vbuckets", default=1024, show_default=True, type=click.IntRange(1, 65535))
@click.option("--bucket", default="default", show_default=True)
@click.option("--member", "members", multiple=True, metavar="HOST:KV:MGMT", help="A node that runs already; repeat it.")
@click.option("--restart", is_flag=True, help="Start nodes again that died.")
@click.option("--enable-faults", is_flag=True, help="Allow `upriver fault`, for testing consumers.")
@click.option("--lazy", is_flag=True, help="Sync less: faster, survives kill -9 but perhaps not a power failure.")
@_USER[0]
@_USER[1]
def start(data: Path, members: tuple[str, ...], restart: bool, **options: Any) -> None:
    """Start nodes and keep their map up to date until Ctrl-C; a cluster that was in --data comes back as it was.

    With --member no process is started: those nodes, which run with --member themselves, become the cluster.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if members:
        _start_given(data, [_member(each) for each in members], stop, options)
    else:
        _start_local(data, restart, stop, options)


def _member(text: str) -> Member:
    from upriver.cluster.plan import Member

    try:
        host, kv, mgmt = text.rsplit(":", 2)
        return Member(host, int(kv), int(mgmt))
    except ValueError as error:
        raise ConfigError(f"{text!r} is not HOST:KV-PORT:MANAGEMENT-PORT, like 127.0.0.1:11210:8091") from error


def _ready(state: ClusterState) -> None:
    click.echo("ready couchbase://" + ",".join(str(member) for member in state.members))
    sys.stdout.flush()


def _start_given(data: Path, members: list[Member], stop: threading.Event, options: dict[str, Any]) -> None:
    from upriver.cluster.collections import answering
    from upriver.cluster.manager import STATE_FILE

    manager = _manager(data, options["username"], options["password"])
    if not (data / STATE_FILE).exists():
        manager.create(options["bucket"], members, options["vbuckets"], options["replicas"])
    with answering(manager.answer_proposals):
        _watch(manager, stop)


def _start_local(data: Path, restart: bool, stop: threading.Event, options: dict[str, Any]) -> None:
    from upriver.cluster.local import local_cluster

    if not options["username"]:
        del options["username"], options["password"]
    with local_cluster(data=data, **options) as running:
        _watch(running.manager, stop, partial(_look_after, running, restart))


def _watch(manager: Manager, stop: threading.Event, first: Callable[[], None] = lambda: None) -> None:
    """A round every second; who waits for whom is said once, and again when it is otherwise."""
    _ready(manager.watch())
    told: dict[int, list[int]] = {}
    while not stop.wait(1.0):
        first()
        manager.watch()
        for number, needs in manager.waits.items():
            if told.get(number) != needs:
                others = ", ".join(map(str, needs))
                click.echo(f"node {number} has crashed and waits for node {others}, which may know more", err=True)
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
def status(data: Path, username: str, password: str, as_json: bool) -> None:
    """Show the nodes, what each owns, and how far replicas are behind."""
    manager = _manager(data, username, password)
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
    if needs:  # it crashed, and they may have durable writes that it lost
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
    """Seqnos that the node's replicas are behind their actives; None if that cannot be said."""
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

    sizes = f"{len(state.owners)} vbuckets, {_counted(state.replicas, 'replica')}"
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


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


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
def failover(node: str, force: bool, data: Path, username: str, password: str, as_json: bool) -> None:
    """Promote the replicas of NODE (its number or HOST:PORT), which is gone."""
    manager = _manager(data, username, password)
    before = manager.state
    after = manager.fail_over(node, force=force)
    promoted = sum(old[0] != new[0] for old, new in zip(before.owners, after.owners, strict=True))
    said = f"promoted the replicas of {_counted(promoted, 'vbucket')}"
    _report(manager, as_json, said, promoted=promoted)


@cluster.command(short_help="Make a running node part of the cluster.")
@click.argument("member", metavar="HOST:KV:MGMT")
@_cluster_options
def add(member: str, data: Path, username: str, password: str, as_json: bool) -> None:
    """Make a node that runs with `upriver serve --member` part of the cluster.

    It owns nothing until `upriver cluster rebalance` moves vbuckets to it.
    """
    manager = _manager(data, username, password)
    manager.add(_member(member))
    nodes = len(manager.state.members)
    said = f"{member} is a member, one of {nodes}, and owns nothing until `upriver cluster rebalance`"
    _report(manager, as_json, said, nodes=nodes)


@cluster.command()
@click.argument("node")
@_cluster_options
def remove(node: str, data: Path, username: str, password: str, as_json: bool) -> None:
    """Move everything off NODE and forget it."""
    manager = _manager(data, username, password)
    with progress_bar("moving", len(manager.state.owners), quiet=as_json, unit="vbuckets") as advance:
        manager.remove(node, lambda done, total, move: advance(done * len(manager.state.owners) // total, 1))
    nodes = len(manager.state.members)
    _report(manager, as_json, f"removed node {node}; the cluster has {_counted(nodes, 'node')}", nodes=nodes)


@cluster.command()
@_cluster_options
def rebalance(data: Path, username: str, password: str, as_json: bool) -> None:
    """Spread the vbuckets evenly over the nodes that answer."""
    manager = _manager(data, username, password)
    with progress_bar("moving", 1000, quiet=as_json, unit="vbuckets") as advance:
        count = manager.rebalance(None, lambda done, total, move: advance(1000 * done // total, 1))
    _report(manager, as_json, f"moved {_counted(count, 'vbucket')}", moved=count)
