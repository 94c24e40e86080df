"""What the vbuckets of a bucket share: the file, the clock, the locks, the gauges, and what is not yet on disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upriver.errors import DamagedVbucket, TemporaryFailure
from upriver.store.arrays import Scratch
from upriver.store.collections.transition import Transition
from upriver.store.disk.file import Disk
from upriver.store.log.memory import Gauge, MemoryCheckpoint
from upriver.store.options import StoreOptions

if TYPE_CHECKING:
    from upriver.store.collections.manifest import Manifest
    from upriver.store.vbucket import VBucket


@dataclass(slots=True)
class Listeners:
    """The callbacks of the store, and the threads that they run in."""

    on_persisted: Callable[[list[tuple[int, int]]], None] | None = None
    """After every commit, in the thread that made it, with pairs of vbucket and persisted seqno."""
    on_room: Callable[[], None] | None = None
    """In the same thread, when writes are accepted again after a ``TemporaryFailure``."""
    on_trouble: Callable[[str], None] | None = None
    """In any thread: the reason why nothing can be written to disk, or "" once writing works again."""
    on_damage: Callable[[DamagedVbucket], None] | None = None
    """In any thread, when a vbucket is found damaged for the first time."""


class Shared:
    """One per bucket. ``lock`` guards everything in memory; ``commit_lock`` is held around every write transaction.

    A thread that needs both takes ``commit_lock`` first.
    """

    def __init__(
        self, disk: Disk, options: StoreOptions, seed: int, now_ns: Callable[[], int], manifest: Manifest,
        random_uuid: Callable[[], int],
    ) -> None:  # fmt: skip
        self.disk = disk
        self.options = options
        self.seed = seed
        self.now_ns = now_ns
        self.random_uuid = random_uuid
        self.manifest = manifest
        self.manifests: dict[int, Manifest] = {}  # the manifests kept on disk, by uid
        self._transition: Transition | None = None  # the one computed last
        self.listeners = Listeners()
        disk.on_damage = self._tell_damage
        self.lock = threading.RLock()
        self.commit_lock = threading.RLock()
        self.table_scratch = Scratch()  # for the holder of commit_lock
        self.log_gauge = Gauge()
        self.index_gauge = Gauge()
        self.ages: deque[MemoryCheckpoint] = deque()
        self.present: frozenset[int] = frozenset()  # vbuckets that have a record on disk
        self.dirty: dict[int, VBucket] = {}
        self.dirty_bytes = 0
        self.disk_full = False
        self.failure = ""  # why nothing can be persisted until the bucket is reopened
        self.refused = False  # a write was refused, so ``on_room`` is due
        self.wake_flusher: Callable[[], None] = _nobody
        self.flush: Callable[[], None] = _nobody
        self.checkpoint_bytes = options.checkpoint_bytes
        self.log_bytes = options.log_bytes
        self._most_dirty_bytes = options.dirty_bytes
        self.vbucket_count = 0

    def _tell_damage(self, damage: DamagedVbucket) -> None:
        if self.listeners.on_damage is not None:
            self.listeners.on_damage(damage)

    def change_options(self, options: StoreOptions, vbuckets: int) -> None:
        self.options = options
        self.checkpoint_bytes = options.checkpoint_bytes_of(vbuckets)
        self.log_bytes = options.log_bytes
        self._most_dirty_bytes = options.dirty_bytes

    @property
    def now_s(self) -> int:
        return self.now_ns() // 1_000_000_000

    def transition_from(self, old: Manifest) -> Transition:
        """From ``old`` to the bucket's manifest; the last one is kept, as nearly all vbuckets have the same ``old``."""
        known = self._transition
        if known is None or known.new is not self.manifest or (known.old is not old and known.old != old):
            known = self._transition = Transition(old, self.manifest)
        return known

    def check_room(self) -> None:
        """Raise ``TemporaryFailure`` while too many bytes wait for the disk."""
        if self.failure:
            raise TemporaryFailure(f"nothing can be written to disk ({self.failure}); open the bucket again")
        if self.disk_full:
            self.refused = True
            raise TemporaryFailure("the disk is full; writes are taken again when there is space")
        if self.dirty_bytes > self._most_dirty_bytes:
            self.refused = True
            self.wake_flusher()
            raise TemporaryFailure("memory quota reached: waiting for the disk")

    def note_dirty(self, vbucket: VBucket, size: int) -> None:
        self.dirty_bytes += size
        if vbucket.id not in self.dirty:
            self.dirty[vbucket.id] = vbucket
            if len(self.dirty) == 1:
                self.wake_flusher()
        if self.dirty_bytes >= self.options.flush_bytes:
            self.wake_flusher()

    def evict(self, wanted_bytes: int | None = None, tries: int | None = None) -> None:
        """Evict the oldest checkpoints that are on disk until the log fits its share of memory."""
        wanted = self.options.log_bytes if wanted_bytes is None else wanted_bytes
        tries = len(self.ages) if tries is None else min(tries, len(self.ages))
        while self.log_gauge.bytes > wanted and tries > 0:
            tries -= 1
            oldest = self.ages.popleft()
            log = oldest.log
            if log.by_serial.get(oldest.serial) is not oldest:
                continue
            if log.checkpoints[0] is oldest and log.flushed(oldest):
                oldest.closed = True
                log.evict()
            else:
                self.ages.append(oldest)


def _nobody() -> None:
    """Nobody flushes in the background."""
