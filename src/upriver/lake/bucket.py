"""What a sync asks the bucket directly: its collections and size, and the whole content of some vbuckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from upriver.client.blocking import Database, collection_names
from upriver.errors import ConfigError
from upriver.lake.change_log import table_name
from upriver.lake.options import SyncOptions


@dataclass(frozen=True)
class Survey:
    """What a bucket looks like at the start of a run."""

    vbuckets: int
    changes: int  # the sum of all high seqnos: no fewer than there are documents
    collections: dict[str, int]  # table name -> collection id
    uuid: str = ""  # the bucket's own; empty if the cluster does not say


def database(options: SyncOptions) -> Database:
    return Database(options.connect_options())


def survey(options: SyncOptions) -> Survey:
    """Ask the cluster."""
    with database(options) as db:
        names = {table_name(scope, name, cid): cid for cid, (scope, name) in collection_names(db).items()}
        return Survey(db.topology.vbuckets, sum(db.high_seqnos().values()), names, db.topology.bucket_uuid)


def check(options: SyncOptions) -> Survey:
    """Survey the bucket; ``ConfigError`` if a wanted collection does not exist."""
    found = survey(options)
    asked = [options.with_(collections=(name,)) for name in options.collections] or [options]
    for one in asked:
        if not any(wanted(one, name) for name in found.collections):
            what = one.collections[0] if one.collections else f"of scope {one.scope}"
            known = ", ".join(sorted(found.collections))
            raise ConfigError(f"bucket '{options.bucket}' has no collection {what}; it has {known}")
    return found


def wanted(options: SyncOptions, name: str) -> bool:
    """Whether this collection (``scope.collection``) is part of the sync."""
    scope, _, collection = name.partition(".")
    if options.scope and not options.collections:
        return scope == options.scope
    chosen = {part if "." in part else f"{options.scope or '_default'}.{part}" for part in options.collections}
    return not chosen or f"{scope}.{collection}" in chosen


def scan(db: Database, vbuckets: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """All changes of some vbuckets, from the beginning to their high seqnos."""
    highs = db.high_seqnos()
    todo = {vbucket: highs[vbucket] for vbucket in vbuckets if highs.get(vbucket, 0) > 0}
    if todo:
        yield from db.change_batches(vbuckets=todo, end=todo)
