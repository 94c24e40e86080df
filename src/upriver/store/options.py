"""The options of a store, and how its memory quota is divided."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from upriver.errors import ConfigError

MIB = 1 << 20


class Durability(Enum):
    """What a commit syncs before ``persisted_seqno`` moves.

    ``FSYNC`` syncs data and meta page: nothing acknowledged is lost, even when the power fails. ``LAZY`` syncs the data
    and leaves the meta page to the system: a power failure may lose the last commit (the file stays intact), a crash of
    the process loses nothing. LAZY saves one of two syncs.
    """

    FSYNC = "fsync"
    LAZY = "lazy"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of one bucket; sizes in bytes, times in seconds."""

    quota_bytes: int = 256 * MIB
    flush_bytes: int = 16 * MIB  # group commit: when this much is waiting ...
    flush_delay_s: float = 0.05  # ... or this long after the first change
    durability: Durability = Durability.FSYNC
    max_value_bytes: int = 20 * MIB
    purge_age_s: int = 3 * 86400
    max_ttl_s: int = 0  # 0: no limit
    lww: bool = False  # conflict resolution by CAS instead of by rev
    background: bool = True  # False: only flush() and close() persist
    map_bytes: int = 0  # 0: as large as the disk
    block_bytes: int = 64 * 1024 - 64  # with LMDB's header, fills whole pages of the file
    checkpoint_bytes: int = 1 * MIB  # at most
    max_failover_entries: int = 25

    def __post_init__(self) -> None:
        if self.quota_bytes < 8 * MIB:
            raise ConfigError(f"quota_bytes is {self.quota_bytes}; at least {8 * MIB} are needed")
        if not 4096 <= self.block_bytes <= 4 * MIB:
            raise ConfigError(f"block_bytes is {self.block_bytes}; allowed: 4096 to {4 * MIB}")

    @property
    def log_bytes(self) -> int:
        """For memory checkpoints, written or still dirty."""
        return self.quota_bytes // 2

    def checkpoint_bytes_of(self, vbuckets: int) -> int:
        """Small enough for several per vbucket, so that evicted ones are full and worth reusing."""
        return min(self.checkpoint_bytes, max(64 * 1024, self.log_bytes // (4 * vbuckets)))

    @property
    def spare_bytes(self) -> int:
        """Freed memory that the pool may keep for reuse."""
        return self.quota_bytes // 16

    @property
    def dirty_bytes(self) -> int:
        """Above this, writes are refused until the disk has caught up."""
        return self.quota_bytes * 3 // 8

    @property
    def index_bytes(self) -> int:
        """For overlays: keys written since the last key table went to disk."""
        return self.quota_bytes // 4

    @property
    def batch_bytes(self) -> int:
        """The most that one commit takes: LMDB holds the dirty pages of a commit in memory."""
        return min(self.flush_bytes * 2, self.quota_bytes // 16)
