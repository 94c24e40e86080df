"""What a sync has committed: ``<lake>/_upriver/offsets.json``, for whoever must tell what is late from what is lost.

One JSON object, replaced as a whole after the log of a batch is committed. What it says is in the log, always; a log
may be one batch ahead of it, after a crash between the two. Its members, to which later versions may add others:

* ``batch``: the number of the newest batch whose log is committed.
* ``offset``: the end of that batch, exactly as Spark stores it for the source (``upriver.spark.offsets``). Every
  change up to it, of what ``filter`` lets through, is in the log.
* ``filter``: what the sync reads. ``{"scope": "", "collections": []}`` is the whole bucket. A ``scope`` is that scope
  with all its collections; ``collections`` are names in full, ``scope.collection``, and ``scope`` is then empty.

Spark writes the end of batch N to ``<checkpoint>/offsets/N`` before it runs the batch, in the last line of the file.
It writes ``<checkpoint>/commits/N`` when the batch is over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow.fs as pafs

from upriver.errors import ConfigError
from upriver.spark.tables.lake import Lake
from upriver.spark.tables.options import SyncOptions
from upriver.spark.tables.pieces import filesystem

NAME = "offsets.json"


@dataclass(frozen=True)
class Reached:
    """What the lake has: the content of ``offsets.json``."""

    batch: int
    offset: dict[str, Any]
    filter: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, lake: Lake) -> Reached | None:
        """What was noted last, None if nothing was."""
        found = lake.load(NAME)
        return cls(found["batch"], found["offset"], found["filter"]) if found else None

    def store(self, lake: Lake) -> None:
        lake.store(NAME, {"batch": self.batch, "offset": self.offset, "filter": self.filter})


def note(lake: Lake, batch: int, options: SyncOptions) -> None:
    """The log of ``batch`` is committed. Nothing is noted of a query whose checkpoint is elsewhere."""
    offset = Checkpoint(lake.checkpoint).offset(batch)
    if offset is not None:
        Reached(batch, offset, filter_of(options)).store(lake)


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
