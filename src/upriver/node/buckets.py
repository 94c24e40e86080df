"""The buckets of a node, each in its own directory; a broken bucket does not keep the others from opening.

The store reports from its flusher thread what is on disk; everything else here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upriver.errors import (
    ConfigError,
    DamagedVbucket,
    DirectoryInUse,
    KeyExists,
    KeyNotFound,
    NotMyVbucket,
    TemporaryFailure,
    UpriverError,
)
from upriver.files import replace_file
from upriver.model import VbucketState
from upriver.node import log
from upriver.node.bucket_settings import BucketSettings
from upriver.node.cluster.manifest_changes import Proposals
from upriver.node.dcp.live import LiveTurns
from upriver.protocol.consumer.streams import Registry
from upriver.store import Bucket, StoreOptions, claim

if TYPE_CHECKING:
    from upriver.node.cluster.cluster_map import KeptMap
    from upriver.node.cluster.durability import SyncWrites
    from upriver.node.connection import ClientConnection
    from upriver.node.dcp.replicator import Replicator
    from upriver.store import VBucket

_NAME = re.compile(r"[A-Za-z0-9._%-]{1,100}\Z")
_XATTR_MARK = "upriver.xattrs"
_MARK = "upriver.bucket"  # marks the directories that are buckets


class PersistenceWaits:
    """Requests of one bucket that wait until a seqno is on disk: SEQNO_PERSISTENCE and durable writes."""

    def __init__(self, store: Bucket, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._waiting: dict[int, dict[asyncio.Future[None], int]] = {}  # by vbucket: futures and their seqnos
        store.listeners.on_persisted = self._from_flusher

    def until(self, vbucket_id: int, seqno: int) -> asyncio.Future[None]:
        """A future that is done when ``seqno`` is on disk; cancel it to stop waiting."""
        vbucket = self._store.vbucket(vbucket_id)
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(vbucket_id, {})[future] = seqno
        future.add_done_callback(partial(self._forget, vbucket_id))
        # Checked after the future is registered: the flusher may have reported the seqno just before.
        if vbucket.persisted_seqno >= seqno:
            future.set_result(None)
        return future

    def cancel(self) -> None:
        """The bucket closes: cancel every future."""
        for waiting in list(self._waiting.values()):
            for future in list(waiting):
                future.cancel()

    def _forget(self, vbucket_id: int, future: asyncio.Future[None]) -> None:
        """Drop a future that is done or cancelled."""
        waiting = self._waiting.get(vbucket_id, {})
        waiting.pop(future, None)
        if not waiting:
            self._waiting.pop(vbucket_id, None)

    def _from_flusher(self, written: list[tuple[int, int]]) -> None:
        if self._waiting and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._persisted, written)

    def _persisted(self, written: list[tuple[int, int]]) -> None:
        for vbucket_id, seqno in written:
            for future, wanted in list(self._waiting.get(vbucket_id, {}).items()):
                if wanted <= seqno and not future.done():
                    future.set_result(None)


class NodeBucket:
    """A bucket as connections use it: the store, its DCP connections, and the requests that wait for its disk."""

    def __init__(self, store: Bucket, path: Path) -> None:
        self.store = store
        self._xattr_mark = path / _XATTR_MARK
        self.has_xattrs = self._xattr_mark.exists()
        self.name: str = store.name
        self.dcp_connections: dict[str, ClientConnection] = {}  # by name, of producers and consumers
        self.passive_streams = Registry()  # of vbuckets that this node consumes, over all connections
        self.member = False  # of a cluster: its map decides the states of vbuckets
        self.waits_for_map = False  # none in this run yet; the one on disk may be from before a failover
        self.sync_writes: SyncWrites  # set by the node
        self.replicator: Replicator | None = None
        self.settings = BucketSettings()
        self.proposals = Proposals()  # of changes that the manager decides on
        self.kept_map: KeptMap | None = None  # the newest that a manager pushed; read when first needed
        self.backed_up: set[int] = set()  # vbuckets whose writers wait for a takeover to catch up
        self.responses: Counter[int] = Counter()  # how often each status was answered
        self.traffic = True  # DISABLE_TRAFFIC stops KV operations with Etmpfail
        self.on_seqno_acknowledged: Callable[[int, str, int], None] | None = None  # vbucket, consumer, prepared seqno
        self._state_changes: dict[int, asyncio.Future[None]] = {}
        self.manifest_changes = asyncio.Lock()  # held while a new manifest is made from the present one
        self._loop = asyncio.get_running_loop()
        self.waits = PersistenceWaits(store, self._loop)
        self.live = LiveTurns(self, self._loop)
        store.listeners.on_damage = self._found_damage
        for error in list(store.damage.values()):
            self._found_damage(error)  # found while the store was opened

    def expect_xattrs(self) -> None:
        """From now on, a plain SET must look for extended attributes to keep."""
        if not self.has_xattrs:
            replace_file(self._xattr_mark, "")
            self.has_xattrs = True

    @property
    def uuid(self) -> str:
        return f"{self.store.uuid:032x}"

    def set_state(
        self, vbucket_id: int, state: VbucketState, *, takeover: bool = False, silent: bool = False,
        topology: Any = None, durable: bool = True,
    ) -> VBucket:  # fmt: skip
        """Change a vbucket's state, and wake the requests that wait for it (docs/protocol/vbuckets.md#states)."""
        vbucket = self.store.set_state(
            vbucket_id, state, takeover=takeover, silent=silent, topology=topology, durable=durable
        )
        self._state_changed(vbucket_id)
        if state is VbucketState.ACTIVE and not takeover:
            self.passive_streams.kill(vbucket_id)  # docs/protocol/vbuckets.md#set-vbucket
        self.sync_writes.state_changed(vbucket)
        return vbucket

    def set_states(self, states: Mapping[int, VbucketState]) -> None:
        """``set_state`` for many vbuckets at once, by a cluster map.

        Only new branches must be on disk before others see them: after a crash, the map decides the states again.
        """
        self.store.set_states(states, durable=VbucketState.ACTIVE in states.values())
        for vbucket_id, state in states.items():
            self._state_changed(vbucket_id)
            if state is VbucketState.ACTIVE:
                self.passive_streams.kill(vbucket_id)
                self.sync_writes.commit_all(self.store.vbucket(vbucket_id))
            self.sync_writes.state_changed(self.store.vbucket(vbucket_id))

    def on_disk(self) -> asyncio.Future[None]:
        """Done when everything written before is on disk, or at once while persistence is stopped."""
        return asyncio.get_running_loop().run_in_executor(None, self.store.flush_unless_paused)

    def delete_vbucket(self, vbucket_id: int) -> None:
        self.store.delete_vbucket(vbucket_id)
        self._state_changed(vbucket_id)

    async def state_change(self, vbucket_id: int, timeout_s: float | None = None) -> None:
        """Return when the vbucket's state changes, or after the timeout."""
        if vbucket_id not in self._state_changes:
            self._state_changes[vbucket_id] = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._state_changes[vbucket_id]], timeout=timeout_s)

    def _state_changed(self, vbucket_id: int) -> None:
        future = self._state_changes.pop(vbucket_id, None)
        if future is not None and not future.done():
            future.set_result(None)
        if vbucket_id in self.store.damage:
            self._loop.call_soon(self._heal, vbucket_id)

    def _found_damage(self, error: DamagedVbucket) -> None:
        """Called in any thread."""
        log.warning("vbucket_damaged", bucket=self.name, vbucket=error.vbucket, file=error.file, reason=error.what)
        self._loop.call_soon_threadsafe(self._heal, error.vbucket)

    def _heal(self, vbucket_id: int) -> None:
        """Erase a damaged replica, so that it is filled from its active again.

        A damaged active vbucket stays as it is: there may be no other copy of it.
        """
        if vbucket_id in self.store.unreadable:
            return  # making it a replica again erases it
        try:
            if self.store.vbucket(vbucket_id).state is not VbucketState.REPLICA:
                return
            self.passive_streams.kill(vbucket_id)
            self.store.begin_anew(vbucket_id)
        except NotMyVbucket:
            return
        except UpriverError as error:
            log.warning("replica_not_healed", bucket=self.name, vbucket=vbucket_id, reason=error)
            return
        log.warning("replica_begins_anew", bucket=self.name, vbucket=vbucket_id)

    async def apply_manifest(self, manifest: bytes) -> None:
        """Give the bucket a new manifest; in a thread, because that takes long with many vbuckets and collections."""
        await asyncio.get_running_loop().run_in_executor(None, self.store.apply_manifest, manifest)

    async def empty(self) -> None:
        """Start every vbucket again with an empty history; in a thread."""
        await asyncio.get_running_loop().run_in_executor(None, self.store.empty)
        for vbucket in self.store.existing():
            self._state_changed(vbucket.id)
            self.passive_streams.kill(vbucket.id)

    def stop(self) -> None:
        """End replication and everything that waits; the store stays open."""
        if self.replicator is not None:
            self.replicator.stop()
        self.sync_writes.cancel()
        self.waits.cancel()


