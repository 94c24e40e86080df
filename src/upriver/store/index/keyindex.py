"""The key index of a vbucket: an overlay in memory, frozen overlays on their way to disk, and key tables on disk.

New entries go into the overlay. A full overlay grows, or is frozen if it is large enough for a table or memory is
short: an empty one takes its place, and the next commit writes the frozen one. Four tables of similar size are merged
into one, so each entry is rewritten only a few times. A lookup takes the newest entry that it finds.

The first use of a vbucket after a restart reads the records that are in no table. After a crash these are about 3,300
keys, or a quarter as many as the tables have if that is more and memory allows; at most four versions of each, or
16,384 records in all if that is more. A clean shutdown leaves at most 512 records per vbucket.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from upriver.errors import DamagedVbucket
from upriver.store import registers as r
from upriver.store.arrays import Scratch, words
from upriver.store.disk.file import Disk, Words
from upriver.store.disk.sealed import COUNT_BITS, entries_of, filter_of, slots_of
from upriver.store.index import kernels as k
from upriver.store.shared import Shared
from upriver.wire.bulk.decode import address_of

SMALLEST_TABLE = 16
WORTH_A_TABLE = 4096  # slots from which an overlay may be frozen before memory is short
RESERVED_SLOTS = 1024
MOST_FROZEN = 4
MOST_UNKNOWN = 16384  # records in no table, when they are mostly versions of a few keys
FAN = 4
TABLE_LOAD = 0.75
FEWEST_SLOTS = 96  # LMDB then gives a table its own pages, where words are aligned


class FrozenOverlay(NamedTuple):
    """An overlay with the entries since the one before it, up to seqno ``upto``."""

    table: Words
    entries: int
    upto: int


class IndexEntry(NamedTuple):
    """An entry of the key index. ``seqno`` is 0 if the key is unknown; ``place`` is its record's place in memory."""

    seqno: int
    deleted: bool
    rev_seqno: int
    place: int


UNKNOWN_KEY = IndexEntry(0, False, 0, 0)


