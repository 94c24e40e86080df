"""Positions of a whole bucket as a value: comparable, JSON, and honest about snapshots.

The JSON form is versioned and names the bucket, so that a checkpoint of another bucket is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from upriver.client.filters import Filter
from upriver.errors import CorruptCheckpoint
from upriver.model import SEQNO_MAX, Position

FORMAT = "upriver-positions"
VERSION, KNOWN_VERSIONS = 2, (1, 2)  # 1 did not tell which collections were read


@dataclass(frozen=True, slots=True)
class Standpoint:
    """One vbucket: the position, older seqnos at which the reader was consistent, and how many rollbacks it saw.

    ``filter`` says of what: of everything else, nothing has been read up to here. None: nobody knows.
    """

    position: Position = field(default_factory=Position)
    points: tuple[int, ...] = ()
    epoch: int = 0
    filter: Filter | None = None


@dataclass(frozen=True, slots=True)
class Positions(Mapping[int, Position]):
    """Where a reader stands in every vbucket; ``positions[vb]`` is a ``Position``."""

    standpoints: Mapping[int, Standpoint] = field(default_factory=dict)
    bucket_uuid: str = ""
    vbuckets: int = 0

    def __getitem__(self, vb: int) -> Position:
        return self.standpoints[vb].position

    def __iter__(self) -> Iterator[int]:
        return iter(self.standpoints)

    def __len__(self) -> int:
        return len(self.standpoints)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Positions):
            return NotImplemented
        return dict(self.items()) == dict(other.items()) and self.bucket_uuid == other.bucket_uuid

    def __hash__(self) -> int:
        return hash((self.bucket_uuid, tuple(sorted((vb, p.vbuuid, p.seqno) for vb, p in self.items()))))

    def __le__(self, other: Positions) -> bool:
        """Whether ``other`` has at least everything that this one has (which is false across a lost branch)."""
        return all(
            vb in other and (s.position.seqno == 0 or _reaches(other.standpoints[vb], s))
            for vb, s in self.standpoints.items()
        )

    def merged(self, other: Positions) -> Positions:
        """This one with the vbuckets of ``other`` in place of its own."""
        return replace(self, standpoints={**self.standpoints, **other.standpoints})

    def rolled_back(self, vbucket: int, to_seqno: int) -> Positions:
        """After undoing what was read of a vbucket above ``to_seqno``, as ``HistoryLost`` asks for.

        Where the position is not beyond it yet, there is nothing to undo, and it stays.
        """
        old = self.standpoints[vbucket]
        if old.position.seqno <= to_seqno:
            return self
        points = tuple(p for p in old.points if p < to_seqno)
        branch = old.position.vbuuid if to_seqno else 0
        back = Standpoint(Position(branch, to_seqno, to_seqno, to_seqno), points, old.epoch + 1, old.filter)
        return replace(self, standpoints={**self.standpoints, vbucket: back})

    def only(self, vbuckets: set[int]) -> Positions:
        """The positions of these vbuckets alone."""
        return replace(self, standpoints={vb: s for vb, s in self.standpoints.items() if vb in vbuckets})

    def to_json(self) -> dict[str, Any]:
        """A plain value for ``json``; u64 numbers that JavaScript could not hold are hexadecimal text.

        The filter is that of all positions which do not name their own.
        """
        common = next((s.filter for s in self.standpoints.values()), None)
        return {
            "format": FORMAT,
            "version": VERSION,
            "bucket_uuid": self.bucket_uuid,
            "vbuckets": self.vbuckets,
            "filter": _filter_json(common),
            "positions": {str(vb): _to_json(s, common) for vb, s in sorted(self.standpoints.items())},
        }

    @classmethod
    def from_json(cls, value: Any) -> Positions:
        """``CorruptCheckpoint`` says what is wrong with it."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise CorruptCheckpoint("this is not a checkpoint of upriver")
        if value.get("version") not in KNOWN_VERSIONS:
            raise CorruptCheckpoint(f"checkpoint version {value.get('version')!r} is not known to this upriver")
        try:
            common = value.get("filter")
            found = {int(vb): _from_json(entry, common) for vb, entry in value["positions"].items()}
            return cls(found, str(value["bucket_uuid"]), _number(value["vbuckets"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpoint(f"the checkpoint is damaged ({error!r}); delete it to start again") from error


def _reaches(other: Standpoint, this: Standpoint) -> bool:
    at, wanted = other.position, this.position
    read = other.filter is None or this.filter is None or other.filter.covers(this.filter)
    return read and wanted.vbuuid == at.vbuuid and wanted.seqno <= at.seqno


def _filter_json(found: Filter | None) -> dict[str, Any] | None:
    return None if found is None else found.to_json()


def _to_json(s: Standpoint, common: Filter | None) -> dict[str, Any]:
    p = s.position
    found: dict[str, Any] = {"vbuuid": f"{p.vbuuid:x}", "seqno": p.seqno}
    if (p.snap_start, p.snap_end) != (p.seqno, p.seqno):
        found["snapshot"] = [p.snap_start, f"{p.snap_end:x}"]
    if s.points:
        found["points"] = list(s.points)
    if s.epoch:
        found["epoch"] = s.epoch
    return found if s.filter == common else {**found, "filter": _filter_json(s.filter)}


def _from_json(entry: Any, common: Any) -> Standpoint:
    seqno = _number(entry["seqno"])
    start, end = entry.get("snapshot", (seqno, f"{seqno:x}"))
    position = Position(_number(int(entry["vbuuid"], 16)), seqno, _number(start), _number(int(end, 16)))
    points, epoch = tuple(_number(p) for p in entry.get("points", ())), _number(entry.get("epoch", 0))
    read = entry.get("filter", common)
    return Standpoint(position, points, epoch, None if read is None else Filter.from_json(read))


def _number(value: Any) -> int:
    """A u64; a number that was damaged into another kind must not be rounded into a position."""
    if type(value) is not int or not 0 <= value <= SEQNO_MAX:
        raise ValueError(f"{value!r} is no seqno, uuid or count")
    return value
