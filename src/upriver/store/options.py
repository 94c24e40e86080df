"""What can be chosen about a store, and how its memory quota is shared out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from upriver.errors import ConfigError

MIB = 1 << 20


class Durability(Enum):
    """How far a commit is pushed before ``persisted_seqno`` moves.

    ``FSYNC`` syncs data and the meta page: nothing acknowledged is lost, even when the power fails. ``LAZY`` syncs
    the data but leaves the meta page to the system: after a power failure the last commit may be missing (the file
    is intact), after a crash of the process nothing is. LAZY saves one of two syncs.
    """

    FSYNC = "fsync"
    LAZY = "lazy"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of one bucket; sizes in bytes, times in seconds."""

    quota_bytes: int = 256 * MIB
    flush_bytes: int = 16 * MIB  # group commit: as soon as this much is waiting ...
    flush_delay_s: float = 0.05  # ... or this long after the first change
    durability: Durability = Durability.FSYNC
    max_value_bytes: int = 20 * MIB
    purge_age_s: int = 3 * 86400
    max_ttl_s: int = 0  # 0: no limit
    lww: bool = False  # conflict resolution by CAS instead of by rev
    background: bool = True  # False: only flush() and close() persist
    map_bytes: int = 0  # 0: as large as the disk
    block_bytes: int = 64 * 1024 - 64  # fills whole pages of the file together with LMDB's own header
    checkpoint_bytes: int = 1 * MIB  # at most
    max_failover_entries: int = 25

    def __post_init__(self) -> None:
        if self.quota_bytes < 8 * MIB:
            raise ConfigError(f"quota_bytes is {self.quota_bytes}; at least {8 * MIB} are needed")
        if not 4096 <= self.block_bytes <= 4 * MIB:
            raise ConfigError(f"block_bytes is {self.block_bytes}; allowed: 4096 to {4 * MIB}")

    @property
    def log_bytes(self) -> int:
        """Memory checkpoints, written or still dirty."""
        return self.quota_bytes // 2

    def checkpoint_bytes_of(self, vbuckets: int) -> int:
        """Small enough that every vbucket can have several: then those that are evicted are full, and worth reusing."""
        return min(self.checkpoint_bytes, max(64 * 1024, self.log_bytes // (4 * vbuckets)))

    @property
    def spare_bytes(self) -> int:
        """Freed memory that the pool may keep for its next use."""
        return self.quota_bytes // 16

    @property
    def dirty_bytes(self) -> int:
        """Above this writes are refused until the disk has caught up."""
        return self.quota_bytes * 3 // 8

    @property
    def index_bytes(self) -> int:
        """Key tables of what was written since the key index on disk was last brought forward."""
        return self.quota_bytes // 4

    @property
    def batch_bytes(self) -> int:
        """Most that one commit takes: LMDB holds its dirty pages in memory until then."""
        return min(self.flush_bytes * 2, self.quota_bytes // 16)
