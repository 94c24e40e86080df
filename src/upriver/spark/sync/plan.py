"""What a sync would do (``--dry-run``), without doing it."""

from __future__ import annotations

from typing import Any, TypedDict

from upriver.errors import ConfigError
from upriver.lake import bucket
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.lake.tables import Tables
from upriver.spark.sync.committed import CommittedBatch, check
from upriver.spark.sync.job import table_options


class TablePlan(TypedDict):
    """What a sync would do with one collection."""

    name: str
    plan: str


class SyncPlan(TypedDict):
    """What a sync would do, in plain values."""

    bucket: str
    vbuckets: int
    changes: int
    to: str
    new: bool
    batch: int
    tables: list[TablePlan]
    remarks: list[str]


def explain(options: SyncOptions) -> SyncPlan:
    """Plan a sync from what the bucket and the lake have now."""
    found = bucket.survey(options)
    lake = Lake(options.to, options.checkpoint)
    settings = lake.settings()
    tables = Tables(lake, settings.get("id", ""), table_options(options, found.vbuckets))
    names = sorted({*found.collections, *tables.names()})
    before = CommittedBatch.load(lake)
    wanted = [name for name in names if bucket.wanted(options, name)]
    plans: list[TablePlan] = [{"name": name, "plan": _plan(name, found, tables, before)} for name in wanted]
    plans += [{"name": name, "plan": "no longer followed: its tables stay as they are"}
              for name in tables.names() if name not in wanted]  # fmt: skip
    return {
        "bucket": options.bucket,
        "vbuckets": found.vbuckets,
        "changes": found.changes,
        "to": options.to,
        "new": not settings,
        "batch": tables.last_batch(),
        "tables": plans,
        "remarks": _remarks(settings, found, options) + _refusals(lake, tables),
    }


def _plan(name: str, found: bucket.Survey, tables: Tables, before: CommittedBatch | None) -> str:
    collection = tables.collection(name)
    if not collection.changes.exists:
        return "load all of it into new tables" if name in found.collections else "nothing"
    if before is not None and not before.follows(name):
        return "not followed until now: all vbuckets are rolled back and read again"
    if found.collections.get(name) not in tables.collection_ids(name)[-1:]:
        return "dropped or created again since: its rows are removed first"
    waiting = sum(file.rows for file in collection.tail.files())
    rows = sum(file.rows for file in collection.current.files())
    return f"continue after batch {collection.applied}: {rows:,} rows in current, {waiting:,} waiting in the tail"


def _remarks(settings: dict[str, Any], found: bucket.Survey, options: SyncOptions) -> list[str]:
    remarks = []
    if settings and (settings["bucket"], settings["vbuckets"]) != (options.bucket, found.vbuckets):
        remarks.append(f"{options.to} holds another bucket ('{settings['bucket']}'): the sync would refuse")
    elif settings.get("uuid", found.uuid) != found.uuid:
        done = "everything is taken back and read again" if options.adopt else "the sync would refuse without --adopt"
        remarks.append(f"{options.to} holds a bucket of this name that is another one: {done}")
    if options.log_retention:
        remarks.append("the log is trimmed: a rollback beyond it reads its vbuckets again")
    missing = [
        name
        for name in options.collections
        if not any(bucket.wanted(options.with_(collections=(name,)), known) for known in found.collections)
    ]
    if missing:
        remarks.append(f"the bucket has no collection {', '.join(missing)}: the sync would refuse")
    return remarks


def _refusals(lake: Lake, tables: Tables) -> list[str]:
    try:
        check(lake, tables.last_batch())
    except ConfigError as error:
        return [f"the sync would refuse: {error}"]
    return []
