"""``upriver replicate``: keeps streams between two clusters (or nodes) open, and reports how far each vbucket is.

The bytes between consumer and producer pass through this process unchanged.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from upriver.client.blocking import Database
from upriver.client.options import ConnectOptions
from upriver.cluster.connection import ReplicationConnection
from upriver.cluster.relay import RelayEvent, SeenMessage, Side
from upriver.errors import ConfigError, Status, StatusError, UpriverError
from upriver.model import VbucketState
from upriver.protocol.topology import Address
from upriver.wire.messages.dcp import StreamEnd
from upriver.wire.messages.upr import UprStreamEnd

RETRY_S, MAX_RETRY_S = 0.5, 10.0
MISSING_S = 30.0  # how long a vbucket may be active nowhere while it moves
AT_ONCE = 128  # stream handshakes in parallel
Pair = tuple[Address, Address]


@dataclass(slots=True)
class ReplicationProgress:
    """How far the replication is: by vbucket, the seqno at the source and the last one that was forwarded."""

    source: dict[int, int] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)  # active nowhere at the source when it was last asked
    passed: dict[int, int] = field(default_factory=dict)
    streaming: set[int] = field(default_factory=set)
    bytes_passed: int = 0
    reconnects: int = 0

    @property
    def lag(self) -> dict[int, int]:
        return {vb: max(0, high - self.passed.get(vb, 0)) for vb, high in self.source.items()}

    @property
    def caught_up(self) -> bool:
        return not self.missing and len(self.streaming) == len(self.source) and not any(self.lag.values())


class ThirdParty:
    """Replicates vbuckets from one cluster to another until it is cancelled."""

    def __init__(
        self, source: ConnectOptions, target: ConnectOptions, vbuckets: Iterable[int] | None = None, *,
        demote: bool = False,
    ) -> None:  # fmt: skip
        self._source_options, self._target_options = source, target
        self._source, self._target = Database(source), Database(target)
        self._demote = demote
        count = self._source.topology.vbuckets
        if count != self._target.topology.vbuckets:
            raise ConfigError(f"the source has {count} vbuckets, the target {self._target.topology.vbuckets}")
        self.vbuckets = sorted(range(count) if vbuckets is None else set(vbuckets))
        if self.vbuckets and self.vbuckets[-1] >= count:
            raise ConfigError(f"there is no vbucket {self.vbuckets[-1]}: the last is {count - 1}")
        self.progress = ReplicationProgress(source=dict.fromkeys(self.vbuckets, 0))
        self._connections: dict[Pair, ReplicationConnection] = {}
        self._missing_since = time.monotonic()

    async def run(
        self, on_progress: Callable[[ReplicationProgress], None], *, once: bool = False, every_s: float = 0.5
    ) -> None:
        """Replicate; with ``once``, stop as soon as everything that the source has was forwarded."""
        async with asyncio.TaskGroup() as group:
            pairs = [group.create_task(self._keep_up(pair, vbs)) for pair, vbs in self._pairs().items()]
            while True:
                await self._measure()
                on_progress(self.progress)
                if once and self.progress.caught_up:
                    break
                await asyncio.sleep(every_s)
            for task in pairs:
                task.cancel()

    def close(self) -> None:
        self._source.close()
        self._target.close()

    def _pairs(self) -> dict[Pair, list[int]]:
        found: defaultdict[Pair, list[int]] = defaultdict(list)
        for vb in self.vbuckets:
            source = self._source.topology.active(vb)
            target = self._target.topology.active(vb) or self._target.topology.nodes[0]
            if source is None:
                raise ConfigError(f"nobody owns vbucket {vb} at the source")
            found[source, target].append(vb)
        return found

    async def _measure(self) -> None:
        highs = await asyncio.to_thread(self._source.high_seqnos, complete=False)
        self._look_for_missing(set(self.vbuckets) - highs.keys())
        self.progress.source |= {vb: highs[vb] for vb in self.vbuckets if vb in highs}
        self.progress.bytes_passed = sum(c.relay.bytes_from[Side.PRODUCER] for c in self._connections.values())
        for connection in self._connections.values():
            for vb in self.vbuckets:
                if seqno := connection.relay.seqno(vb):
                    self.progress.passed[vb] = seqno

    def _look_for_missing(self, missing: set[int]) -> None:
        """Raise if one of our vbuckets has been active nowhere for longer than a move takes."""
        self.progress.missing = missing
        if not missing:
            self._missing_since = time.monotonic()
        elif time.monotonic() - self._missing_since > MISSING_S:
            raise UpriverError(f"vbucket {min(missing)} is active at no node of the source")

    async def _keep_up(self, pair: Pair, vbuckets: list[int]) -> None:
        """Keep one pair of nodes connected: reconnect whenever the connection ends."""
        delay = RETRY_S
        while True:
            began = time.monotonic()
            try:
                await self._replicate(pair, vbuckets)
            except ConfigError:
                raise
            except (UpriverError, OSError, TimeoutError):
                self.progress.reconnects += 1
            delay = RETRY_S if time.monotonic() - began > MAX_RETRY_S else min(MAX_RETRY_S, 2 * delay)
            await asyncio.sleep(delay)

    async def _replicate(self, pair: Pair, vbuckets: list[int]) -> None:
        source, target = pair
        name = f"replicate:{source}->{target}"
        connection = await ReplicationConnection.open(
            source, target, self._source_options, name, consumer_options=self._target_options
        )
        ended: asyncio.Queue[int] = asyncio.Queue()
        connection.on_event = lambda event: self._seen(event, ended)
        self._connections[pair] = connection
        try:
            for at in range(0, len(vbuckets), AT_ONCE):
                await asyncio.gather(*(self._add(connection, vb) for vb in vbuckets[at : at + AT_ONCE]))
            self.progress.passed |= await connection.high_seqnos(Side.CONSUMER, VbucketState.REPLICA)
            await self._renew(connection, ended)
        finally:
            self.progress.streaming -= set(vbuckets)
            await connection.close()

    def _seen(self, event: RelayEvent, ended: asyncio.Queue[int]) -> None:
        if isinstance(event, SeenMessage) and isinstance(event.message, StreamEnd | UprStreamEnd):
            self.progress.streaming.discard(event.message.vbucket)
            ended.put_nowait(event.message.vbucket)

    async def _renew(self, connection: ReplicationConnection, ended: asyncio.Queue[int]) -> None:
        """Reopen streams that end, until the connection closes."""
        gone = asyncio.ensure_future(connection.wait_closed())
        try:
            while True:
                next_end = asyncio.ensure_future(ended.get())
                await asyncio.wait({gone, next_end}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    next_end.cancel()
                    gone.result()
                    return
                await asyncio.sleep(RETRY_S)
                await self._add(connection, next_end.result())
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError, UpriverError, OSError):
                await gone

    async def _add(self, connection: ReplicationConnection, vb: int) -> None:
        state = await connection.vbucket_state(Side.CONSUMER, vb)
        if state is VbucketState.ACTIVE and not self._demote:
            what = f"vbucket {vb} is active at the target; with --demote it becomes a replica"
            raise ConfigError(f"{what}, and what only it has is undone")
        if state is not VbucketState.REPLICA:
            await connection.set_vbucket(Side.CONSUMER, vb, VbucketState.REPLICA)
        try:
            await connection.add_stream(vb)
        except StatusError as error:
            if error.status != Status.KEY_EEXISTS:
                raise
        self.progress.streaming.add(vb)
