"""The asyncio client: ``async with upriver.connect(...) as db``, then documents, seqnos and the change feed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from upriver.client._requests.connections import converse_async
from upriver.client._requests.operations import AskRun, Connect, Features, Operation, Operations, Pause, Step
from upriver.client.options import ConnectOptions
from upriver.client.srv import srv_seeds
from upriver.client.tracing import span
from upriver.errors import ConnectFailed, RemoteProtocolError, StatusError
from upriver.model import Document, FailoverLog
from upriver.net.aio_conversation import AsyncConversation
from upriver.protocol.topology import Address, Topology

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client._feed.aio_feed import AsyncFeed
    from upriver.client.changes import Change

T = TypeVar("T")


def connect(
    connection: str | ConnectOptions,
    bucket: str | None = None,
    username: str | None = None,
    password: str | None = None,
    **options: Any,
) -> AsyncDatabase:
    """A bucket of a cluster, to be used with ``async with``. Options as in ``ConnectOptions``."""
    return AsyncDatabase(ConnectOptions.of(connection, bucket=bucket, username=username, password=password, **options))


class AsyncDatabase:
    """One bucket of a cluster; any number of tasks may use it."""

    def __init__(self, options: ConnectOptions) -> None:
        self.options = options
        self._connections: dict[Address, AsyncConversation] = {}
        self._opening: dict[Address, asyncio.Lock] = {}
        self._operations = Operations(options, options.seeds)
        self._feeds: set[AsyncFeed[Any]] = set()

    async def __aenter__(self) -> AsyncDatabase:
        try:
            self._operations.seeds = await asyncio.to_thread(srv_seeds, self.options)
            await self.run(self._operations.bootstrap())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        for feed in list(self._feeds):
            await feed.close()
        for address in list(self._connections):
            self._drop(address)

    # ---------------------------------------------------------------------------------------------- cluster

    @property
    def topology(self) -> Topology:
        """The newest cluster map that we have seen."""
        return self._operations.topology

    async def refresh(self) -> Topology:
        """Ask for the newest cluster map."""
        return await self.run(self._operations.bootstrap())

    async def run(self, operation: Operation[T]) -> T:
        """Do what an operation asks for until it has its result."""
        with span(getattr(operation, "__name__", "operation"), self.options.bucket):
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
                found = await converse_async(address, self.options, again=self._operations.connected)
                self._connections[address] = found
            return found

    def _drop(self, address: Address) -> None:
        if connection := self._connections.pop(address, None):
            connection.close()

    # ---------------------------------------------------------------------------------------------- documents

    async def get(self, key: str | bytes, collection_id: int = 0) -> Document:
        """A document; ``KeyNotFound`` if there is none."""
        return await self.run(self._operations.get(key, collection_id))

    async def set(
        self, key: str | bytes, value: bytes, collection_id: int = 0, *, expiry: int = 0, cas: int = 0
    ) -> int:
        """Write a document (with ``cas``: only if that is still its CAS); its new CAS."""
        return await self.run(self._operations.set(key, value, collection_id, expiry, cas))

    async def add(self, key: str | bytes, value: bytes, collection_id: int = 0, *, expiry: int = 0) -> int:
        """Write a document that must not exist yet (``KeyExists``); its CAS."""
        return await self.run(self._operations.add(key, value, collection_id, expiry))

    async def delete(self, key: str | bytes, collection_id: int = 0, *, cas: int = 0) -> int:
        """Remove a document; the CAS of its tombstone."""
        return await self.run(self._operations.delete(key, collection_id, cas))

    async def set_many(self, documents: Mapping[bytes, bytes], collection_id: int = 0) -> None:
        """Write many documents, pipelined per node."""
        await self.run(self._operations.set_many(documents, collection_id))

    # ---------------------------------------------------------------------------------------------- history

    async def high_seqnos(self, collection_id: int | None = None, *, complete: bool = True) -> dict[int, int]:
        """The high seqno of every active vbucket (of one collection); ``complete`` waits for those on the move."""
        return await self.run(self._operations.high_seqnos(collection_id, complete=complete))

    async def failover_logs(self, vbuckets: Iterable[int]) -> dict[int, FailoverLog]:
        """The failover log of each vbucket."""
        return await self.run(self._operations.failover_logs(vbuckets))

    async def manifest(self) -> dict[str, Any]:
        """The collections manifest."""
        return await self.run(self._operations.manifest())

    async def collection_names(self) -> dict[int, tuple[str, str]]:
        """Scope and collection name by collection id."""
        return await self.run(self._operations.collection_names())

    async def collection_id(self, path: str) -> int:
        """The id of ``scope.collection``."""
        return await self.run(self._operations.collection_id(path))

    async def stats(self, group: str = "") -> dict[str, dict[str, str]]:
        """A group of statistics of every node, by its address."""
        return await self.run(self._operations.stats(group))

    # ---------------------------------------------------------------------------------------------- the feed

    def changes(self, **read: Any) -> AsyncFeed[Change]:
        """Changes one by one, as typed objects: ``async for change in db.changes(start="now")``.

        Options as in ``ReadOptions``; ``checkpoint`` and ``request`` as in the blocking ``Database.feed``.
        """
        from upriver.client._feed.aio_feed import AsyncFeed
        from upriver.client.changes import ObjectMaker

        return AsyncFeed(self, ObjectMaker, read, batches=False)

    def change_batches(self, **read: Any) -> AsyncFeed[pa.RecordBatch]:
        """Changes as Arrow batches in the schema ``upriver.records.CHANGES``."""
        from upriver.client._feed.aio_feed import AsyncFeed
        from upriver.client._feed.arrow import BatchMaker

        return AsyncFeed(self, BatchMaker, read, batches=True)
