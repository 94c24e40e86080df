"""Nodes as a manager sees them, without sockets or disks: thousands of histories of a cluster in a few seconds.

The manager is the real one; its nodes are slow, frozen, crashed or on an old map whenever that hurts most. There is
one vbucket. A write is acknowledged when a majority of the chain that its lead knows has it, as in a real cluster.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upriver.cluster.manager import Manager, StaleState, UnsafeFailover
from upriver.cluster.nodes import NodeRefused, NodeReport, NodeUnreachable
from upriver.cluster.plan import NOBODY, ClusterState, Member, Move, VbucketReport
from upriver.cluster.state_file import StateFile
from upriver.errors import UpriverError
from upriver.model import FailoverLog, VbucketState
from upriver.node.cluster.cluster_map import Version


@dataclass
class Stream:
    """From one source as it is in this life; acknowledgements may be on their way when it ends."""

    source: int
    life: int
    acknowledged: list[int] = field(default_factory=list)


@dataclass
class SimulatedNode:
    """A process and its disk. ``history`` are the writes that it has, in order."""

    number: int
    log: FailoverLog
    history: list[int] = field(default_factory=list)
    persisted: list[int] = field(default_factory=list)
    durable_log: FailoverLog | None = None
    map: ClusterState | None = None
    state: VbucketState = VbucketState.DEAD
    alive: bool = True
    frozen: bool = False
    member: bool = False
    clean: bool = True
    fenced: bool = False
    life: int = 0
    stream: Stream | None = None
    copies: dict[int, set[int]] = field(default_factory=dict)  # of writes that are not acknowledged yet

    @property
    def leads(self) -> bool:
        return self.alive and self.member and self.state is VbucketState.ACTIVE

    def persist(self) -> None:
        self.persisted, self.durable_log = list(self.history), self.log

    def report(self) -> NodeReport:
        high = len(self.history)
        row = VbucketReport(int(self.state), high, len(self.persisted), high, self.log.entries)
        version = self.map.lineage.version if self.map is not None else Version()
        uuid = self.map.uuid if self.map is not None else ""
        return NodeReport(version, uuid, self.member, self.clean, self.fenced, {0: row})


class SimulatedNodes:
    """Stands in for the manager's ``Nodes``: some nodes do not answer, and some answers get lost."""

    def __init__(self, cluster: Simulation) -> None:
        self._cluster = cluster

    def _reached(self, member: Member) -> SimulatedNode:
        node = self._cluster.nodes[member.kv]
        if not node.alive or node.frozen or self._cluster.random.random() < self._cluster.loss:
            raise NodeUnreachable(str(member))
        return node

    def report(self, member: Member, bucket: str) -> NodeReport:
        return self._reached(member).report()

    def fence(self, member: Member, bucket: str, source: Member) -> NodeReport:
        node = self._reached(member)
        node.fenced = True
        if node.stream is not None and node.stream.source == source.kv:
            self._cluster.end_stream(node)
        self._cluster.something_happens()
        return node.report()

    def push(self, member: Member, bucket: str, state: dict[str, Any], *, welcome: bool = False) -> None:
        node = self._reached(member)
        new = ClusterState.from_json(state)
        if node.map is not None and not new.lineage.follows(node.map.lineage.version):
            raise NodeRefused("an old map")
        if not node.member and not node.clean and not welcome:
            raise NodeRefused("it has crashed")
        self._cluster.given(node, new)
        self._cluster.become(node, new)
        self._cluster.something_happens()

    def newest_map(self, member: Member, bucket: str) -> ClusterState:
        node = self._reached(member)
        if node.map is None:
            raise NodeRefused("it never had one")
        return node.map

    def take_over(
        self, member: Member, bucket: str, vbuckets: list[int], planned: Version, timeout_s: float
    ) -> dict[int, str]:
        node = self._reached(member)
        if node.map is None or node.map.lineage.version != planned:
            raise NodeRefused("another plan")
        if not self._cluster.take_over(node):
            return {0: "interrupted"}
        if self._cluster.random.random() < self._cluster.loss:
            raise NodeUnreachable("the answer got lost")
        return {}


