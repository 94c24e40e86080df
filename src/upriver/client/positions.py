"""The positions of all vbuckets of a bucket as one value, and its JSON form: what a checkpoint keeps.

The JSON has a version and names the bucket, so that a checkpoint of another bucket is detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from upriver.client.names import covers, filter_from_json, filter_to_json
from upriver.errors import CorruptCheckpoint
from upriver.model import SEQNO_MAX
from upriver.protocol.filters import Filter
from upriver.protocol.position import Position

FORMAT = "upriver-positions"
VERSION, KNOWN_VERSIONS = 2, (1, 2)  # version 1 has no filters


@dataclass(frozen=True, slots=True)
class Positions(Mapping[int, Position]):
    """Where a reader is in every vbucket; ``positions[vb]`` is a ``Position``. Equal if their claims are equal."""

    by_vbucket: Mapping[int, Position] = field(default_factory=dict)
    bucket_uuid: str = ""
    vbuckets: int = 0

    def __getitem__(self, vb: int) -> Position:
        return self.by_vbucket[vb]

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_vbucket)

    def __len__(self) -> int:
        return len(self.by_vbucket)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Positions):
            return NotImplemented
        return self._claims() == other._claims() and self.bucket_uuid == other.bucket_uuid

    def __hash__(self) -> int:
        return hash((self.bucket_uuid, tuple(sorted(self._claims().items()))))

    def _claims(self) -> dict[int, tuple[int, int, int, int]]:
        return {vb: (at.vbuuid, at.seqno, at.snap_start, at.snap_end) for vb, at in self.items()}

    def __le__(self, other: Positions) -> bool:
        """Whether ``other`` has at least everything that this one has; False across a lost branch."""
        return all(vb in other and (at.seqno == 0 or _reaches(other[vb], at)) for vb, at in self.items())

    def merged(self, other: Positions) -> Positions:
        """These positions, with those of ``other`` in place of their own."""
        return replace(self, by_vbucket={**self, **other})

    def rolled_back(self, vbucket: int, to_seqno: int) -> Positions:
        """The positions after undoing a vbucket's changes above ``to_seqno``, as ``HistoryLost`` requires.

        A position at or below ``to_seqno`` stays.
        """
        at = self[vbucket]
        if at.seqno <= to_seqno:
            return self
        return replace(self, by_vbucket={**self, vbucket: at.rolled_back(to_seqno)._replace(epoch=at.epoch + 1)})

    def only(self, vbuckets: set[int]) -> Positions:
        """The positions of some vbuckets."""
        return replace(self, by_vbucket={vb: at for vb, at in self.items() if vb in vbuckets})

    def to_json(self) -> dict[str, Any]:
        """A plain value for ``json``; u64 numbers too large for JavaScript are hexadecimal text.

        ``filter`` applies to all positions without a filter of their own.
        """
        common = next((at.filter for at in self.values()), None)
        return {
            "format": FORMAT,
            "version": VERSION,
            "bucket_uuid": self.bucket_uuid,
            "vbuckets": self.vbuckets,
            "filter": _filter_json(common),
            "positions": {str(vb): _to_json(at, common) for vb, at in sorted(self.items())},
        }

    @classmethod
    def from_json(cls, value: Any) -> Positions:
        """The inverse of ``to_json``; ``CorruptCheckpoint`` says what is wrong with other values."""
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


def _reaches(other: Position, this: Position) -> bool:
    read = other.filter is None or this.filter is None or covers(other.filter, this.filter)
    return read and this.vbuuid == other.vbuuid and this.seqno <= other.seqno


def _filter_json(found: Filter | None) -> dict[str, Any] | None:
    return None if found is None else filter_to_json(found)


def _to_json(at: Position, common: Filter | None) -> dict[str, Any]:
    found: dict[str, Any] = {"vbuuid": f"{at.vbuuid:x}", "seqno": at.seqno}
    if (at.snap_start, at.snap_end) != (at.seqno, at.seqno):
        found["snapshot"] = [at.snap_start, f"{at.snap_end:x}"]
    if at.points:
        found["points"] = list(at.points)
    if at.epoch:
        found["epoch"] = at.epoch
    return found if at.filter == common else {**found, "filter": _filter_json(at.filter)}


def _from_json(entry: Any, common: Any) -> Position:
    seqno = _number(entry["seqno"])
    first, last = entry.get("snapshot", (seqno, f"{seqno:x}"))
    start, end = _number(first), _number(int(last, 16))
    points = tuple(sorted({point for point in map(_number, entry.get("points", ())) if 0 < point < start}))
    read = entry.get("filter", common)
    filter = None if read is None else filter_from_json(read)
    epoch = _number(entry.get("epoch", 0))
    return Position(_number(int(entry["vbuuid"], 16)), seqno, start, end, points, epoch, filter).checked()


def _number(value: Any) -> int:
    """Check that a value is a u64; a damaged number must not be rounded into a position."""
    if type(value) is not int or not 0 <= value <= SEQNO_MAX:
        raise ValueError(f"{value!r} is not a seqno, uuid or count")
    return value
