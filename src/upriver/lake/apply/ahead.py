"""Vbuckets that were read again further than the sync has come, until it has come as far.

The log of a vbucket that rolls back beyond its retention is read from the bucket, up to where the bucket is, while the
sync is at an older offset. A failover that loses what lies between the two is no rollback for the source, which
had not read it. So what was read, and of which branch, is noted, and asked after while it is ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from upriver.lake.layout import Lake
from upriver.model import FailoverEntry, FailoverLog, unsigned
from upriver.protocol.history import has_lost
from upriver.protocol.offsets import Offset

NAME = "ahead.json"
Branches = Callable[[Sequence[int]], Mapping[int, Sequence[tuple[int, int]]]]  # failover logs, newest entry first


@dataclass(frozen=True)
class Ahead:
    """How far a vbucket was read, and of which branch."""

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
    """Looks at rows as they pass: the newest seqno of each vbucket, and its branch."""

    def __init__(self) -> None:
        self.found: dict[int, Ahead] = {}

    def see(self, rows: pa.RecordBatch) -> None:
        table = pa.table(rows.select(["vbucket", "vbuuid", "seqno"]))
        for row in table.group_by(["vbucket", "vbuuid"]).aggregate([("seqno", "max")]).to_pylist():
            if row["seqno_max"] >= self.found.get(row["vbucket"], Ahead(0, 0)).seqno:
                self.found[row["vbucket"]] = Ahead(row["vbuuid"], row["seqno_max"])


def load(lake: Lake) -> dict[str, dict[int, Ahead]]:
    """By collection and vbucket; those that the sync has passed are left out."""
    noted = lake.load(NAME)
    reached = _reached(lake) if noted else {}
    return {
        name: {int(vb): Ahead(*found) for vb, found in places.items() if found[1] > reached.get(int(vb), 0)}
        for name, places in noted.items()
    }


def note(lake: Lake, name: str, found: Mapping[int, Ahead]) -> None:
    """A collection's vbuckets were read that far."""
    known = load(lake)
    known[name] = {**known.get(name, {}), **found}
    lake.store(
        NAME,
        {
            one: {str(vb): [place.vbuuid, place.seqno] for vb, place in places.items()}
            for one, places in known.items()
            if places
        },
    )


def lost(lake: Lake, branches: Branches) -> dict[str, list[int]]:
    """Vbuckets whose branch ended before the point up to which they were read, by collection."""
    known = load(lake)
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
