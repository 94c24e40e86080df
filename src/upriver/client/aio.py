"""The client for asyncio: ``async with upriver.aio.connect(...) as db``, then documents, seqnos and the change feed.

``upriver.client.blocking`` has the same names with the same parameters for threads.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from upriver.client._requests.connections import converse_async
from upriver.client._requests.operations import AskRun, Connect, Features, Operation, Operations, Pause, Step
from upriver.client.names import CollectionIds, path_of
from upriver.client.options import ConnectKeywords, ConnectOptions
from upriver.client.reading import FeedKeywords, FeedOptions
from upriver.client.srv import srv_seeds
from upriver.client.telemetry import span
from upriver.errors import ConnectFailed, RemoteProtocolError, StatusError
from upriver.model import DEFAULT_COLLECTION, Document, FailoverLog
from upriver.net.aio_conversation import AsyncConversation
from upriver.protocol.topology import Address, Topology

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client._feed.aio_feed import AsyncChangeFeed
    from upriver.client.changes import Change

T = TypeVar("T")


def connect(
    connection: str | ConnectOptions, bucket: str | None = None, **options: Unpack[ConnectKeywords]
) -> AsyncDatabase:
    """A bucket of a cluster, for ``async with``, which connects and closes it.

    ``connection`` is ``couchbase://host1,host2:port?option=value`` (``couchbases://``: with TLS), or ``ConnectOptions``
    with everything in it. ``ConfigError`` for options that cannot work; ``async with`` raises ``ConnectFailed`` if no
    node answers, and ``AuthenticationFailed`` for a wrong name or password.
    """
    return AsyncDatabase(ConnectOptions.of(connection, bucket, **options))


class AsyncKeyValue(ABC):
    """Documents of one collection. Requests follow documents to other nodes, and are retried after temporary errors."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations

    @abstractmethod
    async def _ask(self, name: str, make: Callable[[int], Operation[T]]) -> T:
        """Run the operation that ``make`` returns for the collection's id; ``name`` is for tracing."""

    async def get(self, key: str | bytes) -> Document:
        """The document with its CAS; ``KeyNotFound`` if there is none."""
        return await self._ask("get", lambda number: self.operations.get(key, number))

    async def set(self, key: str | bytes, value: bytes, *, expiry: int = 0, cas: int = 0) -> int:
        """Write a document; returns its new CAS.

        With ``cas``, write only if that is still the document's CAS (``KeyExists`` if not, ``KeyNotFound`` if there is
        no document). ``expiry``: seconds from now, or a Unix time; 0 is never.
        """
        return await self._ask("set", lambda number: self.operations.set(key, value, number, expiry, cas))

    async def add(self, key: str | bytes, value: bytes, *, expiry: int = 0) -> int:
        """Write a document that must not exist yet (``KeyExists`` if it does); returns its CAS."""
        return await self._ask("add", lambda number: self.operations.add(key, value, number, expiry))

    async def delete(self, key: str | bytes, *, cas: int = 0) -> int:
        """Remove a document (``KeyNotFound`` if there is none); returns the CAS of its tombstone."""
        return await self._ask("delete", lambda number: self.operations.delete(key, number, cas))

    async def set_many(self, documents: Mapping[bytes, bytes]) -> None:
        """Write many documents, pipelined per node, in no particular order.

        Raises the first error that a retry cannot fix; some documents may have been written then.
        """
        await self._ask("set_many", lambda number: self.operations.set_many(documents, number))


