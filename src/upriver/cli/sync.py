"""``upriver sync``: lake tables that stay equal to a bucket."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.errors import UpriverError

if TYPE_CHECKING:
    from upriver.spark.tables.options import SyncOptions
    from upriver.spark.tables.run import Live


@click.command()
@click.argument("connection", required=False)
@click.option("--bucket", help="[default: default]")
@click.option("--to", help="Directory (or s3://, gs://, hdfs:// address) of the tables.")
@click.option("--collections", help="Only these: scope.collection, separated by commas.")
@click.option("--scope", help="Only the collections of this scope.")
@click.option("--format", type=click.Choice(["delta"]), help="[default: delta]")
@click.option("--once", is_flag=True, default=None, help="Bring the tables up to the bucket, and end.")
@click.option("--every", help="How often to look for changes: 500ms, 5s, 1m.  [default: 1s]")
@click.option("--history", is_flag=True, default=None, help="Also keep every version with its validity (SCD type 2).")
@click.option("--deletes", type=click.Choice(["remove", "mark"]), help="Of documents: rows go, or are marked.")
@click.option("--retention", help="How long a reader may stay on an old version of a table.  [default: 24h]")
@click.option("--log-retention", help="How far back the change log reaches.  [default: for ever]")
@click.option("--max-rows", type=int, help="Changes per batch, at most.  [default: 1000000]")
@click.option("--max-bytes", type=int, help="Bytes of changes per batch, about.  [default: 1073741824]")
@click.option("--adopt", is_flag=True, default=None, help="Go on with a bucket that was deleted and created again.")
@click.option("--partitions", type=int, help="Tasks per batch.  [default: one per core]")
@click.option("--username")
@click.option("--password", envvar="UPRIVER_PASSWORD")
@click.option("--password-file")
@click.option("--ca-file", help="PEM file of the authority that signed the nodes' certificates.")
@click.option("--config", type=click.Path(), help="TOML file with any of these options, under their own names.")
@click.option("--master", default="local[*]", show_default=True, help="Where Spark runs, unless spark-submit says it.")
@click.option("--dry-run", is_flag=True, help="Explain what would be done, and do nothing.")
@click.option("--report", type=click.Path(), help="Draw the run into this HTML file.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON per batch on stdout.")
@click.option("--verbose", is_flag=True, help="Show what happens to the tables, and Spark's warnings.")
def sync(
    config: str | None, master: str, dry_run: bool, report: str | None, as_json: bool, verbose: bool, **given: Any
) -> None:
    """Keep Delta tables equal to the bucket at CONNECTION (couchbase://host[:port]).

    The first run loads what is there; every run goes on where the last one stopped. Ctrl-C stops between batches.
    """
    from upriver.spark.tables.options import SyncOptions

    options = SyncOptions.load(config, {name: value for name, value in given.items() if value is not None})
    logging.basicConfig(level="INFO" if verbose else "ERROR", stream=sys.stderr, format="%(message)s")
    if dry_run:
        _explain(options, as_json)
        return
    started = time.time()
    try:
        _run(options, master, as_json, verbose)
    finally:
        if report:
            _report(options, report, started)


def _run(options: SyncOptions, master: str, as_json: bool, verbose: bool) -> None:
    import upriver.spark
    from upriver.spark.tables.run import session

    stop = threading.Event()
    shown = JsonLines() if as_json else Display(options)
    shown.say("starting Spark ...")
    with nullcontext() if verbose else _stderr_to(options):
        spark = session(master)
    # Only now: Spark sets a handler of its own, which would cancel the batch that is running.
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        live = upriver.spark.sync(spark, options, stop=stop, on_progress=shown)
        shown.done(live)
    except UpriverError:
        if not stop.is_set():
            raise
        shown.say("stopped in the middle of a batch; the next run repeats it")
    finally:
        spark.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _stderr_to(options: SyncOptions) -> Iterator[None]:
    """Give what starts now, the JVM and its workers, a log file beside the tables for their chatter."""
    if "://" in options.to:
        yield
        return
    log = Path(options.to) / "_upriver" / "spark.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    ours = os.dup(2)
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(ours, 2)
            os.close(ours)


class JsonLines:
    """For machines: every batch, and the end, as a line of JSON."""

    def __call__(self, live: Live) -> None:
        for batch in live.news:
            click.echo(json.dumps({"type": "batch", **asdict(batch), "lag": live.lag}))

    def say(self, text: str) -> None:
        """People only."""

    def done(self, live: Live) -> None:
        click.echo(json.dumps({"type": "end", "batches": live.count, "rows": live.rows, "lag": live.lag}))


class Display:
    """For people: a bar while much is to be loaded, then one line that stays up to date."""

    def __init__(self, options: SyncOptions) -> None:
        from rich.console import Console
        from rich.status import Status

        self._console = Console(stderr=True)
        self._to = options.to
        self._status = Status("", console=self._console)
        self._live = self._console.is_terminal

    def say(self, text: str) -> None:
        if self._live:
            self._status.start()
            self._status.update(text)
        else:
            self._console.print(text, highlight=False)

    def __call__(self, live: Live) -> None:
        if self._live:
            self._status.update(line(live))
        elif live.news:
            self._console.print(line(live), highlight=False)

    def done(self, live: Live) -> None:
        if self._live:
            self._status.stop()
        from upriver.spark.tables.report import counted

        spent = time.time() - live.started
        rolled = f", {counted(live.rollbacks, 'rollback')} repaired" if live.rollbacks else ""
        batches = counted(live.count, "batch", "batches")
        self._console.print(
            f"{counted(live.rows, 'change')} in {batches} and {spent:.1f} s{rolled}; tables are in {self._to}",
            highlight=False,
        )


def line(live: Live) -> str:
    """The state of a run in one line: a bar with speed and remaining time, or lag, batch time and rollbacks."""
    from upriver.spark.tables.report import amount, counted, duration, size

    batches = [batch for batch in live.batches if batch.rows]
    if not batches:
        return "waiting for changes ..."
    last, spent = batches[-1], max(time.time() - live.started, 1e-3)
    if live.loading:
        recent = batches[-5:]
        speed = sum(b.rows for b in recent) / max(sum(b.total_s for b in recent), 1e-3)
        bytes_s = sum(b.value_bytes for b in recent) / max(sum(b.total_s for b in recent), 1e-3)
        share = min(live.rows / max(live.expected, 1), 1.0)
        bar = ("━" * round(share * 30)).ljust(30, "┄")
        left = f"{duration((live.expected - live.rows) / max(speed, 1))} left" if share < 1 else "almost done"
        return f"loading {bar} {share:4.0%}  {amount(live.rows)} rows, {amount(speed)}/s, {size(bytes_s)}/s, {left}"
    return (
        f"in step: {amount(live.lag or 0)} changes and {duration(last.behind_s)} behind, batch {last.batch} took "
        f"{duration(last.total_s)} for {amount(last.rows)} rows, {counted(live.rollbacks, 'rollback')}, "
        f"{amount(live.rows / spent)} rows/s"
    )


def _explain(options: SyncOptions, as_json: bool) -> None:
    from upriver.spark.tables.plan import explain

    found = explain(options)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"bucket '{found['bucket']}': {found['vbuckets']} vbuckets, {found['changes']:,} changes so far")
    click.echo(f"tables under {found['to']}: " + ("new" if found["new"] else f"at batch {found['batch']}"))
    for table in found["tables"]:
        click.echo(f"  {table['name']:30} {table['plan']}")
    for remark in found["remarks"]:
        click.echo(f"note: {remark}")


def _report(options: SyncOptions, path: str, since: float) -> None:
    from upriver.spark.tables.progress import Journal
    from upriver.spark.tables.report import write_report

    journal = Journal(options.to)
    title = f"upriver sync: {options.bucket} to {options.to}"
    write_report(path, list(journal.read(since)), journal.lags(since), title)
    click.echo(f"report: {path}", err=True)
