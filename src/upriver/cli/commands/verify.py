"""``upriver verify``: compare the tables with the bucket."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.connecting import ConnectingCommand
from upriver.cli.lake_options import lake_options, sync_options
from upriver.lake.report import counted

if TYPE_CHECKING:
    from upriver.lake.verify.comparison import Comparison


@click.command(cls=ConnectingCommand)
@lake_options
@click.option(
    "--view",
    type=click.Choice(["fresh", "current"]),
    default="fresh",
    show_default=True,
    help="What to compare: current with its tail, or the Delta table alone.",
)
@click.option("--strict", is_flag=True, help="Count late rows as differences, too.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON per collection.")
def verify(view: str, strict: bool, as_json: bool, **given: Any) -> None:
    """Compare the tables with the bucket at CONNECTION, while both keep changing.

    A change after the offsets that the sync has committed counts as late, not as a difference. Exit code 0: equal; 1:
    something differs (its keys are shown), or could not be compared.
    """
    from upriver.lake import compare

    found = compare(sync_options(given), view=view)
    wrong = False
    for result in found:
        wrong |= not result.equal or (strict and result.late > 0)
        click.echo(json.dumps(result.to_json()) if as_json else _sentence(result))
    if not as_json:
        total = sum(result.differences for result in found)
        judged = "current with its tail" if view == "fresh" else "current alone, without its tail"
        click.secho(f"{counted(total, 'difference')} (view: {judged})", fg="red" if total else "green")
    sys.exit(1 if wrong else 0)


def _sentence(result: Comparison) -> str:
    from upriver.lake.verify.comparison import KINDS, MAX_KEYS

    rows = f"{result.table_rows:,} rows" if result.has_table else "no table"
    text = f"{result.name}: {result.bucket_rows:,} documents, {rows}: "
    if result.equal:
        return text + "equal" + (f" ({result.late} rows not there yet)" if result.late else "")
    parts = [f"{counted(result.differences, 'difference')} in vbuckets {result.differing_vbuckets[:MAX_KEYS]}"]
    for kind in (*KINDS, "lost_files"):
        keys = getattr(result, kind)
        if keys:
            more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
            parts.append(f"  {kind.replace('_', ' ')}: {', '.join(keys[:MAX_KEYS])}{more}")
    if result.waiting:
        parts.append(f"  {result.waiting} of these have a newer row in the tail: --view fresh shows it")
    return text + "\n".join(parts)
