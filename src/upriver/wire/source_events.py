"""What a stream source hands out: runs of packed records, and the snapshots that they belong to.

The store makes these and a producer sends them on; neither knows the other.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt


class SnapshotStart(NamedTuple):
    """The runs that follow, up to the one whose ``upto`` is ``end``, form one snapshot.

    ``last_matching`` is the last seqno in it that passes the stream's filter, 0 if none does.
    """

    start: int
    end: int
    flags: int
    last_matching: int
    max_visible: int
    high_completed: int
    high_prepared: int
    purge_seqno: int


class Run(NamedTuple):
    """Packed records side by side, of which those with ``after < seqno <= upto`` are meant.

    ``data`` is valid until the source is polled again or closed.
    """

    data: memoryview
    after: int
    upto: int
    memory: bool


class OsoStart(NamedTuple):
    """Runs of one disk snapshot follow, in any order and without a marker (docs/protocol/snapshots.md#oso)."""


class OsoEnd(NamedTuple):
    """All of it was handed out; ``max_seqno`` is where the disk snapshot ended."""

    max_seqno: int


class EndReason(Enum):
    """Why a source has no more."""

    OK = "ok"
    STATE_CHANGED = "state changed"
    ROLLBACK = "rollback"
    BACKFILL_FAILED = "backfill failed"
    FILTER_EMPTY = "filter empty"


class End(NamedTuple):
    """The last event of a source."""

    reason: EndReason


class NewSnapshot(NamedTuple):
    """What live streams lack: one whole snapshot in memory, records at ``address`` that last as long as ``data``."""

    first: int
    last: int
    begins_checkpoint: bool
    address: int
    size: int
    data: npt.NDArray[np.uint8]


StreamEvent: TypeAlias = SnapshotStart | Run | OsoStart | OsoEnd | End
