"""The client for threads and Spark executors: documents, seqnos, and the change feed as Arrow batches.

One thread pumps all connections of a feed. Memory is bounded by the flow-control window per node: its bytes are
acknowledged when the caller comes back for more.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from upriver.client.kv import KvConnection, make_session
from upriver.client.options import ConnectOptions
from upriver.errors import NotMyVbucket, RemoteProtocolError, StatusError
from upriver.model import Document, FailoverLog, Position, VbucketState, vbucket_of
from upriver.net.blocking import ConnectFailed, Pipe, Poller
from upriver.net.blocking import connect as connect_socket
from upriver.protocol.feed import Advanced, Feed, FeedEvent, FeedRequest
from upriver.protocol.session import FeedSettings, config_json
from upriver.protocol.topology import Address, Topology, parse_topology
from upriver.wire.cluster import (
    GetAllVbSeqnos,
    GetAllVbSeqnosResponse,
    GetFailoverLog,
    GetFailoverLogResponse,
    GetManifest,
)
from upriver.wire.keys import join_key
from upriver.wire.kv import Delete, Get, GetResponse, MutationResponse, Set

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_WINDOW = 20 * 1024 * 1024
MAX_BACKOFF_S = 5.0


def connect(connection: str, bucket: str = "default", **options: Any) -> Database:
    """A bucket of a cluster; a context manager. Options as in ``ConnectOptions``."""
    return Database(ConnectOptions.parse(connection, bucket=bucket, **options))


class Database:
    """One bucket, reached by blocking sockets. Not for several threads at once."""

    def __init__(self, options: ConnectOptions) -> None:
        self.options = options
        self._connections: dict[Address, KvConnection] = {}
        self.topology = self._bootstrap()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # ---------------------------------------------------------------------------------------------- cluster

    def _bootstrap(self) -> Topology:
        """The cluster map from the first seed that answers."""
        failures = []
        for seed in self.options.seeds:
            try:
                connection = self._connect(seed)
            except (ConnectFailed, RemoteProtocolError) as error:
                failures.append(str(error))
                continue
            return self._parse(connection.session.config or b"", seed.host)
        raise ConnectFailed("no node could be reached: " + "; ".join(failures))

    def _parse(self, config: bytes, host: str) -> Topology:
        return parse_topology(config_json(config), host, tls=self.options.tls, network=self.options.network)

    def _connect(self, address: Address) -> KvConnection:
        if address not in self._connections:
            self._connections[address] = KvConnection(address, self.options)
        return self._connections[address]

    def _drop(self, address: Address) -> None:
        if connection := self._connections.pop(address, None):
            connection.close()

    def refresh(self) -> Topology:
        """Ask for the newest cluster map."""
        for address in list(self._connections):
            self._drop(address)
        self.topology = self._bootstrap()
        return self.topology

    def _owner(self, vbucket: int) -> KvConnection:
        owner = self.topology.active(vbucket)
        if owner is None:
            raise NotMyVbucket(f"no node owns vbucket {vbucket} in the current cluster map")
        return self._connect(owner)

    # ---------------------------------------------------------------------------------------------- documents

    def get(self, key: str | bytes, collection_id: int = 0) -> Document:
        raw = _raw(key)
        vb = vbucket_of(raw, self.topology.vbuckets)
        response = self._owner(vb).ask(Get(join_key(collection_id, raw), vbucket=vb))
        assert isinstance(response, GetResponse)
        meta = {"flags": response.flags, "datatype": response.datatype}
        return Document(raw, response.value, collection_id, response.cas, **meta)

    def set(self, key: str | bytes, value: bytes, collection_id: int = 0, *, expiry: int = 0, cas: int = 0) -> int:
        """Write a document; its new CAS."""
        raw = _raw(key)
        vb = vbucket_of(raw, self.topology.vbuckets)
        message = Set(0, expiry, join_key(collection_id, raw), value, vbucket=vb, cas=cas)
        response = self._owner(vb).ask(message)
        assert isinstance(response, MutationResponse)
        return response.cas

    def delete(self, key: str | bytes, collection_id: int = 0) -> int:
        raw = _raw(key)
        vb = vbucket_of(raw, self.topology.vbuckets)
        return self._owner(vb).ask(Delete(join_key(collection_id, raw), vbucket=vb)).cas

    def set_many(self, documents: Mapping[bytes, bytes], collection_id: int = 0) -> None:
        """Write many documents, pipelined per node; the first refusal is raised after all were sent."""
        by_node: dict[Address, list[Set]] = {}
        for key, value in documents.items():
            vb = vbucket_of(key, self.topology.vbuckets)
            owner = self._owner(vb).address
            by_node.setdefault(owner, []).append(Set(0, 0, join_key(collection_id, key), value, vbucket=vb))
        failure: StatusError | None = None
        for address, messages in by_node.items():
            for response in self._connect(address).pipeline(messages):
                if response.status and failure is None:
                    failure = StatusError.of(response.status, str(address))
        if failure:
            raise failure

    # ---------------------------------------------------------------------------------------------- history

    def high_seqnos(self) -> dict[int, int]:
        """The high seqno of every active vbucket."""
        found: dict[int, int] = {}
        for address in self.topology.nodes:
            response = self._connect(address).ask(GetAllVbSeqnos(VbucketState.ACTIVE))
            assert isinstance(response, GetAllVbSeqnosResponse)
            found.update((entry.vbucket, entry.seqno) for entry in response.seqnos)
        return found

    def failover_logs(self, vbuckets: Iterator[int] | range | list[int]) -> dict[int, FailoverLog]:
        """The failover log of each vbucket."""
        by_node: dict[Address, list[int]] = {}
        for vb in vbuckets:
            by_node.setdefault(self._owner(vb).address, []).append(vb)
        found: dict[int, FailoverLog] = {}
        for address, owned in by_node.items():
            answers = self._connect(address).pipeline(GetFailoverLog(vbucket=vb) for vb in owned)
            for vb, answer in zip(owned, answers, strict=True):
                if not isinstance(answer, GetFailoverLogResponse):
                    raise StatusError.of(answer.status, f"failover log of vbucket {vb} at {address}")
                found[vb] = FailoverLog(answer.entries)
        return found

    def collection_names(self) -> dict[int, tuple[str, str]]:
        """Scope and collection name by collection id."""
        response = self._connect(self.topology.nodes[0]).ask(GetManifest())
        manifest = config_json(getattr(response, "value", b""))
        return {
            int(collection["uid"], 16): (scope["name"], collection["name"])
            for scope in manifest["scopes"]
            for collection in scope["collections"]
        }

    # ---------------------------------------------------------------------------------------------- the feed

    def feed(self, request: FeedRequest | None = None, *, window: int = DEFAULT_WINDOW, name: str = "") -> BlockingFeed:
        """A feed that this thread will pump; everything from the beginning by default."""
        if request is None:
            request = FeedRequest({vb: Position() for vb in range(self.topology.vbuckets)})
        settings = FeedSettings(name or f"upriver:{secrets.token_hex(6)}", buffer_bytes=window)
        feed = Feed(
            request, self.topology, lambda: make_session(self.options, settings), window, tls=self.options.tls
        )
        return BlockingFeed(feed, self.options, self.collection_names())

    def change_batches(self, request: FeedRequest | None = None, **options: Any) -> Iterator[pa.RecordBatch]:
        """Changes as Arrow batches in the schema ``upriver.records.CHANGES``."""
        with self.feed(request, **options) as feed:
            yield from feed.batches()


def _raw(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


class BlockingFeed:
    """Pumps a ``Feed`` from the calling thread."""

    def __init__(self, feed: Feed, options: ConnectOptions, names: Mapping[int, tuple[str, str]]) -> None:
        self.feed, self.options = feed, options
        self.names = dict(names)
        self.reconnects = 0
        self._poller = Poller()
        self._pipes: dict[Address, Pipe] = {}
        self._backoff: dict[Address, float] = {}
        self._try_at: dict[Address, float] = {}

    def __enter__(self) -> BlockingFeed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for address in list(self._pipes):
            self._disconnect(address)
        self._poller.close()

    def positions(self) -> dict[int, Position]:
        """What may be claimed of what has been yielded so far."""
        return self.feed.positions()

    def batches(self, *, rows: int = 16_384, idle_s: float | None = None) -> Iterator[pa.RecordBatch]:
        """Arrow batches until the feed is done, or until nothing came for ``idle_s`` seconds."""
        from upriver.client.arrow import BatchMaker

        maker = BatchMaker(self.names, rows)
        quiet_since = time.monotonic()
        while not self.feed.done:
            came = False
            for event in self.events(0.05):
                came = came or not isinstance(event, Advanced)
                yield from maker.add(self.feed, event)
            yield from maker.flush(self.feed)
            if came:
                quiet_since = time.monotonic()
            elif idle_s is not None and time.monotonic() - quiet_since >= idle_s:
                return

    def events(self, timeout_s: float) -> Iterator[FeedEvent]:
        """One round: connect what is missing, wait, and yield what came."""
        self._maintain_links()
        yield from self.feed.tick(time.monotonic())
        self._flush()
        by_pipe = {pipe: address for address, pipe in self._pipes.items()}
        for pipe in self._poller.wait(timeout_s):
            yield from self._read(by_pipe[pipe], pipe)

    def _read(self, address: Address, pipe: Pipe) -> Iterator[FeedEvent]:
        link = self.feed.links[address]
        try:
            size = pipe.read_into(link.buffer())
            if size == 0:
                self._lost(address)
            elif size > 0:
                yield from self.feed.received(address, size, time.monotonic())
                pipe.write(link.data_to_send())
        except OSError:
            self._lost(address)

    def _flush(self) -> None:
        for address, pipe in list(self._pipes.items()):
            try:
                pipe.write(self.feed.links[address].data_to_send())
            except OSError:
                self._lost(address)

    def _maintain_links(self) -> None:
        now = time.monotonic()
        for address in self.feed.wanted() - self._pipes.keys():
            if self._try_at.get(address, 0.0) <= now:
                self._connect(address)

    def _connect(self, address: Address) -> None:
        try:
            tls = self.options.ssl_context()
            sock = connect_socket(address.host, address.port, self.options.connect_timeout_s, tls)
        except ConnectFailed:
            self._lost(address)
            return
        pipe = Pipe(sock)
        self._pipes[address] = pipe
        self._poller.add(pipe)
        pipe.write(self.feed.connected(address).data_to_send())

    def _lost(self, address: Address) -> None:
        self.reconnects += 1
        delay = self._backoff.get(address, 0.05)
        self._backoff[address] = min(MAX_BACKOFF_S, delay * 2)
        jittered = delay * (0.5 + secrets.randbelow(1000) / 1000)
        self._try_at[address] = time.monotonic() + jittered
        self.feed.lost(address, time.monotonic())
        self._disconnect(address)

    def _disconnect(self, address: Address) -> None:
        if pipe := self._pipes.pop(address, None):
            with suppress(KeyError, ValueError):
                self._poller.remove(pipe)
            pipe.close()