class SimulatedFile(StateFile):
    """The manager's file, as a variable."""

    def __init__(self) -> None:
        super().__init__(Path("never-written"))
        self.text = ""
        self.copies: list[str] = []  # old contents that may be restored
        self._parsed: tuple[str, ClusterState | None] = ("", None)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def read(self) -> str:
        return self.text

    def write(self, text: str) -> None:
        self.text = text
        self.copies = [*self.copies[-30:], text]

    def load(self) -> ClusterState:
        text, state = self._parsed
        if text != self.text or state is None:
            state = super().load()
            self._parsed = self.text, state
        return state

    def restore(self, text: str, *, restart: bool) -> None:
        """A copy from earlier, under a manager that runs or before the next one starts."""
        self.text = text
        if restart:
            self.forget()


class SimulatedManager(Manager):
    def __init__(self, cluster: Simulation) -> None:
        super().__init__(Path("never-written"))
        self._nodes: Any = SimulatedNodes(cluster)
        self.file = self._file = SimulatedFile()

    def _wait_until_caught_up(self, state: ClusterState, moves: list[Move], deadline: float) -> None:
        """Whether little is left to stream matters for how long writers wait, not for what is lost."""


class Simulation:
    """One cluster and everything that may happen to it, in an order that the seed decides."""

    def __init__(self, seed: int, *, copies_are_restored: bool = False) -> None:
        self.copies_are_restored = copies_are_restored
        self.random = random.Random(seed)
        count = self.random.choice((2, 3, 3, 4))
        replicas = self.random.randint(1, min(2, count - 1))
        self.loss = self.random.choice((0.0, 0.1, 0.3))
        self.nodes = [SimulatedNode(n, FailoverLog.new(self._uuid())) for n in range(count)]
        self.manager = SimulatedManager(self)
        self.acknowledged: set[int] = set()
        self.writes = 0
        self.said: list[str] = []
        self.busy = False
        self.newest: ClusterState | None = None  # the newest map that any node was given
        self.forked = False  # a manager continued from a copy while no node with a newer map could be reached
        loss, self.loss = self.loss, 0.0
        self.manager.create("b", [Member("node", n, n) for n in range(count)], 1, replicas)
        self.loss = loss

    def _uuid(self) -> int:
        return self.random.getrandbits(48) | 1

    def given(self, node: SimulatedNode, new: ClusterState) -> None:
        """A node takes this map."""
        if node.map is not None:
            assert new.lineage.includes(node.map.lineage.version), "the new map does not know the old one"
        if self.newest is not None and not new.lineage.includes(self.newest.lineage.version):
            self.forked = True
        self.newest = new

    # ------------------------------------------------------------------------------------------ nodes

    def become(self, node: SimulatedNode, new: ClusterState) -> None:
        chain, before = new.owners[0], node.state
        node.map, node.member, node.fenced = new, True, False
        node.state = (
            VbucketState.DEAD if node.number not in chain
            else VbucketState.ACTIVE if chain[0] == node.number else VbucketState.REPLICA
        )  # fmt: skip
        if node.state is VbucketState.ACTIVE and before is not VbucketState.ACTIVE:
            self._promote(node)
        if node.stream is not None and (node.state is not VbucketState.REPLICA or node.stream.source != chain[0]):
            self.end_stream(node)
        if node.state is not VbucketState.ACTIVE:
            node.copies.clear()
        self._decide(node)

    def _promote(self, node: SimulatedNode) -> None:
        node.log = node.log.branch(self._uuid(), len(node.history))
        node.persist()  # a new branch is on disk before anybody sees it
        node.copies.clear()
        self._end_streams_of(node)

    def _end_streams_of(self, source: SimulatedNode) -> None:
        """Acknowledgements on these streams no longer arrive."""
        for other in self.nodes:
            if other.stream is not None and other.stream.source == source.number:
                other.stream = None

    def end_stream(self, node: SimulatedNode) -> None:
        """Acknowledgements that it has sent may still arrive."""
        if node.stream is not None:
            self._deliver(node, self.random.randint(0, len(node.stream.acknowledged)))
        node.stream = None

    def write(self, node: SimulatedNode) -> None:
        if node.leads and not node.frozen:
            self.writes += 1
            node.history.append(self.writes)
            node.copies[self.writes] = set()

    def replicate(self, node: SimulatedNode) -> None:
        """Take some of the active's writes, and acknowledge them."""
        source = self._source_of(node)
        if source is None:
            self.end_stream(node)
            return
        if node.stream is None:
            self._join(node, source)
        stream = node.stream
        assert stream is not None
        node.history += source.history[len(node.history) :][: self.random.randint(1, 3)]
        stream.acknowledged.append(len(node.history))

    def _source_of(self, node: SimulatedNode) -> SimulatedNode | None:
        if not node.alive or node.frozen or node.fenced or node.state is not VbucketState.REPLICA or node.map is None:
            return None
        lead = node.map.owners[0][0]
        source = self.nodes[lead] if lead != NOBODY else None
        return source if source is not None and source.leads and not source.frozen else None

    def _join(self, node: SimulatedNode, source: SimulatedNode) -> None:
        """The stream request: roll back history that the source does not have."""
        for uuid, _ in [*node.log]:
            end = source.log.last_seqno_of(uuid, len(source.history))
            ours = node.log.last_seqno_of(uuid, len(node.history))
            if end is not None and ours is not None:
                self._roll_back(node, min(end, ours))
                break
        else:
            self._roll_back(node, 0)
        node.log = source.log
        node.stream = Stream(source.number, source.life)
        for by in source.copies.values():
            by.discard(node.number)

    def _roll_back(self, node: SimulatedNode, to: int) -> None:
        """Persist a write at once, with everything before it."""
        if to < len(node.history):
            del node.history[to:]
            node.log = node.log.roll_back(to, self._uuid())
            node.persist()

    def _deliver(self, node: SimulatedNode, count: int) -> None:
        stream = node.stream
        if stream is None or not count:
            return
        source = self.nodes[stream.source]
        highest = max(stream.acknowledged[:count])
        del stream.acknowledged[:count]
        if source.life == stream.life and source.leads:
            for write in source.history[:highest]:
                if write in source.copies:
                    source.copies[write].add(node.number)
            self._decide(source)

    def _decide(self, lead: SimulatedNode) -> None:
        if not lead.leads or lead.map is None:
            return
        chain = lead.map.owners[0]
        needed = len(chain) // 2
        for write, by in list(lead.copies.items()):
            if len(by & {*chain[1:]}) >= needed:
                self.acknowledged.add(write)
                del lead.copies[write]

    def take_over(self, node: SimulatedNode) -> bool:
        source = self._source_of(node)
        if source is None or self.random.random() < self.loss:
            return False
        if node.stream is None:
            self._join(node, source)
        node.history[:] = source.history
        source.state = VbucketState.DEAD
        source.copies.clear()
        if self.random.random() < self.loss:
            return False  # interrupted: no node is active
        node.state, node.stream = VbucketState.ACTIVE, None  # on the same branch
        return True

    # ------------------------------------------------------------------------------------------ trouble

    def crash(self, node: SimulatedNode) -> None:
        if node.alive and self._others_know(node):
            self.end_stream(node)
            active = node.state is VbucketState.ACTIVE
            node.alive = node.member = node.clean = False
            node.frozen = False
            node.life += 1
            node.history, node.log = list(node.persisted), node.durable_log or node.log
            if active:
                node.log = node.log.branch(self._uuid(), len(node.history))
            node.copies.clear()
            self._end_streams_of(node)

    def restore_a_copy(self, node: SimulatedNode) -> None:
        """Somebody puts an old copy of the manager's file in its place."""
        if self.copies_are_restored:
            file = self.manager.file
            file.restore(self.random.choice(file.copies), restart=self.random.random() < 0.5)

    def _others_know(self, node: SimulatedNode) -> bool:
        """Whether some node of the chain still has every acknowledged write: a write that all lose cannot be saved."""
        kept: set[int] = set()
        for member in self.manager.state.owners[0]:
            if member != NOBODY:
                one = self.nodes[member]
                kept |= {*(one.persisted if one is node else one.history)}
        return self.acknowledged <= kept

    def start(self, node: SimulatedNode) -> None:
        node.alive = True

    def freeze(self, node: SimulatedNode) -> None:
        node.frozen = node.alive

    def thaw(self, node: SimulatedNode) -> None:
        node.frozen = False

    def acknowledge(self, node: SimulatedNode) -> None:
        if node.stream is not None and not self.nodes[node.stream.source].frozen:
            self._deliver(node, self.random.randint(0, len(node.stream.acknowledged)))

    def persist(self, node: SimulatedNode) -> None:
        if node.alive and not node.frozen:
            node.persist()

    # ------------------------------------------------------------------------------------------ the manager

    def watch(self, node: SimulatedNode) -> None:
        self.manager.watch()

    def fail_over(self, node: SimulatedNode) -> None:
        with contextlib.suppress(UnsafeFailover, StaleState):
            self.manager.fail_over(str(node.number))

    def move(self, node: SimulatedNode) -> None:
        lead = self.manager.state.owners[0][0]
        if lead not in (NOBODY, node.number):
            self._try(lambda: self.manager.move_all([Move(0, lead, node.number)]))

    def rebalance(self, node: SimulatedNode) -> None:
        self._try(self.manager.rebalance)

    def _try(self, command: Any) -> None:
        try:
            command()
        except UpriverError as error:
            self.said.append(f"  ({error})")

    # ------------------------------------------------------------------------------------------ the course of things

    def something_happens(self) -> None:
        """One random event; happens also between two requests of the manager."""
        while not self.busy and self.random.random() < 0.5:
            self._happen(self.random.choice((Simulation.write, Simulation.replicate, Simulation.acknowledge)))

    def _happen(self, what: Any) -> None:
        node = self.random.choice(self.nodes)
        self.said.append(f"{what.__name__}({node.number})")
        what(self, node)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._happen(self.random.choices(list(EVENTS), list(EVENTS.values()))[0])
        self.heal()

    def heal(self) -> None:
        """All nodes are back and answer; after a few rounds they agree."""
        self.loss, self.busy = 0.0, True
        for node in self.nodes:
            node.alive, node.frozen = True, False
        for _ in range(4 * len(self.nodes)):
            self.manager.watch()
            for node in self.nodes:
                for _ in range(self.writes + 1):
                    self.replicate(node)
                self.acknowledge(node)

    def lost(self) -> set[int]:
        """Acknowledged writes that the active does not have."""
        lead = self.nodes[self.manager.state.owners[0][0]]
        assert [node for node in self.nodes if node.leads] == [lead], "one node leads, and no other"
        return self.acknowledged - {*lead.history}


EVENTS = {
    Simulation.write: 16, Simulation.replicate: 22, Simulation.acknowledge: 18, Simulation.persist: 3,
    Simulation.crash: 2, Simulation.start: 3, Simulation.freeze: 1, Simulation.thaw: 2, Simulation.watch: 5,
    Simulation.fail_over: 2, Simulation.move: 2, Simulation.rebalance: 1, Simulation.restore_a_copy: 1,
}  # fmt: skip


def one_after_the_other(work: Any) -> list[Any]:
    """``at_once`` without threads, so that a seed always makes the same run."""
    outcomes: list[Any] = []
    for each in work:
        try:
            outcomes.append(each())
        except UpriverError as error:
            outcomes.append(error)
    return outcomes
