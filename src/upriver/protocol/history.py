"""The rollback decision: whether a reader may go on where it stopped.

Implements docs/protocol/rollback.md#decision and its UPR variant (docs/protocol/upr.md#both). A producer decides about
its own vbucket; the client and the Spark driver decide about a failover log that they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from upriver.model import SEQNO_MAX, Claim, FailoverLog


class Accept(NamedTuple):
    """The stream may begin at the requested seqno."""


class RollbackTo(NamedTuple):
    """The reader must first forget everything above ``seqno``."""

    seqno: int


class UnknownUuid(NamedTuple):
    """UPR only: the branch is not known. The answer is KeyEnoent, and the reader starts from 0."""


Decision: TypeAlias = Accept | RollbackTo
UprDecision: TypeAlias = Accept | RollbackTo | UnknownUuid


@dataclass(frozen=True, slots=True)
class History:
    """What the decision needs to know about a vbucket.

    ``collection_high`` is the highest seqno in the collections of the stream's filter; None without a filter.
    ``purge_seqno`` is 0 for streams that ignore purged tombstones.
    """

    log: FailoverLog
    high_seqno: int
    purge_seqno: int = 0
    collection_high: int | None = None


def decide(history: History, wanted: Claim, *, strict: bool = False, known_purge_seqno: int = 0) -> Decision:
    """Decide whether the branch and the snapshot that a reader claims are part of this history.

    >>> log = FailoverLog.new(0xA).branch(0xB, 500)
    >>> decide(History(log, 900), Claim(0xA, 600, 600, 600))
    RollbackTo(seqno=500)
    """
    start, uuid = wanted.seqno, wanted.vbuuid
    if start == 0 and (not strict or uuid == 0):
        return Accept()
    if _missed_deletions(history, start, known_purge_seqno):
        return RollbackTo(0)
    upper = history.log.last_seqno_of(uuid, history.high_seqno)
    if upper is None:
        return RollbackTo(0)
    snap_start, snap_end = wanted.snap_start, wanted.snap_end
    if start == snap_start:
        snap_end = start  # nothing of the snapshot was received
    if snap_end <= upper:
        return Accept()
    if start == snap_end:
        snap_start = start  # all of the snapshot was received
    return RollbackTo(min(upper, snap_start))


def decide_upr(history: History, uuid: int, start: int) -> UprDecision:
    """The same for UPR, which has no snapshot range and reports an unknown branch."""
    if uuid == 0 and start == 0:
        return Accept()
    if history.log.last_seqno_of(uuid, history.high_seqno) is None:
        return UnknownUuid()
    return decide(history, Claim(uuid, start, start, start))


def has_lost(log: FailoverLog, uuid: int, seqno: int) -> bool:
    """Whether history left the branch ``uuid`` before ``seqno``, up to which a reader has read it.

    >>> log = FailoverLog.new(7).branch(9, 40)
    >>> has_lost(log, 7, 50), has_lost(log, 7, 40), has_lost(log, 9, 99), has_lost(log, 5, 1)
    (True, False, False, True)
    """
    last = log.last_seqno_of(uuid, SEQNO_MAX)
    return last is None or last < seqno


def _missed_deletions(history: History, start: int, known_purge_seqno: int) -> bool:
    """Whether tombstones above ``start`` were purged that this reader may have needed."""
    purge, high = history.purge_seqno, history.collection_high
    if start == 0 or start >= purge or known_purge_seqno == purge:
        return False
    untouched = high is not None and start >= high and high <= purge
    return not untouched
