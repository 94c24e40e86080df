"""What a sync has committed: ``<lake>/_upriver/offsets.json``, for whoever must tell what is late from what is lost.

One JSON object, replaced as a whole after the log of a batch is committed. What it says is in the log, always; a log
may be one batch ahead of it, after a crash between the two. Its members, to which later versions may add others:

* ``batch``: the number of the newest batch whose log is committed.
* ``query``: the id of the query, as Spark has it in ``<checkpoint>/metadata``. Another one is not this lake's.
* ``offset``: the end of that batch, exactly as Spark stores it for the source (``upriver.protocol.offsets``). Every
  change up to it, of what ``filter`` lets through, is in the log; but see ``unread``.
* ``filter``: what the sync reads. ``{"scope": "", "collections": []}`` is the whole bucket. A ``scope`` is that scope
  with all its collections; ``collections`` are names in full, ``scope.collection``, and ``scope`` is then empty.
* ``behind``: vbuckets of which ``offset`` promises too much, as bits of a hexadecimal number (empty for none): those
  that are ``unread``, and those that have not caught up yet with a filter that became wider. They are on their way.
* ``unread``: vbuckets that tasks of this batch had to leave alone (keys are their numbers as text): the next batch
  rolls them back and reads them again. Those that batches before have left are in the offset itself.
* ``complete``: vbuckets that are consistent at ``offset``, as bits of a hexadecimal number. With it, the plan of the
  next batch knows what its predecessor knew, also in another process.

Before the log is committed, what tasks reported of the batch goes to ``reports.json``. A batch that is run again after
a crash finds part of its log committed, by the run before, and what both runs say must then hold.

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
from upriver.lake.change_log import Written
from upriver.lake.files import filesystem
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.protocol.offsets import Offset, mask_of, of_mask
from upriver.spark.reader.planning import Known

NAME, REPORTS = "offsets.json", "reports.json"


@dataclass(frozen=True)
class Reached:
    """What the lake has: the content of ``offsets.json``."""

    batch: int
    offset: dict[str, Any]
    filter: dict[str, Any] = field(default_factory=dict)
    reports: Reports = field(default_factory=lambda: Reports())
    query: str = ""

    @classmethod
    def load(cls, lake: Lake) -> Reached | None:
        """What was noted last, None if nothing was."""
        found = lake.load(NAME)
        if not found:
            return None
        return cls(found["batch"], found["offset"], found["filter"], Reports.of(found), found.get("query", ""))

    def store(self, lake: Lake) -> None:
        told = {"batch": self.batch, "query": self.query, "offset": self.offset, "filter": self.filter}
        lake.store(NAME, {**told, "behind": mask_of(self.behind()), **self.reports.plain()})

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
class Reports:
    """What the tasks of a batch found out."""

    complete: frozenset[int] = frozenset()
    unread: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Reports:
        unread = found.get("unread", {})
        return cls(of_mask(found.get("complete", "")), {int(vb): seqno for vb, seqno in unread.items()})

    def plain(self) -> dict[str, Any]:
        return {"complete": mask_of(self.complete), "unread": {str(vb): seqno for vb, seqno in self.unread.items()}}

    def also(self, other: Reports) -> Reports:
        """What is true of rows of which some came from one run and some from another."""
        unread = {**self.unread, **other.unread}
        for vb in self.unread.keys() & other.unread.keys():
            unread[vb] = min(self.unread[vb], other.unread[vb])
        return Reports(self.complete & other.complete, unread)


def keep(lake: Lake, batch: int, written: Written) -> Reports:
    """The log of ``batch`` is going to be committed: keep what its tasks reported, and say what holds."""
    told = Reports(frozenset(written.complete), dict(written.unread))
    before = lake.load(REPORTS)
    if before and before["batch"] == batch:
        told = told.also(Reports.of(before))
    lake.store(REPORTS, {"batch": batch, "query": Checkpoint(lake.checkpoint).query, **told.plain()})
    return told


def check(lake: Lake, last: int) -> None:
    """``ConfigError`` if the checkpoint is not the one that the tables were written with, up to batch ``last``."""
    checkpoint, known = Checkpoint(lake.checkpoint), Reached.load(lake)
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
            f"{lake.root} has tables whose checkpoint ({lake.checkpoint}) is missing, old or another one's: {wrong}. "
            "Restore it, or sync to a new directory"
        )


def note(lake: Lake, batch: int, options: SyncOptions, told: Reports | None = None) -> None:
    """The log of ``batch`` is committed. Nothing is noted of a query whose checkpoint is elsewhere."""
    checkpoint = Checkpoint(lake.checkpoint)
    offset = checkpoint.offset(batch)
    if offset is not None:
        Reached(batch, offset, filter_of(options), told or Reports(), checkpoint.query).store(lake)


def recall(root: str) -> Callable[[dict[str, Any]], Known | None]:
    """For the driver that plans: what the lake at ``root`` has kept of the batch that ended at an offset."""

    def known(offset: dict[str, Any]) -> Known | None:
        found = Reached.load(Lake(root))
        if found is None or found.offset != offset:
            return None
        positions = Offset.from_json(offset).positions
        complete = {vb: (positions[vb].vbuuid, positions[vb].seqno) for vb in found.reports.complete}
        return Known(complete, dict(found.reports.unread), heard=True)

    return known


def take_over(lake: Lake, options: SyncOptions) -> None:
    """A lake of an earlier version has noted nothing: what its checkpoint says was committed, it has reached."""
    checkpoint = Checkpoint(lake.checkpoint)
    batch = checkpoint.committed()
    if Reached.load(lake) is None and batch is not None:
        note(lake, batch, options)


def filter_of(options: SyncOptions) -> dict[str, Any]:
    """The filter of a sync as ``offsets.json`` has it."""
    if not options.collections:
        return {"scope": options.scope, "collections": []}
    scope = options.scope or "_default"
    names = {name if "." in name else f"{scope}.{name}" for name in options.collections}
    return {"scope": "", "collections": sorted(names)}


@dataclass(frozen=True)
class Checkpoint:
    """What Spark keeps of a query, read and never written."""

    root: str

    def offset(self, batch: int) -> dict[str, Any] | None:
        """Where a batch ends; None if Spark has not planned it here."""
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
        """The id of the query, which Spark makes up with its checkpoint; empty if there is none."""
        text = self._read("metadata")
        return str(json.loads(text)["id"]) if text else ""

    def committed(self) -> int | None:
        """The newest batch that Spark knows to be done."""
        fs, base = filesystem(self.root)
        found = fs.get_file_info(pafs.FileSelector(f"{base}/commits", allow_not_found=True))
        return max((int(info.base_name) for info in found if info.base_name.isdigit()), default=None)

    def _read(self, name: str) -> str | None:
        fs, base = filesystem(self.root)
        if fs.get_file_info(f"{base}/{name}").type != pafs.FileType.File:
            return None
        with fs.open_input_stream(f"{base}/{name}") as source:
            return bytes(source.read()).decode()
