"""A feed on asyncio: connections read into the decoder's buffer, and the caller takes items with ``async for``.

While the caller is busy, connections read on until the flow-control window is used up or too many bundles wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from upriver.client._feed.feed_base import FeedBase
from upriver.client._feed.link_policy import LinkPolicy
from upriver.client.reading import FeedOptions, missed, plan, settled
from upriver.errors import ConnectFailed, LocalProtocolError, UpriverError
from upriver.net.aio import Connection, connect
from upriver.protocol.topology import Address

if TYPE_CHECKING:
    from upriver.client.aio import AsyncDatabase

T = TypeVar("T")
MAINTAIN_S = 0.05
MOST_WAITING, FEW_WAITING = 4, 2  # waiting bundles at which reading stops, and below which it resumes


class _Link:
    """The machine behind one connection: passes bytes and the loss of the connection to the feed."""

    def __init__(self, feed: AsyncChangeFeed[Any], address: Address) -> None:
        self.feed, self.address = feed, address

    def buffer(self) -> memoryview:
        return self.feed.subscription.feed.links[self.address].buffer()

    def received(self, size: int) -> None:
        self.feed._received(self.address, size)

    def lost(self, error: Exception | None) -> None:
        why = error if isinstance(error, OSError) else ConnectFailed(f"{self.address} closed the connection")
        self.feed._lost(self.address, why)


class AsyncChangeFeed(FeedBase[T]):
    """An async iterable of changes or batches that also knows its position.

    ``async for`` opens it, and closes it when the loop ends. Inside ``async with``, a loop may be left, and the next
    one continues there. A closed feed still has its positions, but cannot be opened again.
    """

    def __init__(self, database: AsyncDatabase, options: FeedOptions, *, batches: bool) -> None:
        super().__init__(options, batches=batches)
        self._database = database
        self._policy: LinkPolicy  # made with the subscription
        self._connections: dict[Address, Connection] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._maintenance: asyncio.Task[None] | None = None
        self._chore: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self._quiet_since = 0.0  # 0 until all streams are open
        self._earlier: list[
            AsyncChangeFeed[T]
        ] = []  # they read what the position lacks, because its filter was narrower

    async def __aenter__(self) -> AsyncChangeFeed[T]:
        self._must_not_be_closed()
        if self._subscription is None:
            await self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[T]:
        return self.items()

    async def _open(self) -> None:
        database, operations, options = self._database, self._database.operations, self.options
        if options.checkpoint and (saved := await asyncio.to_thread(options.checkpoint.load)):
            options = replace(options, start=saved)
        read = await database.run(settled(operations, options))
        earlier = await database.run(missed(operations, read))
        request = await database.run(plan(operations, read))
        manifest = await database.manifest()
        if self._closed:
            raise LocalProtocolError("the feed was closed while it was being opened")
        self._subscribe(operations, read, request, manifest)
        self.subscription.lacking = {vb for one in earlier for vb in one.vbuckets or ()}
        self._policy = LinkPolicy(
            self.feed, self.subscription.reconnects, database.options.connect_timeout_s, self.subscription.want_map,
            asyncio.get_running_loop().time(),
        )  # fmt: skip
        self._earlier = [AsyncChangeFeed(database, one, batches=self._batches) for one in earlier]
        database._feeds.add(self)
        if not self._earlier:
            self._begin()

    def _begin(self) -> None:
        self._maintenance = self._maintenance or asyncio.create_task(self._maintain())

    async def close(self) -> None:
        """Close the connections; positions stay readable."""
        self._closed = True
        self._wake.set()
        self._database._feeds.discard(self)
        for one in self._earlier:
            await one.close()
        tasks = [task for task in (self._maintenance, self._chore, *self._connecting) if task]
        for task in tasks:
            task.cancel()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._subscription:
            self._subscription.feed.links.clear()  # frees their memory now, not when garbage is collected
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def catching_up(self) -> bool:
        """Whether the feed still reads changes from before the position, which stays until they are complete."""
        return bool(self._earlier)

    async def confirm(self) -> None:
        """Save the position to the ``checkpoint``: the caller has processed everything that it was given."""
        if self.options.checkpoint:
            await asyncio.to_thread(self.options.checkpoint.save, self.positions())

    async def lag(self) -> dict[int, int]:
        """How many seqnos the caller is behind in each vbucket. Asks the nodes; moving vbuckets are left out."""
        return self._lag(await self._database.high_seqnos(complete=False))

    # ---------------------------------------------------------------------------------------------- items

    async def items(self, *, idle_s: float | None = None) -> AsyncGenerator[T, None]:
        """Like a loop over the feed, but it ends when nothing has come for ``idle_s`` seconds.

        None means the feed's own ``idle_s``. Inside ``async with``, another loop can continue later.
        """
        opens_it = self._subscription is None
        await self.__aenter__()
        try:
            idle_s = self.subscription.read.idle_s if idle_s is None else idle_s
            async with aclosing(self._earlier_items(idle_s)) as earlier:
                async for item in earlier:
                    yield item
            if self._earlier:
                return  # they were idle for too long
            self._begin()
            loop, outbox = asyncio.get_running_loop(), self._outbox
            self._quiet_since = 0.0
            while True:
                while (items := outbox.take(loop.time())) is not None:
                    self._caught_up()
                    for outbox.given, item in enumerate(items, 1):
                        yield item
                    self._quiet_since = 0.0
                if self._has_ended(idle_s, loop.time()):
                    return
                await self._wait(outbox.wait_s(loop.time()))
        finally:
            if opens_it:
                await self.close()

    async def _earlier_items(self, idle_s: float | None) -> AsyncGenerator[T, None]:
        while self._earlier:
            one = await self._earlier[0].__aenter__()  # so that leaving the loop does not close it
            self.subscription.earlier = [one.subscription]
            async with aclosing(one.items(idle_s=idle_s)) as items:
                async for item in items:
                    yield item
            if not one._is_over:
                return
            await one.close()
            self.subscription.begin_after(one.subscription)
            del self._earlier[0]

    def _has_ended(self, idle_s: float | None, now: float) -> bool:
        self._caught_up()
        if self._failure:
            raise self._failure
        if self._closed:
            raise LocalProtocolError("the feed was closed while it was being read")
        if self._is_over:
            return True
        self._quiet_since = self._quiet_since or (now if self.feed.settled else 0.0)
        quiet = self._quiet_since and self._outbox.idle
        return bool(idle_s is not None and quiet and now - self._quiet_since >= idle_s)

    async def _wait(self, wait_s: float | None) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(MAINTAIN_S if wait_s is None else min(wait_s, MAINTAIN_S)):
                await self._wake.wait()
        except TimeoutError:
            return

    def _caught_up(self) -> None:
        """The caller has taken something: send acknowledgements, and resume reading."""
        feed, outbox = self.feed, self._outbox
        for address, connection in self._connections.items():
            if link := feed.links.get(address):
                connection.write(link.data_to_send())
                if connection.paused and outbox.waiting < FEW_WAITING:
                    link.heard_at = asyncio.get_running_loop().time()
                    connection.resume()

    # ---------------------------------------------------------------------------------------------- pumping

    def _received(self, address: Address, size: int) -> None:
        now = asyncio.get_running_loop().time()
        subscription = self.subscription
        link = subscription.feed.links[address]
        try:
            for event in self._policy.received(address, size, now):
                subscription.add(event, now)
        except UpriverError as error:
            self._lost(address, error)
            return
        except Exception as error:  # a bug: asyncio would only log it, and the caller would wait for ever
            self._fail(error)
            return
        connection = self._connections[address]
        connection.write(link.data_to_send())
        if self._outbox.waiting >= MOST_WAITING:
            connection.pause()
        self._wake.set()

    def _lost(self, address: Address, error: OSError | UpriverError) -> None:
        if connection := self._connections.pop(address, None):
            connection.close()
        self._wake.set()
        try:
            self._policy.lost(address, error, asyncio.get_running_loop().time())
        except UpriverError as final:
            self._fail(final)

    def _fail(self, error: Exception) -> None:
        """Raise the error in the caller, after everything that came before it."""
        self._failure = self._failure or error
        self._wake.set()

    async def _maintain(self) -> None:
        """Connect to missing nodes, call the feed's ``tick``, and run its chores."""
        loop, subscription = asyncio.get_running_loop(), self.subscription
        try:
            while not self._failure:
                now = loop.time()
                self._policy.begin_round(now)
                self._start_connecting(now)
                for event in subscription.feed.tick(now):
                    subscription.add(event, now)
                self._drop_dead(now)
                self._caught_up()
                self._start_chore(now)
                await asyncio.sleep(MAINTAIN_S)
        except Exception as error:
            self._fail(error)

    def _start_chore(self, now: float) -> None:
        """Run one chore at a time, as a task: a node that does not answer must not stop the others."""
        if self._chore and self._chore.done():
            self._chore.result()
            self._chore = None
        if self._chore is None and (chore := self.subscription.chore(now)):
            self._chore = asyncio.create_task(self._database.run(chore))

    def _drop_dead(self, now: float) -> None:
        for address, connection in list(self._connections.items()):
            if connection.paused and (link := self.subscription.feed.links.get(address)):
                link.heard_at = now  # we are not reading, so this is not silence of the peer
        for address, error in self._policy.dead(now):
            self._lost(address, error)

    def _start_connecting(self, now: float) -> None:
        busy = {task.get_name() for task in self._connecting}
        for address in self._policy.due(now, self._connections.keys()):
            if str(address) not in busy:
                task = asyncio.create_task(self._connect(address), name=str(address))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)

    async def _connect(self, address: Address) -> None:
        options = self._database.options
        connection = Connection(_Link(self, address))
        link = self.subscription.feed.connected(address, asyncio.get_running_loop().time())
        self._connections[address] = connection
        try:
            await connect(connection, address.host, address.port, options.connect_timeout_s, options.ssl_context())
        except UpriverError as error:
            self._lost(address, error)
            return
        if self._connections.get(address) is not connection:
            connection.close()  # given up while connecting
            return
        connection.write(link.data_to_send())
