"""A change feed over all nodes of a cluster: which streams are open where, and what to do when one ends.

Pure: the shell connects to the addresses in ``wanted()``, moves bytes, and passes in the time. Everything that can go
wrong between a reader and a cluster is decided here, for the asyncio client, the blocking client and Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from upriver.errors import AccessDenied, HistoryLost, Status, StatusError
from upriver.model import SEQNO_MAX, FailoverLog, OnRollback
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
from upriver.protocol.feed.positions import PositionTable
from upriver.protocol.feed.stream_states import StreamStates
from upriver.protocol.history import has_lost
from upriver.protocol.position import Position
from upriver.protocol.session import Session, config_json
from upriver.protocol.topology import Address, Topology, parse_topology
from upriver.wire.constants import StreamEndStatus, StreamFlag
from upriver.wire.messages.dcp import StreamRequest

STREAMS_IN_FLIGHT = 256
ASK_MAP_EVERY_S, ASK_MAP_IDLE_S = 1.0, 2.5  # while a vbucket waits, and otherwise
_FILTER_LOST = (Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE)


class ClusterFeed:
    """The state of one feed. ``topology`` may be replaced by a newer map at any time.

    ``jitter`` returns factors around 1 for pauses, so that many readers do not return at the same instant. Feeds that
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
        self.table = PositionTable(topology.vbuckets)
        self.links: dict[Address, NodeLink] = {}
        self.logs: dict[int, FailoverLog] = {}
        self.rollbacks = self.moves = 0  # moves: how often a vbucket continued on another node
        self.left: set[int] = set()  # vbuckets whose newest branch is not the requested one
        self.refused: set[int] = set()  # vbuckets with a requested branch of which the producer wants a rollback
        self.noop_interval_s = noop_interval_s
        self._make_session, self._window, self._parse = make_session, window, parse
        self._states = StreamStates(request.starts, jitter)
        self._opened_at: dict[int, int] = {}
        self._home: dict[int, Address] = {}  # the node from which each vbucket was last read
        self._to_latest: set[int] = set()  # vbuckets whose end seqno does not exist on the current branch
        self._unconfirmed = set(request.starts) if request.resumed else set()
        self._opaques = opaques or count(1)
        self._ask_map_at = 0.0
        self._remembered: dict[int, Position] = {}
        self._emitted: list[FeedEvent] = []
        for vb, position in request.starts.items():
            self.table.resume(vb, position)
            if request.resumed and position.seqno == 0 < position.snap_end:
                self.table.interrupted[vb] = position.vbuuid, position.snap_end
            if self._end(vb) == 0 and position.seqno == 0:
                self._finish(vb)
        self._emitted.clear()

    # ---------------------------------------------------------------------------------------------- for the caller

    @property
    def done(self) -> bool:
        return self._states.all_done

    @property
    def settled(self) -> bool:
        """Whether every wanted stream is open."""
        return not self._states.waiting and not self._states.opening

    @property
    def vbuckets(self) -> list[int]:
        return self._states.vbuckets

    def positions(self) -> dict[int, Position]:
        """The position of every vbucket, if the caller has processed everything that came."""
        return {vb: self.table.position(vb) for vb in self._states.vbuckets}

    def taken(self, documents: FeedRows) -> None:
        """The caller is done with the rows: the producer may send as many bytes again."""
        if link := self.links.get(documents.link):
            link.acknowledge(documents.rows.bytes)

    def remember(self, vb: int) -> None:
        """Remember the position, for ``refilter`` with ``again``: a new filter may let changes after it through."""
        self._remembered.setdefault(vb, self.table.position(vb))

    def begin_after(self, vb: int, read: Position, epoch: int) -> None:
        """Begin after another feed has read, from 0 to our position, the collections that we lacked.

        Call it before reading. Our older consistent points do not cover those collections. If the caller was told to
        undo everything, begin at 0.
        """
        at = self.table.position(vb)
        if epoch == at.epoch:
            self.table.resume(vb, at._replace(snap_start=0, snap_end=max(at.snap_end, read.snap_end), points=()))
            return
        self.table.resume(vb, Position(epoch=epoch))
        if self._end(vb) != SEQNO_MAX:
            self._to_latest.add(vb)

    def refilter(self, value: bytes, again: bool = False) -> None:
        """Use another filter from now on; with ``again``, go back to the remembered positions first."""
        self.filter = value
        self._states.unpark()
        for vb in list(self._remembered) if again else ():
            self._go_back(vb, self._remembered.pop(vb))

    def _go_back(self, vb: int, position: Position) -> None:
        for link in self.links.values():
            if vb in link.streams:
                link.close_stream(vb)
                self._states.wait(vb, 0.0)
        now = self.table.position(vb)
        if (now.epoch, now.vbuuid) == (position.epoch, position.vbuuid):
            self.table.resume(vb, position)
        else:  # a rollback came in between: the position is on a lost branch
            self.table.roll_back(vb, now.rollback_target(position.seqno))

    # ---------------------------------------------------------------------------------------------- for the shell

    def wanted(self) -> set[Address]:
        """The nodes to connect to: those with open streams, and the owners of vbuckets that wait."""
        owners = {self.topology.active(vb) for vb in self._states.waiting}
        busy = {address for address, link in self.links.items() if link.streams}
        return busy | {owner for owner in owners if owner is not None}

    def connected(self, address: Address, now: float = 0.0) -> NodeLink:
        """The shell has a socket to this node; its link begins the handshake."""
        link = NodeLink(self._make_session(), self.table, self._window, now, now)
        self.links[address] = link
        return link

    def adopt(self, address: Address, link: NodeLink, now: float) -> None:
        """Use a connection that another feed has released."""
        link.table, link.heard_at = self.table, now
        self.links[address] = link

    def release(self, address: Address) -> NodeLink | None:
        """Release the connection for another feed; None if not all streams have ended in order."""
        link = self.links.get(address)
        if not self.done or link is None or not link.idle:
            return None
        link.flush_acknowledgements()
        return self.links.pop(address)

    def lost(self, address: Address, now: float) -> None:
        """The connection is gone; its vbuckets wait for a new one."""
        link = self.links.pop(address, None)
        for vb in list(link.streams) if link else ():
            self.table.close(vb)
            self._states.wait(vb, now)

    def received(self, address: Address, size: int, now: float) -> Iterator[FeedEvent]:
        """Decode bytes that were read into a link's buffer; iterate to the end before reading again."""
        link = self.links[address]
        link.heard_at = now
        for event in link.received(size):
            if isinstance(event, RowsReceived):
                yield FeedRows(event, address)
            else:
                self._HANDLERS[type(event)](self, address, event, now)
                if self._emitted:
                    yield from self._take_emitted()
        if self._states.waiting:
            self._open_streams(now)

    def tick(self, now: float) -> Iterator[FeedEvent]:
        """Time has passed: open streams that wait, acknowledge bytes, and ask for the cluster map."""
        for link in self.links.values():
            link.tick(now)
        if self._states.waiting:
            self._open_streams(now)
        if now >= self._ask_map_at:
            self._ask_map_at = now + (ASK_MAP_EVERY_S if self._states.waiting else ASK_MAP_IDLE_S)
            self._ask_map()
        yield from self._take_emitted()

    def silent(self, now: float) -> list[Address]:
        """Nodes that have sent nothing for two noop intervals."""
        return [a for a, link in self.links.items() if now - link.heard_at > 2 * self.noop_interval_s]

    def late(self, now: float, within_s: float) -> list[Address]:
        """Nodes whose handshake has taken longer than ``within_s``."""
        return [a for a, link in self.links.items() if not link.ready and now - link.begun_at > within_s]

    def was_away(self, seconds: float) -> None:
        """We did not read for this long; do not count it as silence of the nodes."""
        for link in self.links.values():
            link.heard_at += seconds
            link.begun_at += seconds

    def use(self, topology: Topology) -> bool:
        """Use a newer cluster map; False if it is not newer."""
        if topology.revision <= self.topology.revision or topology.vbuckets != self.topology.vbuckets:
            return False
        self.topology = topology
        for address, link in self.links.items():
            self._leave_moved(address, link)
        return True

    def _leave_moved(self, address: Address, link: NodeLink) -> None:
        """Close streams at an old owner: a takeover does not end them, and nothing more comes there.

        See docs/protocol/snapshots.md#stream-end.
        """
        for vb in list(link.streams):
            if self.topology.active(vb) not in (None, address):
                link.close_stream(vb)
                self._states.wait(vb, 0.0)

    # ---------------------------------------------------------------------------------------------- opening

    def _open_streams(self, now: float) -> None:
        for vb, until in list(self._states.waiting.items()):
            if self._states.opening >= STREAMS_IN_FLIGHT:
                return
            owner = self.topology.active(vb)
            link = self.links.get(owner) if owner else None
            if link and link.ready and until <= now:
                link.open_stream(self._stream_request(vb), self._end(vb))
                self._states.ask(vb)

    def _stream_request(self, vb: int) -> StreamRequest:
        opaque = next(
            self._opaques
        )  # unique over all links: a vbucket may move while data of its old stream still arrives
        at = self.table.position(vb).claim
        flags, end = self.request.flags, self._end(vb)
        if vb in self._to_latest:
            flags, end = flags | StreamFlag.TO_LATEST, SEQNO_MAX
        return StreamRequest(
            flags, 0, at.seqno, end, at.vbuuid, at.snap_start, at.snap_end, self.filter, vbucket=vb, opaque=opaque
        )

    def _ask_map(self) -> None:
        """Ask one node for the map, or all nodes while a vbucket waits: only some may have the newest map."""
        ready = [link for link in self.links.values() if link.ready]
        for link in ready if self._states.waiting else ready[:1]:
            link.ask_config(self.topology.revision)

    def _end(self, vb: int) -> int:
        """The end seqno, never below the start: a start beyond the end may be on a lost branch; the producer knows."""
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
        if vb in self.request.branches:
            if self.request.branches[vb] != log.uuid:
                link.close_stream(vb)
                self._leave(vb, self.left)
                return
            self.table.set_branch(vb, log.uuid)  # even if we come from an older branch: the end is a seqno of this one
        lost = self.table.vbuuid(vb)
        self._states.open(vb)
        self.moves += self._home.get(vb, address) != address
        self._home[vb] = address
        self.logs[vb] = log
        self._announce_lost(vb, log)
        self._opened_at[vb] = self.table.seqno(vb)
        self.table.adopt(vb, log.uuid, link.streams[vb], self._end(vb))
        if self._end(vb) != SEQNO_MAX and vb not in self._to_latest and self._ended_early(vb, lost, log):
            # The end was a seqno of a lost branch; waiting for it on this one could take for ever.
            link.close_stream(vb)
            self._to_latest.add(vb)
            self._states.wait(vb, now)

    def _leave(self, vb: int, why: set[int]) -> None:
        why.add(vb)
        self._finish(vb)

    def _ended_early(self, vb: int, branch: int, log: FailoverLog) -> bool:
        return branch != 0 and has_lost(log, branch, self._end(vb))

    def _announce_lost(self, vb: int, log: FailoverLog) -> None:
        """Tell the caller to undo changes of which the producer cannot know that the caller has them.

        Either they came in an out-of-order snapshot that was cut short: some may have been deleted and purged since,
        and a reader that begins at 0 is never told to roll back. Or the caller got them before it was restarted, after
        it saved the position that we started from, and their branch is lost.
        """
        at, emit = self.table.position(vb), self.request.on_rollback is OnRollback.EMIT
        branch, highest = self.table.interrupted.pop(vb, (0, 0))
        if highest > at.seqno:
            self._lose(vb, at.seqno, branch)
        elif vb in self._unconfirmed and emit and at.vbuuid not in (0, log.uuid):
            self._lose(vb, at.seqno, at.vbuuid)
        self._unconfirmed.discard(vb)

    def _lose(self, vb: int, target: int, branch: int) -> None:
        """Everything above ``target`` is void: raise or emit that, as the request says."""
        self.rollbacks += 1
        if self.request.on_rollback is OnRollback.FAIL:
            raise HistoryLost(vb, target, branch)
        epoch = self.table.next_epoch(vb)
        if self.request.on_rollback is OnRollback.EMIT:
            self._emitted.append(RolledBack(vb, target, branch, epoch))

    def _rolled_back(self, address: Address, event: RollbackAsked, now: float) -> None:
        vb, at = event.vbucket, self.table.position(event.vbucket)
        if vb in self.request.branches:
            self._leave(vb, self.refused)
            return
        if event.seqno == 0 and self._try_older_branch(vb, at):
            self._states.wait(vb, now)
            return
        # A real rollback goes below our position; one that does not would make us send the same request again.
        lowest = 0 if self.request.back_to_zero else min(event.seqno, max(0, at.seqno - 1))
        target = at.rollback_target(lowest)
        if at.seqno > 0:  # else there is nothing to undo
            self._lose(vb, target, at.vbuuid)
        self._unconfirmed.discard(vb)
        self.table.roll_back(vb, target)
        if self._end(vb) != SEQNO_MAX:
            self._to_latest.add(vb)
        self._states.wait_after_rollback(vb, at.seqno, target, now)

    def _try_older_branch(self, vb: int, at: Position) -> bool:
        """Claim the branch before the newest, which the producer may know, if we have no changes of the newest."""
        log = self.logs.get(vb)
        if log is None or len(log) < 2 or log.uuid != at.vbuuid or at.snap_end > log.entries[0].seqno:
            return False
        self.logs[vb] = FailoverLog(log.entries[1:])
        self.table.set_branch(vb, self.logs[vb].uuid)
        return True

    def _refused(self, address: Address, event: StreamRefused, now: float) -> None:
        vb = event.vbucket
        if event.status == Status.NOT_MY_VBUCKET:
            newer = event.value[:1] == b"{" and self.use(self._parse(config_json(event.value), address.host))
            self._states.wait(vb, now) if newer else self._states.pause(vb, now)
        elif is_temporary(event.status):
            self._states.pause(vb, now)
        elif event.status in _FILTER_LOST and self.request.follow:
            self._finish(vb) if self._end(vb) != SEQNO_MAX else self._park(vb)
        elif event.status == Status.ERANGE and vb in self._to_latest:
            self._finish(vb)  # the filter's collections end before our start: nothing is left to read
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
            moved = self.table.seqno(vb) > self._opened_at.get(vb, 0)
            self._states.wait_after_end(vb, now, moved=moved)

    def _collection_event(self, address: Address, event: CollectionEventReceived, now: float) -> None:
        vb = event.vbucket
        self._emitted.append(CollectionChange(vb, event.message, self.table.vbuuid(vb), self.table.epoch(vb)))

    def _moved(self, address: Address, event: SeqnoMoved, now: float) -> None:
        self._emitted.append(SeqnoReached(event.vbucket, event.seqno))

    def _park(self, vb: int) -> None:
        self._states.park(vb)
        self._emitted.append(FilterGone(vb))

    def _finish(self, vb: int) -> None:
        self._states.finish(vb)
        self._emitted.append(VbucketDone(vb))

    _HANDLERS: dict[type[LinkEvent], Callable[[ClusterFeed, Address, Any, float], None]] = {
        LinkReady: _ready, NewConfig: _ready, StreamOpened: _opened, RollbackAsked: _rolled_back,
        StreamRefused: _refused, StreamEnded: _ended, CollectionEventReceived: _collection_event, SeqnoMoved: _moved,
    }  # fmt: skip
