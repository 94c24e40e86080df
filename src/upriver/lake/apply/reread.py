"""Rereads: vbuckets whose log does not reach back far enough are read again from the bucket, into the change log.

A rollback row to seqno 0 comes before the rows that were read, so it voids everything older. The log has no older
versions of the documents, so the log of that vbucket begins where the reread ended (its floor).

A reread goes up to the bucket's high seqno, while the sync is at an older offset. If a failover loses what lies between
the two, the source sees no rollback, because it has not read that far. So ``ahead.json`` notes how far each vbucket was
read, and on which branch. `find_lost` checks the notes against the failover logs until the sync has come as far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from upriver.errors import ConfigError
from upriver.lake.change_log import LogMark, write_log, write_marks
from upriver.lake.files import DataFile
from upriver.lake.layout import Lake
from upriver.model import FailoverEntry, FailoverLog, unsigned
from upriver.protocol.history import has_lost
from upriver.protocol.offsets import Offset
from upriver.records.schema import Event

AHEAD_FILE = "ahead.json"
Reread = Callable[[Sequence[int]], Iterable[pa.RecordBatch]]  # all changes that the bucket has of some vbuckets
Branches = Callable[[Sequence[int]], Mapping[int, Sequence[tuple[int, int]]]]  # failover logs, newest entry first


@dataclass(frozen=True)
class Ahead:
    """How far a vbucket was read, and on which branch."""

    vbuuid: int
    seqno: int

    def lost(self, log: Sequence[tuple[int, int]]) -> bool:
        """Has the bucket left this branch before the point up to which it was read?

        >>> Ahead(7, 50).lost([(9, 40), (7, 0)]), Ahead(7, 50).lost([(9, 60), (7, 0)]), Ahead(7, 50).lost([(7, 0)])
        (True, False, False)
        """
        entries = tuple(FailoverEntry(unsigned(uuid), seqno) for uuid, seqno in log)
        return has_lost(FailoverLog(entries), unsigned(self.vbuuid), self.seqno)


class Highs:
    """Notes, as rows pass, the newest seqno of each vbucket and its branch."""

    def __init__(self) -> None:
        self.found: dict[int, Ahead] = {}

    def see(self, rows: pa.RecordBatch) -> None:
        table = pa.table(rows.select(["vbucket", "vbuuid", "seqno"]))
        for row in table.group_by(["vbucket", "vbuuid"]).aggregate([("seqno", "max")]).to_pylist():
            if row["seqno_max"] >= self.found.get(row["vbucket"], Ahead(0, 0)).seqno:
                self.found[row["vbucket"]] = Ahead(row["vbuuid"], row["seqno_max"])


@dataclass(frozen=True)
class RereadFiles:
    """Uncommitted log files: what the bucket has of some vbuckets, and the rollbacks that void everything older."""

    files: list[DataFile]
    rollbacks: list[LogMark]
    highs: dict[int, Ahead]  # how far each vbucket was read

    def floors(self) -> dict[int, int]:
        """The seqno up to which the log lacks older versions, by vbucket."""
        return {
            mark.vbucket: self.highs[mark.vbucket].seqno if mark.vbucket in self.highs else 0 for mark in self.rollbacks
        }


def read_again(lake: Lake, name: str, epochs: Mapping[int, int], reread: Reread | None, batch: int) -> RereadFiles:
    """Read these vbuckets again, each under its epoch, and write the rows of one collection as log files."""
    if reread is None:
        raise ConfigError(
            f"{name}: vbuckets {sorted(epochs)} rolled back beyond the retention of the log; "
            "run the sync again with access to the bucket"
        )
    highs = Highs()

    def rows() -> Iterator[pa.RecordBatch]:
        for part in reread(sorted(epochs)):
            highs.see(part)
            yield _with_epochs(part, epochs)

    written = write_log(rows(), lake.root, batch)
    rollbacks = [LogMark(Event.ROLLBACK.value, vbucket, 0, epoch, batch) for vbucket, epoch in epochs.items()]
    for other, files in written.files.items():
        if other != name:
            lake.table("changes", other).drop_uncommitted(files)
    files = [*written.files.get(name, []), write_marks(lake.root, name, rollbacks, batch)]
    return RereadFiles(files, rollbacks, highs.found)


def _with_epochs(rows: pa.RecordBatch, epochs: Mapping[int, int]) -> pa.RecordBatch:
    """The same rows in the epochs of their vbuckets."""
    lifted = pa.array([epochs[vbucket] for vbucket in rows.column("vbucket").to_pylist()], pa.int32())
    return rows.set_column(rows.schema.get_field_index("epoch"), rows.schema.field("epoch"), lifted)


def load_ahead(lake: Lake) -> dict[str, dict[int, Ahead]]:
    """What was read ahead of the sync, by collection and vbucket, without vbuckets that the sync has passed."""
    noted = lake.load(AHEAD_FILE)
    reached = _reached(lake) if noted else {}
    return {
        name: {int(vb): Ahead(*found) for vb, found in places.items() if found[1] > reached.get(int(vb), 0)}
        for name, places in noted.items()
    }


def note_ahead(lake: Lake, name: str, found: Mapping[int, Ahead]) -> None:
    """Note how far vbuckets of a collection were read."""
    known = load_ahead(lake)
    known[name] = {**known.get(name, {}), **found}
    lake.store(
        AHEAD_FILE,
        {
            one: {str(vb): [place.vbuuid, place.seqno] for vb, place in places.items()}
            for one, places in known.items()
            if places
        },
    )


def find_lost(lake: Lake, branches: Branches) -> dict[str, list[int]]:
    """Vbuckets whose branch ended before the point up to which they were read, by collection."""
    known = load_ahead(lake)
    vbuckets = sorted({vb for places in known.values() for vb in places})
    if not vbuckets:
        return {}
    logs = branches(vbuckets)
    found = {
        name: sorted(vb for vb, place in places.items() if vb in logs and place.lost(logs[vb]))
        for name, places in known.items()
    }
    return {name: gone for name, gone in found.items() if gone}


def _reached(lake: Lake) -> dict[int, int]:
    noted: dict[str, Any] = lake.load("offsets.json").get("offset", {})
    return {vb: at.seqno for vb, at in enumerate(Offset.from_json(noted).positions)} if noted else {}
