"""When a range of ``current`` is rewritten: pure arithmetic that keeps the cost per change flat.

``current`` is cut into ranges of vbuckets, and changes wait in the tail. Each change adds 1/share rows of copying to a
budget. As soon as the changes since the last rewrite have paid for a range, the most changed one is rewritten. So a
batch costs the same in a table of any size. Folding a long tail is paid from the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from upriver.lake.files import DataFile, Span
from upriver.lake.options import TableShape


@dataclass(frozen=True)
class MergePolicy:
    """When tables are merged and cut; the defaults were measured."""

    share: float = 0.25  # a change pays for copying 1/share rows
    longest: float = 0.5  # a range is rewritten, whatever the budget, when this share of it waits in the tail
    small_rows: int = 8_192  # ranges up to this size are rewritten in every batch
    target_rows: int = 131_072  # of a range; twice as many split it,
    target_bytes: int = 160 << 20  # and so do twice as many bytes
    max_files: int = 4  # of one range, before they are rewritten as one
    tail_files: int = 32  # before they are folded into one
    hold_rows: int = 500_000  # with a backlog of this size, load the log first
    inline_rows: int = 200_000  # merges of more rows run on the executors,
    inline_bytes: int = 256 << 20  # and so do merges of more bytes
    staleness_s: float = math.inf  # no change waits in the tail for longer


@dataclass(frozen=True)
class TableOptions:
    """How the tables of a lake are kept."""

    policy: MergePolicy = field(default_factory=MergePolicy)
    keep_deleted: bool = False
    max_columns: int = 200
    shapes: dict[str, TableShape] = field(default_factory=dict)  # columns that the user gave, by table name
    vbuckets: int = 1024


@dataclass(frozen=True)
class VbucketRange:
    """A range of vbuckets of ``current``, its rows, and the last batch merged into it."""

    lo: int
    hi: int
    rows: int = 0
    merged: int = -1

    @property
    def width(self) -> int:
        return self.hi - self.lo + 1


def ranges_of(
    current: Sequence[DataFile], vbuckets: int, expected_rows: int, policy: MergePolicy, expected_bytes: int = 0
) -> list[VbucketRange]:
    """The ranges that ``current`` is cut into; for a new table, those that suit its expected size.

    Vbuckets without a file, because none of their changes was merged yet, are ranges as well.
    """
    found: dict[tuple[int, int], VbucketRange] = {}
    for file in current:
        known = found.get((file.lo, file.hi), VbucketRange(file.lo, file.hi))
        rows, merged = known.rows + file.rows, max(known.merged, file.last_batch)
        found[file.lo, file.hi] = VbucketRange(file.lo, file.hi, rows, merged)
    if not found:
        parts = max(-(-expected_rows // policy.target_rows), -(-expected_bytes // policy.target_bytes))
        return cut(0, vbuckets - 1, parts)
    ranges, free = [], 0
    for part in sorted(found.values(), key=lambda part: part.lo):
        if part.lo > free:
            ranges.append(VbucketRange(free, part.lo - 1))
        ranges.append(part)
        free = max(free, part.hi + 1)
    return [*ranges, VbucketRange(free, vbuckets - 1)] if free < vbuckets else ranges


def cut(lo: int, hi: int, parts: int) -> list[VbucketRange]:
    """A range of vbuckets in ``parts`` equal parts, as far as it has that many vbuckets.

    >>> [(part.lo, part.hi) for part in cut(0, 9, 4)]
    [(0, 1), (2, 4), (5, 6), (7, 9)]
    """
    parts = max(1, min(parts, hi - lo + 1))
    width = hi - lo + 1
    edges = [lo + width * index // parts for index in range(parts + 1)]
    return [VbucketRange(edges[index], edges[index + 1] - 1) for index in range(parts)]


def in_doubt(files: Sequence[DataFile]) -> bool:
    """Whether the names of these files cannot be relied on: another tool wrote some, or their ranges overlap."""
    if any(file.foreign for file in files):
        return True
    spans = sorted({(file.lo, file.hi) for file in files})
    return any(one[1] >= other[0] for one, other in pairwise(spans))


def waiting(ranges: Sequence[VbucketRange], tail: Sequence[DataFile]) -> list[int]:
    """About how many tail rows wait for each range, if keys are spread evenly over vbuckets."""
    if not tail:
        return [0] * len(ranges)
    names = ("lo", "hi", "last_batch", "rows")
    lo, hi, last_batch, rows = (np.array([getattr(file, name) for file in tail]) for name in names)
    density = rows / (hi - lo + 1)
    found = []
    for part in ranges:
        shared_vbuckets = np.clip(np.minimum(hi, part.hi) - np.maximum(lo, part.lo) + 1, 0, None)
        found.append(round(float((density * shared_vbuckets)[last_batch > part.merged].sum())))
    return found


def worth_merging(
    ranges: Sequence[VbucketRange], tail: Sequence[DataFile], fresh: Sequence[int], policy: MergePolicy
) -> set[Span]:
    """The ranges to rewrite now, given the new rows of each: small ones, and the most changed that are paid for."""
    chosen: set[Span] = set()
    scored = []
    for part, new, old in zip(ranges, fresh, waiting(ranges, tail), strict=True):
        pending = old + new
        if pending and part.rows + pending <= policy.small_rows:
            chosen.add((part.lo, part.hi))
        elif pending:
            scored.append((pending / max(part.rows, 1), part))
    left, paid = budget(ranges, tail, fresh, policy), sum(fresh) / policy.share
    for changed, part in sorted(scored, key=lambda both: (-both[0], both[1].lo)):
        # Half of this batch's payment counts, so a rewrite is too early as often as it is too late. A range that has
        # mostly changed must not wait, whatever the budget.
        if left + min(paid, part.rows) / 2 < part.rows and changed < policy.longest:
            break
        left -= part.rows
        chosen.add((part.lo, part.hi))
    return chosen


def budget(
    ranges: Sequence[VbucketRange], tail: Sequence[DataFile], fresh: Sequence[int], policy: MergePolicy
) -> float:
    """How many rows may be copied now: what changes since the last rewrite have paid, less what folding cost."""
    newest = max((part.merged for part in ranges), default=-1)
    changed, folded = float(sum(fresh)), 0
    for file in tail:
        if file.last_batch >= newest:  # folding comes after rewriting
            batches = max(file.last_batch - file.first_batch + 1, 1)
            changed += file.rows * min(1.0, (file.last_batch - newest) / batches)
            folded += file.rows if batches > 1 else 0
    return changed / policy.share - folded


def hold(unapplied: int, in_tables: int, lag: int, policy: MergePolicy) -> bool:
    """Whether to write only the log for now: during a large load, tables advance only when they would double."""
    return lag >= policy.hold_rows and unapplied < max(in_tables, 4 * policy.hold_rows)


def frontier(current: Sequence[DataFile], vbuckets: int) -> npt.NDArray[np.int64]:
    """The last batch that each vbucket of ``current`` has, -1 for none.

    A file is written by merging everything that waits for its range, so the range has every batch up to the last one.
    The name of a file that another tool wrote says nothing.
    """
    merged = np.full(vbuckets, -1, dtype=np.int64)
    for file in current:
        if not file.foreign:
            here = merged[file.lo : file.hi + 1]
            np.maximum(here, file.last_batch, out=here)
    return merged


Present = Callable[[DataFile], npt.NDArray[np.int64]]  # the vbuckets that a file has rows of


def spanned(file: DataFile) -> npt.NDArray[np.int64]:
    """The vbuckets that a file may have rows of, by its name."""
    return np.arange(file.lo, file.hi + 1)


def missing(file: DataFile, merged: npt.NDArray[np.int64], present: Present = spanned) -> npt.NDArray[np.int64]:
    """The vbuckets of a tail file whose rows ``current`` may lack; all of a file that another tool wrote."""
    here = present(file)
    here = here[here < len(merged)]
    return here if file.foreign else here[merged[here] < file.last_batch]


def superseded(tail: Sequence[DataFile], merged: npt.NDArray[np.int64], present: Present = spanned) -> list[DataFile]:
    """Tail files to remove: ``current`` has their rows, and no file that stays may hold an older row of their keys.

    If one did, a deleted document would come back once its deletion has left the tail.
    """
    done = [file for file in tail if not len(missing(file, merged, present))]
    while done:
        gone = {file.path for file in done}
        stay = [file for file in tail if file.path not in gone]
        kept = [
            file
            for file in done
            if not any(other.first_batch <= file.last_batch and other.overlaps(file.lo, file.hi) for other in stay)
        ]
        if len(kept) == len(done):
            break
        done = kept
    return done


def overdue(
    ranges: Sequence[VbucketRange],
    tail: Sequence[DataFile],
    merged: npt.NDArray[np.int64],
    now_ms: int,
    policy: MergePolicy,
    present: Present = spanned,
) -> set[Span]:
    """Ranges with rows that have waited so long that they must be merged.

    Ranges take turns between half and nine tenths of the limit, so that not all are rewritten at once.
    """
    due: set[Span] = set()
    if math.isinf(policy.staleness_s):
        return due
    for file in tail:
        share = (now_ms - file.made_ms) / 1000 / policy.staleness_s if policy.staleness_s else math.inf
        if share < 0.5:
            continue
        lacking = missing(file, merged, present)
        for index, part in enumerate(ranges):
            if share >= 0.5 + 0.4 * index / len(ranges) and ((lacking >= part.lo) & (lacking <= part.hi)).any():
                due.add((part.lo, part.hi))
    return due
