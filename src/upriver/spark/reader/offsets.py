"""Where a micro-batch source stands: one value per vbucket, and its canonical, compact JSON.

Spark compares offsets as text, keeps a hundred of them, and hands them back after any crash. So the JSON of an offset
is unique, and below 40 KB for 1024 vbuckets whatever the numbers are. What the numbers mean, and why they are enough
to never lose a document, is in ``planning``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from upriver.errors import ConfigError
from upriver.spark.reader.filters import Filter

VERSION = 1
LIMIT_BYTES = 39_000
POINTS_KEPT = 4
FILTERS_KEPT = 15
_MASKS = ("rollbacks", "reads", "unread")


@dataclass(frozen=True, slots=True)
class Place:
    """The reader's place in one vbucket.

    ``points`` are seqnos, newest first, at which everything delivered so far was a complete state of the vbucket.
    Seqno 0 always is one and is not listed. ``epoch`` counts the rollbacks. ``filter`` is which of the offset's filters
    everything up to here was read with.
    """

    vbuuid: int = 0
    seqno: int = 0
    points: tuple[int, ...] = ()
    epoch: int = 0
    filter: int = 0

    def __post_init__(self) -> None:
        steps = (self.seqno + 1, *self.points, 0)
        if any(newer <= older for newer, older in pairwise(steps)):
            raise ValueError(f"points {self.points} are not falling seqnos up to {self.seqno}")

    @property
    def consistent(self) -> int:
        """The newest seqno at which the reader had a complete state."""
        return self.points[0] if self.points else 0

    def newest_point(self, limit: int) -> int:
        """The newest consistent seqno that is no higher than ``limit``."""
        return next((point for point in self.points if point <= limit), 0)


@dataclass(frozen=True, slots=True)
class Offset:
    """The places in all vbuckets, indexed by vbucket.

    ``rollbacks`` are the vbuckets that the batch which ends here rolls back, each to its newest point, before it reads
    the new branch. ``reads`` are those that it reads; whether it did is known only when it is over. ``unread`` are
    those whose place nobody has read up to yet, though a batch before was to: only their points count.
    ``anchor`` marks the first offset of a query, whose batch is empty. ``baseline`` is set when the query did not
    begin at the beginning: the oldest point of each vbucket is then where it began, not a complete state.
    ``filters``: the first is what is wanted, the others what some places still have (none: an offset of an earlier
    version, which did not say). ``former`` are filters that were wanted before.
    """

    places: tuple[Place, ...]
    rollbacks: frozenset[int] = frozenset()
    anchor: bool = False
    baseline: bool = False
    reads: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    bucket: str = ""  # its uuid; empty if the cluster does not say, or an earlier version made this offset
    filters: tuple[Filter, ...] = ()
    former: tuple[Filter, ...] = ()

    @classmethod
    def earliest(cls, vbuckets: int, bucket: str = "", filters: tuple[Filter, ...] = ()) -> Offset:
        return cls((Place(),) * vbuckets, bucket=bucket, filters=filters)

    @property
    def vbuckets(self) -> int:
        return len(self.places)

    def settled(self) -> Offset:
        """The same places without what concerns only the batch that ended here; it is taken to have been read."""
        return replace(self, rollbacks=frozenset(), reads=frozenset(), unread=frozenset(), anchor=False)

    def to_json(self) -> dict[str, Any]:
        """What Spark stores. Points are dropped, oldest first, when the text would get too long: that is always safe,
        it only makes a rollback go back further."""
        for kept in range(POINTS_KEPT, -1, -1):
            found = self._to_json(kept)
            if kept == 0 or len(json.dumps(found)) <= LIMIT_BYTES:
                return found
        raise AssertionError("unreachable")

    def _to_json(self, kept: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "dcp": VERSION,
            "vbuuids": " ".join(f"{place.vbuuid:x}" for place in self.places),
            "seqnos": " ".join(str(place.seqno) for place in self.places),
            "behind": " ".join(self._behind(place, kept) for place in self.places),
        }
        epochs = " ".join(str(place.epoch) for place in self.places) if any(p.epoch for p in self.places) else ""
        masks = {name: mask_of(getattr(self, name)) for name in _MASKS}
        filters = {name: [one.text() for one in getattr(self, name)] for name in ("filters", "former")}
        filter_of = "".join(f"{place.filter:x}" for place in self.places) if any(p.filter for p in self.places) else ""
        extras = {"epochs": epochs, **masks, "anchor": self.anchor, "baseline": self.baseline, "bucket": self.bucket,
                  **filters, "filter_of": filter_of}  # fmt: skip
        return found | {name: value for name, value in extras.items() if value}

    def _behind(self, place: Place, kept: int) -> str:
        """How far behind the seqno each consistent point lies; ``-`` for none."""
        points = place.points
        if len(points) > kept:
            oldest = points[-1:] if self.baseline and kept else ()
            points = (*points[: kept - len(oldest)], *oldest)
        return ",".join(str(place.seqno - point) for point in points) or "-"

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Offset:
        """An offset that ``to_json`` made; ``ConfigError`` says what is wrong with anything else."""
        try:
            return cls._from_json(found)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"not an offset of the dcp source: {error!r}") from error

    @classmethod
    def _from_json(cls, found: Mapping[str, Any]) -> Offset:
        if found["dcp"] != VERSION:
            raise ValueError(f"version {found['dcp']!r}; this upriver reads version {VERSION}")
        columns = [found[name].split(" ") for name in ("vbuuids", "seqnos", "behind")]
        epochs = found["epochs"].split(" ") if "epochs" in found else ["0"] * len(columns[0])
        filter_of = found.get("filter_of") or "0" * len(columns[0])
        places = []
        for vbuuid, seqno, behind, epoch, chosen in zip(*columns, epochs, filter_of, strict=True):
            at = int(seqno)
            points = () if behind == "-" else tuple(at - int(back) for back in behind.split(","))
            places.append(Place(int(vbuuid, 16), at, points, int(epoch), int(chosen, 16)))
        masks = {name: of_mask(found.get(name, "")) for name in _MASKS}
        anchor, baseline, bucket = found.get("anchor", False), found.get("baseline", False), found.get("bucket", "")
        filters, former = (tuple(map(Filter.of_text, found.get(name, ()))) for name in ("filters", "former"))
        return cls(tuple(places), anchor=bool(anchor), baseline=bool(baseline), bucket=str(bucket), filters=filters,
                   former=former, **masks)  # fmt: skip


def mask_of(vbuckets: Iterable[int]) -> str:
    """A set of vbuckets as short text.

    >>> mask_of({0, 5}), mask_of(())
    ('21', '')
    """
    bits = sum(1 << vb for vb in vbuckets)
    return f"{bits:x}" if bits else ""


def of_mask(text: str) -> frozenset[int]:
    """The vbuckets that ``mask_of`` was given."""
    bits = int(text or "0", 16)
    return frozenset(vb for vb in range(bits.bit_length()) if bits >> vb & 1)


def with_point(points: Sequence[int], point: int, *, keep_oldest: bool = False) -> tuple[int, ...]:
    """``points`` (newest first) with a newer one, thinned so that the gaps between them grow with age.

    >>> with_point((90, 80, 50, 10), 100)
    (100, 80, 50, 10)
    """
    if point <= 0 or (points and point <= points[0]):
        return tuple(points)
    found = [point, *points]
    while len(found) > POINTS_KEPT:
        # The point whose absence widens its gap the least, seen from the newest. The oldest goes only by age.
        last = len(found) - 1 if keep_oldest else len(found)
        widened = [((point - found[i + 1] if i + 1 < len(found) else point) / (point - found[i - 1] + 1), i)
                   for i in range(1, last)]  # fmt: skip
        del found[min(widened)[1]]
    return tuple(found)
