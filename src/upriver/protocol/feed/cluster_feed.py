"""A change feed over all nodes of a cluster: which streams are open where, and what to do when one ends.

Pure: the shell connects to the addresses in ``wanted()``, moves bytes, and says what time it is. Everything that can
go wrong between a reader and a cluster is decided here once, for the async client, the blocking client and Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from itertools import count
from typing import Any

from upriver.errors import AccessDenied, HistoryLost, Status, StatusError
from upriver.model import SEQNO_MAX, FailoverLog, OnRollback, Position
from upriver.protocol.feed.events import (
    CollectionChange,
    FeedEvent,
    FeedRequest,
    FeedRows,
    FilterGone,
    RolledBack,
    SeqnoReached,
    VbucketDone,
)
from upriver.protocol.feed.node_link import (
    CollectionEventReceived,
    LinkEvent,
    LinkReady,
    NewConfig,
    NodeLink,
    RollbackAsked,
    RowsReceived,
    SeqnoMoved,
    StreamEnded,
    StreamOpened,
    StreamRefused,
    is_temporary,
)
from upriver.protocol.session import Session, config_json
from upriver.protocol.standing import Standing
from upriver.protocol.topology import Address, Topology, parse_topology
from upriver.wire.constants import StreamEndStatus, StreamFlag
from upriver.wire.messages.dcp import StreamRequest

__all__ = [
    "ClusterFeed",
    "CollectionChange",
    "FeedEvent",
    "FeedRequest",
    "FeedRows",
    "FilterGone",
    "RolledBack",
    "SeqnoReached",
    "VbucketDone",
    "backoff",
]  # fmt: skip

STREAMS_IN_FLIGHT = 256
MAX_BACKOFF_S = 5.0
ASK_MAP_EVERY_S, ASK_MAP_IDLE_S = 1.0, 2.5  # while a vbucket waits, and otherwise
_FILTER_LOST = (Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE)


def backoff(attempt: int) -> float:
    """Seconds to wait before try ``attempt`` (1: the first repetition).

    >>> [backoff(n) for n in (0, 1, 2, 20)]
    [0.0, 0.05, 0.1, 5.0]
    """
    return min(MAX_BACKOFF_S, 0.05 * 2 ** min(attempt - 1, 10)) if attempt else 0.0


class _State(Enum):
    WAITING = auto()  # for its turn, its node, or the end of a pause
    OPENING = auto()
    OPEN = auto()
    PARKED = auto()  # its filter names nothing
    DONE = auto()


class ClusterFeed:
    """The state of one feed. ``topology`` may be replaced at any time by a newer map.

    ``jitter`` gives factors around 1 for pauses, so that many readers do not come back at the same instant. Feeds that
    use a connection one after the other must share ``opaques``: late data of one must not look like another's.
    """

    def __init__(
        self,
        request: FeedRequest,
        topology: Topology,
        make_session: Callable[[], Session],
        window: int,
        *,
        parse: Callable[[Any, str], Topology] = parse_topology,
        noop_interval_s: float = 20.0,
        jitter: Callable[[], float] = lambda: 1.0,
        opaques: Iterator[int] | None = None,
    ) -> None:
        self.request, self.topology, self.filter = request, topology, request.value
        self.standing = Standing(topology.vbuckets)
        self.links: dict[Address, NodeLink] = {}
        self.logs: dict[int, FailoverLog] = {}
        self.rollbacks = self.moves = 0  # moves: how often a vbucket went on over another node's connection
        self.left: set[int] = set()  # vbuckets whose newest branch is not the one that was asked for
        self.refused: set[int] = set()  # those of which a branch was asked for, but the producer wants a rollback
        self.noop_interval_s = noop_interval_s
        self._make_session, self._window, self._parse, self._jitter = make_session, window, parse, jitter
        self._state = dict.fromkeys(request.starts, _State.WAITING)
        self._waiting: dict[int, float] = dict.fromkeys(request.starts, 0.0)  # until when
        self._fruitless = dict.fromkeys(request.starts, 0)  # tries in a row that moved nothing
        self._opened_at: dict[int, int] = {}
        self._rollback_span: dict[int, tuple[int, int]] = {}  # between which seqnos a vbucket was rolled back
        self._home: dict[int, Address] = {}  # over whose connection each vbucket came last
        self._to_latest: set[int] = set()  # their end does not exist on the branch that we are on now
        self._unconfirmed = set(request.starts) if request.resumed else set()
        self._opaques = opaques or count(1)
        self._undone, self._opening, self._ask_at = len(self._state), 0, 0.0
        self._remembered: dict[int, tuple[Position, int]] = {}
        self._emitted: list[FeedEvent] = []
        for vb, position in request.starts.items():
            self.standing.resume(vb, position, epoch=request.epochs.get(vb, 0), points=request.points.get(vb, ()))
            if request.resumed and position.seqno == 0 < position.snap_end:
                self.standing.interrupted[vb] = position.vbuuid, position.snap_end
            if self._end(vb) == 0 and position.seqno == 0:
                self._finish(vb)
        self._emitted.clear()

    # ---------------------------------------------------------------------------------------------- for the caller

    @property
    def done(self) -> bool:
        return self._undone == 0

    @property
    def settled(self) -> bool:
        """Whether every stream that is wanted has been opened."""
        return not self._waiting and not self._opening

    @property
    def vbuckets(self) -> list[int]:
        return list(self._state)

    def positions(self) -> dict[int, Position]:
        """What may be claimed for every vbucket, when everything that came has been acted on."""
        return {vb: self.standing.position(vb) for vb in self._state}

    def taken(self, documents: FeedRows) -> None:
        """The caller has the rows: their bytes may be sent again."""
        if link := self.links.get(documents.link):
            link.acknowledge(documents.rows.bytes)

    def remember(self, vb: int) -> None:
        """``refilter`` with ``again`` is to go back to here: changes that it lets pass may follow from here on."""
        self._remembered.setdefault(vb, (self.standing.position(vb), self.standing.epoch[vb]))

    def begin_behind(self, vb: int, read: Position, epoch: int) -> None:
        """Another feed has read the rest of a vbucket from 0 up to where this one begins; call it before that.

        Of that rest, the older points of ours say nothing. If the caller was told to undo it all, we begin at 0.
        """
        at = self.standing.position(vb)
        if epoch == self.standing.epoch[vb]:
            both = Position(at.vbuuid, at.seqno, 0, max(at.snap_end, read.snap_end))
            self.standing.resume(vb, both, epoch=epoch)
            return
        self.standing.resume(vb, Position(), epoch=epoch)
        if self._end(vb) != SEQNO_MAX:
            self._to_latest.add(vb)

    def refilter(self, value: bytes, again: bool = False) -> None:
        """Use another filter from now on; ``again``: open the streams of the remembered vbuckets anew, from there."""
        self.filter = value
        for vb, state in self._state.items():
            if state is _State.PARKED:
                self._wait(vb, 0.0)
        for vb in list(self._remembered) if again else ():
            self._go_back(vb, *self._remembered.pop(vb))

    def _go_back(self, vb: int, position: Position, epoch: int) -> None:
        for link in self.links.values():
            if vb in link.streams:
                self._opening -= self._state[vb] is _State.OPENING
                link.close_stream(vb)
                self._wait(vb, 0.0)
        if self.standing.epoch[vb] == epoch and self.standing.vbuuid[vb] == position.vbuuid:
            self.standing.resume(vb, position, epoch=epoch, points=self.standing.points(vb))
        else:  # a rollback came in between: that place is on a branch that is gone
            self.standing.roll_back(vb, self.standing.rollback_target(vb, position.seqno))

    # ---------------------------------------------------------------------------------------------- for the shell

    def wanted(self) -> set[Address]:
        """The nodes to be connected to: those with open streams, and the owners of vbuckets that wait."""
        owners = {self.topology.active(vb) for vb in self._waiting}
        busy = {address for address, link in self.links.items() if link.streams}
        return busy | {owner for owner in owners if owner is not None}

    def connected(self, address: Address, now: float = 0.0) -> NodeLink:
        """The shell has a socket to this node; its link begins the handshake."""
        link = NodeLink(self._make_session(), self.standing, self._window, now, now)
        self.links[address] = link
        return link

    def adopt(self, address: Address, link: NodeLink, now: float) -> None:
        """Go on with a connection that another feed has released."""
        link.standing, link.heard_at = self.standing, now
        self.links[address] = link

    def release(self, address: Address) -> NodeLink | None:
        """Let another feed use the connection; None if it cannot, because not all streams here ended in order."""
        link = self.links.get(address)
        if not self.done or link is None or not link.idle:
            return None
        link.flush_acknowledgements()
        return self.links.pop(address)

    def lost(self, address: Address, now: float) -> None:
        """The connection is gone; its vbuckets wait for another."""
        link = self.links.pop(address, None)
        for vb in list(link.streams) if link else ():
            self.standing.close(vb)
            if self._state[vb] is _State.OPENING:
                self._opening -= 1
            self._wait(vb, now)

    def received(self, address: Address, size: int, now: float) -> Iterator[FeedEvent]:
        """Bytes came in on a link; iterate to the end before reading again."""
        link = self.links[address]
        link.heard_at = now
        for event in link.received(size):
            if isinstance(event, RowsReceived):
                yield FeedRows(event, address)
            else:
                self._HANDLERS[type(event)](self, address, event, now)
                if self._emitted:
                    yield from self._take_emitted()
        if self._waiting:
            self._open_streams(now)

    def tick(self, now: float) -> Iterator[FeedEvent]:
        """Time has passed: streams that waited are tried again, few freed bytes are given back."""
        for link in self.links.values():
            link.tick(now)
        if self._waiting:
            self._open_streams(now)
        if now >= self._ask_at:
            self._ask_at = now + (ASK_MAP_EVERY_S if self._waiting else ASK_MAP_IDLE_S)
            self._ask_map()
        yield from self._take_emitted()

    def silent(self, now: float) -> list[Address]:
        """Nodes that have said nothing for two noop intervals: dead, or as good as dead."""
        return [a for a, link in self.links.items() if now - link.heard_at > 2 * self.noop_interval_s]

    def late(self, now: float, within_s: float) -> list[Address]:
        """Nodes whose handshake is not over after so long, whatever they say."""
        return [a for a, link in self.links.items() if not link.ready and now - link.begun_at > within_s]

    def was_away(self, seconds: float) -> None:
        """Nobody listened for so long: that silence is not the peers'."""
        for link in self.links.values():
            link.heard_at += seconds
            link.begun_at += seconds

    def use(self, topology: Topology) -> bool:
        """Adopt a newer map; false if it is not newer."""
        if topology.revision <= self.topology.revision or topology.vbuckets != self.topology.vbuckets:
            return False
        self.topology = topology
        for address, link in self.links.items():
            self._leave_moved(address, link)
        return True

    def _leave_moved(self, address: Address, link: NodeLink) -> None:
        """A takeover does not end the streams at the old owner (protocol.md 6.7): nothing would come there any more."""
        for vb in list(link.streams):
            if self.topology.active(vb) not in (None, address):
                self._opening -= self._state[vb] is _State.OPENING
                link.close_stream(vb)
                self._wait(vb, 0.0)

    # ---------------------------------------------------------------------------------------------- opening

    def _open_streams(self, now: float) -> None:
        for vb, until in list(self._waiting.items()):
            if self._opening >= STREAMS_IN_FLIGHT:
                return
            owner = self.topology.active(vb)
            link = self.links.get(owner) if owner else None
            if link and link.ready and until <= now:
                link.open_stream(self._stream_request(vb), self._end(vb))
                del self._waiting[vb]
                self._state[vb] = _State.OPENING
                self._opening += 1

    def _stream_request(self, vb: int) -> StreamRequest:
        opaque = next(self._opaques)  # unique over all links: a vbucket may move while its old stream still comes
        at = self.standing.position(vb)
        flags, end = self.request.flags, self._end(vb)
        at = Position(at.vbuuid) if at.seqno == 0 else at  # what an out-of-order snapshot brought is not to be claimed
        if vb in self._to_latest:
            flags, end = flags | StreamFlag.TO_LATEST, SEQNO_MAX
        return StreamRequest(
            flags, 0, at.seqno, end, at.vbuuid, at.snap_start, at.snap_end, self.filter, vbucket=vb, opaque=opaque
        )

    def _ask_map(self) -> None:
        """One node is enough, unless somebody waits, perhaps for a map that only some nodes have yet."""
        ready = [link for link in self.links.values() if link.ready]
        for link in ready if self._waiting else ready[:1]:
            link.ask_config(self.topology.revision)

    def _end(self, vb: int) -> int:
        """Never below the start: a position beyond the end may be one of a lost branch, and only asking tells."""
        return max(self.request.ends.get(vb, SEQNO_MAX), self.request.starts[vb].seqno)

    def _take_emitted(self) -> list[FeedEvent]:
        emitted, self._emitted = self._emitted, []
        return emitted

    # ---------------------------------------------------------------------------------------------- link events

    def _ready(self, address: Address, event: LinkReady | NewConfig, now: float) -> None:
        if event.config:
            self.use(self._parse(config_json(event.config), address.host))

    def _opened(self, address: Address, event: StreamOpened, now: float) -> None:
        vb, log, link = event.vbucket, event.log, self.links[address]
        self._opening -= 1
        if vb in self.request.branches:
            if self.request.branches[vb] != log.uuid:
                link.close_stream(vb)
                self._leave(vb, self.left)
                return
            self.standing.vbuuid[vb] = log.uuid  # even if we come from an older one: the end is a seqno of this one
        lost = self.standing.vbuuid[vb]
        self._state[vb] = _State.OPEN
        self.moves += self._home.get(vb, address) != address
        self._home[vb] = address
        self.logs[vb] = log
        self._announce_lost(vb, log)
        self._opened_at[vb] = self.standing.seqno(vb)
        self.standing.adopt(vb, log.uuid, link.streams[vb], self._end(vb))
        if self._end(vb) != SEQNO_MAX and vb not in self._to_latest and self._ended_early(vb, lost, log):
            # The end was a seqno of a branch that is gone; waiting for it on this one could last for ever.
            link.close_stream(vb)
            self._to_latest.add(vb)
            self._wait(vb, now)

    def _leave(self, vb: int, why: set[int]) -> None:
        why.add(vb)
        self._finish(vb)

    def _ended_early(self, vb: int, branch: int, log: FailoverLog) -> bool:
        if not branch or branch == log.uuid:
            return False
        last = log.last_seqno_of(branch, SEQNO_MAX)
        return last is None or last < self._end(vb)

    def _announce_lost(self, vb: int, log: FailoverLog) -> None:
        """The caller may hold changes that the producer cannot know of.

        They came in an out-of-order snapshot that was cut short: some of it may have been deleted, and purged, since,
        and whoever begins at 0 is never told to roll back. Or they came to an earlier life of the caller, after it
        had saved the position that we started from, and their branch is gone.
        """
        at, emit = self.standing.position(vb), self.request.on_rollback is OnRollback.EMIT
        branch, highest = self.standing.interrupted.pop(vb, (0, 0))
        if highest > at.seqno:
            self._lose(vb, at.seqno, branch)
        elif vb in self._unconfirmed and emit and at.vbuuid not in (0, log.uuid):
            self._lose(vb, at.seqno, at.vbuuid)
        self._unconfirmed.discard(vb)

    def _lose(self, vb: int, target: int, branch: int) -> None:
        """Tell, as the caller wishes, that what came above ``target`` is void."""
        self.rollbacks += 1
        if self.request.on_rollback is OnRollback.FAIL:
            raise HistoryLost(vb, target, branch)
        self.standing.epoch[vb] += 1
        if self.request.on_rollback is OnRollback.EMIT:
            self._emitted.append(RolledBack(vb, target, branch, self.standing.epoch[vb]))

    def _rolled_back(self, address: Address, event: RollbackAsked, now: float) -> None:
        vb, at = event.vbucket, self.standing.position(event.vbucket)
        self._opening -= 1
        if vb in self.request.branches:
            self._leave(vb, self.refused)
            return
        if event.seqno == 0 and self._try_older_branch(vb, at):
            self._wait(vb, now)
            return
        # A true rollback goes below where we stand; never believe one that would have us ask the same again.
        lowest = 0 if self.request.back_to_zero else min(event.seqno, max(0, at.seqno - 1))
        target = self.standing.rollback_target(vb, lowest)
        if at.seqno > 0:  # or there is nothing to undo
            self._lose(vb, target, at.vbuuid)
        self._unconfirmed.discard(vb)
        self.standing.roll_back(vb, target)
        if self._end(vb) != SEQNO_MAX:
            self._to_latest.add(vb)
        self._wait(vb, self._after_rollback(vb, at.seqno, target, now))

    def _after_rollback(self, vb: int, seqno: int, target: int, now: float) -> float:
        """When to ask again: at once, unless since the last rollback we got neither further nor further back."""
        furthest, lowest = self._rollback_span.get(vb, (0, SEQNO_MAX))
        self._rollback_span[vb] = max(furthest, seqno), target if seqno > furthest else min(lowest, target)
        if seqno > furthest or target < lowest:
            self._fruitless[vb] = 0
            return now
        return self._pause(vb, now)

    def _try_older_branch(self, vb: int, at: Position) -> bool:
        """A producer that never heard of our newest branch may know the one before, if we have nothing newer."""
        log = self.logs.get(vb)
        if log is None or len(log) < 2 or log.uuid != at.vbuuid or at.snap_end > log.entries[0].seqno:
            return False
        self.logs[vb] = FailoverLog(log.entries[1:])
        self.standing.vbuuid[vb] = self.logs[vb].uuid
        return True

    def _refused(self, address: Address, event: StreamRefused, now: float) -> None:
        vb = event.vbucket
        self._opening -= 1
        if event.status == Status.NOT_MY_VBUCKET:
            newer = event.value[:1] == b"{" and self.use(self._parse(config_json(event.value), address.host))
            self._wait(vb, now if newer else self._pause(vb, now))
        elif is_temporary(event.status):
            self._wait(vb, self._pause(vb, now))
        elif event.status in _FILTER_LOST and self.request.follow:
            self._finish(vb) if self._end(vb) != SEQNO_MAX else self._park(vb)
        elif event.status == Status.ERANGE and vb in self._to_latest:
            self._finish(vb)  # the collections of the filter end before our start: nothing is left to read
        else:
            detail = event.value[:200].decode("utf-8", "replace")
            raise StatusError.of(event.status, f"stream of vbucket {vb} at {address}{': ' + detail if detail else ''}")

    def _ended(self, address: Address, event: StreamEnded, now: float) -> None:
        vb, finite = event.vbucket, self._end(event.vbucket) != SEQNO_MAX
        if event.status == StreamEndStatus.OK and finite:
            self._finish(vb)
        elif event.status == StreamEndStatus.FILTER_EMPTY:
            self._park(vb) if self.request.follow and not finite else self._finish(vb)
        elif event.status == StreamEndStatus.LOST_PRIVILEGES:
            raise AccessDenied(f"stream of vbucket {vb} at {address}: the user may no longer read this")
        else:
            if self.standing.seqno(vb) > self._opened_at.get(vb, 0):
                self._fruitless[vb] = 0
            self._wait(vb, self._pause(vb, now) if self._fruitless[vb] else now)
            self._fruitless[vb] += 1

    def _collection_event(self, address: Address, event: CollectionEventReceived, now: float) -> None:
        vb = event.vbucket
        self._emitted.append(CollectionChange(vb, event.message, self.standing.vbuuid[vb], self.standing.epoch[vb]))

    def _moved(self, address: Address, event: SeqnoMoved, now: float) -> None:
        self._emitted.append(SeqnoReached(event.vbucket, event.seqno))

    def _wait(self, vb: int, until: float) -> None:
        self._state[vb] = _State.WAITING
        self._waiting[vb] = until

    def _pause(self, vb: int, now: float) -> float:
        self._fruitless[vb] += 1
        return now + backoff(self._fruitless[vb]) * self._jitter()

    def _park(self, vb: int) -> None:
        self._state[vb] = _State.PARKED
        self._emitted.append(FilterGone(vb))

    def _finish(self, vb: int) -> None:
        self._waiting.pop(vb, None)
        self._state[vb] = _State.DONE
        self._undone -= 1
        self._emitted.append(VbucketDone(vb))

    _HANDLERS: dict[type[LinkEvent], Callable[[ClusterFeed, Address, Any, float], None]] = {
        LinkReady: _ready, NewConfig: _ready, StreamOpened: _opened, RollbackAsked: _rolled_back,
        StreamRefused: _refused, StreamEnded: _ended, CollectionEventReceived: _collection_event, SeqnoMoved: _moved,
    }  # fmt: skip
