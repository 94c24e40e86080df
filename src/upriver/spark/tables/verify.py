"""Do the tables equal the bucket? Counts, then a checksum per vbucket, then the keys that differ; while writes go on.

Neither side has to stand still. The bucket is read from the beginning, group by group of vbuckets, and compared with
the fresh table. What differs is then looked at key by key, with a read of the very document: equal by now, or *late*
when the log has not reached the collection's newest change yet, or wrong.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from upriver.client.blocking import Database
from upriver.errors import KeyNotFound
from upriver.records.schema import Event
from upriver.spark.tables import bucket
from upriver.spark.tables.columns import parse, shape_of, to_document
from upriver.spark.tables.lake import Lake
from upriver.spark.tables.log import DOCUMENTS, read_log, table_name
from upriver.spark.tables.options import SyncOptions
from upriver.spark.tables.read import read_arrow
from upriver.spark.tables.state import JSON_DATATYPE, text_keys, winners

MAX_KEYS = 20
GROUP_CHANGES = 500_000
PATIENCE_S = 2.0


@dataclass(frozen=True)
class State:
    """One document, on one side: where in its vbucket, and a checksum of what it says."""

    vbucket: int
    seqno: int
    digest: int


@dataclass
class Comparison:
    """What was found for one collection."""

    name: str
    bucket_rows: int = 0
    table_rows: int = 0
    differing_vbuckets: list[int] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # in the bucket, not in the table
    extra: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    late: int = 0  # keys changed after what the table has: not wrong, only not there yet

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)

    @property
    def differences(self) -> int:
        return len(self.missing) + len(self.extra) + len(self.different)

    def plain(self) -> dict[str, Any]:
        """For ``--json``: counts, and the first keys of each kind."""
        lists = {name: getattr(self, name)[:MAX_KEYS] for name in ("missing", "extra", "different")}
        return {
            "collection": self.name, "equal": self.equal, "bucket_rows": self.bucket_rows,
            "table_rows": self.table_rows, "late": self.late, "differences": self.differences,
            "differing_vbuckets": self.differing_vbuckets, **lists,
        }


def digest(document: object) -> int:
    """A checksum of what a document says: key order, ``1`` or ``1.0``, and fields that are null make no difference."""
    if isinstance(document, bytes):
        return zlib.crc32(document)
    plain = {name: _normal(value) for name, value in document.items() if value is not None} \
        if isinstance(document, dict) else document
    return zlib.crc32(orjson.dumps(plain, option=orjson.OPT_SORT_KEYS))


def _normal(value: object) -> object:
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {name: _normal(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_normal(inner) for inner in value]
    return value


def verify(options: SyncOptions, collections: Sequence[str] = (), *, rounds: int = 5) -> list[Comparison]:
    """Compare every collection of the lake (or some) with the bucket."""
    lake = Lake(options.to)
    with bucket.database(options) as db:
        names = {f"{scope}.{name}": cid for cid, (scope, name) in db.collection_names().items()}
        chosen = sorted(name for name in {*lake.names(), *names} if bucket.wanted(options, name))
        if collections:
            chosen = [name for name in chosen if name in collections]
        results = {name: Comparison(name) for name in chosen}
        suspects: dict[str, dict[str, int]] = {name: {} for name in chosen}
        for group in _groups(db.high_seqnos()):
            truth = bucket_states(bucket.scan(db, group), set(chosen))
            for name in chosen:
                said = table_states(lake, name, (group[0], group[-1]))
                results[name].bucket_rows += len(truth.get(name, {}))
                results[name].table_rows += len(said)
                suspects[name] |= differing(truth.get(name, {}), said)
        for name in chosen:
            if suspects[name]:
                _confirm(db, lake, results[name], suspects[name], names.get(name), rounds)
    return list(results.values())


def _groups(highs: Mapping[int, int]) -> list[list[int]]:
    """Vbuckets in runs of a size that fits in memory."""
    groups: list[list[int]] = [[]]
    size = 0
    for vbucket in sorted(highs):
        if size > GROUP_CHANGES:
            groups.append([])
            size = 0
        groups[-1].append(vbucket)
        size += highs[vbucket]
    return [group for group in groups if group]


def bucket_states(batches: Iterable[pa.RecordBatch], chosen: set[str]) -> dict[str, dict[str, State]]:
    """The documents of each collection, by key, from a read from the beginning."""
    found: dict[str, dict[str, State]] = {}
    for rows in batches:
        documents = pa.table(rows.filter(pc.is_in(rows.column("event"), value_set=pa.array(DOCUMENTS))))
        for row in _rows(documents):
            name = table_name(row["scope"], row["collection"], row["collection_id"])
            if name not in chosen:
                continue
            if row["event"] == Event.MUTATION:
                said = State(row["vbucket"], row["seqno"], digest(_document(row)))
                found.setdefault(name, {})[row["key"]] = said
            else:
                found.setdefault(name, {}).pop(row["key"], None)
    return found


def _rows(documents: pa.Table) -> list[dict[str, Any]]:
    names = ["event", "vbucket", "seqno", "scope", "collection", "collection_id", "value", "datatype"]
    rows: list[dict[str, Any]] = documents.select(names).to_pylist()
    for row, key in zip(rows, text_keys(documents.column("key")).to_pylist(), strict=True):
        row["key"] = key
    return rows


def _document(row: Mapping[str, Any]) -> object:
    value = row["value"] or b""
    found = parse(value) if (row["datatype"] or 0) & JSON_DATATYPE else None
    return value if found is None else found


def table_states(
    lake: Lake, name: str, span: tuple[int, int], keys: Iterable[str] | None = None
) -> dict[str, State]:
    """What the fresh table says about a stretch of vbuckets, or some keys of it, by key."""
    if not lake.table("current", name).exists:
        return {}
    table = read_arrow(lake.root, name, span=span)
    if keys is not None:
        table = table.filter(pc.is_in(table.column("_key"), value_set=pa.array(keys, pa.string())))
    shape = shape_of(table.schema)
    found = {}
    for batch in table.to_batches(max_chunksize=32_768):
        for row in batch.to_pylist():
            found[row["_key"]] = State(row["_vbucket"], row["_seqno"], digest(to_document(row, shape)))
    return found


def differing(truth: Mapping[str, State], said: Mapping[str, State]) -> dict[str, int]:
    """Keys that differ, with their vbuckets, looked for only in vbuckets whose checksums do."""
    ours, theirs = _checksums(said), _checksums(truth)
    suspects = {vbucket for vbucket in {*ours, *theirs} if ours.get(vbucket) != theirs.get(vbucket)}
    vbuckets = {key: state.vbucket for side in (truth, said) for key, state in side.items()}
    return {
        key: vbucket for key, vbucket in vbuckets.items()
        if vbucket in suspects and _content(truth.get(key)) != _content(said.get(key))
    }


def _confirm(
    db: Database, lake: Lake, result: Comparison, suspects: dict[str, int], collection_id: int | None, rounds: int
) -> None:
    """Look again, key by key, until what is left is wrong, or only late and the patience is over."""
    before: dict[int, int] = {}
    for remaining in range(rounds, -1, -1):
        highs = db.high_seqnos(collection_id) if collection_id is not None else {}
        reached = positions(lake, result.name, set(suspects.values()))
        said = table_states(lake, result.name, (min(suspects.values()), max(suspects.values())), list(suspects))
        truth = {key: _get(db, key, collection_id) for key in suspects}
        after = db.high_seqnos(collection_id) if collection_id is not None else {}
        suspects = {key: vb for key, vb in suspects.items() if truth[key] != _content(said.get(key))}
        late = {
            vb for vb in suspects.values()
            if highs.get(vb, 0) > reached.get(vb, 0) or after.get(vb) != highs.get(vb)
        }
        nobody_writes = before == reached  # the tables stand still: waiting changes nothing
        if not late or not remaining or (nobody_writes and remaining < rounds):
            break
        before = reached
        time.sleep(PATIENCE_S)
    result.late = sum(vb in late for vb in suspects.values())
    wrong = {key: vb for key, vb in sorted(suspects.items()) if vb not in late}
    result.differing_vbuckets = sorted(set(wrong.values()))
    for key in wrong:
        kind = result.missing if key not in said else result.extra if truth[key] is None else result.different
        kind.append(key)


def _get(db: Database, key: str, collection_id: int | None) -> int | None:
    if collection_id is None:
        return None
    try:
        found = db.get(key, collection_id)
    except KeyNotFound:
        return None
    return digest(_document({"value": found.value, "datatype": found.datatype}))


def positions(lake: Lake, name: str, vbuckets: set[int]) -> dict[int, int]:
    """How far the table has come in some vbuckets: the newest change in its log, after all rollbacks."""
    log = lake.table("changes", name)
    if not log.exists:
        return {}
    rows = read_log(log.uri, log.pieces(), min(vbuckets), max(vbuckets), ["vbucket", "epoch", "seqno"])
    last = winners(rows.column("vbucket"), rows.column("epoch"), rows.column("seqno"))
    return {row["vbucket"]: row["seqno"] for row in rows.take(last).to_pylist()}


def _content(state: State | None) -> int | None:
    return None if state is None else state.digest


def _checksums(side: Mapping[str, State]) -> dict[int, tuple[int, int]]:
    """Per vbucket: how many documents, and the sum of their checksums, which no order changes."""
    sums: dict[int, tuple[int, int]] = {}
    for key, state in side.items():
        count, total = sums.get(state.vbucket, (0, 0))
        mixed = zlib.crc32(key.encode(), state.digest)
        sums[state.vbucket] = count + 1, (total + mixed) & 0xFFFF_FFFF_FFFF_FFFF
    return sums
