"""Durable writes: prepared here, acknowledged by a majority of the vbucket's nodes, then committed.

A prepare outlives the client that made it: the active vbucket resolves it, by a commit when enough replicas have it,
or by an abort when they do not have it in time. A vbucket that stops being active leaves it to its successor, and the
client is told that the outcome is unknown.

The cluster map says which nodes make a majority; for a node alone, the topology of SET_VBUCKET does
(docs/protocol/vbuckets.md#set-vbucket). During a move a vbucket has two chains of nodes, and a write needs a majority
of each. Without a chain it needs no other node.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from upriver.errors import DurabilityImpossible, KeyNotFound, NotMyVbucket, SyncWriteAmbiguous, UpriverError
from upriver.model import VbucketState
from upriver.node import log
from upriver.store import Stored
from upriver.wire import kv, subdoc
from upriver.wire.constants import DurabilityLevel
from upriver.wire.keys import split_key

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection
    from upriver.node.dispatch import Pending
    from upriver.node.server import Node
    from upriver.store import VBucket

DurableRequest = (
    kv.Set | kv.Add | kv.Delete | kv.Append | kv.Counter | subdoc.SubdocMutation | subdoc.SubdocMultiMutation
)


@dataclass(frozen=True, slots=True)
class Chain:
    """The replicas of one chain, by the names that they acknowledge under; None where one is missing."""

    replicas: tuple[str | None, ...]

    @property
    def names(self) -> set[str]:
        return {name for name in self.replicas if name is not None}

    @property
    def needed(self) -> int:
        """How many replicas make a majority with the active node; ``DurabilityImpossible`` if there are too few."""
        count = len(self.replicas) + 1
        majority = count // 2 + 1
        if len(self.names) + 1 < majority:
            raise DurabilityImpossible(f"{majority} nodes of {count} are needed")
        return majority - 1


def chains_of(node: Node, bucket: NodeBucket, vbucket_id: int) -> list[Chain]:
    """The chains of a vbucket that is active here."""
    if bucket.member:
        current = node.cluster_map(bucket)
        replicas = current.owners[vbucket_id][1:]
        return [Chain(tuple(str(current.nodes[member]) if member >= 0 else None for member in replicas))]
    try:
        topology = bucket.store.vbucket(vbucket_id).topology
    except NotMyVbucket:
        return []
    return [Chain(tuple(chain[1:])) for chain in topology or ()]


@dataclass(slots=True)
class _Wait:
    """One prepare, and the replicas that have acknowledged it."""

    seqno: int
    done: asyncio.Future[None]
    replicas: set[str] = field(default_factory=set)


class SyncWrites:
    """The durable writes of one bucket that are under way."""

    def __init__(self, node: Node, bucket: NodeBucket) -> None:
        self._node, self._bucket = node, bucket
        self._waiting: defaultdict[int, list[_Wait]] = defaultdict(list)
        self._tasks: dict[tuple[int, int], asyncio.Task[Stored]] = {}
        bucket.on_seqno_acknowledged = self.acknowledged

    def replicas_needed(self, vbucket_id: int) -> int:
        """How many replicas make a majority with this node; ``DurabilityImpossible`` if there are too few."""
        return max((chain.needed for chain in chains_of(self._node, self._bucket, vbucket_id)), default=0)

    def acknowledged(self, vbucket_id: int, consumer: str, seqno: int) -> None:
        """Note that a replica has every prepare up to ``seqno``."""
        for wait in self._waiting.get(vbucket_id, ()):
            if wait.seqno <= seqno:
                wait.replicas.add(consumer)
        self._decide(vbucket_id)

    def forget(self, vbucket_id: int, consumer: str) -> None:
        """Drop what a restarted replica acknowledged: it acknowledges again what it still has."""
        for wait in self._waiting.get(vbucket_id, ()):
            wait.replicas.discard(consumer)

    def map_changed(self) -> None:
        for vbucket_id in list(self._waiting):
            self._decide(vbucket_id)

    def _decide(self, vbucket_id: int) -> None:
        """Resolve the writes that a majority has; only the replicas of the newest map count."""
        waiting = self._waiting.get(vbucket_id)
        if not waiting:
            return
        try:
            found = chains_of(self._node, self._bucket, vbucket_id)
            chains = [(chain.needed, chain.names) for chain in found]
        except DurabilityImpossible:
            return
        for wait in waiting:
            if not wait.done.done() and all(len(wait.replicas & names) >= needed for needed, names in chains):
                wait.done.set_result(None)

    def resolve(
        self, vb: VBucket, key: bytes, collection_id: int, prepared: Stored, level: int, timeout_s: float | None
    ) -> asyncio.Task[Stored]:
        """Commit the prepare when it is durable, abort it when that takes too long, whether or not the client stays."""
        at = vb.id, prepared.seqno
        work = self._resolve(vb, key, collection_id, prepared.seqno, level, timeout_s)
        task = self._tasks[at] = self._node.loop.create_task(work)
        task.add_done_callback(lambda done: self._finished(vb, prepared.seqno, done))
        return task

    def _finished(self, vb: VBucket, seqno: int, task: asyncio.Task[Stored]) -> None:
        self._tasks.pop((vb.id, seqno), None)
        if task.cancelled() or task.exception() is None:
            return
        log.info("durable_write_unresolved", vbucket=vb.id, seqno=seqno, reason=str(task.exception()))
        if isinstance(task.exception(), SyncWriteAmbiguous) and vb.state is VbucketState.ACTIVE:
            self.resume(vb)  # the vbucket was active again before this task saw that it was not

    async def _resolve(
        self, vb: VBucket, key: bytes, collection_id: int, seqno: int, level: int, timeout_s: float | None
    ) -> Stored:
        wait = _Wait(seqno, self._node.loop.create_future())
        self._waiting[vb.id].append(wait)
        try:
            needed = self.replicas_needed(vb.id)
            async with asyncio.timeout(timeout_s):
                if level >= DurabilityLevel.MAJORITY_AND_PERSIST_ON_ACTIVE:
                    await self._bucket.waits.until(vb.id, seqno)
                if needed:
                    await wait.done
            return vb.durable.commit(key, collection_id, seqno)
        except DurabilityImpossible:  # the map has changed since it was prepared
            self._abort(vb, key, collection_id, seqno)
            raise
        except TimeoutError as error:
            self._abort(vb, key, collection_id, seqno)
            raise SyncWriteAmbiguous("a majority did not have it in time") from error
        except (NotMyVbucket, KeyNotFound) as error:
            raise SyncWriteAmbiguous("the vbucket has moved") from error
        finally:
            self._waiting[vb.id].remove(wait)

    @staticmethod
    def _abort(vb: VBucket, key: bytes, collection_id: int, seqno: int) -> None:
        try:
            vb.durable.abort(key, collection_id, seqno)
        except (NotMyVbucket, KeyNotFound):
            return  # another node resolves it now

    def state_changed(self, vb: VBucket) -> None:
        """A vbucket that has become active resolves its prepares; one that is no longer active leaves them."""
        if vb.state is VbucketState.ACTIVE:
            self.resume(vb)
            return
        for wait in self._waiting.get(vb.id, ()):
            if not wait.done.done():
                wait.done.set_exception(SyncWriteAmbiguous("the vbucket has moved"))

    def resume_all(self) -> None:
        """Resolve what was prepared here before the node stopped or crashed; until then, those keys accept no write.

        A client may have been told that such a write is durable: the prepare was on disk, the commit was not.
        """
        for vb in self._bucket.store.existing():
            if vb.state is VbucketState.ACTIVE and vb.pending:
                self.resume(vb)

    def resume(self, vb: VBucket) -> None:
        """Resolve prepares without a task: from before a restart, or made by the node that was active before."""
        vb.durable.drop_completed()
        for wire_key, seqno in list(vb.pending.items()):
            if (vb.id, seqno) not in self._tasks:
                collection_id, key = split_key(wire_key)
                self._resolve_old(vb, key, collection_id, seqno)

    def _resolve_old(self, vb: VBucket, key: bytes, collection_id: int, seqno: int) -> None:
        try:
            alone = not self.replicas_needed(vb.id)
        except DurabilityImpossible:
            alone = True
        if alone:
            self._commit_old(vb, key, collection_id, seqno)
            return
        self.resolve(vb, key, collection_id, Stored(0, seqno, vb.uuid), DurabilityLevel.MAJORITY, None)

    @staticmethod
    def _commit_old(vb: VBucket, key: bytes, collection_id: int, seqno: int) -> None:
        """Commit a prepare that no other node decides on. One that cannot be read must not stop the others."""
        try:
            vb.durable.commit(key, collection_id, seqno)
        except UpriverError as error:
            log.warning("durable_write_unresolved", vbucket=vb.id, seqno=seqno, reason=error)

    def commit_all(self, vb: VBucket) -> None:
        """Commit every prepare after a failover: a client may have been told that it is durable."""
        vb.durable.drop_completed()
        for wire_key, seqno in list(vb.pending.items()):
            collection_id, key = split_key(wire_key)
            vb.durable.commit(key, collection_id, seqno)

    def cancel(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()


def when_durable(
    conn: ClientConnection, request: DurableRequest, vb: VBucket, stored: Stored, reply: Callable[[Stored], None]
) -> Pending:
    """Call ``reply`` with what was stored: now, or when it is as durable as the request asks for."""
    durability = request.durability
    if durability is None:
        reply(stored)
        return None
    collection_id, key = conn.split(request.key)
    if not vb.durable.is_prepared(key, collection_id, stored.seqno):
        reply(stored)  # nothing had to be written
        return None
    sync_writes = conn.require_bucket().sync_writes
    if durability.level == DurabilityLevel.MAJORITY and not sync_writes.replicas_needed(vb.id):
        reply(vb.durable.commit(key, collection_id, stored.seqno))
        return None
    longest_s = conn.node.options.limits.persistence_wait_s
    timeout_s = min(durability.timeout_ms / 1000, longest_s) if durability.timeout_ms else longest_s
    return _reply_when(sync_writes.resolve(vb, key, collection_id, stored, durability.level, timeout_s), reply)


async def _reply_when(task: asyncio.Task[Stored], reply: Callable[[Stored], None]) -> None:
    reply(await asyncio.shield(task))
