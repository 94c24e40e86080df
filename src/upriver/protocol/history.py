"""Where a reader and a vbucket part ways: the rollback decision (``protocol.md`` 5.6)."""

from __future__ import annotations

from upriver.model import FailoverLog


def rollback_point(
    log: FailoverLog, *, high_seqno: int, start: int, vbuuid: int, snap_start: int, snap_end: int,
    purge_seqno: int = 0, known_purge_seqno: int = 0, strict: bool = False, collection_high: int | None = None,
) -> int | None:  # fmt: skip
    """The seqno that the reader has to go back to, or None if it may go on. The comments are the steps of 5.6."""
    if start == 0 and (not strict or vbuuid == 0):
        return None  # A
    exempt = collection_high is not None and collection_high <= start < purge_seqno and collection_high <= purge_seqno
    if 0 < start < purge_seqno and not exempt and known_purge_seqno != purge_seqno:
        return 0  # B
    entries = list(log)
    index = next((n for n in reversed(range(len(entries))) if entries[n].uuid == vbuuid), None)
    if index is None:
        return 0  # C
    upper = entries[index - 1].seqno if index else high_seqno
    if start == snap_start:
        snap_end = start  # D
    if snap_end <= upper:
        return None  # E
    if start == snap_end:
        snap_start = start  # F
    return min(upper, snap_start)  # G
