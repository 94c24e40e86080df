"""How a bucket gets a new manifest: on disk first, then into every active vbucket, a few commits for all of them.

Others read and write meanwhile; between two vbuckets they may have the lock. If a crash comes in the middle, the next
start goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from upriver.model import VbucketState
from upriver.store.collections import kept as kept_manifests
from upriver.store.collections.manifest import Manifest
from upriver.store.log.flusher import Flusher
from upriver.store.shared import Shared
from upriver.store.vbucket import VBucket

PutIdentity = Callable[[Any, Manifest], None]


class ManifestChanges:
    """The changes of one bucket, one after the other: ``turn`` is held by who makes one."""

    def __init__(self, shared: Shared, flusher: Flusher, vbuckets: dict[int, VBucket]) -> None:
        self._shared, self._flusher, self._vbuckets = shared, flusher, vbuckets
        self.turn = threading.Lock()

    def keep(self, new: Manifest, check: Callable[[], None], put_identity: PutIdentity) -> None:
        """Make it the bucket's manifest: from here on vbuckets that are created or emptied catch up with it."""
        shared = self._shared
        with shared.commit_lock:
            shared.manifest.check_successor(new)
            check()
            shared.check_room()
            if new == shared.manifest:
                return
            with shared.disk.write() as transaction:
                kept_manifests.put(transaction, shared.disk, new)
                put_identity(transaction, new)
                unused = self._unused()
                kept_manifests.drop(transaction, shared.disk, unused)
            with shared.lock:
                shared.manifest = shared.manifests[new.uid] = new
                for uid in unused:
                    del shared.manifests[uid]

    def _unused(self) -> list[int]:
        """Those that no vbucket refers to any more; what is not on disk yet may still be referred to there."""
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
            with self._shared.commit_lock:  # the flusher would begin with the first ones: one commit is enough
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
        """After a start: a crash may have come between a manifest and what vbuckets make of it."""
        for vbucket in self._vbuckets.values():
            if vbucket.collections.lags_behind:
                vbucket.collections.adopt_manifest()
        if self._shared.dirty:
            self._flusher.flush()
