"""Moving vbuckets from one node to another, by a third party: stream, wait, take over, verify.

Every step looks at both ends first, so a move that was interrupted is repaired by doing it again.

See docs/protocol/consumer.md#third-party.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import TypeVar

from upriver.client.options import ConnectOptions
from upriver.cluster.catch_up import LOOK_EVERY_S, is_close, takeover_stat
from upriver.cluster.connection import ReplicationConnection
from upriver.cluster.relay import RelayEvent, SeenMessage, Side
from upriver.errors import ConfigError, ConnectFailed, Status, StatusError, UpriverError
from upriver.model import VbucketState
from upriver.wire.messages.cluster import SeqnoPersistence
from upriver.wire.messages.dcp import StreamEnd
from upriver.wire.messages.upr import UprStreamEnd

STREAMED = 64  # vbuckets that stream to their new owner in parallel
AT_ONCE = 8  # how many of those are handed over in parallel
TRIES = 3
T = TypeVar("T")
OnMoved = Callable[[int, "MoveOutcome"], None]


class MoveOutcome(Enum):
    """How the move of a vbucket ended."""

    MOVED = "moved"
    ALREADY_THERE = "already there"


class Mover:
    """Moves vbuckets from the node ``source`` to the node ``target``, over one connection, many of them at a time."""

    def __init__(self, source: ConnectOptions, target: ConnectOptions, timeout_s: float = 120.0) -> None:
        self._options, self._target_options = source, target
        self._timeout_s = timeout_s
        self._connection: ReplicationConnection | None = None
        self._ends: defaultdict[int, asyncio.Future[None]] = defaultdict(asyncio.Future)  # see ``_stream``

    async def move_all(self, vbuckets: list[int], on_moved: OnMoved | None = None) -> None:
        """Move these vbuckets; a move that is interrupted is tried again over a new connection."""
        try:
            wanted = list(dict.fromkeys(vbuckets))
            for first in range(0, len(wanted), STREAMED):
                await self._move_with_retries(wanted[first : first + STREAMED], on_moved or _ignore)
        finally:
            await self._drop()

    async def _move_with_retries(self, vbuckets: list[int], on_moved: OnMoved) -> None:
        left = dict.fromkeys(vbuckets)

        def done(vb: int, outcome: MoveOutcome) -> None:
            del left[vb]
            on_moved(vb, outcome)

        for tries in reversed(range(TRIES)):
            try:
                await self._move(await self._connected(), list(left), done)
            except (ConnectFailed, OSError, TimeoutError, StatusError) as error:
                await self._drop()
                if not tries:
                    what = f"vbucket {next(iter(left))} could not be moved: {error or 'timed out'}"
                    raise UpriverError(f"{what}; run the same command again") from error
                await asyncio.sleep(0.2)
            else:
                return

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
        if isinstance(event, SeenMessage) and isinstance(event.message, StreamEnd | UprStreamEnd):
            end = self._ends[_stream(event.message.opaque)]
            if not end.done():
                end.set_result(None)

    async def _move(self, connection: ReplicationConnection, vbuckets: list[int], done: OnMoved) -> None:
        there = await together(self._settle(connection, vb) for vb in vbuckets)
        for vb, is_there in zip(vbuckets, there, strict=True):
            if is_there:
                done(vb, MoveOutcome.ALREADY_THERE)
        waiting = [vb for vb, is_there in zip(vbuckets, there, strict=True) if not is_there]
        await together(self._stream(connection, vb) for vb in waiting)
        for first in range(0, len(waiting), AT_ONCE):
            batch = waiting[first : first + AT_ONCE]
            await together(self._until_caught_up(connection, vb) for vb in batch)
            await together(self._hand_over(connection, vb, done) for vb in batch)

    async def _hand_over(self, connection: ReplicationConnection, vb: int, done: OnMoved) -> None:
        await connection.close_stream(vb)
        await self._take_over(connection, vb)
        await self._verify(connection, vb)
        done(vb, MoveOutcome.MOVED)

    async def _settle(self, connection: ReplicationConnection, vb: int) -> bool:
        """Bring both ends to the state in which a move begins; True if the vbucket has moved already."""
        ours, theirs = await asyncio.gather(*(connection.vbucket_state(side, vb) for side in Side))
        if theirs is VbucketState.ACTIVE and ours is not VbucketState.ACTIVE:
            return True
        if theirs is VbucketState.ACTIVE:
            raise ConfigError(f"vbucket {vb} is active at both ends; make it a replica or dead at one of them first")
        if ours is None:
            raise ConfigError(f"vbucket {vb} is at neither end")
        if ours is not VbucketState.ACTIVE:  # a takeover was interrupted, or it was made dead: its data is here
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

    async def _until_caught_up(self, connection: ReplicationConnection, vb: int) -> None:
        """Return once little is left to send and everything that was sent is on the target's disk."""
        deadline = time.monotonic() + self._timeout_s
        while not is_close(await connection.stat(Side.PRODUCER, takeover_stat(vb, connection.name))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"vbucket {vb} does not catch up")
            await asyncio.sleep(LOOK_EVERY_S)
        if seqno := connection.relay.seqno(vb):
            await connection.ask(Side.CONSUMER, SeqnoPersistence(seqno, vbucket=vb), self._timeout_s)

    async def _take_over(self, connection: ReplicationConnection, vb: int) -> None:
        """Return when the takeover stream ends. The end of the previous stream may arrive meanwhile."""
        opaque = (await connection.add_stream(vb, takeover=True)).stream_opaque
        await connection.wait_for(self._ends[_stream(opaque)], self._timeout_s)

    async def _verify(self, connection: ReplicationConnection, vb: int) -> None:
        ours, theirs = await asyncio.gather(*(connection.vbucket_state(side, vb) for side in Side))
        if theirs is not VbucketState.ACTIVE or ours is VbucketState.ACTIVE:
            raise ConnectFailed(f"the takeover of vbucket {vb} ended with {ours!r} here and {theirs!r} there")


def _stream(opaque: int) -> int:
    """A stream by its opaque, whose bytes some servers reverse in the answer to ADD_STREAM (19).

    >>> _stream(0x01000000) == _stream(0x00000001)
    True
    """
    return min(opaque, int.from_bytes(opaque.to_bytes(4, "little"), "big"))


async def together(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """All results. If one fails, the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _ignore(vb: int, outcome: MoveOutcome) -> None:
    """The default of ``on_moved``."""
