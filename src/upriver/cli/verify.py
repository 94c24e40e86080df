"""``upriver verify``: do the tables equal the bucket?"""

from __future__ import annotations

import json
import sys
from typing import Any

import click


@click.command()
@click.argument("connection")
@click.option("--bucket", default="default", show_default=True)
@click.option("--to", "--lake", "to", required=True, help="Directory of the tables.")
@click.option("--collections", default="", help="Only these: scope.collection, separated by commas.")
@click.option("--username", default="")
@click.option("--password", default="", envvar="UPRIVER_PASSWORD")
@click.option("--ca-file", default="")
@click.option("--strict", is_flag=True, help="Rows that are only late count as differences, too.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON per collection.")
def verify(strict: bool, as_json: bool, **given: Any) -> None:
    """Compare the tables with the bucket at CONNECTION, while both go on.

    Exit code 0: equal; 1: something differs (its keys are shown).
    """
    from upriver.spark.tables.options import SyncOptions
    from upriver.spark.tables.verify import verify as compare

    found = compare(SyncOptions.parse(given))
    wrong = False
    for result in found:
        wrong |= not result.equal or (strict and result.late > 0)
        click.echo(json.dumps(result.plain()) if as_json else _sentence(result))
    if not as_json:
        total = sum(result.differences for result in found)
        click.secho(f"{total} differences", fg="red" if total else "green")
    sys.exit(1 if wrong else 0)


def _sentence(result: Any) -> str:
    from upriver.spark.tables.verify import MAX_KEYS

    text = f"{result.name}: {result.bucket_rows:,} documents, {result.table_rows:,} rows: "
    if result.equal:
        return text + "equal" + (f" ({result.late} rows not there yet)" if result.late else "")
    parts = [f"{result.differences} differences in vbuckets {result.differing_vbuckets[:MAX_KEYS]}"]
    for kind in ("missing", "extra", "different"):
        keys = getattr(result, kind)
        if keys:
            more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
            parts.append(f"  {kind}: {', '.join(keys[:MAX_KEYS])}{more}")
    return text + "\n".join(parts)