def _disk_trouble(name: str, reason: str) -> None:
    if reason:
        log.warning("disk_trouble", bucket=name, reason=reason, effect="writes are refused until it is over")
    else:
        log.warning("disk_trouble_over", bucket=name)


class Buckets:
    """All buckets by name. ``broken`` says why one could not be opened."""

    def __init__(
        self,
        root: Path,
        vbuckets: int,
        options: StoreOptions,
        make_sync_writes: Callable[[NodeBucket], SyncWrites],
        *,
        member: bool = False,
    ) -> None:
        self._member = member
        self._root = root
        self._vbuckets = vbuckets
        self._options = options
        self._make_sync_writes = make_sync_writes
        self._open: dict[str, NodeBucket] = {}
        self.broken: dict[str, str] = {}

    def open_all(self) -> None:
        """Open every bucket directory; raises ``DirectoryInUse`` if another process has one of them open."""
        self._root.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._root.iterdir()):
            if (path / _MARK).is_file():
                self._open_one(path)

    def _open_one(self, path: Path) -> None:
        try:
            vbuckets = int((path / _MARK).read_text())
            settings = BucketSettings.load(path)
            options = settings.store_options(self._options)
            store = Bucket.open(path, name=path.name, vbuckets=vbuckets, options=options)
        except DirectoryInUse:
            raise
        except (UpriverError, OSError, ValueError) as error:
            self.broken[path.name] = str(error) or type(error).__name__
            log.warning("bucket_broken", bucket=path.name, reason=self.broken[path.name])
            return
        self._open[path.name] = self._node_bucket(store, path, settings)
        log.info("bucket_open", bucket=path.name, vbuckets=vbuckets)

    def _node_bucket(self, store: Bucket, path: Path, settings: BucketSettings) -> NodeBucket:
        bucket = NodeBucket(store, path)
        bucket.settings = settings
        bucket.sync_writes = self._make_sync_writes(bucket)
        bucket.traffic = not self._member
        bucket.waits_for_map = self._member
        store.listeners.on_trouble = partial(_disk_trouble, bucket.name)
        if not self._member:  # a member waits for its manager's map
            bucket.sync_writes.resume_all()
        return bucket

    def create(
        self,
        name: str,
        vbuckets: int | None = None,
        settings: BucketSettings = BucketSettings(),  # noqa: B008
    ) -> NodeBucket:
        """Create a bucket; its vbuckets are active here, unless this node is a member of a cluster."""
        if not _NAME.match(name) or name.startswith("."):
            raise ConfigError(f"{name!r} is not a bucket name: letters, digits and . _ % - only")
        if name in self._open or name in self.broken:
            raise KeyExists(f"bucket {name} exists")
        path = self._root / name
        path.mkdir(parents=True, exist_ok=True)
        count = vbuckets or self._vbuckets
        store = Bucket.open(path, name=name, vbuckets=count, options=settings.store_options(self._options))
        if not self._member:
            store.create_all(VbucketState.ACTIVE)
        store.flush()
        settings.save(path)
        replace_file(path / _MARK, str(count))
        self._open[name] = self._node_bucket(store, path, settings)
        log.info("bucket_created", bucket=name, vbuckets=count)
        return self._open[name]

    def change_settings(self, bucket: NodeBucket, settings: BucketSettings) -> None:
        """Apply settings now, and keep them for the next start."""
        settings.save(self._root / bucket.name)
        bucket.settings = settings
        bucket.store.change_options(settings.store_options(self._options))

    def delete(self, name: str) -> None:
        """Close a bucket and erase its data. The caller has closed its connections."""
        bucket = self._open.pop(name, None)
        if bucket is None and name not in self.broken:
            raise KeyNotFound(f"no bucket {name}")
        if bucket is not None:
            bucket.stop()
            bucket.store.close()
        self._erase(self._root / name)
        self.broken.pop(name, None)
        log.info("bucket_deleted", bucket=name)

    def _erase(self, path: Path) -> None:
        """Erase a directory, unless another process has it open and would keep writing to deleted files."""
        if not path.exists():
            return
        try:
            owner = claim(path)
        except (DirectoryInUse, OSError) as error:
            raise TemporaryFailure(f"{path.name} is not erased: {error}") from error
        with owner:
            shutil.rmtree(path)

    def find(self, name: str) -> NodeBucket | None:
        return self._open.get(name)

    def get(self, name: str) -> NodeBucket:
        bucket = self._open.get(name)
        if bucket is None:
            raise KeyNotFound(f"no bucket {name}")
        return bucket

    def names(self) -> list[str]:
        return sorted(self._open)

    def __iter__(self) -> Iterator[NodeBucket]:
        return iter(list(self._open.values()))

    async def close(self) -> None:
        """Flush and mark every bucket clean; one that fails does not keep the others from closing."""
        loop = asyncio.get_running_loop()
        for bucket in self:
            try:
                bucket.stop()
                await loop.run_in_executor(None, bucket.store.close)
            except (UpriverError, OSError):
                log.failure("bucket_close_failed", bucket=bucket.name)
        self._open.clear()
