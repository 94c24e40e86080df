"""What a feed is asked for, and what it tells: plain values between ``ClusterFeed`` and its shells."""

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
    """What to read: where each vbucket starts, and up to which seqno (``SEQNO_MAX``: for ever)."""

    starts: Mapping[int, Position]
    ends: Mapping[int, int] = field(default_factory=dict)
    flags: StreamFlag = StreamFlag.ACTIVE_VB_ONLY
    value: bytes = b""  # the stream request's JSON: collection filter
    on_rollback: OnRollback = OnRollback.EMIT
    follow: bool = False  # a filter whose collections are gone waits for ``ClusterFeed.refilter`` instead of ending
    resumed: bool = False  # the caller may have acted on changes after ``starts``: tell it if their branch is gone
    branches: Mapping[int, int] = field(default_factory=dict)  # by vbucket: read this branch only, or leave it alone
    back_to_zero: bool = False  # every rollback leads to 0: the caller is consistent nowhere else


@dataclass(slots=True)
class FeedRows:
    """Rows of changes, in order; they take part of the window of ``link`` until ``ClusterFeed.taken`` is called."""

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
    """A collection or a scope was made, changed or dropped, as one vbucket tells it."""

    vbucket: int
    message: SystemEvent
    vbuuid: int = 0
    epoch: int = 0


@dataclass(slots=True)
class SeqnoReached:
    """The position moved, though no row came."""

    vbucket: int
    seqno: int


@dataclass(slots=True)
class VbucketDone:
    """This vbucket has delivered everything up to its end."""

    vbucket: int


@dataclass(slots=True)
class FilterGone:
    """The collections of the filter do not exist now: look their names up again, then ``ClusterFeed.refilter``."""

    vbucket: int


FeedEvent = FeedRows | RolledBack | CollectionChange | SeqnoReached | VbucketDone | FilterGone
