"""A bucket's manifests: kept on disk by uid, and applied to the vbuckets.

A new manifest goes to disk first, then into every active vbucket, with a few commits for all of them. Other threads can
take the lock between two vbuckets. After a crash in the middle, the next start applies the rest.

The record of a vbucket is written with every commit. It names its manifest only by uid: a thousand collections would be
most of what a commit writes. A manifest is kept as long as a vbucket refers to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any

from upriver.errors import CorruptStore, InvalidArguments
from upriver.model import VbucketState
from upriver.store.collections.manifest import Manifest
from upriver.store.disk.file import Disk
from upriver.store.disk.sealed import seal_record
from upriver.store.log.flusher import Flusher
from upriver.store.shared import Shared
from upriver.store.vbucket import VBucket

PutIdentity = Callable[[Any, Manifest], None]

_PREFIX = b"manifest"
_KEY = Struct(">8sQ")


class ManifestChanges:
    """Changes a bucket's manifest, one change at a time: the thread that makes one holds ``turn``."""

    def __init__(self, shared: Shared, flusher: Flusher, vbuckets: dict[int, VBucket]) -> None:
        self._shared, self._flusher, self._vbuckets = shared, flusher, vbuckets
        self.turn = threading.Lock()

    def keep(self, new: Manifest, check: Callable[[], None], put_identity: PutIdentity) -> None:
        """Make ``new`` the bucket's manifest, durably; vbuckets created or emptied from now on adopt it."""
        shared = self._shared
        with shared.commit_lock:
            shared.manifest.check_successor(new)
            check()
            shared.check_room()
            if new == shared.manifest:
                return
            with shared.disk.write() as transaction:
                put_manifest(transaction, shared.disk, new)
                put_identity(transaction, new)
                unused = self._unused()
                drop_manifests(transaction, shared.disk, unused)
            with shared.lock:
                shared.manifest = shared.manifests[new.uid] = new
                for uid in unused:
                    del shared.manifests[uid]

    def _unused(self) -> list[int]:
        """Manifests that no vbucket refers to. While changes wait there are none: the disk may refer to older ones."""
        with self._shared.lock:
            if self._shared.dirty:
                return []
            used = {vbucket.collections.manifest.uid for vbucket in self._vbuckets.values()}
        return [uid for uid in self._shared.manifests if uid not in used]

    def apply(self) -> None:
        """Bring the active vbuckets up to the bucket's manifest; durable on return."""
        with self._shared.lock:
            waiting = list(self._vbuckets.values())
        while waiting:
            with self._shared.commit_lock:  # keeps the flusher from committing the first ones separately
                self._apply_to(waiting.pop())
                while waiting and self._shared.dirty_bytes < self._shared.options.flush_bytes:
                    self._apply_to(waiting.pop())
                self._flusher.flush_unless_paused()

    def _apply_to(self, vbucket: VBucket) -> None:
        with self._shared.lock:
            known, wanted = vbucket.collections.manifest, self._shared.manifest
            if vbucket.state is VbucketState.ACTIVE and known.uid <= wanted.uid and known != wanted:
                vbucket.collections.apply_manifest(self._shared.transition_from(known))

    def catch_up(self) -> None:
        """After a start: apply what a crash kept the vbuckets from applying."""
        for vbucket in self._vbuckets.values():
            if vbucket.collections.lags_behind:
                vbucket.collections.adopt_manifest()
        if self._shared.dirty:
            self._flusher.flush()


def _ignore(damage: CorruptStore) -> None:
    """A vbucket that refers to a damaged manifest reports it."""


def read_manifests(disk: Disk, on_damage: Callable[[CorruptStore], None] = _ignore) -> dict[int, Manifest]:
    """The undamaged manifests on disk, by uid."""
    found: dict[int, Manifest] = {}
    with disk.read() as transaction:
        cursor = transaction.cursor(db=disk.meta)
        more = cursor.set_range(_PREFIX)
        while more and bytes(cursor.key()).startswith(_PREFIX):
            try:
                manifest = _parse(disk.bucket_record(bytes(cursor.key()), disk.value(cursor)), disk)
                found[manifest.uid] = manifest
            except CorruptStore as damage:
                on_damage(damage)
            more = cursor.next()
    return found


def _parse(fields: dict[str, Any], disk: Disk) -> Manifest:
    try:
        return Manifest.parse(fields["manifest"])
    except (KeyError, TypeError, InvalidArguments) as failure:
        raise CorruptStore(f"{disk.file}: a manifest is damaged: {failure}") from failure


def put_manifest(transaction: Any, disk: Disk, manifest: Manifest) -> None:
    key, fields = _KEY.pack(_PREFIX, manifest.uid), {"manifest": manifest.to_json().decode()}
    transaction.put(key, seal_record(key, fields), db=disk.meta)


def drop_manifests(transaction: Any, disk: Disk, uids: Iterable[int]) -> None:
    for uid in uids:
        transaction.delete(_KEY.pack(_PREFIX, uid), db=disk.meta)
