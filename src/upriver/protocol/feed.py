"""A change feed over all nodes of a cluster: which streams are open where, and what to do when one ends.

Pure: the shell connects to the addresses in ``wanted()``, moves bytes, and says what time it is. Everything that can
go wrong between a reader and a cluster is decided here once, for the async client, the blocking client and Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from upriver.errors import Rollback, Status, StatusError
from upriver.model import SEQNO_MAX, FailoverLog, Position
from upriver.protocol.feed_link import (
    Ended,
    Event,
    FeedLink,
    LinkEvent,
    Moved,
    Opened,
    Ready,
    Refused,
    RolledBack,
    Rows,
    is_temporary,
)
from upriver.protocol.session import Session, config_json
from upriver.protocol.standing import Standing
from upriver.protocol.topology import Address, Topology, parse_topology
from upriver.wire.constants import StreamEndStatus, StreamFlag
from upriver.wire.dcp import StreamRequest
from upriver.wire.events import SystemEvent

STREAMS_IN_FLIGHT = 256


class OnRollback(Enum):
    """What a rollback means to the caller."""

    EMIT = "emit"  # tell, then go on with the new branch
    FAIL = "fail"
    REWIND = "rewind"  # go on silently: for callers to whom seeing a change twice, or an undone one, does not matter


@dataclass(frozen=True, slots=True)
class FeedRequest:
    """What to read: where each vbucket starts, and up to which seqno (``SEQNO_MAX``: for ever)."""

    starts: Mapping[int, Position]
    ends: Mapping[int, int] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)
    points: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    flags: StreamFlag = StreamFlag.ACTIVE_VB_ONLY
    value: bytes = b""  # the stream request's JSON: collection filter
    on_rollback: OnRollback = OnRollback.EMIT


@dataclass(slots=True)
class Documents:
    """Rows of changes, in order; ``size`` bytes of ``link``'s window are held until ``Feed.taken`` is told."""

    rows: Rows
    link: Address


@dataclass(slots=True)
class RollbackEvent:
    """Everything of this vbucket above ``to_seqno`` never happened; the new branch follows."""

    vbucket: int
    to_seqno: int
    lost_branch: int
    epoch: int


@dataclass(slots=True)
class CollectionChange:
    vbucket: int
    message: SystemEvent


@dataclass(slots=True)
class Advanced:
    """The position moved though no row came."""

    vbucket: int
    seqno: int


@dataclass(slots=True)
class VbucketDone:
    """This vbucket has delivered everything up to its end."""

    vbucket: int


FeedEvent = Documents | RollbackEvent | CollectionChange | Advanced | VbucketDone


class _State(Enum):
    IDLE = auto()
    OPENING = auto()
    OPEN = auto()
    DONE = auto()