class AsyncDatabase(AsyncKeyValue):
    """One bucket. Any number of tasks may use it at once.

    Its document methods are for the default collection; ``collection`` gives the others.
    """

    def __init__(self, options: ConnectOptions) -> None:
        super().__init__(Operations(options, options.seeds))
        self.options = options
        self._connections: dict[Address, AsyncConversation] = {}
        self._opening: dict[Address, asyncio.Lock] = {}
        self._ids = CollectionIds(self.operations)
        self._feeds: set[AsyncChangeFeed[Any]] = set()

    async def __aenter__(self) -> AsyncDatabase:
        try:
            self.operations.seeds = await asyncio.to_thread(srv_seeds, self.options)
            await self.run(self.operations.bootstrap())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, and all feeds of this database; their positions stay readable."""
        for feed in list(self._feeds):
            await feed.close()
        for address in list(self._connections):
            self._drop(address)

    def collection(self, name: str) -> AsyncCollection:
        """A collection by its name, ``"scope.collection"``, or ``"collection"`` in the default scope.

        This sends no request. The first request looks the name up, and raises ``UnknownCollection`` or
        ``UnknownScope`` if it does not exist. A collection that is dropped and created again is found again.
        """
        return AsyncCollection(self, name)

    async def _ask(self, name: str, make: Callable[[int], Operation[T]]) -> T:
        return await self.run(make(DEFAULT_COLLECTION), name)

    # ---------------------------------------------------------------------------------------------- cluster

    @property
    def topology(self) -> Topology:
        """The newest cluster map seen so far."""
        return self.operations.topology

    async def refresh(self) -> Topology:
        """Ask for the newest cluster map."""
        return await self.run(self.operations.bootstrap())

    async def high_seqnos(self, *, complete: bool = True) -> dict[int, int]:
        """The high seqno of every vbucket. ``complete`` waits for vbuckets that are moving; else they are left out."""
        return await self.run(self.operations.high_seqnos(complete=complete))

    async def failover_logs(self, vbuckets: Iterable[int]) -> dict[int, FailoverLog]:
        """The failover log of each vbucket."""
        return await self.run(self.operations.failover_logs(vbuckets))

    async def persisted_seqnos(self, branches: Mapping[int, int]) -> dict[int, int]:
        """The seqno up to which each vbucket's branch (by its vbuuid) is on disk everywhere; 0 if unknown."""
        return await self.run(self.operations.persisted(branches))

    async def manifest(self) -> dict[str, Any]:
        """The collections manifest, as parsed JSON."""
        return await self.run(self.operations.manifest())

    async def collections(self) -> list[str]:
        """The names of all collections, as ``collection`` takes them."""
        return sorted(map(".".join, (await self.run(self.operations.collection_names())).values()))

    async def stats(self, group: str = "") -> dict[str, dict[str, str]]:
        """A group of statistics from every node, by address."""
        return await self.run(self.operations.stats(group))

    # ---------------------------------------------------------------------------------------------- the feed

    def changes(self, **options: Unpack[FeedKeywords]) -> AsyncChangeFeed[Change]:
        """Changes one by one, as typed objects: ``async for change in db.changes(end="now")``."""
        from upriver.client._feed.aio_feed import AsyncChangeFeed

        return AsyncChangeFeed(self, FeedOptions.of(**options), batches=False)

    def change_batches(self, **options: Unpack[FeedKeywords]) -> AsyncChangeFeed[pa.RecordBatch]:
        """Changes as Arrow batches in the schema ``upriver.records.schema.CHANGES``."""
        from upriver.client._feed.aio_feed import AsyncChangeFeed

        return AsyncChangeFeed(self, FeedOptions.of(**options), batches=True)

    # ---------------------------------------------------------------------------------------------- conversations

    async def run(self, operation: Operation[T], name: str = "") -> T:
        """For upriver's own modules: run an operation, traced as ``name``."""
        with span(name or getattr(operation, "__name__", "operation"), self.options.bucket):
            return await self._run(operation)

    async def _run(self, operation: Operation[T]) -> T:
        try:
            step = next(operation)
            while True:
                try:
                    result = await self._perform(step)
                except (ConnectFailed, StatusError, RemoteProtocolError) as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(result)
        except StopIteration as finished:
            return finished.value  # type: ignore[no-any-return]

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, Connect):
            self._drop(step.address)
            return (await self._connect(step.address)).config
        if isinstance(step, Features):
            return (await self._connect(step.address)).session.features
        if isinstance(step, AskRun):
            return await (await self._connect(step.address)).ask_run(step.run)
        return await (await self._connect(step.address)).ask(step.messages, step.ends)

    async def _connect(self, address: Address) -> AsyncConversation:
        async with self._opening.setdefault(address, asyncio.Lock()):
            found = self._connections.get(address)
            if found is None or found.broken:
                found = await converse_async(address, self.options, again=self.operations.connected)
                self._connections[address] = found
            return found

    def _drop(self, address: Address) -> None:
        if connection := self._connections.pop(address, None):
            connection.close()


class AsyncCollection(AsyncKeyValue):
    """The documents of one collection; made by ``AsyncDatabase.collection``."""

    def __init__(self, database: AsyncDatabase, name: str) -> None:
        super().__init__(database.operations)
        self.name = ".".join(path_of(name))
        self._database = database

    async def high_seqnos(self) -> dict[int, int]:
        """The seqno of the collection's newest change in every vbucket; vbuckets that are moving are left out."""
        return await self._ask("high_seqnos", self.operations.high_seqnos)

    async def _ask(self, name: str, make: Callable[[int], Operation[T]]) -> T:
        return await self._database.run(self._database._ids.within(self.name, make), name)
