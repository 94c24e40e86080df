"""A bucket: vbuckets that share a directory, a flusher and a memory quota."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from upriver.errors import DamagedVbucket, NotMyVbucket, OutOfRange, TemporaryFailure
from upriver.model import SEQNO_MAX, FailoverLog, VbucketState
from upriver.store.arrays import POOL, keep_heap
from upriver.store.collections.changes import ManifestChanges, put_manifest, read_manifests
from upriver.store.collections.manifest import Manifest
from upriver.store.disk.file import BUCKET, FORMAT, Disk, meta_key, seal_vbucket
from upriver.store.disk.sealed import seal_record
from upriver.store.log.flusher import Flusher
from upriver.store.opening import check_identity, read_vbuckets, survive_crash
from upriver.store.options import StoreOptions
from upriver.store.record import describe
from upriver.store.shared import Shared
from upriver.store.upkeep.compaction import compact, wants_compaction
from upriver.store.upkeep.emptying import empty
from upriver.store.upkeep.expiry import expire_due
from upriver.store.vbucket import VBucket
from upriver.wire.packed import EndReason

WORTH_KEEPING = 512  # records whose keys are in no key table
SLICE = 4  # vbuckets that one call of ``maintain`` compacts


def random_uuid() -> int:
    """48 random bits, never 0 (docs/protocol/rollback.md#failover-log)."""
    return secrets.randbits(48) or 1


class Bucket:
    """An open bucket; ``open`` makes it. Its methods block and are for one thread, unless they say otherwise.

    Its vbuckets may be used from any thread. ``listeners`` are called when changes become durable, or cannot.
    """

    def __init__(self, name: str, vbuckets: int, shared: Shared, identity: dict[str, Any]) -> None:
        self.name = name
        self.vbuckets = vbuckets
        self.uuid = int(identity["uuid"])
        self.options = shared.options
        self._identity = identity
        self._shared = shared
        self.listeners = shared.listeners
        self._vbuckets: dict[int, VBucket] = {}
        self._unreadable: dict[int, str] = {}  # vbuckets whose records are damaged, and how
        self._flusher = Flusher(shared)
        self._manifests = ManifestChanges(shared, self._flusher, self._vbuckets)
        self._closed = self._closing = False
        self.opened_clean = True  # the last shutdown was clean: nothing was lost

    @classmethod
    def open(
        cls, path: str | Path, *, name: str, vbuckets: int = 1024, options: StoreOptions | None = None,
        now_ns: Callable[[], int] = time.time_ns, uuids: Callable[[], int] = random_uuid,
    ) -> Bucket:  # fmt: skip
        """Open the bucket in this directory, or create one; refuses files that are damaged or not ours."""
        options = options or StoreOptions()
        disk = Disk(Path(path), options)
        try:
            return cls._opened(disk, name, vbuckets, options, now_ns, uuids)
        except BaseException:
            disk.close()
            raise

    @classmethod
    def _opened(
        cls, disk: Disk, name: str, vbuckets: int, options: StoreOptions, now_ns: Callable[[], int],
        uuids: Callable[[], int],
    ) -> Bucket:  # fmt: skip
        stored = disk.identity()
        identity = stored or {
            "format": FORMAT, "uuid": uuids(), "seed": secrets.randbits(63), "vbuckets": vbuckets, "name": name,
            "clean": True, "manifest": None, "sealed": True,
        }  # fmt: skip
        check_identity(identity, disk, vbuckets)
        manifest = Manifest.parse(identity["manifest"]) if identity["manifest"] else Manifest()
        shared = Shared(disk, options, int(identity["seed"]), now_ns, manifest, uuids)
        shared.manifests = read_manifests(disk)
        if manifest.uid:
            shared.manifests[manifest.uid] = manifest  # also kept in the bucket's record
        shared.change_options(options, vbuckets)
        bucket = cls(name, vbuckets, shared, identity)
        bucket._load(clean=bool(identity["clean"]), fresh=stored is None)
        POOL.allow(options.spare_bytes)
        keep_heap(options.batch_bytes)
        if options.background:
            bucket._flusher.start()
        return bucket

    def _load(self, clean: bool, fresh: bool) -> None:
        """Read every vbucket's record; after a crash begin new branches, durably, before anything is served."""
        shared = self._shared
        self.opened_clean = clean
        found, self._unreadable = read_vbuckets(shared, self.vbuckets, self._identity["format"], fresh)
        self._vbuckets.update(found)
        shared.vbucket_count = len(found)
        # A vbucket that must catch up with the manifest writes new events where readers may be ahead: as after a crash.
        branching = [vb for vb in found.values() if not clean or vb.collections.lags_behind]
        for vbucket in branching:
            survive_crash(vbucket)
        disk = shared.disk
        disk.begin_writing()
        with disk.write() as transaction:
            self._put_identity(transaction, clean=False)
            if shared.manifest.uid:
                put_manifest(transaction, disk, shared.manifest)  # repairs a damaged copy
            for vbucket in branching:
                transaction.put(meta_key(vbucket.id), seal_vbucket(vbucket.id, describe(vbucket)), db=disk.meta)
            disk.put_present(transaction, shared.present)
        self._manifests.catch_up()

    def _put_identity(self, transaction: Any, clean: bool) -> None:
        self._identity.update(clean=clean, format=FORMAT, manifest=_manifest_field(self._shared.manifest))
        transaction.put(BUCKET, seal_record(BUCKET, self._identity), db=self._shared.disk.meta)

    # ---- persistence and closing ----

    def flush(self) -> None:
        """Everything written before this call is durable when it returns; raises ``DiskFull``."""
        self._flusher.flush()

    def flush_unless_paused(self) -> None:
        """``flush``, unless persistence is paused: then the changes become durable when it resumes."""
        self._flusher.flush_unless_paused()

    def stop_persistence(self) -> bool:
        """Keep everything in memory until ``start_persistence``; False if persistence is stopped already.

        Until then ``persisted_seqno`` stands still and changes of state are not durable. Operations that need an
        up-to-date disk (compaction, rollback, deletion, a manifest) raise ``TemporaryFailure``; so do writes when too
        much waits in memory. ``close`` still persists everything.
        """
        if self._flusher.paused:
            return False
        self._flusher.pause()
        return True

    def start_persistence(self) -> bool:
        """Undo ``stop_persistence``; False if persistence is running already."""
        if not self._flusher.paused:
            return False
        self._flusher.resume()
        return True

    def close(self) -> None:
        """Persist everything and mark the shutdown as clean."""
        if self._closed:
            return
        self._end_upkeep()
        self._flusher.stop()
        self._flusher.resume()
        self._end_streams()
        self._freeze_keys()
        try:
            self._flusher.flush()
            with self._shared.commit_lock, self._shared.disk.write() as transaction:
                self._put_identity(transaction, clean=True)
        except BaseException:
            self._release()
            raise
        self._release(clean=True)

    def _freeze_keys(self) -> None:
        """Write key tables for vbuckets where the next start would otherwise read many records."""
        with self._shared.lock:
            for vbucket in self._vbuckets.values():
                if vbucket.high_seqno - vbucket.indexed_seqno > WORTH_KEEPING:
                    vbucket.keys.freeze(vbucket.high_seqno)
                    self._shared.note_dirty(vbucket, 0)

    def abandon(self) -> None:
        """Close without flushing, as a crash would."""
        if not self._closed:
            self._end_upkeep()
            self._flusher.stop()
            self._end_streams()
            self._release()

    def _end_upkeep(self) -> None:
        """Wait until background work has finished its current vbucket; it begins no other."""
        self._closing = True
        with self._manifests.turn, self._shared.commit_lock:
            pass

    def _release(self, clean: bool = False) -> None:
        self._closed = True
        with self._shared.lock:
            for vbucket in self._vbuckets.values():  # else its memory would stay until the next garbage collection
                vbucket.memory.clear(vbucket.high_seqno)
                vbucket.keys.clear()
        self._shared.disk.close(clean)
        POOL.allow(-self.options.spare_bytes)

    def _end_streams(self) -> None:
        with self._shared.lock:
            for vbucket in self._vbuckets.values():
                vbucket.end_streams(EndReason.STATE_CHANGED)

    def __enter__(self) -> Bucket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def change_options(self, options: StoreOptions) -> None:
        """Change quota and max TTL; the other options stay as they are."""
        options = replace(self.options, quota_bytes=options.quota_bytes, max_ttl_s=options.max_ttl_s)
        with self._shared.lock:
            POOL.allow(options.spare_bytes - self.options.spare_bytes)
            self.options = options
            self._shared.change_options(options, self.vbuckets)

    # ---- vbuckets ----

    def vbucket(self, vbucket_id: int) -> VBucket:
        try:
            return self._vbuckets[vbucket_id]
        except KeyError:
            self._check_readable(vbucket_id)
            raise NotMyVbucket(f"no vbucket {vbucket_id} here") from None

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Vbuckets whose records are damaged, and what is wrong.

        Such a vbucket can become a replica, which starts empty, or be deleted; anything else is refused.
        """
        return self._unreadable

    def _check_readable(self, vbucket_id: int) -> None:
        if vbucket_id in self._unreadable:
            raise self._shared.disk.damaged(vbucket_id, self._unreadable[vbucket_id])

    def existing(self) -> Iterator[VBucket]:
        """The vbuckets of this bucket, ordered by id."""
        return iter([self._vbuckets[number] for number in sorted(self._vbuckets)])

    def set_state(
        self, vbucket_id: int, state: VbucketState, *, takeover: bool = False, silent: bool = False,
        topology: Any = None, durable: bool = True,
    ) -> VBucket:  # fmt: skip
        """Change the state of a vbucket, creating it if it is missing; durable on return unless ``durable`` is False.

        Becoming active begins a new branch (docs/protocol/rollback.md#failover-log), except in a takeover.
        Streams end, unless ``silent`` (a producer's own step from active to dead, docs/protocol/vbuckets.md#takeover).
        Later writes to the vbucket never become durable before its state does.
        """
        vbucket = self._change_state(vbucket_id, state, takeover, silent, topology)
        if durable:
            self._flusher.flush_unless_paused()
        return vbucket

    def set_states(self, states: Mapping[int, VbucketState], *, durable: bool = True) -> None:
        """``set_state`` for many vbuckets, made durable together."""
        for vbucket_id, state in states.items():
            self._change_state(vbucket_id, state, takeover=False, silent=False, topology=None)
        if durable:
            self._flusher.flush_unless_paused()

    def create_all(self, state: VbucketState = VbucketState.ACTIVE) -> None:
        """Create every vbucket that is missing, with one commit."""
        for vbucket_id in range(self.vbuckets):
            if vbucket_id not in self._vbuckets and vbucket_id not in self._unreadable:
                self._change_state(vbucket_id, state, takeover=False, silent=False, topology=None)
        self._flusher.flush_unless_paused()

    def _change_state(
        self, vbucket_id: int, state: VbucketState, takeover: bool, silent: bool, topology: Any
    ) -> VBucket:
        if not 0 <= vbucket_id < self.vbuckets:
            raise OutOfRange(f"vbucket {vbucket_id} of {self.vbuckets}")
        if state is VbucketState.REPLICA and vbucket_id in self._unreadable:
            self._erase_unreadable(vbucket_id)
        self._check_readable(vbucket_id)
        with self._shared.lock:
            vbucket = self._vbuckets.get(vbucket_id)
            if vbucket is None:
                vbucket = VBucket(self._shared, vbucket_id, state, FailoverLog.new(self._shared.random_uuid()))
                self._vbuckets[vbucket_id] = vbucket
                self._shared.vbucket_count = len(self._vbuckets)
                if state is VbucketState.ACTIVE:  # others learn it from their active
                    vbucket.collections.adopt_manifest()
            elif vbucket.state is not state:
                vbucket.change_state(state, takeover=takeover, silent=silent)
            if topology is not None or state is not VbucketState.ACTIVE:
                vbucket.topology = topology
            self._shared.note_dirty(vbucket, 0)
            return vbucket

    def delete_vbucket(self, vbucket_id: int) -> None:
        """Erase the vbucket; its streams end."""
        if vbucket_id in self._unreadable:
            self._erase_unreadable(vbucket_id)
            return
        vbucket = self.vbucket(vbucket_id)
        with self._shared.commit_lock, self._shared.lock:
            self._flusher.flush()
            vbucket.state = VbucketState.DEAD
            vbucket.end_streams(EndReason.STATE_CHANGED)
            self._erase(vbucket_id)
            vbucket.memory.clear(0)
            vbucket.keys.clear()
            del self._vbuckets[vbucket_id]
            self._shared.vbucket_count = len(self._vbuckets)

    def _erase_unreadable(self, vbucket_id: int) -> None:
        with self._shared.commit_lock:
            self._check_open()
            self._erase(vbucket_id)
            del self._unreadable[vbucket_id]

    def _erase(self, vbucket_id: int) -> None:
        """Erase the vbucket on disk, and forget its damage."""
        disk = self._shared.disk
        present = self._shared.present - {vbucket_id}
        with disk.write() as transaction:
            disk.erase(transaction, vbucket_id)
            disk.erase_tables(transaction, vbucket_id)
            transaction.delete(meta_key(vbucket_id), db=disk.meta)
            disk.put_present(transaction, present)
        self._shared.present = present
        disk.damage.pop(vbucket_id, None)

    def empty(self) -> None:
        """Remove all documents: every vbucket begins a new history and its streams end. Durable on return.

        May be called in any thread; other threads can read and write meanwhile.
        """
        for number in self._unreadable:
            self._check_readable(number)  # its state is unknown
        with self._manifests.turn:
            empty(self._shared, self._vbuckets, self._check_open)
            self._manifests.apply()

    def _check_open(self) -> None:
        if self._closing:
            raise TemporaryFailure("the bucket is being closed")
        self._flusher.check_running()

    # ---- collections ----

    @property
    def manifest(self) -> Manifest:
        return self._shared.manifest

    def apply_manifest(self, data: bytes | str) -> None:
        """Make this the bucket's manifest; active vbuckets write its system events. Durable on return.

        May be called in any thread; other threads can read and write meanwhile.

        See docs/protocol/collections.md#applying.
        """
        new = Manifest.parse(data)
        with self._manifests.turn:
            self._manifests.keep(new, self._check_open, self._put_new_manifest)
            self._manifests.apply()

    def _put_new_manifest(self, transaction: Any, manifest: Manifest) -> None:
        record = {**self._identity, "manifest": _manifest_field(manifest)}
        transaction.put(BUCKET, seal_record(BUCKET, record), db=self._shared.disk.meta)

    # ---- upkeep ----

    def compact(
        self, vbucket_id: int | None = None, *, purge_before_s: int | None = None,
        purge_before_seqno: int | None = None, drop_deletes: bool = False,
    ) -> None:  # fmt: skip
        """Reclaim the space of old versions and dropped collections, and purge old tombstones."""
        if purge_before_s is None:
            purge_before_s = self._shared.now_s - self.options.purge_age_s
        chosen = list(self.existing()) if vbucket_id is None else [self.vbucket(vbucket_id)]
        for vbucket in chosen:
            cutoff = self._shared.now_s if drop_deletes else purge_before_s
            compact(vbucket, cutoff, SEQNO_MAX if purge_before_seqno is None else purge_before_seqno)

    def maintain(self, most: int = SLICE) -> int:
        """One slice of background work: compact the vbuckets that need it. Returns how many are left."""
        waiting = [vbucket for vbucket in self._present() if wants_compaction(vbucket)]
        for vbucket in waiting[:most]:
            with self._shared.commit_lock:
                if self._may_maintain(vbucket):
                    with suppress(DamagedVbucket):  # ``on_damage`` was called; continue with the others
                        compact(vbucket, self._shared.now_s - self.options.purge_age_s, SEQNO_MAX)
        return max(0, len(waiting) - most) if not self._flusher.paused else 0

    def run_expiry_pager(self) -> int:
        """Turn expired documents into tombstones, each with a new seqno; returns how many."""
        expired = 0
        for vbucket in self._present():
            with self._shared.commit_lock:
                if self._may_maintain(vbucket) and vbucket.state is VbucketState.ACTIVE:
                    with suppress(DamagedVbucket):
                        expired += expire_due(vbucket)
        return expired

    def _present(self) -> list[VBucket]:
        with self._shared.lock:  # upkeep runs in another thread
            return list(self.existing())

    def _may_maintain(self, vbucket: VBucket) -> bool:
        """False if the vbucket was deleted, the bucket is closing, or persistence is paused."""
        return not self._closing and not self._flusher.paused and self._vbuckets.get(vbucket.id) is vbucket

    @property
    def damage(self) -> Mapping[int, DamagedVbucket]:
        """The first damage found in each vbucket since the bucket was opened."""
        return self._shared.disk.damage

    def begin_anew(self, vbucket_id: int) -> None:
        """Empty a replica, damaged or not, so that its active can fill it again."""
        self.vbucket(vbucket_id).rollback(0)
        self._shared.disk.damage.pop(vbucket_id, None)

    def trim_memory(self, wanted_bytes: int = 0) -> None:
        """Evict checkpoints that are on disk until the memory log has this size; slow streams then read from disk."""
        with self._shared.lock:
            self._shared.evict(wanted_bytes)

    # ---- gauges ----

    @property
    def dirty_bytes(self) -> int:
        return self._shared.dirty_bytes

    @property
    def memory_bytes(self) -> int:
        """The size of the memory log and the overlays."""
        return self._shared.log_gauge.bytes + self._shared.index_gauge.bytes

    def stats(self) -> dict[str, int]:
        """Figures for people and for STAT."""
        vbuckets = list(self._vbuckets.values())
        return {
            "items": sum(vb.item_count for vb in vbuckets),
            "tombstones": sum(vb.tombstone_count for vb in vbuckets),
            "expired": sum(vb.expired_count for vb in vbuckets),
            "streams": sum(len(vb.sources) for vb in vbuckets),
            "memory_bytes": self.memory_bytes,
            "log_bytes": self._shared.log_gauge.bytes,
            "index_bytes": self._shared.index_gauge.bytes,
            "dirty_bytes": self.dirty_bytes,
            "quota_bytes": self.options.quota_bytes,
            "disk_bytes": self.disk_bytes,
            "commits": self._flusher.commits,
            "disk_full": int(self._shared.disk_full),
            "paused": int(self._flusher.paused),
            "manifest_uid": self._shared.manifest.uid,
        }

    @property
    def disk_bytes(self) -> int:
        return self._shared.disk.size_bytes

    def wait_for_room(self, timeout_s: float = 60.0) -> bool:
        """Block until writes are accepted again, for loaders; False after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self._shared.dirty_bytes > self._shared.options.dirty_bytes // 2 or self._shared.disk_full:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


def _manifest_field(manifest: Manifest) -> str | None:
    return manifest.to_json().decode() if manifest.uid else None
