"""``upriver inspect --check DIR``: compare everything in a data directory with its checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from upriver.cli.progress import progress_bar
from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.store.upkeep.check import CheckedAmount, StoreFinding


def check_directory(path: Path, as_json: bool) -> bool:
    """Print what is damaged in a data directory of a node, or of one bucket; True if nothing is."""
    from upriver.store.upkeep.check import CheckedAmount, check_bucket

    buckets = _buckets(path)
    looked = CheckedAmount()
    findings: list[StoreFinding] = []
    with progress_bar("checking", 1000 * len(buckets), quiet=as_json, unit="bytes") as advance:
        for number, bucket in enumerate(buckets):
            at_this, found = check_bucket(bucket, partial(_tell, advance, 1000 * number))
            looked = looked.plus(at_this)
            findings += found
            advance(1000 * (number + 1), at_this.size_bytes)
    _print(len(buckets), looked, findings, as_json)
    return not findings


def _tell(advance: Callable[[int, int], None], begin: int, done: int, total: int) -> None:
    advance(begin + 1000 * done // max(1, total), 0)


def _buckets(path: Path) -> list[Path]:
    if (path / "data.mdb").exists():
        return [path]
    found = sorted(each.parent for each in path.glob("*/upriver.bucket")) if path.is_dir() else []
    if not found:
        raise ConfigError(f"--check: {path} is not the data directory of a node, nor a bucket's in one")
    return found


def _print(buckets: int, looked: CheckedAmount, findings: list[StoreFinding], as_json: bool) -> None:
    if as_json:
        checked = {"buckets": buckets, **looked._asdict()}
        click.echo(json.dumps({"checked": checked, "damage": [each._asdict() for each in findings]}, indent=2))
        return
    for each in findings:
        where = f"bucket {each.bucket}" + (f", vbucket {each.vbucket}" if each.vbucket is not None else "")
        click.secho(f"{where}: {each.what} ({each.file})", fg="red")
    sizes = f"{looked.vbuckets:,} vbuckets, {looked.blocks:,} blocks, {looked.tables:,} key tables"
    click.echo(f"{buckets} bucket{'' if buckets == 1 else 's'}, {sizes}: {len(findings) or 'nothing'} damaged")
