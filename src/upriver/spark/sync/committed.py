"""What a sync has committed: ``<lake>/_upriver/offsets.json``, which tells late changes from lost ones.

One JSON object, replaced as a whole after the log of a batch is committed. The log always has what this file says;
after a crash between the two, the log may be one batch ahead. Its members, which later versions may add to:

* ``batch``: the number of the newest batch whose log is committed.
* ``query``: the id of the query, as Spark has it in ``<checkpoint>/metadata``. A checkpoint with another id does not
  belong to this lake.
* ``offset``: the end of that batch, exactly as Spark stores it for the source (``upriver.protocol.offsets``). Every
  change up to it, of what ``filter`` lets through, is in the log; but see ``unread``.
* ``filter``: what the sync reads. ``{"scope": "", "collections": []}`` is the whole bucket. A ``scope`` is that scope
  with all its collections; ``collections`` are names in full, ``scope.collection``, and ``scope`` is then empty.
* ``behind``: vbuckets that do not have everything up to ``offset``, as bits of a hexadecimal number (empty for none):
  those that are ``unread``, and those that have not caught up yet with a wider filter. Later batches bring the rest.
* ``unread``: vbuckets that tasks of this batch could not read (keys are their numbers as text): the next batch rolls
  them back and reads them again. Those that earlier batches could not read are in the offset itself.
* ``complete``: vbuckets that are consistent at ``offset``, as bits of a hexadecimal number. With it, the plan of the
  next batch knows in any process what the tasks of this one reported.

Before the log is committed, what tasks reported of the batch is stored in ``reports.json``. A batch that runs again
after a crash finds part of its log committed by the first run, so only what both runs reported is true.

Spark writes the end of batch N to ``<checkpoint>/offsets/N`` before it runs the batch, in the last line of the file.
It writes ``<checkpoint>/commits/N`` when the batch is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.fs as pafs

from upriver.errors import ConfigError
from upriver.lake.change_log import WrittenFiles
from upriver.lake.files import filesystem
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.protocol.offsets import Offset, mask_of, of_mask
from upriver.spark.reader.planning import Known

NAME, REPORTS = "offsets.json", "reports.json"


@dataclass(frozen=True)
class CommittedBatch:
    """The last batch that a lake has committed: the content of ``offsets.json``."""

    batch: int
    offset: dict[str, Any]
    filter: dict[str, Any] = field(default_factory=dict)
    reports: BatchReports = field(default_factory=lambda: BatchReports())
    query: str = ""

    @classmethod
    def load(cls, lake: Lake) -> CommittedBatch | None:
        """The last committed batch, None if there is none."""
        found = lake.load(NAME)
        if not found:
            return None
        return cls(
            found["batch"], found["offset"], found["filter"], BatchReports.from_json(found), found.get("query", "")
        )

    def store(self, lake: Lake) -> None:
        known = {"batch": self.batch, "query": self.query, "offset": self.offset, "filter": self.filter}
        lake.store(NAME, {**known, "behind": mask_of(self.behind()), **self.reports.to_json()})

    def follows(self, name: str) -> bool:
        """Whether this collection (``scope.collection``) was part of the sync."""
        scope, collections = self.filter["scope"], self.filter["collections"]
        return name in collections if collections else not scope or name.partition(".")[0] == scope

    def behind(self) -> set[int]:
        """The vbuckets that do not have everything up to the offset."""
        offset = Offset.from_json(self.offset)
        lacking = {vb for vb, at in enumerate(offset.positions) if at.filter}
        return {*self.reports.unread, *offset.unread, *lacking}


@dataclass(frozen=True)
class BatchReports:
    """What the tasks of a batch reported: vbuckets that are complete, and those that were not read."""

    complete: frozenset[int] = frozenset()
    unread: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> BatchReports:
        unread = found.get("unread", {})
        return cls(of_mask(found.get("complete", "")), {int(vb): seqno for vb, seqno in unread.items()})

    def to_json(self) -> dict[str, Any]:
        return {"complete": mask_of(self.complete), "unread": {str(vb): seqno for vb, seqno in self.unread.items()}}

    def merged(self, other: BatchReports) -> BatchReports:
        """What holds for a batch whose rows come partly from one run and partly from another."""
        unread = {**self.unread, **other.unread}
        for vb in self.unread.keys() & other.unread.keys():
            unread[vb] = min(self.unread[vb], other.unread[vb])
        return BatchReports(self.complete & other.complete, unread)


def keep(lake: Lake, batch: int, written: WrittenFiles) -> BatchReports:
    """Store what the tasks of ``batch`` reported, before its log is committed; what holds after earlier attempts."""
    reports = BatchReports(frozenset(written.complete), dict(written.unread))
    before = lake.load(REPORTS)
    if before and before["batch"] == batch:
        reports = reports.merged(BatchReports.from_json(before))
    lake.store(REPORTS, {"batch": batch, "query": SparkCheckpoint(lake.checkpoint).query, **reports.to_json()})
    return reports


def check(lake: Lake, last: int) -> None:
    """``ConfigError`` unless the tables were written with this checkpoint, up to batch ``last``."""
    checkpoint, known = SparkCheckpoint(lake.checkpoint), CommittedBatch.load(lake)
    begun = lake.load(REPORTS)
    wrong = ""
    if begun and begun["query"] not in ("", checkpoint.query):
        wrong = f"the tables were written by query {begun['query']}, it is of {checkpoint.query or 'none'}"
    elif known and checkpoint.offset(known.batch) != known.offset:
        wrong = f"it does not have batch {known.batch} as the tables do"
    elif last >= 0 and checkpoint.offset(last) is None:
        wrong = f"it does not have batch {last}"
    if wrong:
        raise ConfigError(
            f"{lake.root} has tables whose checkpoint ({lake.checkpoint}) is missing, old or of another lake: {wrong}. "
            "Restore it, or sync to a new directory"
        )


def note(lake: Lake, batch: int, options: SyncOptions, reports: BatchReports | None = None) -> None:
    """Store that the log of ``batch`` is committed. Nothing is stored if the checkpoint does not have the batch."""
    checkpoint = SparkCheckpoint(lake.checkpoint)
    offset = checkpoint.offset(batch)
    if offset is not None:
        CommittedBatch(batch, offset, filter_of(options), reports or BatchReports(), checkpoint.query).store(lake)


def recall(root: str) -> Callable[[dict[str, Any]], Known | None]:
    """For the driver that plans: what the lake at ``root`` knows of the batch that ended at an offset."""

    def known(offset: dict[str, Any]) -> Known | None:
        found = CommittedBatch.load(Lake(root))
        if found is None or found.offset != offset:
            return None
        positions = Offset.from_json(offset).positions
        complete = {vb: (positions[vb].vbuuid, positions[vb].seqno) for vb in found.reports.complete}
        return Known(complete, dict(found.reports.unread), reported=True)

    return known


def take_over(lake: Lake, options: SyncOptions) -> None:
    """A lake of an earlier version has no ``offsets.json``: take over what its checkpoint says was committed."""
    checkpoint = SparkCheckpoint(lake.checkpoint)
    batch = checkpoint.committed()
    if CommittedBatch.load(lake) is None and batch is not None:
        note(lake, batch, options)


def filter_of(options: SyncOptions) -> dict[str, Any]:
    """The filter of a sync as ``offsets.json`` has it."""
    if not options.collections:
        return {"scope": options.scope, "collections": []}
    scope = options.scope or "_default"
    names = {name if "." in name else f"{scope}.{name}" for name in options.collections}
    return {"scope": "", "collections": sorted(names)}


@dataclass(frozen=True)
class SparkCheckpoint:
    """The checkpoint that Spark keeps of a query; read, never written."""

    root: str

    def offset(self, batch: int) -> dict[str, Any] | None:
        """The end of a batch; None if Spark has not planned it here."""
        text = self._read(f"offsets/{batch}")
        if text is None:
            return None
        try:
            found = json.loads(text.splitlines()[-1])
            return dict(found)
        except (IndexError, ValueError) as error:
            raise ConfigError(
                f"{self.root}/offsets/{batch} is damaged ({error}): restore the checkpoint from a backup"
            ) from error

    @property
    def query(self) -> str:
        """The id of the query, which Spark creates with its checkpoint; empty if there is none."""
        text = self._read("metadata")
        return str(json.loads(text)["id"]) if text else ""

    def committed(self) -> int | None:
        """The newest batch that Spark has committed."""
        fs, base = filesystem(self.root)
        found = fs.get_file_info(pafs.FileSelector(f"{base}/commits", allow_not_found=True))
        return max((int(info.base_name) for info in found if info.base_name.isdigit()), default=None)

    def _read(self, name: str) -> str | None:
        fs, base = filesystem(self.root)
        if fs.get_file_info(f"{base}/{name}").type != pafs.FileType.File:
            return None
        with fs.open_input_stream(f"{base}/{name}") as source:
            return bytes(source.read()).decode()
