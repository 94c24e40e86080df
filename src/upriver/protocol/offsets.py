"""Offsets: the positions of a bucket as Spark's checkpoint keeps them, in one canonical, compact JSON object.

Spark compares offsets as text, keeps a hundred of them, and returns them after any crash. So an offset has exactly one
JSON form, which stays below 40 KB for 1024 vbuckets whatever the numbers are. ``spark.reader.planning`` explains why
offsets are enough to never lose a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from upriver.errors import ConfigError
from upriver.protocol.filters import Filter
from upriver.protocol.position import POINTS_KEPT, Position, thinned

VERSION = 1
LIMIT_BYTES = 39_000
FILTERS_KEPT = 15
_MASKS = ("rollbacks", "reads", "unread")


@dataclass(frozen=True, slots=True)
class Offset:
    """The positions in all vbuckets, indexed by vbucket.

    ``rollbacks``: vbuckets that the batch ending here rolls back, each to its newest consistent point, before it reads
    the new branch. ``reads``: vbuckets that this batch reads; only after the batch is it known whether it did.
    ``unread``: vbuckets that an earlier batch should have read up to their position but did not; only their consistent
    points count. ``anchor`` marks the first offset of a query, whose batch is empty. ``baseline`` is set if the query
    did not begin at the beginning: the oldest point of each vbucket is then where it began. ``filters``: the first is
    the filter to read with, which also applies to positions that name none; the others still apply to some positions.
    Offsets of an earlier version have no filters. ``former``: filters that the query used before.
    """

    positions: tuple[Position, ...]
    rollbacks: frozenset[int] = frozenset()
    anchor: bool = False
    baseline: bool = False
    reads: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    bucket: str = ""  # the bucket's uuid; empty if the cluster gives none, or in offsets of an earlier version
    filters: tuple[Filter, ...] = ()
    former: tuple[Filter, ...] = ()

    @classmethod
    def earliest(cls, vbuckets: int, bucket: str = "", filters: tuple[Filter, ...] = ()) -> Offset:
        return cls((Position(),) * vbuckets, bucket=bucket, filters=filters)

    @property
    def vbuckets(self) -> int:
        return len(self.positions)

    def settled(self) -> Offset:
        """The same positions without the marks of the batch that ended here, which counts as read."""
        return replace(self, rollbacks=frozenset(), reads=frozenset(), unread=frozenset(), anchor=False)

    def to_json(self) -> dict[str, Any]:
        """The JSON that Spark stores.

        If the text would be too long, consistent points are dropped. That is safe: a rollback only goes back further.
        """
        found = self._without_points()
        room = LIMIT_BYTES - len(json.dumps(found))
        most, behind = POINTS_KEPT, self._behind(POINTS_KEPT)
        while len(behind) > room and most:
            most //= 2
            behind = self._behind(most)
        return {name: behind if name == "behind" else value for name, value in found.items()}

    def _without_points(self) -> dict[str, Any]:
        at = self.positions
        found: dict[str, Any] = {
            "dcp": VERSION,
            "vbuuids": " ".join(f"{each.vbuuid:x}" for each in at),
            "seqnos": " ".join(str(each.seqno) for each in at),
            "behind": "",
        }
        extras = {
            "epochs": " ".join(str(each.epoch) for each in at) if any(each.epoch for each in at) else "",
            **{name: mask_of(getattr(self, name)) for name in _MASKS},
            "anchor": self.anchor, "baseline": self.baseline, "bucket": self.bucket,
            "filters": [each.text() for each in self.filters], "former": [each.text() for each in self.former],
            "filter_of": "".join(f"{self._filter_number(each):x}" for each in at) if any(e.filter for e in at) else "",
        }  # fmt: skip
        return found | {name: value for name, value in extras.items() if value}

    def _filter_number(self, position: Position) -> int:
        return 0 if position.filter is None else self.filters.index(position.filter)

    def _behind(self, most: int) -> str:
        """For each position, how far its consistent points are behind its seqno, newest first; ``-`` for none."""
        points = [self._kept(at.consistent_points[1:], most) for at in self.positions]
        return " ".join(
            ",".join([str(at.seqno - point) for point in reversed(kept)]) or "-"
            for at, kept in zip(self.positions, points, strict=True)
        )

    def _kept(self, points: tuple[int, ...], most: int) -> tuple[int, ...]:
        """At most so many points. A single one is the newest, or with ``baseline`` the point where the query began."""
        if most > 1:
            return thinned(points, most)
        return (points[:1] if self.baseline else points[-1:]) if most else ()

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Offset:
        """The inverse of ``to_json``; ``ConfigError`` says what is wrong with other values."""
        try:
            return cls._from_json(found)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"not an offset of the dcp source: {error!r}") from error

    @classmethod
    def _from_json(cls, found: Mapping[str, Any]) -> Offset:
        if found["dcp"] != VERSION:
            raise ValueError(f"version {found['dcp']!r}; this upriver reads version {VERSION}")
        columns = [found[name].split(" ") for name in ("vbuuids", "seqnos", "behind")]
        epochs = found["epochs"].split(" ") if "epochs" in found else ["0"] * len(columns[0])
        filter_of = found.get("filter_of") or "0" * len(columns[0])
        filters, former = (tuple(map(Filter.of_text, found.get(name, ()))) for name in ("filters", "former"))
        positions = []
        for vbuuid, seqno, behind, epoch, number in zip(*columns, epochs, filter_of, strict=True):
            at = int(seqno)
            points = () if behind == "-" else tuple(at - int(back) for back in reversed(behind.split(",")))
            position = Position.of_points(int(vbuuid, 16), at, points, int(epoch))
            positions.append(position if number == "0" else position._replace(filter=filters[int(number, 16)]))
        masks = {name: of_mask(found.get(name, "")) for name in _MASKS}
        anchor, baseline, bucket = found.get("anchor", False), found.get("baseline", False), found.get("bucket", "")
        return cls(tuple(positions), anchor=bool(anchor), baseline=bool(baseline), bucket=str(bucket), filters=filters,
                   former=former, **masks)  # fmt: skip


def mask_of(vbuckets: Iterable[int]) -> str:
    """A set of vbuckets as short text.

    >>> mask_of({0, 5}), mask_of(())
    ('21', '')
    """
    bits = sum(1 << vb for vb in vbuckets)
    return f"{bits:x}" if bits else ""


def of_mask(text: str) -> frozenset[int]:
    """The inverse of ``mask_of``."""
    bits = int(text or "0", 16)
    return frozenset(vb for vb in range(bits.bit_length()) if bits >> vb & 1)
