"""The client for threads: ``with upriver.connect(...) as db``, then documents, seqnos and the change feed.

``upriver.client.aio`` has the same names with the same parameters for asyncio.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from upriver.client._requests.connections import converse
from upriver.client._requests.operations import AskRun, Connect, Features, Operation, Operations, Pause, Step
from upriver.client.names import CollectionIds, path_of
from upriver.client.options import ConnectKeywords, ConnectOptions
from upriver.client.reading import FeedKeywords, FeedOptions
from upriver.client.srv import srv_seeds
from upriver.client.telemetry import span
from upriver.errors import ConnectFailed, RemoteProtocolError, StatusError
from upriver.model import DEFAULT_COLLECTION, Document, FailoverLog
from upriver.net.conversation import Conversation
from upriver.protocol.topology import Address, Topology

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client._feed.blocking_feed import ChangeFeed
    from upriver.client.changes import Change

T = TypeVar("T")


def connect(
    connection: str | ConnectOptions, bucket: str | None = None, **options: Unpack[ConnectKeywords]
) -> Database:
    """Connect to a bucket of a cluster; returns when connected. Use it with ``with``, which closes it.

    ``connection`` is ``couchbase://host1,host2:port?option=value`` (``couchbases://``: with TLS), or ``ConnectOptions``
    with everything in it. ``ConfigError`` for options that cannot work, ``ConnectFailed`` if no node answers,
    ``AuthenticationFailed`` for a wrong name or password.
    """
    return Database(ConnectOptions.of(connection, bucket, **options))


class KeyValue(ABC):
    """Documents of one collection. Requests follow documents to other nodes, and are retried after temporary errors."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations

    @abstractmethod
    def _ask(self, name: str, make: Callable[[int], Operation[T]]) -> T:
        """Run the operation that ``make`` returns for the collection's id; ``name`` is for tracing."""

    def get(self, key: str | bytes) -> Document:
        """The document with its CAS; ``KeyNotFound`` if there is none."""
        return self._ask("get", lambda number: self.operations.get(key, number))

    def set(self, key: str | bytes, value: bytes, *, expiry: int = 0, cas: int = 0) -> int:
        """Write a document; returns its new CAS.

        With ``cas``, write only if that is still the document's CAS (``KeyExists`` if not, ``KeyNotFound`` if there is
        no document). ``expiry``: seconds from now, or a Unix time; 0 is never.
        """
        return self._ask("set", lambda number: self.operations.set(key, value, number, expiry, cas))

    def add(self, key: str | bytes, value: bytes, *, expiry: int = 0) -> int:
        """Write a document that must not exist yet (``KeyExists`` if it does); returns its CAS."""
        return self._ask("add", lambda number: self.operations.add(key, value, number, expiry))

    def delete(self, key: str | bytes, *, cas: int = 0) -> int:
        """Remove a document (``KeyNotFound`` if there is none); returns the CAS of its tombstone."""
        return self._ask("delete", lambda number: self.operations.delete(key, number, cas))

    def set_many(self, documents: Mapping[bytes, bytes]) -> None:
        """Write many documents, pipelined per node, in no particular order.

        Raises the first error that a retry cannot fix; some documents may have been written then.
        """
        self._ask("set_many", lambda number: self.operations.set_many(documents, number))


