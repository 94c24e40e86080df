"""Moving vbuckets from one node to another, by a third party: stream, wait, take over, verify (``protocol.md`` 15.4).

Every step looks at both ends first, so a move that was interrupted is repaired by doing it again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from enum import Enum

from upriver.client.options import ConnectOptions
from upriver.errors import ConfigError, ConnectFailed, Status, StatusError, UpriverError
from upriver.model import VbucketState
from upriver.replicate.connection import ReplicationConnection
from upriver.replicate.relay import RelayEvent, Seen, Side
from upriver.wire.cluster import SeqnoPersistence
from upriver.wire.dcp import StreamEnd
from upriver.wire.upr import UprStreamEnd

FEW_ITEMS = 100
LOOK_EVERY_S = 0.02
TRIES = 3


class Moved(Enum):
    """What came of a vbucket."""

    MOVED = "moved"
    ALREADY_THERE = "already there"


class Mover:
    """Moves vbuckets, one after the other, from the node ``source`` to the node ``target``."""

    def __init__(self, source: ConnectOptions, target: ConnectOptions, timeout_s: float = 120.0) -> None:
        self._options, self._target_options = source, target
        self._timeout_s = timeout_s
        self._connection: ReplicationConnection | None = None
        self._ends: defaultdict[int, asyncio.Future[None]] = defaultdict(asyncio.Future)  # by the stream's opaque

    async def move_all(self, vbuckets: list[int], on_moved: Callable[[int, Moved], None] | None = None) -> None:
        """Move these; one that is interrupted is tried again over a new connection."""
        try:
            for vb in vbuckets:
                outcome = await self._move_stubbornly(vb)
                if on_moved is not None:
                    on_moved(vb, outcome)
        finally:
            await self._drop()

    async def _move_stubbornly(self, vb: int) -> Moved:
        for left in reversed(range(TRIES)):
            try:
                return await self._move(await self._connected(), vb)
            except (ConnectFailed, OSError, TimeoutError, StatusError) as error:
                await self._drop()
                if not left:
                    what = f"vbucket {vb} could not be moved: {error or 'timed out'}; run the same command again"
                    raise UpriverError(what) from error
                await asyncio.sleep(0.2)
        raise AssertionError("unreachable")

    async def _connected(self) -> ReplicationConnection:
        if self._connection is None:
            source, target = self._options.seeds[0], self._target_options.seeds[0]
            name = f"move:{source}->{target}:{secrets.token_hex(4)}"
            self._connection = await ReplicationConnection.open(
                source, target, self._options, name, consumer_options=self._target_options
            )
            self._connection.on_event = self._seen
        return self._connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._ends.clear()
        if connection is not None:
            await connection.close()

    def _seen(self, event: RelayEvent) -> None:
        if isinstance(event, Seen) and isinstance(event.message, StreamEnd | UprStreamEnd):
            end = self._ends[event.message.opaque]
            if not end.done():
                end.set_result(None)

    async def _move(self, connection: ReplicationConnection, vb: int) -> Moved:
        if await self._settle(connection, vb):
            return Moved.ALREADY_THERE
        await self._stream(connection, vb)
        await self._until_close(connection, vb)
        await connection.close_stream(vb)
        await self._take_over(connection, vb)
        await self._verify(connection, vb)
        return Moved.MOVED

    async def _settle(self, connection: ReplicationConnection, vb: int) -> bool:
        """Bring both ends to where a move begins; True if it has happened already."""
        ours = await connection.vbucket_state(Side.PRODUCER, vb)
        theirs = await connection.vbucket_state(Side.CONSUMER, vb)
        if theirs is VbucketState.ACTIVE and ours is not VbucketState.ACTIVE:
            return True
        if theirs is VbucketState.ACTIVE:
            raise ConfigError(f"vbucket {vb} is active at both ends; make it a replica or dead at one of them first")
        if ours is None:
            raise ConfigError(f"vbucket {vb} is at neither end")
        if ours is not VbucketState.ACTIVE:  # a takeover was interrupted, or it was switched off: its data is here
            await connection.set_vbucket(Side.PRODUCER, vb, VbucketState.ACTIVE)
        if theirs is not VbucketState.REPLICA:
            await connection.set_vbucket(Side.CONSUMER, vb, VbucketState.REPLICA)
        return False

    async def _stream(self, connection: ReplicationConnection, vb: int) -> None:
        try:
            await connection.add_stream(vb)
        except StatusError as error:
            if error.status != Status.KEY_EEXISTS:
                raise

    async def _until_close(self, connection: ReplicationConnection, vb: int) -> None:
        """Little is left to send, and the target has on disk what was sent."""
        deadline = time.monotonic() + self._timeout_s
        while await self._left_to_send(connection, vb) > FEW_ITEMS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"vbucket {vb} does not catch up")
            await asyncio.sleep(LOOK_EVERY_S)
        if seqno := connection.relay.seqno(vb):
            await connection.ask(Side.CONSUMER, SeqnoPersistence(seqno, vbucket=vb), self._timeout_s)

    async def _left_to_send(self, connection: ReplicationConnection, vb: int) -> int:
        ours = (await connection.high_seqnos(Side.PRODUCER, VbucketState.ACTIVE)).get(vb, 0)
        theirs = (await connection.high_seqnos(Side.CONSUMER, VbucketState.REPLICA)).get(vb, 0)
        return ours - theirs

    async def _take_over(self, connection: ReplicationConnection, vb: int) -> None:
        """Until the stream of the takeover ends; the end of the one before it may still be on its way."""
        opaque = (await connection.add_stream(vb, takeover=True)).stream_opaque
        await connection.wait_for(self._ends[opaque], self._timeout_s)

    async def _verify(self, connection: ReplicationConnection, vb: int) -> None:
        ours = await connection.vbucket_state(Side.PRODUCER, vb)
        theirs = await connection.vbucket_state(Side.CONSUMER, vb)
        if theirs is not VbucketState.ACTIVE or ours is VbucketState.ACTIVE:
            raise ConnectFailed(f"the takeover of vbucket {vb} ended with {ours!r} here and {theirs!r} there")
