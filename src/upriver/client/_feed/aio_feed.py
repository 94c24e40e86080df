"""A feed on asyncio: connections write into the decoder's buffer, the caller takes items out with ``async for``.

While the caller is busy the connections go on until the flow-control window is used up, or too much waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from upriver.client._feed.link_policy import LinkPolicy
from upriver.client._feed.outbox import Outbox
from upriver.client._feed.subscription import MakeBundles, Subscription
from upriver.client.blocking import default_name
from upriver.client.names import Names
from upriver.client.positions import Positions
from upriver.client.reading import ReadOptions, missed, plan, settings_of, settled
from upriver.errors import ConnectFailed, LocalProtocolError, UpriverError
from upriver.net.aio import Connection, connect
from upriver.protocol.topology import Address

if TYPE_CHECKING:
    from upriver.client.aio import AsyncDatabase

T = TypeVar("T")
MAINTAIN_S = 0.05
MOST_WAITING, FEW_WAITING = 4, 2  # bundles; between them reading stops and goes on


class _Link:
    """What a connection tells the feed: bytes have come, or it is gone."""

    def __init__(self, feed: AsyncFeed[Any], address: Address) -> None:
        self.feed, self.address = feed, address

    def buffer(self) -> memoryview:
        return self.feed.subscription.feed.links[self.address].buffer()

    def received(self, size: int) -> None:
        self.feed._received(self.address, size)

    def lost(self, error: Exception | None) -> None:
        why = error if isinstance(error, OSError) else ConnectFailed(f"{self.address} closed the connection")
        self.feed._lost(self.address, why)


class AsyncFeed(Generic[T]):
    """An async iterable of items, which also knows its positions.

    ``async for`` opens it, and closes it when the loop is left. Inside ``async with``, a loop may be left and another
    one goes on where it was. A closed feed still tells its positions, and is not opened again.
    """

    def __init__(self, database: AsyncDatabase, make: MakeBundles, read: dict[str, Any], *, batches: bool) -> None:
        self._database, self._make, self._read, self._batches = database, make, dict(read), batches
        self._checkpoint = self._read.pop("checkpoint", None)
        self._request = self._read.pop("request", None)
        self._subscription: Subscription | None = None
        self._policy: LinkPolicy | None = None
        self._outbox: Outbox | None = None
        self._connections: dict[Address, Connection] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._maintenance: asyncio.Task[None] | None = None
        self._chore: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self._closed = False
        self._quiet_since = 0.0  # not before all streams are open
        self._earlier: list[AsyncFeed[T]] = []  # they read what the positions lack, because their filter was narrower

    @property
    def subscription(self) -> Subscription:
        if self._subscription is None:
            raise LocalProtocolError("the feed is not open yet")
        return self._subscription

    @property
    def policy(self) -> LinkPolicy:
        assert self._policy is not None  # made with the subscription
        return self._policy

    async def __aenter__(self) -> AsyncFeed[T]:
        if self._closed:
            raise LocalProtocolError("the feed is closed; begin another one at its positions()")
        if self._subscription is None:
            await self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _open(self) -> None:
        database = self._database
        if self._checkpoint and (saved := await asyncio.to_thread(self._checkpoint.load)):
            self._read["start"] = saved
        read = await database.run(settled(database._operations, ReadOptions.of(**self._read)))
        earlier = [] if self._request else await database.run(missed(database._operations, read))
        settings = settings_of(database.options, read, read.name or default_name())
        request = self._request or await database.run(plan(database._operations, read))
        names = Names.of_manifest(await database.manifest())
        if self._closed:
            raise LocalProtocolError("the feed was closed while it was being opened")
        known = None if self._request else read.filter
        self._subscription = Subscription(database._operations, request, settings, names, read, known)
        self._subscription.lacking = {vb for one in earlier for vb in one.vbuckets or ()}
        self._policy = LinkPolicy(
            self._subscription.feed, self._subscription.reconnects, database.options.connect_timeout_s,
            self._subscription.want_map, asyncio.get_running_loop().time(),
        )  # fmt: skip
        self._earlier = [AsyncFeed(database, self._make, one.as_given(), batches=self._batches) for one in earlier]
        options: dict[str, Any] = {"rows": read.rows} if self._batches else {"where": read.where}
        self._outbox = self._subscription.deliver(self._make, **options)
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
            self._subscription.feed.links.clear()  # with their memory, which should not wait for the garbage collector
        await asyncio.gather(*tasks, return_exceptions=True)

    def positions(self) -> Positions:
        """Where the caller is with what was yielded so far; a mapping from vbucket to ``Position``."""
        return self.subscription.positions()

    async def confirm(self) -> None:
        """Save the positions: the caller is done with everything that it was given."""
        if self._checkpoint:
            await asyncio.to_thread(self._checkpoint.save, self.positions())

    # ---------------------------------------------------------------------------------------------- items

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        ours = self._subscription is None  # whoever opens it closes it
        await self.__aenter__()
        assert self._outbox is not None
        loop, outbox = asyncio.get_running_loop(), self._outbox
        self._quiet_since = 0.0
        try:
            async with aclosing(self._earlier_items()) as earlier:
                async for item in earlier:
                    yield item
            if self._earlier:
                return  # they were idle for too long
            self._begin()
            while True:
                while (items := outbox.take(loop.time())) is not None:
                    self._caught_up()
                    for outbox.given, item in enumerate(items, 1):
                        yield item
                    self._quiet_since = 0.0
                if self._is_over(outbox, loop.time()):
                    return
                await self._wait(outbox.wait_s(loop.time()))
        finally:
            if ours:
                await self.close()

    async def _earlier_items(self) -> AsyncGenerator[T, None]:
        while self._earlier:
            one = self._earlier[0]
            await one.__aenter__()  # so that leaving the loop does not close it
            self.subscription.earlier = [one.subscription]
            async with aclosing(one.__aiter__()) as items:
                async for item in items:
                    yield item
            if not (one.subscription.feed.done and one._outbox and one._outbox.idle):
                return
            await one.close()
            self.subscription.begin_behind(one.subscription)
            del self._earlier[0]

    @property
    def catching_up(self) -> bool:
        """Whether what comes is older than the positions: if they were saved now, it would come again."""
        return bool(self._earlier)

    def _is_over(self, outbox: Outbox, now: float) -> bool:
        self._caught_up()
        if self._failure:
            raise self._failure
        if self._closed:
            raise LocalProtocolError("the feed was closed while it was being read")
        feed, idle_s = self.subscription.feed, self.subscription.read.idle_s
        if feed.done and outbox.idle:
            return True
        self._quiet_since = self._quiet_since or (now if feed.settled else 0.0)
        return bool(idle_s is not None and self._quiet_since and outbox.idle and now - self._quiet_since >= idle_s)

    async def _wait(self, wait_s: float | None) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(MAINTAIN_S if wait_s is None else min(wait_s, MAINTAIN_S)):
                await self._wake.wait()
        except TimeoutError:
            return

    def _caught_up(self) -> None:
        """The caller has taken something: acknowledge it, and read on."""
        feed, outbox = self.subscription.feed, self._outbox
        for address, connection in self._connections.items():
            if link := feed.links.get(address):
                connection.write(link.data_to_send())
                if connection.paused and outbox and outbox.waiting < FEW_WAITING:
                    link.heard_at = asyncio.get_running_loop().time()
                    connection.resume()

    # ---------------------------------------------------------------------------------------------- pumping

    def _received(self, address: Address, size: int) -> None:
        now = asyncio.get_running_loop().time()
        subscription = self.subscription
        link = subscription.feed.links[address]
        try:
            for event in self.policy.received(address, size, now):
                subscription.add(event, now)
        except UpriverError as error:
            self._lost(address, error)
            return
        except Exception as error:  # ours: asyncio would only log it, and the caller would wait for ever
            self._fail(error)
            return
        connection = self._connections[address]
        connection.write(link.data_to_send())
        if self._outbox and self._outbox.waiting >= MOST_WAITING:
            connection.pause()
        self._wake.set()

    def _lost(self, address: Address, error: OSError | UpriverError) -> None:
        if connection := self._connections.pop(address, None):
            connection.close()
        self._wake.set()
        try:
            self.policy.lost(address, error, asyncio.get_running_loop().time())
        except UpriverError as final:
            self._fail(final)

    def _fail(self, error: Exception) -> None:
        """Tell the caller, after everything that came before."""
        self._failure = self._failure or error
        self._wake.set()

    async def _maintain(self) -> None:
        """Connect what is missing, let time pass for the feed, and run its chores."""
        loop, subscription = asyncio.get_running_loop(), self.subscription
        try:
            while not self._failure:
                now = loop.time()
                self.policy.begin_round(now)
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
        """One at a time, beside everything else: a node that does not answer must not stop the others."""
        if self._chore and self._chore.done():
            self._chore.result()
            self._chore = None
        if self._chore is None and (chore := self.subscription.chore(now)):
            self._chore = asyncio.create_task(self._database.run(chore))

    def _drop_dead(self, now: float) -> None:
        for address, connection in list(self._connections.items()):
            if connection.paused and (link := self.subscription.feed.links.get(address)):
                link.heard_at = now  # we do not listen, so the silence is not the node's
        for address, error in self.policy.dead(now):
            self._lost(address, error)

    def _start_connecting(self, now: float) -> None:
        busy = {task.get_name() for task in self._connecting}
        for address in self.policy.due(now, self._connections.keys()):
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
            connection.close()  # given up while it was being made
            return
        connection.write(link.data_to_send())
