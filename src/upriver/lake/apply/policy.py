"""When a range of ``current`` is worth rewriting: pure arithmetic, so that the cost per change stays flat.

``current`` is cut into ranges of vbuckets, and changes wait in the tail. Each pays for 1/share rows that are copied
later; as soon as those since the last rewriting have paid for a range, the one that needs it most is rewritten. So a
batch costs the same in a table of any size, and none has to make up for others. Where the tail is so long that it is
folded, that is paid from the same purse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from upriver.lake.files import Piece


@dataclass(frozen=True)
class Policy:
    """The knobs, with the defaults that were measured."""

    share: float = 0.25  # a change pays for copying 1/share rows
    longest: float = 0.5  # a range of which this much waits in the tail is rewritten in any case
    small_rows: int = 8_192  # ranges up to this size are rewritten in every batch
    target_rows: int = 131_072  # of a range; twice as many split it,
    target_bytes: int = 160 << 20  # and so do twice as many bytes
    max_files: int = 4  # of one range, before they are made one
    tail_files: int = 32  # before they are made one
    hold_rows: int = 500_000  # a backlog of this size: load the log first
    inline_rows: int = 200_000  # larger steps run on the executors,
    inline_bytes: int = 256 << 20  # of rows or of bytes
    staleness_s: float = math.inf  # nothing waits in the tail for longer


@dataclass(frozen=True)
class Range:
    """A stretch of vbuckets of ``current``: its rows, and the last batch merged into it."""

    lo: int
    hi: int
    rows: int = 0
    merged: int = -1

    @property
    def width(self) -> int:
        return self.hi - self.lo + 1


def ranges_of(
    current: Sequence[Piece], vbuckets: int, expected_rows: int, policy: Policy, expected_bytes: int = 0
) -> list[Range]:
    """The ranges that ``current`` is cut into; those that a table of the expected size should have, when it is new.

    Vbuckets that have no file yet, because nothing of theirs was ever merged, are ranges as well.
    """
    found: dict[tuple[int, int], Range] = {}
    for piece in current:
        known = found.get((piece.lo, piece.hi), Range(piece.lo, piece.hi))
        rows, merged = known.rows + piece.rows, max(known.merged, piece.last)
        found[piece.lo, piece.hi] = Range(piece.lo, piece.hi, rows, merged)
    if not found:
        parts = max(-(-expected_rows // policy.target_rows), -(-expected_bytes // policy.target_bytes))
        return cut(0, vbuckets - 1, parts)
    ranges, free = [], 0
    for part in sorted(found.values(), key=lambda part: part.lo):
        if part.lo > free:
            ranges.append(Range(free, part.lo - 1))
        ranges.append(part)
        free = max(free, part.hi + 1)
    return [*ranges, Range(free, vbuckets - 1)] if free < vbuckets else ranges


def cut(lo: int, hi: int, parts: int) -> list[Range]:
    """A stretch of vbuckets in about as many equal parts.

    >>> [(part.lo, part.hi) for part in cut(0, 9, 4)]
    [(0, 1), (2, 4), (5, 6), (7, 9)]
    """
    parts = max(1, min(parts, hi - lo + 1))
    width = hi - lo + 1
    edges = [lo + width * index // parts for index in range(parts + 1)]
    return [Range(edges[index], edges[index + 1] - 1) for index in range(parts)]


def in_doubt(pieces: Sequence[Piece]) -> bool:
    """Do some of these files not say what they hold, or do they overlap? Then none of them vouches for anything."""
    if any(piece.foreign for piece in pieces):
        return True
    spans = sorted({(piece.lo, piece.hi) for piece in pieces})
    return any(one[1] >= other[0] for one, other in pairwise(spans))


def waiting(ranges: Sequence[Range], tail: Sequence[Piece]) -> list[int]:
    """About how many tail rows wait for each range; keys are spread evenly over vbuckets."""
    lo, hi, last, rows = (np.array([getattr(piece, name) for piece in tail]) for name in ("lo", "hi", "last", "rows"))
    density = rows / (hi - lo + 1)
    return (
        [
            round(
                float(
                    (density * np.clip(np.minimum(hi, part.hi) - np.maximum(lo, part.lo) + 1, 0, None))[
                        last > part.merged
                    ].sum()
                )
            )
            for part in ranges
        ]
        if tail
        else [0] * len(ranges)
    )


def worth_merging(
    ranges: Sequence[Range], tail: Sequence[Piece], fresh: Sequence[int], policy: Policy
) -> set[tuple[int, int]]:
    """Which ranges to rewrite now, given the new rows of each: small ones, and the most changed that are paid for."""
    chosen: set[tuple[int, int]] = set()
    scored = []
    for part, new, old in zip(ranges, fresh, waiting(ranges, tail), strict=True):
        pending = old + new
        if pending and part.rows + pending <= policy.small_rows:
            chosen.add((part.lo, part.hi))
        elif pending:
            scored.append((pending / max(part.rows, 1), part))
    left, paid = purse(ranges, tail, fresh, policy), sum(fresh) / policy.share
    for changed, part in sorted(scored, key=lambda both: (-both[0], both[1].lo)):
        # Half a batch too early as often as half a batch too late; and whatever the sums say, a tail is no table.
        if left + min(paid, part.rows) / 2 < part.rows and changed < policy.longest:
            break
        left -= part.rows
        chosen.add((part.lo, part.hi))
    return chosen


def purse(ranges: Sequence[Range], tail: Sequence[Piece], fresh: Sequence[int], policy: Policy) -> float:
    """Rows that may be copied now: what changes since the last rewriting have paid, less what folding them cost."""
    newest = max((part.merged for part in ranges), default=-1)
    changed, folded = float(sum(fresh)), 0
    for piece in tail:
        if piece.last >= newest:  # folding comes after rewriting
            batches = max(piece.last - piece.first + 1, 1)
            changed += piece.rows * min(1.0, (piece.last - newest) / batches)
            folded += piece.rows if batches > 1 else 0
    return changed / policy.share - folded


def hold(unapplied: int, in_tables: int, lag: int, policy: Policy) -> bool:
    """Only the log, for now? While much more is coming, tables are brought forward when they would double."""
    return lag >= policy.hold_rows and unapplied < max(in_tables, 4 * policy.hold_rows)


def frontier(current: Sequence[Piece], vbuckets: int) -> npt.NDArray[np.int64]:
    """The last batch that each vbucket of ``current`` has: what the files that hold it vouch for, and -1 without one.

    A file is written by merging all that waits for its range, so it vouches for its range and for no other; one that
    somebody else wrote vouches for nothing.
    """
    merged = np.full(vbuckets, -1, dtype=np.int64)
    for piece in current:
        if not piece.foreign:
            here = merged[piece.lo : piece.hi + 1]
            np.maximum(here, piece.last, out=here)
    return merged


Present = Callable[[Piece], npt.NDArray[np.int64]]  # the vbuckets that a file has rows of


def spanned(piece: Piece) -> npt.NDArray[np.int64]:
    """The vbuckets that a file may have rows of, told by its name."""
    return np.arange(piece.lo, piece.hi + 1)


def missing(piece: Piece, merged: npt.NDArray[np.int64], present: Present = spanned) -> npt.NDArray[np.int64]:
    """The vbuckets of a tail file that ``current`` may not have; all of a file that does not say what it holds."""
    here = present(piece)
    here = here[here < len(merged)]
    return here if piece.foreign else here[merged[here] < piece.last]


def superseded(tail: Sequence[Piece], merged: npt.NDArray[np.int64], present: Present = spanned) -> list[Piece]:
    """Tail files that can go: ``current`` has their rows, and no file that stays may hold an older row of their keys.

    If one did, a document whose deletion goes first would come back.
    """
    done = [piece for piece in tail if not len(missing(piece, merged, present))]
    while done:
        gone = {piece.path for piece in done}
        stay = [piece for piece in tail if piece.path not in gone]
        kept = [
            piece
            for piece in done
            if not any(other.first <= piece.last and other.overlaps(piece.lo, piece.hi) for other in stay)
        ]
        if len(kept) == len(done):
            break
        done = kept
    return done


def overdue(
    ranges: Sequence[Range],
    tail: Sequence[Piece],
    merged: npt.NDArray[np.int64],
    now_ms: int,
    policy: Policy,
    present: Present = spanned,
) -> set[tuple[int, int]]:
    """Ranges with rows that have waited for so long that it is time to merge them.

    Ranges take turns, between half of what is allowed and nine tenths, so that not all are rewritten at once.
    """
    due: set[tuple[int, int]] = set()
    if math.isinf(policy.staleness_s):
        return due
    for piece in tail:
        share = (now_ms - piece.made_ms) / 1000 / policy.staleness_s if policy.staleness_s else math.inf
        if share < 0.5:
            continue
        lacking = missing(piece, merged, present)
        for index, part in enumerate(ranges):
            if share >= 0.5 + 0.4 * index / len(ranges) and ((lacking >= part.lo) & (lacking <= part.hi)).any():
                due.add((part.lo, part.hi))
    return due