class Feed:
    """The state of one feed. ``topology`` may be replaced at any time by a newer map."""

    def __init__(
        self,
        request: FeedRequest,
        topology: Topology,
        make_session: Callable[[], Session],
        window: int,
        *,
        tls: bool = False,
    ) -> None:
        self.request, self.topology = request, topology
        self.standing = Standing(topology.vbuckets)
        self.links: dict[Address, FeedLink] = {}
        self.logs: dict[int, FailoverLog] = {}
        self.rollbacks = 0
        self._make_session, self._window, self._tls = make_session, window, tls
        self._state = dict.fromkeys(request.starts, _State.IDLE)
        self._retry_at: dict[int, float] = {}
        self._emitted: list[FeedEvent] = []
        for vb, position in request.starts.items():
            points = request.points.get(vb, ())
            self.standing.resume(vb, position, epoch=request.epochs.get(vb, 0), points=points)
            if position.seqno >= self._end(vb):
                self._state[vb] = _State.DONE

    @property
    def done(self) -> bool:
        return all(state is _State.DONE for state in self._state.values())

    def positions(self) -> dict[int, Position]:
        """What may be claimed for every vbucket, now."""
        return {vb: self.standing.position(vb) for vb in self._state}

    def wanted(self) -> set[Address]:
        """The nodes that own a vbucket which still has something to deliver."""
        owners = (self.topology.active(vb) for vb, state in self._state.items() if state is not _State.DONE)
        return {owner for owner in owners if owner is not None}

    def connected(self, address: Address) -> FeedLink:
        """The shell has a socket to this node; its link begins the handshake."""
        link = FeedLink(self._make_session(), self.standing, self._window)
        self.links[address] = link
        return link

    def lost(self, address: Address, now: float, delay: float = 0.0) -> None:
        """The connection is gone; its vbuckets wait ``delay`` seconds for another."""
        link = self.links.pop(address, None)
        for vb in link.streams if link else ():
            self.standing.close(vb)
            self._idle(vb, now + delay)

    def received(self, address: Address, size: int, now: float) -> Iterator[FeedEvent]:
        """Bytes came in on a link; iterate to the end before reading again."""
        link = self.links[address]
        for event in link.received(size):
            if isinstance(event, Rows):
                yield Documents(event, address)
            else:
                self._handle(address, event, now)
            yield from self._take_emitted()
        self.open_streams(now)

    def taken(self, documents: Documents) -> None:
        """The caller has the rows: their bytes may be sent again."""
        if link := self.links.get(documents.link):
            link.acknowledge(documents.rows.bytes)

    def tick(self, now: float) -> Iterator[FeedEvent]:
        """Time has passed: streams that waited are tried again."""
        self.open_streams(now)
        yield from self._take_emitted()

    def use(self, topology: Topology) -> bool:
        """Adopt a newer map; false if it is not newer."""
        if topology.revision <= self.topology.revision or topology.vbuckets != self.topology.vbuckets:
            return False
        self.topology = topology
        return True

    def open_streams(self, now: float) -> None:
        opening = sum(state is _State.OPENING for state in self._state.values())
        for vb, state in self._state.items():
            if opening >= STREAMS_IN_FLIGHT:
                return
            owner = self.topology.active(vb)
            link = self.links.get(owner) if owner else None
            if state is _State.IDLE and link and link.ready and self._retry_at.get(vb, 0.0) <= now:
                link.open_stream(self._stream_request(vb))
                self._state[vb] = _State.OPENING
                opening += 1

    def _end(self, vb: int) -> int:
        return self.request.ends.get(vb, SEQNO_MAX)

    def _stream_request(self, vb: int) -> StreamRequest:
        at = self.standing.position(vb)
        return StreamRequest(
            self.request.flags, 0, at.seqno, self._end(vb), at.vbuuid, at.snap_start, at.snap_end,
            self.request.value, vbucket=vb,
        )  # fmt: skip

    def _take_emitted(self) -> list[FeedEvent]:
        emitted, self._emitted = self._emitted, []
        return emitted

    def _handle(self, address: Address, event: LinkEvent, now: float) -> None:
        if isinstance(event, Ready):
            self.use(parse_topology(config_json(event.config), address.host, tls=self._tls))
        elif isinstance(event, Opened):
            self._state[event.vbucket] = _State.OPEN
            self.logs[event.vbucket] = event.log
            opaque = self.links[address].streams[event.vbucket]
            self.standing.adopt(event.vbucket, event.log.uuid, opaque, self._end(event.vbucket))
        elif isinstance(event, RolledBack):
            self._rolled_back(event, now)
        elif isinstance(event, Refused):
            self._refused(address, event, now)
        elif isinstance(event, Ended):
            self._ended(event, now)
        elif isinstance(event, Event):
            self._emitted.append(CollectionChange(event.vbucket, event.message))
        elif isinstance(event, Moved):
            self._emitted.append(Advanced(event.vbucket, event.seqno))

    def _rolled_back(self, event: RolledBack, now: float) -> None:
        vb = event.vbucket
        if self.request.on_rollback is OnRollback.FAIL:
            raise Rollback(event.seqno)
        lost = self.standing.vbuuid[vb]
        # A true rollback goes below where we stand; never believe one that would have us ask the same again.
        target = self.standing.rollback_target(vb, min(event.seqno, max(0, self.standing.seqno(vb) - 1)))
        self.standing.roll_back(vb, target)
        self.rollbacks += 1
        self._idle(vb, now)
        if self.request.on_rollback is OnRollback.EMIT:
            self._emitted.append(RollbackEvent(vb, target, lost, self.standing.epoch[vb]))

    def _refused(self, address: Address, event: Refused, now: float) -> None:
        vb = event.vbucket
        if event.status == Status.NOT_MY_VBUCKET:
            newer = event.value and self.use(parse_topology(config_json(event.value), address.host, tls=self._tls))
            self._idle(vb, now if newer else now + 0.1)
        elif is_temporary(event.status):
            self._idle(vb, now + 0.2)
        else:
            context = f"vbucket {vb} at {address}: {event.value[:200].decode('utf-8', 'replace')}"
            raise StatusError.of(event.status, context)

    def _ended(self, event: Ended, now: float) -> None:
        vb = event.vbucket
        finished = event.status == StreamEndStatus.OK and self._end(vb) != SEQNO_MAX
        if finished or event.status == StreamEndStatus.FILTER_EMPTY:
            self._state[vb] = _State.DONE
            self._emitted.append(VbucketDone(vb))
        else:
            self._idle(vb, now)

    def _idle(self, vb: int, retry_at: float) -> None:
        self._state[vb] = _State.IDLE
        self._retry_at[vb] = retry_at


def from_beginning(vbuckets: int) -> FeedRequest:
    """A request for everything, for ever."""
    return FeedRequest({vb: Position() for vb in range(vbuckets)})


def bounded(request: FeedRequest, ends: Mapping[int, int]) -> FeedRequest:
    """The same request, ending where ``ends`` says."""
    return replace(request, ends=dict(ends))


__all__ = [
    "Advanced", "CollectionChange", "Documents", "Feed", "FeedEvent", "FeedRequest", "OnRollback", "RollbackEvent",
    "VbucketDone", "bounded", "from_beginning",
]  # fmt: skip
