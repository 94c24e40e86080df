"""The request for a feed, and the events that it emits: plain values between ``ClusterFeed`` and its shells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from upriver.model import OnRollback
from upriver.protocol.feed.node_link import RowsReceived
from upriver.protocol.position import Position
from upriver.protocol.topology import Address
from upriver.wire.constants import StreamFlag
from upriver.wire.messages.events import SystemEvent


@dataclass(frozen=True, slots=True)
class FeedRequest:
    """What to read: the start of each vbucket, and its end seqno (``SEQNO_MAX``: for ever)."""

    starts: Mapping[int, Position]
    ends: Mapping[int, int] = field(default_factory=dict)
    flags: StreamFlag = StreamFlag.ACTIVE_VB_ONLY
    value: bytes = b""  # the JSON of the stream requests: the collection filter
    on_rollback: OnRollback = OnRollback.EMIT
    follow: bool = False  # if the filter's collections are gone, wait for ``ClusterFeed.refilter`` instead of ending
    resumed: bool = False  # the caller may have processed changes after ``starts``: tell it if their branch is lost
    branches: Mapping[int, int] = field(default_factory=dict)  # by vbucket: read only if this is the newest branch
    back_to_zero: bool = False  # every rollback leads to 0, the only consistent point


@dataclass(slots=True)
class FeedRows:
    """Rows of changes, in order. They count against the window of ``link`` until ``ClusterFeed.taken`` is called."""

    rows: RowsReceived
    link: Address


class RolledBack(NamedTuple):
    """Every change of this vbucket above ``to_seqno`` never happened; the new branch follows.

    ``lost_branch`` is the vbuuid of the branch that ended, ``epoch`` the number of rollbacks of this vbucket so far.
    """

    vbucket: int
    to_seqno: int
    lost_branch: int
    epoch: int


@dataclass(slots=True)
class CollectionChange:
    """A collection or a scope was created, changed or dropped, as reported by one vbucket."""

    vbucket: int
    message: SystemEvent
    vbuuid: int = 0
    epoch: int = 0


@dataclass(slots=True)
class SeqnoReached:
    """The position moved without a row."""

    vbucket: int
    seqno: int


@dataclass(slots=True)
class VbucketDone:
    """This vbucket has delivered everything up to its end."""

    vbucket: int


@dataclass(slots=True)
class FilterGone:
    """The filter's collections do not exist now: look their names up again, then call ``ClusterFeed.refilter``."""

    vbucket: int


FeedEvent = FeedRows | RolledBack | CollectionChange | SeqnoReached | VbucketDone | FilterGone
