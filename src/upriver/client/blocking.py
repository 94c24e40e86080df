"""The client for threads and Spark executors: documents, seqnos, and the change feed as Arrow batches.

One thread pumps all connections of a feed. Memory is bounded by the flow-control window per node: its bytes are
acknowledged when the caller comes back for more.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from upriver.client._requests.connections import converse
from upriver.client._requests.operations import AskRun, Connect, Features, Operation, Operations, Pause, Step
from upriver.client.names import Names
from upriver.client.options import ConnectOptions
from upriver.client.srv import srv_seeds
from upriver.client.tracing import span
from upriver.errors import ConnectFailed, RemoteProtocolError, StatusError
from upriver.model import Document, FailoverLog
from upriver.net.conversation import Conversation
from upriver.protocol.feed.cluster_feed import FeedRequest
from upriver.protocol.topology import Address, Topology

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client._feed.blocking_feed import BlockingFeed
    from upriver.client.changes import Change
    from upriver.client.checkpoints import CheckpointStore
    from upriver.client.reading import ReadOptions

T = TypeVar("T")


def connect(connection: str | ConnectOptions, bucket: str | None = None, **options: Any) -> Database:
    """A bucket of a cluster; a context manager. Options as in ``ConnectOptions``."""
    return Database(ConnectOptions.of(connection, bucket=bucket, **options))


class Database:
    """One bucket, reached by blocking sockets. Not for several threads at once.

    ``again``: these options have worked before, so a bucket that is not there yet is ``ConnectFailed``, as any node
    that is away. To others, it is an error of its own.
    """

    def __init__(self, options: ConnectOptions, *, again: bool = False) -> None:
        self.options, self._again = options, again
        self._connections: dict[Address, Conversation] = {}
        self._operations = Operations(options, srv_seeds(options))
        try:
            self.run(self._operations.bootstrap())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for address in list(self._connections):
            self._drop(address)

    # ---------------------------------------------------------------------------------------------- cluster

    @property
    def topology(self) -> Topology:
        """The newest cluster map that we have seen."""
        return self._operations.topology

    def refresh(self) -> Topology:
        """Ask for the newest cluster map."""
        return self.run(self._operations.bootstrap())

    def run(self, operation: Operation[T]) -> T:
        """Do what an operation asks for until it has its result."""
        with span(getattr(operation, "__name__", "operation"), self.options.bucket):
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
            self._drop(step.address)  # whatever is left of the answers must not meet the next question
            raise

    def _connect(self, address: Address) -> Conversation:
        if address not in self._connections:
            again = self._again or self._operations.connected
            self._connections[address] = converse(address, self.options, again=again)
        return self._connections[address]

    def _drop(self, address: Address) -> None:
        if connection := self._connections.pop(address, None):
            connection.close()

    # ---------------------------------------------------------------------------------------------- documents

    def get(self, key: str | bytes, collection_id: int = 0) -> Document:
        """A document; ``KeyNotFound`` if there is none."""
        return self.run(self._operations.get(key, collection_id))

    def set(self, key: str | bytes, value: bytes, collection_id: int = 0, *, expiry: int = 0, cas: int = 0) -> int:
        """Write a document (with ``cas``: only if that is still its CAS); its new CAS."""
        return self.run(self._operations.set(key, value, collection_id, expiry, cas))

    def add(self, key: str | bytes, value: bytes, collection_id: int = 0, *, expiry: int = 0) -> int:
        """Write a document that must not exist yet (``KeyExists``); its CAS."""
        return self.run(self._operations.add(key, value, collection_id, expiry))

    def delete(self, key: str | bytes, collection_id: int = 0, *, cas: int = 0) -> int:
        """Remove a document; the CAS of its tombstone."""
        return self.run(self._operations.delete(key, collection_id, cas))

    def set_many(self, documents: Mapping[bytes, bytes], collection_id: int = 0) -> None:
        """Write many documents, pipelined per node; a refusal that no other try can mend is raised."""
        self.run(self._operations.set_many(documents, collection_id))

    # ---------------------------------------------------------------------------------------------- history

    def high_seqnos(self, collection_id: int | None = None, *, complete: bool = True) -> dict[int, int]:
        """The high seqno of every active vbucket (of one collection); ``complete`` waits for those on the move."""
        return self.run(self._operations.high_seqnos(collection_id, complete=complete))

    def failover_logs(self, vbuckets: Iterable[int]) -> dict[int, FailoverLog]:
        """The failover log of each vbucket."""
        return self.run(self._operations.failover_logs(vbuckets))

    def persisted_seqnos(self, branches: Mapping[int, int]) -> dict[int, int]:
        """Up to where each vbucket's branch is on disk everywhere; 0 where that is not known."""
        return self.run(self._operations.persisted(branches))

    # ---------------------------------------------------------------------------------------------- the rest

    def manifest(self) -> dict[str, Any]:
        """The collections manifest."""
        return self.run(self._operations.manifest())

    def collection_names(self) -> dict[int, tuple[str, str]]:
        """Scope and collection name by collection id."""
        return self.run(self._operations.collection_names())

    def collection_id(self, path: str) -> int:
        """The id of ``scope.collection``."""
        return self.run(self._operations.collection_id(path))

    def stats(self, group: str = "") -> dict[str, dict[str, str]]:
        """A group of statistics of every node, by its address."""
        return self.run(self._operations.stats(group))

    # ---------------------------------------------------------------------------------------------- the feed

    def feed(
        self,
        request: FeedRequest | None = None,
        *,
        window: int | None = None,
        name: str = "",
        checkpoint: CheckpointStore | None = None,
        **read: Any,
    ) -> BlockingFeed:
        """A feed that this thread will pump: what ``request`` says, or what ``ReadOptions`` say.

        With a ``checkpoint`` store it starts at the saved position, if there is one, and ``confirm`` saves it.
        """
        from upriver.client.reading import ReadOptions, missed, settled

        if checkpoint and (saved := checkpoint.load()):
            read["start"] = saved
        options = self.run(settled(self._operations, ReadOptions.of(**read, name=name)))
        earlier = [] if request else self.run(missed(self._operations, options))
        return self._feed(options, request, window, checkpoint, [self._feed(one, None, window) for one in earlier])

    def _feed(
        self,
        read: ReadOptions,
        request: FeedRequest | None,
        window: int | None,
        checkpoint: CheckpointStore | None = None,
        earlier: Sequence[BlockingFeed] = (),
    ) -> BlockingFeed:
        from upriver.client._feed.blocking_feed import BlockingFeed
        from upriver.client._feed.subscription import Subscription
        from upriver.client.reading import plan, settings_of

        settings = settings_of(self.options, read, read.name or default_name())
        if window is not None:
            settings = replace(settings, buffer_bytes=window)
        known = None if request else read.filter
        request = request or self.run(plan(self._operations, read))
        names = Names.of_manifest(self.manifest())
        subscription = Subscription(self._operations, request, settings, names, read, known)
        return BlockingFeed(subscription, self, checkpoint, earlier)

    def change_batches(self, request: FeedRequest | None = None, **options: Any) -> Iterator[pa.RecordBatch]:
        """Changes as Arrow batches in the schema ``upriver.records.CHANGES``; options as in ``ReadOptions``."""
        with self.feed(request, **options) as feed:
            yield from feed.batches()

    def changes(self, request: FeedRequest | None = None, **options: Any) -> Iterator[Change]:
        """Changes one by one, as typed objects; options as in ``ReadOptions``."""
        with self.feed(request, **options) as feed:
            yield from feed.changes()


def default_name() -> str:
    """A connection name that nobody else has: the same name twice would end the other connection."""
    return f"upriver:{secrets.token_hex(6)}"
