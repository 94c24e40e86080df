"""``upriver inspect``: who owns which vbucket, seqnos, failover logs, and how far behind a checkpoint is.

With ``--check`` it reads a data directory instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.connecting import ConnectingCommand, connect_options, connection_arguments, split_options
from upriver.cli.progress import progress_bar
from upriver.errors import ConfigError
from upriver.lake.report import counted

if TYPE_CHECKING:
    from upriver.client.blocking import Database
    from upriver.client.positions import Positions
    from upriver.model import FailoverLog
    from upriver.store.upkeep.check import CheckedAmount, StoreFinding


@click.command(cls=ConnectingCommand)
@connection_arguments
@click.option("--vbucket", "vbuckets", type=int, multiple=True, help="Only this vbucket; may be repeated.")
@click.option("--checkpoint", type=click.Path(path_type=Path, dir_okay=False), help="Show the lag of this checkpoint.")
@click.option("--check", metavar="DIR", help="Instead of a node, read a data directory and name what is damaged.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(**options: Any) -> None:
    """Show the vbuckets of a bucket: owner, high seqno, branch and failover log; with --checkpoint, its lag.

    With --check, DIR is the data directory of a node (which may be running) or of one bucket: everything in it is read
    and compared with its checksums. The exit code is 1 if something is damaged.
    """
    from upriver.client.blocking import connect

    connecting, rest = split_options(options)
    if rest["check"]:
        sys.exit(0 if check_directory(Path(rest["check"]), rest["as_json"]) else 1)
    with connect(connect_options(connecting)) as db:
        found = report(db, rest["vbuckets"], _saved(rest["checkpoint"]))
    if rest["as_json"]:
        click.echo(json.dumps(found, indent=2))
    else:
        _print_vbuckets(found)


def _saved(path: Path | None) -> Positions | None:
    from upriver.client.checkpoints import FileCheckpoint

    if path is None:
        return None
    saved = FileCheckpoint(path).load()
    if saved is None:
        raise ConfigError(f"there is no checkpoint at {path}")
    return saved


def report(db: Database, only: tuple[int, ...], saved: Positions | None) -> dict[str, Any]:
    """What the command shows, as one JSON value."""
    topology, seqnos = db.topology, db.high_seqnos(complete=False)
    wanted = [vb for vb in (only or range(topology.vbuckets)) if vb in seqnos]
    logs = db.failover_logs(wanted)
    vbuckets = [_vbucket(db, vb, seqnos[vb], logs[vb], saved) for vb in wanted]
    found: dict[str, Any] = {
        "bucket": topology.bucket, "bucket_uuid": topology.bucket_uuid, "revision": list(topology.revision),
        "nodes": [str(node) for node in topology.nodes], "vbuckets": vbuckets,
        "high_seqno_sum": sum(seqnos[vb] for vb in wanted),
    }  # fmt: skip
    if saved is not None:
        found["lag"] = sum(entry["lag"] for entry in vbuckets)
        found["rolled_back"] = sum(entry["rollback_to"] is not None for entry in vbuckets)
    return found


def _vbucket(db: Database, vb: int, high: int, log: FailoverLog, saved: Positions | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "vbucket": vb, "node": str(db.topology.active(vb)), "high_seqno": high, "vbuuid": f"{log.uuid:x}",
        "failover_log": [{"uuid": f"{e.uuid:x}", "seqno": e.seqno} for e in log],
    }  # fmt: skip
    if saved is not None:
        from upriver.protocol.history import History, RollbackTo, decide

        position = saved.get(vb)
        decision = decide(History(log, high), position.claim) if position else None
        back = decision.seqno if isinstance(decision, RollbackTo) else None
        at = position.seqno if position else 0
        entry |= {"position": at, "lag": high - min(at, high if back is None else back), "rollback_to": back}
    return entry


def _print_vbuckets(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, lag = Console(), "lag" in found
    revision = ".".join(map(str, found["revision"]))
    console.print(f"bucket {found['bucket']} {found['bucket_uuid']}  map revision {revision}", highlight=False)
    columns = ["vbucket", "node", "high seqno", "branch", "failovers"] + (["position", "lag"] if lag else [])
    table = Table(*columns, box=None)
    for entry in found["vbuckets"]:
        log = " ".join(f"{e['uuid'][:6]}@{e['seqno']}" for e in entry["failover_log"][1:4])
        row = [entry["vbucket"], entry["node"], f"{entry['high_seqno']:,}", entry["vbuuid"], log]
        if lag:
            back = f" (rolls back to {entry['rollback_to']:,})" if entry["rollback_to"] is not None else ""
            row += [f"{entry['position']:,}", f"{entry['lag']:,}{back}"]
        table.add_row(*map(str, row))
    console.print(table)
    if lag:
        console.print(f"lag: {found['lag']:,} seqnos; {found['rolled_back']} vbuckets will roll back", highlight=False)


# ---------------------------------------------------------------------------------------------- --check


def check_directory(path: Path, as_json: bool) -> bool:
    """Print what is damaged in the data directory of a node or of one bucket; True if nothing is."""
    from upriver.store.upkeep.check import CheckedAmount, check_bucket

    buckets = _buckets(path)
    looked = CheckedAmount()
    findings: list[StoreFinding] = []
    with progress_bar("checking", 1000 * len(buckets), quiet=as_json, unit="bytes") as advance:
        for number, bucket in enumerate(buckets):
            at_this, found = check_bucket(bucket, partial(_advance, advance, 1000 * number))
            looked = looked.plus(at_this)
            findings += found
            advance(1000 * (number + 1), at_this.size_bytes)
    _print_damage(len(buckets), looked, findings, as_json)
    return not findings


def _advance(advance: Callable[[int, int], None], begin: int, done: int, total: int) -> None:
    advance(begin + 1000 * done // max(1, total), 0)


def _buckets(path: Path) -> list[Path]:
    if (path / "data.mdb").exists():
        return [path]
    found = sorted(each.parent for each in path.glob("*/upriver.bucket")) if path.is_dir() else []
    if not found:
        raise ConfigError(f"--check: {path} is neither the data directory of a node nor that of a bucket")
    return found


def _print_damage(buckets: int, looked: CheckedAmount, findings: list[StoreFinding], as_json: bool) -> None:
    if as_json:
        checked = {"buckets": buckets, **looked._asdict()}
        click.echo(json.dumps({"checked": checked, "damage": [each._asdict() for each in findings]}, indent=2))
        return
    for each in findings:
        where = f"bucket {each.bucket}" + (f", vbucket {each.vbucket}" if each.vbucket is not None else "")
        click.secho(f"{where}: {each.what} ({each.file})", fg="red")
    sizes = f"{looked.vbuckets:,} vbuckets, {looked.blocks:,} blocks, {looked.tables:,} key tables"
    click.echo(f"{counted(buckets, 'bucket')}, {sizes}: {len(findings) or 'nothing'} damaged")
