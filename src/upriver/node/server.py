"""The node: opens the buckets, listens, runs the housekeeping, and closes cleanly.

``Node`` belongs to one event loop. ``start`` returns when every port listens and no request will have to wait for a
compiler; ``stop`` leaves nothing behind and marks the buckets clean, so that the next start makes no failover entry.
"""

from __future__ import annotations

import asyncio
import errno
import time
from functools import partial
from typing import TYPE_CHECKING

from upriver.errors import ConfigError, CorruptStore, UpriverError
from upriver.node import log, warmup
from upriver.node.access import auth
from upriver.node.access.connection_limits import ConnectionLimits
from upriver.node.access.tls import tls_context
from upriver.node.buckets import Buckets, NodeBucket
from upriver.node.budget import MemoryLimits
from upriver.node.cluster.cluster_map import ClusterMap, NodeAddress, push_map
from upriver.node.cluster.durability import SyncWrites
from upriver.node.cluster.kept_map import KeptMap
from upriver.node.commands.table import COMMANDS
from upriver.node.connection import ClientConnection
from upriver.node.data_directory import DataDirectory
from upriver.node.housekeeping import Housekeeping
from upriver.node.http import routes
from upriver.node.options import VERSION, NodeOptions
from upriver.node.persistence import PersistenceWaits
from upriver.protocol.producer.machine import ProducerMemory

if TYPE_CHECKING:
    from upriver.node.http.routes import HttpServer

_BACKLOG = 512