class KeyIndex:
    """The keys of one vbucket. Kernels take ``overlay``, and ``layers``: the tables below it, newest first."""

    __slots__ = ("_id", "_registers", "_shared", "_tables", "frozen", "layers", "overlay", "ready")

    def __init__(self, shared: Shared, vbucket_id: int, registers: Words) -> None:
        self._shared = shared
        self._id = vbucket_id
        self._registers = registers
        self.overlay: Words = np.zeros(0, np.uint64)
        self.frozen: list[FrozenOverlay] = []
        self._tables: list[Words] = []
        self.ready = False  # kernels may use ``overlay`` and ``layers``
        self.layers: Words = np.zeros(0, np.uint64)

    @property
    def entries(self) -> int:
        """How many entries the overlay has."""
        return int(self._registers[r.ENTRIES])

    def prepare(self) -> None:
        """Make ``overlay`` and ``layers`` ready for kernels."""
        if not self.ready:
            if self.overlay.size == 0:
                self.grow()
            self._tables = self._shared.disk.tables(self._id)
            self._update_layers()
            self.ready = True

    def _update_layers(self) -> None:
        """Write the addresses of all tables into ``layers``; ``frozen`` and ``_tables`` keep the arrays alive."""
        layers = [
            (address_of(frozen.table), frozen.table.size // k.ENTRY, k.ENTRY, 0, 0) for frozen in reversed(self.frozen)
        ]
        for table in reversed(self._tables):
            bits, slots = filter_of(table), slots_of(table)
            layers.append((address_of(slots), slots.size // k.SLOT, k.SLOT, address_of(bits), bits.size))
        self.layers = np.array(layers, np.uint64).reshape(-1)

    # ---- the overlay ----

    def make_room(self, high_seqno: int) -> None:
        """The overlay is full: freeze it if that pays, else grow it."""
        if len(self.frozen) < MOST_FROZEN and (self._is_ripe() or self._is_crowded()):
            self.freeze(high_seqno)
        else:
            self.grow()

    def _is_ripe(self) -> bool:
        on_disk = sum(map(entries_of, self._tables))
        return self.overlay.size // k.ENTRY >= WORTH_A_TABLE and self.entries * FAN >= on_disk

    def _is_crowded(self) -> bool:
        """Whether growing would exceed the memory for overlays, and this is not one of the small ones."""
        gauge, most = self._shared.index_gauge.bytes, self._shared.options.index_bytes
        return gauge + self.overlay.nbytes > most and self.overlay.nbytes * self._shared.vbucket_count * 2 >= most

    def reserve(self, count: int) -> None:
        """While the overlay is small, make room for ``count`` new entries at once."""
        wanted = (self.entries + count) * 5 // 4 + 1
        if self.overlay.size // k.ENTRY < wanted <= RESERVED_SLOTS:
            self.grow(1 << (wanted - 1).bit_length())

    def grow(self, slots: int = 0) -> None:
        """Grow the overlay to ``slots``, or to twice its size."""
        slots = slots or max(SMALLEST_TABLE, self.overlay.size // k.ENTRY * 2)
        grown = words(slots * k.ENTRY)
        k.rehash(self.overlay, k.ENTRY, grown)
        self._replace(grown, self.entries)

    def freeze(self, high_seqno: int) -> None:
        """Replace the overlay with an empty one; the next commit writes it as a table."""
        if self.entries == 0:
            return
        full = FrozenOverlay(self.overlay, self.entries, high_seqno)
        self.frozen.append(full)
        self._shared.index_gauge.bytes += full.table.nbytes  # counts until it is on disk
        self._replace(words(max(SMALLEST_TABLE * k.ENTRY, full.table.size // FAN)), 0)
        self._update_layers()

    def _replace(self, overlay: Words, entries: int) -> None:
        self._shared.index_gauge.bytes += overlay.nbytes - self.overlay.nbytes
        self.overlay = overlay
        self._registers[r.ENTRIES] = entries

    # ---- writing to disk ----

    def freeze_if_due(self, high_seqno: int, unknown: int) -> None:
        """For the flusher: freeze an overlay before it is full if it is large for the memory available.

        Also if it has few keys of many records: the last ``unknown`` ones would be read again after a crash.
        """
        gauge, most = self._shared.index_gauge.bytes, self._shared.options.index_bytes
        large = gauge > most + most // 8 and self.overlay.nbytes * self._shared.vbucket_count >= gauge
        if not self.frozen and (large or unknown > max(MOST_UNKNOWN, FAN * self.entries)):
            self.freeze(high_seqno)

    def written(self, frozen: list[FrozenOverlay]) -> None:
        """Drop these frozen overlays, the oldest: they are on disk now."""
        del self.frozen[: len(frozen)]
        self._shared.index_gauge.bytes -= sum(overlay.table.nbytes for overlay in frozen)
        self.ready = False

    def count_newer(self, hashes: Words, older: int) -> int:
        """How many of these keys have an entry in memory newer than the ``older`` oldest frozen overlays."""
        known = np.zeros(hashes.size, np.bool_)
        for overlay in [frozen.table for frozen in self.frozen[older:]] + [self.overlay]:
            k.mark_known(overlay, hashes, known)
        return int(known.sum())

    def clear(self) -> None:
        """Drop everything in memory; the tables are read again at the next use."""
        self.ready = False
        if self.frozen or self.overlay.size:
            self.written(self.frozen[:])
            self._replace(np.zeros(0, np.uint64), 0)


def put_table(transaction: Any, disk: Disk, vbucket_id: int, overlays: list[FrozenOverlay], scratch: Scratch) -> None:
    """Write overlays (oldest first) as one table, merged with tables on disk if enough have a similar size."""
    tables = disk.tables_in(transaction, vbucket_id)
    count = sum(overlay.entries for overlay in overlays)
    taken = tables[len(tables) - mergeable([entries_of(table) for _, table in tables], count) :]
    if not _are_whole(disk, vbucket_id, taken):
        taken = []  # damage must not enter a new table with a valid checksum, nor stop other vbuckets
    merged = _merge(overlays, [table for _, table in taken], scratch)
    k.fill_filter(slots_of(merged), filter_of(merged))
    disk.put_table(transaction, vbucket_id, merged, [where for where, _ in taken])


def rewrite_table(
    transaction: Any, disk: Disk, vbucket_id: int, overlays: list[FrozenOverlay], removed: Words, tombstones: Words,
    scratch: Scratch,
) -> Words:  # fmt: skip
    """Write everything as one table, without the entries whose seqno is in the sorted ``removed``.

    Returns the hashes of the entries whose seqno is in the sorted ``tombstones``.
    """
    tables = disk.tables_in(transaction, vbucket_id)
    disk.check_tables(transaction, vbucket_id, tables)
    merged = _merge(overlays, [table for _, table in tables], scratch)
    hashes = np.empty_like(tombstones)
    hashes = hashes[: k.hashes_of(slots_of(merged), tombstones, hashes)] if tombstones.size else hashes
    if removed.size:
        merged = _without(merged, removed)
    k.fill_filter(slots_of(merged), filter_of(merged))
    disk.put_table(transaction, vbucket_id, merged, [where for where, _ in tables])
    return hashes


def _are_whole(disk: Disk, vbucket_id: int, tables: list[tuple[int, Words]]) -> bool:
    try:
        for generation, table in tables:
            disk.check_table(vbucket_id, generation, table)
    except DamagedVbucket:
        return False
    return True


def mergeable(sizes: list[int], count: int) -> int:
    """How many of the newest tables to merge with a new one of ``count`` entries."""
    taken = 0
    while True:
        alike = 0
        for size in reversed(sizes[: len(sizes) - taken]):
            if size > 2 * count:
                break
            alike += 1
        if alike < FAN - 1:
            return taken
        count += sum(sizes[len(sizes) - taken - alike : len(sizes) - taken])
        taken += alike


def _merge(overlays: list[FrozenOverlay], tables: list[Words], scratch: Scratch) -> Words:
    """One table with the newest entry of each key; its filter is still empty."""
    most = sum(overlay.entries for overlay in overlays) + sum(map(entries_of, tables))
    filter_words = most // k.FILTERED + 1
    merged = scratch.zeros(1 + filter_words + max(FEWEST_SLOTS, int(most / TABLE_LOAD) + 2) * k.SLOT + 1)
    merged[0] = filter_words << COUNT_BITS
    slots, entries = slots_of(merged), 0
    for overlay in reversed(overlays):
        entries += k.merge_into(overlay.table, k.ENTRY, slots)
    for table in reversed(tables):
        entries += k.merge_into(slots_of(table), k.SLOT, slots)
    merged[0] += np.uint64(entries)
    return merged


def _without(table: Words, removed: Words) -> Words:
    """The same table without the entries whose seqno is in the sorted ``removed``."""
    kept = np.zeros_like(table)
    kept[0] = filter_of(table).size << COUNT_BITS  # divides the rest into filter and slots
    kept[0] += np.uint64(k.drop_entries(slots_of(table), removed, slots_of(kept)))
    return kept