class Database(KeyValue):
    """One bucket, with blocking sockets. Not for several threads at once.

    Its document methods are for the default collection; ``collection`` gives the others.
    """

    def __init__(self, options: ConnectOptions, *, again: bool = False) -> None:
        """``again``: these options have worked before, so a missing bucket is a ``ConnectFailed`` (a node restarts).

        Otherwise a missing bucket raises the node's error.
        """
        super().__init__(Operations(options, srv_seeds(options)))
        self.options, self._again = options, again
        self._connections: dict[Address, Conversation] = {}
        self._ids = CollectionIds(self.operations)
        self._feeds: set[ChangeFeed[Any]] = set()
        try:
            self.run(self.operations.bootstrap())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and all feeds of this database; their positions stay readable."""
        for feed in list(self._feeds):
            feed.close()
        for address in list(self._connections):
            self._drop(address)

    def collection(self, name: str) -> Collection:
        """A collection by its name, ``"scope.collection"``, or ``"collection"`` in the default scope.

        This sends no request. The first request looks the name up, and raises ``UnknownCollection`` or
        ``UnknownScope`` if it does not exist. A collection that is dropped and created again is found again.
        """
        return Collection(self, name)

    def _ask(self, name: str, make: Callable[[int], Operation[T]]) -> T:
        return self.run(make(DEFAULT_COLLECTION), name)

    # ---------------------------------------------------------------------------------------------- cluster

    @property
    def topology(self) -> Topology:
        """The newest cluster map seen so far."""
        return self.operations.topology

    def refresh(self) -> Topology:
        """Ask for the newest cluster map."""
        return self.run(self.operations.bootstrap())

    def high_seqnos(self, *, complete: bool = True) -> dict[int, int]:
        """The high seqno of every vbucket. ``complete`` waits for vbuckets that are moving; else they are left out."""
        return self.run(self.operations.high_seqnos(complete=complete))

    def failover_logs(self, vbuckets: Iterable[int]) -> dict[int, FailoverLog]:
        """The failover log of each vbucket."""
        return self.run(self.operations.failover_logs(vbuckets))

    def persisted_seqnos(self, branches: Mapping[int, int]) -> dict[int, int]:
        """The seqno up to which each vbucket's branch (by its vbuuid) is on disk everywhere; 0 if unknown."""
        return self.run(self.operations.persisted(branches))

    def manifest(self) -> dict[str, Any]:
        """The collections manifest, as parsed JSON."""
        return self.run(self.operations.manifest())

    def collections(self) -> list[str]:
        """The names of all collections, as ``collection`` takes them."""
        return sorted(map(".".join, self.run(self.operations.collection_names()).values()))

    def stats(self, group: str = "") -> dict[str, dict[str, str]]:
        """A group of statistics from every node, by address."""
        return self.run(self.operations.stats(group))

    # ---------------------------------------------------------------------------------------------- the feed

    def changes(self, **options: Unpack[FeedKeywords]) -> ChangeFeed[Change]:
        """Changes one by one, as typed objects: ``for change in db.changes(end="now")``."""
        from upriver.client._feed.blocking_feed import ChangeFeed

        return ChangeFeed(self, FeedOptions.of(**options), batches=False)

    def change_batches(self, **options: Unpack[FeedKeywords]) -> ChangeFeed[pa.RecordBatch]:
        """Changes as Arrow batches in the schema ``upriver.records.schema.CHANGES``."""
        from upriver.client._feed.blocking_feed import ChangeFeed

        return ChangeFeed(self, FeedOptions.of(**options), batches=True)

    # ---------------------------------------------------------------------------------------------- conversations

    def run(self, operation: Operation[T], name: str = "") -> T:
        """For upriver's own modules: run an operation, traced as ``name``."""
        with span(name or getattr(operation, "__name__", "operation"), self.options.bucket):
            return self._run(operation)

    def _run(self, operation: Operation[T]) -> T:
        try:
            step = next(operation)
            while True:
                try:
                    result = self._perform(step)
                except (ConnectFailed, StatusError, RemoteProtocolError) as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(result)
        except StopIteration as finished:
            return finished.value  # type: ignore[no-any-return]

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        if isinstance(step, Connect):
            self._drop(step.address)
            return self._connect(step.address).config
        if isinstance(step, Features):
            return self._connect(step.address).session.features
        connection = self._connect(step.address)
        try:
            if isinstance(step, AskRun):
                return connection.ask_run(step.run)
            return connection.ask(step.messages, step.ends)
        except BaseException:
            self._drop(step.address)  # late answers must not be taken for those to the next request
            raise

    def _connect(self, address: Address) -> Conversation:
        if address not in self._connections:
            again = self._again or self.operations.connected
            self._connections[address] = converse(address, self.options, again=again)
        return self._connections[address]

    def _drop(self, address: Address) -> None:
        if connection := self._connections.pop(address, None):
            connection.close()


class Collection(KeyValue):
    """The documents of one collection; made by ``Database.collection``."""

    def __init__(self, database: Database, name: str) -> None:
        super().__init__(database.operations)
        self.name = ".".join(path_of(name))
        self._database = database

    def high_seqnos(self) -> dict[int, int]:
        """The seqno of the collection's newest change in every vbucket; vbuckets that are moving are left out."""
        return self._ask("high_seqnos", self.operations.high_seqnos)

    def _ask(self, name: str, make: Callable[[int], Operation[T]]) -> T:
        return self._database.run(self._database._ids.within(self.name, make), name)


def collection_names(database: Database) -> dict[int, tuple[str, str]]:
    """For upriver's own modules: the scope and name of each collection, by id."""
    return database.run(database.operations.collection_names())
