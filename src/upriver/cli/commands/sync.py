"""``upriver sync``: lake tables that stay equal to a bucket."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upriver.cli.connecting import ConnectingCommand
from upriver.cli.lake_options import lake_options, sync_options
from upriver.errors import UpriverError
from upriver.lake.report import amount, counted, duration, size

if TYPE_CHECKING:
    from upriver.lake.journal import Batch
    from upriver.lake.options import SyncOptions
    from upriver.spark.sync.run import SyncProgress

AWAY_S = 3.0  # a bucket that fails over is away for a moment
TELL_AGAIN_S = 60.0


@click.command(cls=ConnectingCommand)
@lake_options
@click.option("--checkpoint", help="Directory of Spark's checkpoint, which belongs to the tables.  [default: in --to]")
@click.option("--format", type=click.Choice(["delta"]), help="[default: delta]")
@click.option("--once", is_flag=True, default=None, help="Bring the tables up to date with the bucket, then stop.")
@click.option(
    "--give-up-after",
    help="Stop when the bucket has not answered for this long: 90s, 10m.  [default: never; 60s with --once]",
)
@click.option("--every", help="How often to look for changes: 500ms, 5s, 1m.  [default: 1s]")
@click.option("--history", is_flag=True, default=None, help="Also keep every version with its validity (SCD type 2).")
@click.option("--xattrs", is_flag=True, default=None, help="Keep extended attributes in the change log.")
@click.option(
    "--deletes",
    type=click.Choice(["remove", "mark"]),
    help="What a deletion does to the row: remove it, or mark it (_deleted).  [default: remove]",
)
@click.option("--retention", help="How long a reader may stay on an old version of a table.  [default: 24h]")
@click.option("--log-retention", help="How far back the change log reaches.  [default: for ever]")
@click.option("--max-staleness", help="How long a change may wait before it reaches `current`.  [default: 5m]")
@click.option("--max-rows", type=int, help="Changes per batch, at most.  [default: 1000000]")
@click.option("--max-bytes", type=int, help="Bytes of changes per batch, approximately.  [default: 1073741824]")
@click.option("--adopt", is_flag=True, default=None, help="Continue with a bucket that was deleted and created again.")
@click.option("--partitions", type=int, help="Tasks per batch.  [default: one per core]")
@click.option("--master", default="local[*]", show_default=True, help="Where Spark runs, unless spark-submit sets it.")
@click.option("--ui", is_flag=True, help="Serve Spark's web UI and print its address.")
@click.option("--dry-run", is_flag=True, help="Explain what would be done, and do nothing.")
@click.option("--report", type=click.Path(), help="Draw the run into this HTML file.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON per batch on stdout.")
@click.option("--verbose", is_flag=True, help="Show what happens to the tables, and Spark's warnings.")
def sync(master: str, ui: bool, dry_run: bool, report: str | None, as_json: bool, verbose: bool, **given: Any) -> None:
    """Keep Delta tables equal to the bucket at CONNECTION (couchbase://host, or host:port).

    The first run loads the whole bucket; later runs continue where the last one stopped. Ctrl-C stops between batches.
    """
    options = sync_options(given)
    logging.basicConfig(level="ERROR", stream=sys.stderr, format="%(asctime)s %(message)s")
    if verbose:
        logging.getLogger("upriver").setLevel("INFO")
    if dry_run:
        _explain(options, as_json)
        return
    started = time.time()
    try:
        _run(options, master, as_json, verbose, ui)
    finally:
        if report:
            _report(options, report, started)


def _run(options: SyncOptions, master: str, as_json: bool, verbose: bool, ui: bool) -> None:
    import upriver.spark
    from upriver.lake.bucket import check
    from upriver.spark.sessions import sync_session

    stop = threading.Event()
    shown = JsonLines() if as_json else Display(options)
    check(options)  # report a wrong password or name before Spark starts
    shown.say("starting Spark ...")
    with nullcontext() if verbose else _stderr_to(options):
        spark = sync_session(master, ui=ui)
    if ui:
        shown.say(f"Spark's page is at {spark.sparkContext.uiWebUrl}")
    # Only now, because Spark sets its own handler, which would cancel the running batch.
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
    """Send the stderr of the JVM and its workers, which start meanwhile, to a log file beside the tables."""
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

    def __call__(self, live: SyncProgress) -> None:
        for batch in live.new_batches:
            click.echo(json.dumps({"type": "batch", **asdict(batch), "lag": live.lag}))

    def say(self, text: str) -> None:
        """Text for people is left out."""

    def done(self, live: SyncProgress) -> None:
        click.echo(json.dumps({"type": "end", "batches": live.count, "rows": live.rows, "lag": live.lag}))


class Display:
    """For people: a bar during the first load, then one line that stays up to date.

    Without a terminal, each line is complete and has its time; that the bucket is away is repeated once a minute.
    """

    def __init__(self, options: SyncOptions) -> None:
        from rich.console import Console
        from rich.status import Status

        self._console = Console(stderr=True)
        self._options = options
        self._status = Status("", console=self._console)
        self._live = self._console.is_terminal
        self._away_told = -math.inf

    def say(self, text: str) -> None:
        if self._live:
            self._status.start()
            self._status.update(text)
        else:
            click.echo(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z} {text}", err=True)

    def __call__(self, live: SyncProgress) -> None:
        if self._live:
            self._status.update(line(live, self._options))
        elif live.new_batches or self._must_tell_away(live):
            self.say(line(live, self._options))

    def _must_tell_away(self, live: SyncProgress) -> bool:
        if live.away_s < AWAY_S:
            self._away_told = -math.inf
            return False
        if live.away_s - self._away_told < TELL_AGAIN_S:
            return False
        self._away_told = live.away_s
        return True

    def done(self, live: SyncProgress) -> None:
        if self._live:
            self._status.stop()
        spent = time.time() - live.started
        rolled = f", {counted(live.rollbacks, 'rollback')} repaired" if live.rollbacks else ""
        batches = counted(live.count, "batch", "batches")
        what = f"{counted(live.rows, 'change')} in {batches} and {spent:.1f} s{rolled}"
        text = f"{what}; tables are in {self._options.to}"
        if self._live:
            self._console.print(text, highlight=False, soft_wrap=True)
        else:
            self.say(text)


def line(live: SyncProgress, options: SyncOptions) -> str:
    """The state of a run in one line: that the bucket is away, a bar with the time left, or lag and last batch."""
    if live.away_s >= AWAY_S:
        limit = f"gives up after {options.give_up_after}" if options.give_up_after else "goes on when it does"
        return f"the bucket has not answered for {duration(live.away_s)} ({live.away_because}); the sync {limit}"
    batches = [batch for batch in live.batches if batch.rows]
    if live.loading:
        return _loading(live, batches) if batches else "waiting for the first batch ..."
    return _following(live, batches)


def _loading(live: SyncProgress, batches: list[Batch]) -> str:
    recent = batches[-5:]
    spent = max(sum(batch.total_s for batch in recent), 1e-3)
    speed, bytes_s = sum(batch.rows for batch in recent) / spent, sum(batch.value_bytes for batch in recent) / spent
    # A document that was overwritten is one row and several seqnos: only the seqnos tell how much is left.
    to_come = live.lag if live.lag is not None else max(live.expected - live.rows, 0)
    share = min(max(1 - to_come / max(live.expected, 1), 0.0), 1.0)
    bar = ("━" * round(share * 30)).ljust(30, "┄")
    left = f"{duration(to_come / max(speed, 1))} left" if share < 1 else "almost done"
    return f"loading {bar} {share:4.0%}  {amount(live.rows)} rows, {amount(speed)}/s, {size(bytes_s)}/s, {left}"


def _following(live: SyncProgress, batches: list[Batch]) -> str:
    if not batches:
        return "in step with the bucket, nothing has changed"
    last = batches[-1]
    if live.lag:
        where = f"{counted(live.lag, 'change')} and {duration(last.behind_s)} behind"
    else:
        where = f"in step with the bucket, last batch {duration(max(0.0, time.time() - last.at))} ago"
    rolled = f", {counted(live.rollbacks, 'rollback')} repaired" if live.rollbacks else ""
    took = f"batch {last.batch} took {duration(last.total_s)} for {amount(last.rows)} rows"
    return f"{where}; {took}, {amount(live.rows)} rows in all{rolled}"


def _explain(options: SyncOptions, as_json: bool) -> None:
    from upriver.spark.sync.plan import explain

    found = explain(options)
    if as_json:
        click.echo(json.dumps(found))
        return
    sizes = f"{counted(found['vbuckets'], 'vbucket')}, {counted(found['changes'], 'change')} so far"
    click.echo(f"bucket '{found['bucket']}': {sizes}")
    click.echo(f"tables under {found['to']}: " + ("new" if found["new"] else f"at batch {found['batch']}"))
    for table in found["tables"]:
        click.echo(f"  {table['name']:30} {table['plan']}")
    for remark in found["remarks"]:
        click.echo(f"note: {remark}")


def _report(options: SyncOptions, path: str, since: float) -> None:
    from upriver.lake.journal import Journal
    from upriver.lake.report import write_report

    journal = Journal(options.to)
    title = f"upriver sync: {options.bucket} to {options.to}"
    write_report(path, list(journal.read(since)), journal.lags(since), title)
    click.echo(f"report: {path}", err=True)