class Node:
    """A server and everything it knows."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.version = VERSION
        self.commands = COMMANDS
        self.connections: set[ClientConnection] = set()
        self.logins = auth.Logins()
        self.producer_memory = ProducerMemory()
        self.started = time.monotonic()
        self.kv_port = self.http_port = self.tls_port = 0
        self.connection_limits = ConnectionLimits(options.limits)
        self.memory = MemoryLimits(options.limits)
        self.total_connections = 0
        self._servers: list[asyncio.Server] = []
        self._maps: dict[str, ClusterMap] = {}
        self._map_json: dict[str, tuple[int, bytes]] = {}  # with the uid of the manifest that it names
        self._http: HttpServer | None = None
        self._housekeeping = Housekeeping(self)

    async def start(self) -> None:
        """Serve. Raises what keeps the node from serving at all, and then leaves everything as it found it."""
        self.loop = asyncio.get_running_loop()
        self._directory = DataDirectory.claim(self.options.data)
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        options = self.options
        make_waits = partial(PersistenceWaits, loop=self.loop)
        make_sync_writes = partial(SyncWrites, self)
        self.buckets = Buckets(
            options.data, options.vbuckets, options.store, make_waits, make_sync_writes, member=options.member
        )
        await self.loop.run_in_executor(None, warmup.warm_up)
        self._open_buckets()
        self.users = auth.load(options)
        self._users_seen = self.users.version
        await self._listen()
        self._housekeeping.start()
        log.info("serving", host=options.host, kv_port=self.kv_port, http_port=self.http_port)

    def _open_buckets(self) -> None:
        """Open all buckets and create the one that was asked for; raises if all of them are broken."""
        buckets, wanted = self.buckets, self.options.bucket
        buckets.open_all()
        if wanted and buckets.find(wanted) is None and wanted not in buckets.broken:
            try:
                buckets.create(wanted)
            except OSError as error:
                raise UpriverError(f"bucket {wanted} cannot be made in {self.options.data}: {error}") from error
        if buckets.broken and not buckets.names():
            reasons = "; ".join(f"{name}: {reason}" for name, reason in buckets.broken.items())
            raise CorruptStore(f"no bucket can be opened ({reasons}); restore it, or delete its directory")

    async def _listen(self) -> None:
        """Bind every port, then serve: the cluster map names all of them, and is asked for on any."""
        options = self.options
        self.kv_port = await self._bind(options.kv_port)
        if options.tls_port is not None:
            self.tls_port = await self._bind(options.tls_port, tls=True)
        self._http = await routes.start(self)
        self.http_port = self._http.port
        for server in self._servers:
            await server.start_serving()
        await self._http.serve()

    async def _bind(self, port: int, tls: bool = False) -> int:
        context = tls_context(self.options) if tls else None
        server = await self.loop.create_server(
            partial(ClientConnection, self, tls),
            self.options.host,
            port,
            backlog=_BACKLOG,
            ssl=context,
            start_serving=False,
        )
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close every connection and bucket."""
        self._housekeeping.stop()
        for server in self._servers:
            server.close()
        if self._http is not None:
            await self._http.close()
        for conn in list(self.connections):
            conn.close("the node is stopping")
        for _ in range(20):
            if not self.connections:
                break
            await asyncio.sleep(0.01)
        for conn in list(self.connections):
            conn.abort("the node has stopped")
        await asyncio.sleep(0)
        self.logins.close()
        await self.buckets.close()
        self._directory.release()
        log.info("stopped")

    # ------------------------------------------------------------------------------------------ connections

    def connected(self, conn: ClientConnection) -> None:
        self.total_connections += 1
        self.connections.add(conn)
        self.connection_limits.connected(conn)
        if self.options.default_bucket:
            conn.bucket = self.buckets.find(self.options.default_bucket)  # what may be done there is asked at login
        auth.welcome(conn)
        log.info("connection_open", connection=conn.id, peer=conn.peer)

    def disconnected(self, conn: ClientConnection, reason: str) -> None:
        self.connections.discard(conn)
        self.connection_limits.disconnected(conn)
        log.info("connection_closed", connection=conn.id, peer=conn.peer, reason=reason)

    def refresh_rights(self) -> None:
        """Apply changes of the users' file to open connections."""
        self.users.refresh()
        if self.users.version != self._users_seen:
            self._users_seen = self.users.version
            for conn in [each for each in self.connections if each.user]:
                conn.grant(self.users.access(conn.user))

    # ------------------------------------------------------------------------------------------ cluster map

    def cluster_map(self, bucket: NodeBucket) -> ClusterMap:
        found = self._maps.get(bucket.name)
        if found is None:
            found = self._maps[bucket.name] = ClusterMap.alone(self.address, bucket.store.vbuckets)
        return found

    def set_cluster_map(self, bucket: NodeBucket, new: ClusterMap) -> None:
        """Take a new map and push it to clients that asked for that; others get it when they ask."""
        self._maps[bucket.name] = new
        self._map_json.pop(bucket.name, None)
        push_map(self, bucket)

    @property
    def address(self) -> NodeAddress:
        kv_port = self.options.advertised_kv_port or self.kv_port
        return NodeAddress(self.options.host, kv_port, self.http_port or None, self.tls_port or None)

    def cluster_json(self, bucket: NodeBucket) -> bytes:
        manifest_uid = bucket.store.manifest.uid
        known, found = self._map_json.get(bucket.name, (-1, b""))
        if known != manifest_uid:
            current = self.cluster_map(bucket)
            this_node = max(0, self.index_in(current))
            found = current.to_json(bucket.name, self.bucket_uuid(bucket), this_node, manifest_uid)
            self._map_json[bucket.name] = manifest_uid, found
        return found

    def bucket_uuid(self, bucket: NodeBucket) -> str:
        """The bucket's uuid: the same at all members of a cluster, and another after the bucket was created again."""
        known = KeptMap.of(self, bucket).map  # also before the first map of this run
        return (known.uuid if known is not None else "") or bucket.uuid

    def nodes_json(self) -> bytes:
        """The map without a bucket: all ports of all nodes, for clients that have not selected one."""
        known = next(iter(self._maps.values()), None) or ClusterMap.alone(self.address, 0)
        return known.to_json_without_bucket(max(0, self.index_in(known)))

    def index_in(self, cluster_map: ClusterMap) -> int:
        """Our place in a map's list of nodes, -1 if we are not in it."""
        mine = (self.address.host, self.address.kv)
        return next((n for n, each in enumerate(cluster_map.nodes) if (each.host, each.kv) == mine), -1)

    # ------------------------------------------------------------------------------------------ buckets

    def may_flush(self, bucket: NodeBucket) -> bool:
        """Whether a bucket may be flushed: never if other nodes have a part of it."""
        if len(self.cluster_map(bucket).nodes) > 1:
            return False
        allowed = bucket.settings.flush_enabled
        return self.options.enable_flush if allowed is None else allowed

    def shares(self, bucket: NodeBucket) -> bool:
        """Whether other nodes have a part of the bucket, by the newest map that this node ever had."""
        try:
            known = KeptMap.of(self, bucket).checked()
        except ConfigError:
            return True  # there was a map, and it cannot be read
        return known is not None and len(known.nodes) > 1 and self.index_in(known) >= 0

    def delete_bucket(self, name: str) -> None:
        """Disconnect its users, then erase it."""
        bucket = self.buckets.find(name)
        for conn in list(self.connections):
            if bucket is not None and conn.bucket is bucket:
                conn.abort("its bucket was deleted")
                if conn.dcp is not None:
                    conn.dcp.close()
                conn.select(None)
        self._maps.pop(name, None)
        self._map_json.pop(name, None)
        self.buckets.delete(name)


async def serve(options: NodeOptions) -> Node:
    """A started node; ``UpriverError`` with the reason if it cannot start."""
    node = Node(options)
    try:
        await node.start()
    except OSError as error:
        advice = "; choose another port" if error.errno == errno.EADDRINUSE else ""
        raise UpriverError(f"cannot serve on {options.host}: {error}{advice}") from error
    return node
